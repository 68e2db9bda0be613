"""Merging eight ternary experts: by patterns, and through the same deltas as dense float32.

    python benchmarks/ternary_merge.py [--out FILE.json]

Both routes run in this process, on one thread, with equal results; the ratio is what counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cgmerge.merge import Merger, make_rule
from cgmerge.merge.deltas import Delta
from cgmerge.merge.ternary import Ternary

EXPERTS, ROWS, COLUMNS, DENSITY = 8, 2048, 4096, 0.2


class Signs(Ternary):
    """Signs in memory, int8."""

    def __init__(self, trits: "np.ndarray[Any, np.dtype[np.int8]]", scale: float) -> None:
        self.values = trits
        self.scale = scale
        self.shape = trits.shape

    def trits(self, first: int, last: int) -> "np.ndarray[Any, np.dtype[np.int8]]":
        """Return rows of signs."""
        return self.values[first:last]


class Sparse(dict[str, Delta]):
    """An expert that knows how many of its entries are not 0."""

    nonzeros: Mapping[str, int]


def timed(method: str, params: dict[str, Any], experts: list[Any]) -> tuple[float, torch.Tensor]:
    rule = make_rule(method, len(experts), params=params)
    started = time.process_time()
    merged = Merger(rule, experts).dense("w")
    return time.process_time() - started, merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    chance = [DENSITY / 2, 1 - DENSITY, DENSITY / 2]
    sparse, dense = [], []
    for _ in range(EXPERTS):
        trits = rng.choice(np.array([-1, 0, 1], np.int8), size=(ROWS, COLUMNS), p=chance)
        expert = Sparse(w=Signs(trits, float(np.float32(rng.uniform(0.5, 2)))))
        expert.nonzeros = {"w": int(np.count_nonzero(trits))}
        sparse.append(expert)
        dense.append({"w": expert["w"].dense()})  # type: ignore[union-attr]
    results = {}
    for method, params in (("ties", {"density": 0.25}), ("task-arithmetic", {"scale": 0.5})):
        quick = [timed(method, params, sparse) for _ in range(arguments.repeat)]
        slow = [timed(method, params, dense) for _ in range(arguments.repeat)]
        assert torch.equal(quick[0][1], slow[0][1])
        ours, theirs = (statistics.median(s for s, _ in runs) for runs in (quick, slow))
        results[method] = {
            "patterns_cpu_s": round(ours, 4),
            "dense_cpu_s": round(theirs, 4),
            "ratio": round(theirs / ours, 1),
            "million_entries_per_s": round(ROWS * COLUMNS / ours / 1e6),
        }
        print(f"{method:<16} {results[method]}")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
