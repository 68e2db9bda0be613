"""Every merge method on the demo's experts: tuned on validation rows, measured on test rows.

    python benchmarks/methods_table.py --out cgmerge-methods [--seeds 0,1,2] [--budget 10]

For each seed: train the demo's four experts on the embedded base, compute their statistics, tune
each method (and each entry-wise rule in the spaces) with the same budget, and score the winner.
Ends with benchmarks/results/methods_tiny.json and the table of docs/methods.md. Methods for exactly
two experts merge the first two and are marked.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgmerge.errors import CgmergeError
from cgmerge.evals import demo
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.stats import wilson
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import group_scores
from cgmerge.evals.targets import Target
from cgmerge.evals.tune import tune
from cgmerge.merge import Merger, all_methods, make_rule
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan
from cgmerge.modules.data import read_data
from cgmerge.modules.encoding import encode_all
from cgmerge.modules.expert import open_expert
from cgmerge.modules.layerstats import METHOD, Along, collect_layerwise
from cgmerge.modules.loading import LoadedBase, load_base
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.stats import collect, write_stats
from cgmerge.modules.statsfile import KINDS, Kind, path_of

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "methods_tiny.json"
PAGE = HERE.parent / "docs" / "methods.md"
IN_SPACES = ("core+ties", "knots+ties", "core+dare-ties", "core+pcb")
STATS_ROWS = 128


class Quiet:
    """A demo that says nothing but which part it is in."""

    def stage(self, text: str) -> None:
        """Print the part."""
        print(f"  {text}", flush=True)

    @contextmanager
    def training(self, _skill: str, _steps: int) -> Any:
        """Show no progress."""
        yield _nothing


def _nothing(_done: int, *, note: str = "") -> None:
    """Report no step."""
    del note


@dataclass(frozen=True)
class Case:
    """What methods are compared on."""

    loaded: LoadedBase
    experts: tuple[str, ...]
    validation: list[SkillSet]
    test: list[SkillSet]
    groups: dict[str, tuple[str, ...]]


def demo_case(out: Path, seed: int) -> Case:
    """Run the demo, unless it was run here before, and compute the experts' statistics."""
    folder = out / f"seed-{seed}"
    if not (folder / "record.json").exists():
        demo.run_demo(folder, seed=seed, steps=demo.STEPS, voice=Quiet())
    loaded = load_base(open_base("tiny"), device="cpu", dtype="float32")
    experts = tuple(str(folder / "experts" / skill) for skill in demo.SKILLS)
    data = folder / "data"
    files = [data / f"{skill}.train.jsonl" for skill in demo.SKILLS]
    write_statistics(loaded, experts, files)
    write_layerwise(loaded, experts, files)
    return Case(
        loaded,
        experts,
        demo.skill_sets(data, "validation"),
        demo.skill_sets(data, "test"),
        demo.GROUPS,
    )


def write_statistics(
    loaded: LoadedBase,
    experts: Sequence[str],
    files: Sequence[Path],
    kinds: Sequence[Kind] = KINDS,
) -> None:
    """Write each expert's statistics on its own training rows beside it."""
    for place, path in zip(experts, files, strict=True):
        expert = open_expert(place)
        file = read_data(path)
        rows = encode_all(file.examples[:STATS_ROWS], loaded.tokenizer)
        found = collect(loaded, expert, rows, kinds)
        write_stats(expert.stats_path, found, expert, loaded, [file.sha256])


def write_layerwise(loaded: LoadedBase, experts: Sequence[str], files: Sequence[Path]) -> None:
    """Write the statistics of all experts along their merge."""
    opened = [open_expert(place) for place in experts]
    data = [read_data(path) for path in files]
    rows = [encode_all(file.examples[:STATS_ROWS], loaded.tokenizer) for file in data]
    rule = make_rule(METHOD, len(opened))
    along = Along.of(rule, [expert.digest for expert in opened]).plain()
    found = collect_layerwise(loaded, opened, rows, rule)
    for expert, result, file in zip(opened, found, data, strict=True):
        path = path_of(expert, "layerwise")
        write_stats(path, result, expert, loaded, [file.sha256], along=along)


