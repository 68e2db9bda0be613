"""CPU time and memory of merging, beside mergekit and peft in the same run, as ratios.

    python benchmarks/bench_merge.py [--peers PYTHON] [--repeat 3] [--out FILE.json]

PYTHON is that of an environment with mergekit; without it its cases are left out. Every merge runs
in a process of its own on one thread; CPU seconds and peak memory are counted from after the
imports. The peers take minutes and run once, cgmerge `--repeat` times (medians).

full    TIES of three full fine-tunes of a 254 M base in bfloat16, to a full model
twice   the same with twice the layers: its memory should not grow
lora    TIES of three rank-16 LoRA experts of that base, to rank 16; mergekit goes through models
linear  weighted sum of eight rank-16 LoRA experts of a 97 M model, to rank 16; peft `svd`

`--layers`, `--hidden`, `--mlp`, `--vocab` replace the sizes of every model, for a quick try.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench_cases import LINEAR_EXPERTS, TIES_EXPERTS
from bench_inputs import Shape

HERE = Path(__file__).parent
BIG = Shape(layers=16, hidden=1024, mlp=2816, vocab=32_000)
SMALL = Shape(layers=12, hidden=768, mlp=2048, vocab=8_192)
MEMORY_BAR_MB = 600.0
GROWTH_BAR = 1.05
"""Twice the layers may take this much more: allocators round."""

Rows = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Group:
    """Cases on one set of inputs.

    Attributes:
        shape: Of the models.
        full: Number of full fine-tunes.
        adapters: Number of LoRA experts.
        ours: Cases of cgmerge; the first is what a ratio is about.
        peer: The case it is compared with.
        bar: Smallest ratio of CPU seconds; 0 for none.
    """

    shape: Shape
    full: int
    adapters: int
    ours: Sequence[str]
    peer: str = ""
    bar: float = 0.0


def groups(options: argparse.Namespace) -> dict[str, Group]:
    """Return what is to be run."""
    given = {key: getattr(options, key) for key in ("layers", "hidden", "mlp", "vocab")}
    changed = {key: value for key, value in given.items() if value is not None}
    big, small = replace(BIG, **changed), replace(SMALL, **changed)
    deep = replace(big, layers=2 * big.layers)
    full = ("cgmerge ties full", "cgmerge ties full, mergekit's file")
    found = {
        "full": Group(big, TIES_EXPERTS, 0, full, "mergekit ties full", 4.0),
        "twice": Group(deep, TIES_EXPERTS, 0, full[:1]),
        "lora": Group(big, 0, TIES_EXPERTS, ("cgmerge ties lora",), "mergekit ties lora", 10.0),
        "linear": Group(small, 0, LINEAR_EXPERTS, ("cgmerge linear lora",), "peft svd lora", 40.0),
    }
    return {name: found[name] for name in found if name in options.only.split(",")}


def run_group(name: str, group: Group, options: argparse.Namespace) -> dict[str, Any]:
    """Make the inputs, run the cases, compare results, and clean up."""
    print(f"\n{name}: {group.shape.parameters / 1e6:.0f} M parameters", flush=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as temporary:
        folder = Path(temporary)
        counts = [str(group.full), str(group.adapters)]
        _python(sys.executable, ["bench_inputs.py", str(folder), group.shape.as_json(), *counts])
        rows: Rows = {}
        for turn in range(options.repeat):
            for case in group.ours:
                _measure(rows, case, sys.executable, folder)
            if turn == 0 and group.peer:
                _measure_peer(rows, group.peer, folder, options.peers)
        medians = {
            case: {key: statistics.median(values) for key, values in found.items()}
            for case, found in rows.items()
        }
        found: dict[str, Any] = {"parameters": group.shape.parameters, "median": medians}
        if group.peer in rows:
            found["agreement"] = agreement(name, folder)
    return found


def _measure_peer(rows: Rows, case: str, folder: Path, peers: Path | None) -> None:
    if case.startswith("peft"):
        _measure(rows, case, sys.executable, folder)
    elif peers:
        _measure(rows, case, str(peers), folder)


def _measure(rows: Rows, case: str, python: str, folder: Path) -> None:
    out = _out(folder, case)
    shutil.rmtree(out, ignore_errors=True)
    found = json.loads(_python(python, ["bench_cases.py", case, str(folder), str(out)]))
    for key, value in found.items():
        rows.setdefault(case, {}).setdefault(key, []).append(value)
    print(f"{case:<36} {found['cpu_s']:8.2f} CPU-s  {found['above_mb']:7.0f} MB", flush=True)


def _out(folder: Path, case: str) -> Path:
    return folder / case.replace(" ", "-").replace(",", "").replace("'", "")


def _python(python: str, words: list[str]) -> str:
    """Run a file of this folder on one thread and return its last line."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


