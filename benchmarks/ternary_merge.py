"""Merging eight ternary experts: by patterns, and through dense float32.

    python benchmarks/ternary_merge.py [--out FILE.json]

All routes run in this process, on one thread, in turns, with equal results; block by block, as a
model is written. Dense float32 is measured twice: made from the same signs block by block, which is
what merging such files without patterns takes, and lying in memory ready made (16 times as many
bytes as the signs have, and not counting what made them).
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
from cgmerge.merge.deltas import Delta, Rows
from cgmerge.merge.engine import Rule
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


class Expanded(Rows):
    """The same delta without its secret: float32 rows are made when they are asked for."""

    def __init__(self, signs: Signs) -> None:
        self.signs = signs
        self.shape = signs.shape

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return rows, float32."""
        return self.signs.rows(first, last)


class Sparse(dict[str, Delta]):
    """An expert that knows how many of its entries are not 0."""

    nonzeros: Mapping[str, int]


def seconds(rule: Rule, experts: list[Any]) -> float:
    merger = Merger(rule, experts)
    started = time.process_time()
    for _ in merger.pieces("w"):
        pass
    return time.process_time() - started


def measure(rule: Rule, experts: list[Sparse], repeat: int) -> dict[str, float]:
    """Time all routes in turns; the results must be equal bit for bit."""
    routes: dict[str, list[Any]] = {
        "patterns": experts,
        "expanded": [{"w": Expanded(expert["w"])} for expert in experts],  # type: ignore[arg-type]
        "dense": [{"w": expert["w"].dense()} for expert in experts],  # type: ignore[union-attr]
    }
    results = [Merger(rule, route).dense("w") for route in routes.values()]
    assert all(torch.equal(results[0], result) for result in results[1:])
    runs = [{name: seconds(rule, route) for name, route in routes.items()} for _ in range(repeat)]
    cpu = {name: statistics.median(run[name] for run in runs) for name in routes}
    return {
        **{f"{name}_cpu_s": round(value, 4) for name, value in cpu.items()},
        "ratio_to_expanded": round(cpu["expanded"] / cpu["patterns"], 1),
        "ratio_to_dense": round(cpu["dense"] / cpu["patterns"], 1),
        "million_entries_per_s": round(ROWS * COLUMNS / cpu["patterns"] / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    chance = [DENSITY / 2, 1 - DENSITY, DENSITY / 2]
    experts = []
    for _ in range(EXPERTS):
        trits = rng.choice(np.array([-1, 0, 1], np.int8), size=(ROWS, COLUMNS), p=chance)
        expert = Sparse(w=Signs(trits, float(np.float32(rng.uniform(0.5, 2)))))
        expert.nonzeros = {"w": int(np.count_nonzero(trits))}
        experts.append(expert)
    results = {}
    for method, params in (
        ("ties", {"density": 0.25}),
        ("task-arithmetic", {"scale": 0.5}),
        ("linear", {}),
    ):
        rule = make_rule(method, EXPERTS, params=params)
        results[method] = measure(rule, experts, arguments.repeat)
        print(f"{method:<16} {results[method]}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