def names() -> list[str]:
    return [*(spec.name for spec in all_methods()), *IN_SPACES]


def measure(case: Case, method: str, budget: int) -> dict[str, Any]:
    """Tune one method on validation rows and score it on test rows."""
    experts = case.experts
    try:
        make_rule(method, len(experts))
    except CgmergeError:
        experts = experts[:2]
    refs = tuple(ExpertRef(expert) for expert in experts)
    plan = make_plan(Recipe(experts=refs, method=method, base=case.loaded.base.ref))
    started = time.process_time()
    found = tune(plan, case.loaded, case.validation, budget=budget)
    rule = make_rule(method, len(experts), params=found.best.params)
    merger = Merger(rule, plan.deltas, ids=plan.ids, stats=plan.stats)
    deltas = {name: merger.factors(name, plan.rank).delta for name in merger.names}
    target = Target.of_deltas("merged", deltas, "0" * 64)
    settings = Settings(keeps_base=False, expects_same=True)
    test = evaluate_targets(case.loaded, [target], case.test, settings)
    scores = group_scores(test, "merged", case.groups)
    return {
        "experts": len(experts),
        "params": dict(found.best.params),
        "seconds": round(time.process_time() - started, 1),
        "groups": {name: [score.correct, score.n] for name, score in scores.items()},
    }


def references(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Return the base's and the best single expert's scores from the demo's record."""
    from cgmerge.evals.record import load_record

    evaluation = load_record(folder / "record.json")
    found = {name: group_scores(evaluation, name, demo.GROUPS) for name in ("base", *demo.SKILLS)}
    best = {
        group: max((found[skill][group] for skill in demo.SKILLS), key=lambda s: s.score)
        for group in demo.GROUPS
    }
    rows = {"base": found["base"], "best single expert, by column": best}
    return {
        name: {group: [s.correct, s.n] for group, s in row.items()} for name, row in rows.items()
    }


def table(results: dict[str, Any], groups: Sequence[str]) -> list[str]:
    """Pool the seeds and write one line per method, best unseen pairs first."""
    lines = [f"| method | scale | {' | '.join(groups)} |", f"|---|---|{'---|' * len(groups)}"]
    pooled = []
    for name, runs in results.items():
        cells = {}
        for group in groups:
            correct = sum(run["groups"][group][0] for run in runs)
            n = sum(run["groups"][group][1] for run in runs)
            interval = wilson(correct, n)
            cells[group] = (correct / n, interval.low, interval.high)
        scales = sorted({run["params"]["scale"] for run in runs if "params" in run})
        two = " (2 experts)" if runs[0].get("experts") == 2 else ""
        pooled.append((cells["unseen pairs"][0], f"`{name}`{two}", scales, cells))
    for _, name, scales, cells in sorted(pooled, key=lambda row: -row[0]):
        scale = f"{scales[0]:g}" if scales else "–"
        if len(scales) > 1:  # the seeds chose different ones
            scale += f" … {scales[-1]:g}"
        shown = " | ".join(f"{v:.2f} [{low:.2f}, {high:.2f}]" for v, low, high in cells.values())
        lines.append(f"| {name} | {scale} | {shown} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("cgmerge-methods"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--budget", type=int, default=10)
    parser.add_argument("--only", default="", help="comma-separated methods")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else names()
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in map(int, arguments.seeds.split(",")):
        print(f"seed {seed}", flush=True)
        case = demo_case(arguments.out, seed)
        for name, groups in references(arguments.out / f"seed-{seed}").items():
            results.setdefault(name, []).append({"groups": groups})
        for method in wanted:
            found = measure(case, method, arguments.budget)
            results.setdefault(method, []).append(found)
            pairs = found["groups"]["unseen pairs"]
            print(
                f"  {method:<22} {found['seconds']:6.1f} CPU-s  {pairs[0]}/{pairs[1]}", flush=True
            )
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        content = {"budget": arguments.budget, "seeds": arguments.seeds, "methods": results}
        arguments.results.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table(results, list(demo.GROUPS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