def agreement(name: str, folder: Path) -> dict[str, float]:
    """Return how far our result is from the peer's, where both compute the same thing."""
    if name == "full":
        ours = _out(folder, "cgmerge ties full, mergekit's file")
        return compare_models(ours, _out(folder, "mergekit ties full"), folder / "base")
    if name == "linear":
        ours = _out(folder, "cgmerge linear lora")
        return compare_adapters(ours, _out(folder, "peft svd lora") / "merged")
    return {}


def compare_models(ours: Path, theirs: Path, base: Path) -> dict[str, float]:
    """Return the share of unequal weights and the relative distance of the merged deltas."""
    import torch

    from cgmerge.modules.base import open_base
    from cgmerge.modules.weights import CHUNK_ENTRIES, WeightReader

    readers = [WeightReader(open_base(str(folder))) for folder in (ours, theirs, base)]
    unequal, total, gap, size = 0, 0, 0.0, 0.0
    for name in readers[2].model.infos:
        count = readers[2].count(name)
        for first in range(0, count, CHUNK_ENTRIES):
            last = min(first + CHUNK_ENTRIES, count)
            a, b, start = (reader.floats(name, first, last) for reader in readers)
            unequal += int(torch.count_nonzero(a != b))
            gap += float((a - b).double().square().sum())
            size += float((b - start).double().square().sum())
        total += count
    return {"unequal_share": unequal / total, "relative_distance": (gap / size) ** 0.5}


def compare_adapters(ours: Path, theirs: Path) -> dict[str, float]:
    """Return the relative distance of two adapters' deltas."""
    from cgmerge.merge import inner, stack
    from cgmerge.modules.expert import open_expert

    a, b = (open_expert(str(folder)).deltas() for folder in (ours, theirs))
    gap = size = 0.0
    for name in b:
        difference = stack([a[name], b[name]], [1.0, -1.0])
        gap += float(inner(difference, difference))
        size += float(inner(b[name], b[name]))
    return {"relative_distance": (max(gap, 0.0) / size) ** 0.5}


def bars(chosen: dict[str, Group], found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios that are promised, with what is promised."""
    lines = []
    for name, group in chosen.items():
        medians = found[name]["median"]
        if group.peer in medians:
            for case in group.ours:
                ratio = medians[group.peer]["cpu_s"] / medians[case]["cpu_s"]
                lines.append(_line(f"{group.peer} / {case}, CPU", ratio, group.bar, at_least=True))
    memory = {
        name: found[name]["median"]["cgmerge ties full"]["above_mb"]
        for name in ("full", "twice")
        if name in found
    }
    if "full" in memory:
        what = "cgmerge ties full, MB above import"
        lines.append(_line(what, memory["full"], MEMORY_BAR_MB, at_least=False))
    if len(memory) == 2:
        growth = memory["twice"] / max(memory["full"], 1.0)
        lines.append(_line("memory at twice the layers / once", growth, GROWTH_BAR, at_least=False))
    return lines


def _line(what: str, value: float, bar: float, *, at_least: bool) -> dict[str, Any]:
    reached = value >= bar if at_least else value <= bar
    sign = "≥" if at_least else "≤"
    print(f"{'ok ' if reached else 'NOT'} {what}: {value:.4g} (bar: {sign} {bar:g})")
    return {"what": what, "value": value, "bar": f"{sign} {bar:g}", "reached": reached}


def versions(peers: Path | None) -> dict[str, str]:
    """Return what was compared."""
    found = {"cgmerge": "", "torch": "", "peft": ""}
    for package in found:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source"
    if peers:
        asked = "from importlib.metadata import version; print(version('mergekit'))"
        done = subprocess.run([peers, "-c", asked], capture_output=True, text=True, check=True)
        found["mergekit"] = done.stdout.strip()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="python of an environment with mergekit")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the numbers are kept")
    parser.add_argument("--only", default="full,twice,lora,linear")
    parser.add_argument("--scratch", type=Path, help="folder for models, up to 5 GB")
    for size in ("layers", "hidden", "mlp", "vocab"):
        parser.add_argument(f"--{size}", type=int)
    options = parser.parse_args()
    chosen = groups(options)
    if not chosen:
        parser.error(f"--only {options.only}: one or more of full, twice, lora, linear")
    found = {name: run_group(name, group, options) for name, group in chosen.items()}
    print()
    for name, result in found.items():
        for key, value in result.get("agreement", {}).items():
            print(f"    {name}: {key} {value:.2g}")
    content = {
        "bars": bars(chosen, found),
        "groups": found,
        "versions": versions(options.peers),
    }
    if options.out:
        options.out.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
