"""The eight best merge methods on the real model's experts: tuned, then measured on test rows.

    python benchmarks/real_methods.py --from cgmerge-real [--budget 6]

Uses the experts and data that `make real` left. Every method is tuned on validation rows with the
same budget and scored on test rows. benchmarks/results/real_methods.json is written after every
method: what it has for the same run and budget is not computed again.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from methods_table import Case, measure, table, write_statistics
from real_model import score_groups, skill_sets

from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.summary import group_scores
from cgmerge.evals.targets import open_targets
from cgmerge.evals.tasks import wordlists
from cgmerge.modules.base import open_base
from cgmerge.modules.loading import load_base
from cgmerge.modules.statsfile import Kind

RESULTS = Path(__file__).parent / "results" / "real_methods.json"
KINDS: tuple[Kind, ...] = ("gram",)
"""The statistics that these methods need; Fisher information would take longer than all of them."""
METHODS = ("task-arithmetic", "ties", "mats", "regmean", "emr", "cart", "tsv", "pcb")


def open_case(folder: Path, skills: list[str]) -> Case:
    """Load what `make real` left, and compute the experts' statistics."""
    loaded = load_base(open_base(str(folder / "warm-base")))
    experts = tuple(str(folder / "experts" / skill) for skill in skills)
    data = folder / "data"
    write_statistics(loaded, experts, [data / f"{skill}.train.jsonl" for skill in skills], KINDS)
    sets = {split: skill_sets(data, split, skills) for split in ("validation", "test")}
    return Case(loaded, experts, sets["validation"], sets["test"], score_groups(skills))


def references(case: Case) -> dict[str, dict[str, list[int]]]:
    """Score the shared base and, by column, the best single expert on the test rows."""
    targets = open_targets(list(case.experts), case.loaded.base)
    evaluation = evaluate_targets(case.loaded, targets, case.test, Settings())
    base, *experts = [
        group_scores(evaluation, target.name, case.groups) for target in evaluation.record.targets
    ]
    best = {g: max((one[g] for one in experts), key=lambda s: s.score) for g in case.groups}
    return {
        name: {group: [score.correct, score.n] for group, score in row.items()}
        for name, row in {"base": base, "best single expert, by column": best}.items()
    }


def earlier(path: Path, about: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what an earlier run on the same experts with the same budget has found."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = all(found.get(key) == value for key, value in about.items())
    return dict(found["methods"]) if same else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="folder", type=Path, default=Path("cgmerge-real"))
    parser.add_argument("--skills", default=",".join(wordlists.DEFAULT_SKILLS))
    parser.add_argument("--budget", type=int, default=6)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not (arguments.folder / "record.json").exists():
        print(f"{arguments.folder} holds no finished run; `make real` makes one", file=sys.stderr)
        return 2
    case = open_case(arguments.folder, arguments.skills.split(","))
    run = hashlib.sha256((arguments.folder / "record.json").read_bytes()).hexdigest()
    about = {"budget": arguments.budget, "run": run}
    results = earlier(arguments.results, about)
    if not results:
        results = {name: [{"groups": groups}] for name, groups in references(case).items()}
    for method in arguments.only.split(","):
        if method not in results:
            results[method] = [measure(case, method, arguments.budget)]
            print(f"{method:<18} {results[method][0]}", flush=True)
            arguments.results.write_text(json.dumps(about | {"methods": results}, indent=1) + "\n")
    print("\n".join(table(results, list(case.groups))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
