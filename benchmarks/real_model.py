"""Three word-list skills on SmolLM2-135M-Instruct: train, merge, measure; honest whatever it shows.

    python benchmarks/real_model.py --out cgmerge-real [--overwrite] [--steps 110]

Uses the library calls behind `cgmerge train`, `compose` and `eval`. Scales are chosen on
validation rows; the table is about test rows. Ends with benchmarks/results/real_model.json.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from cgmerge import fs
from cgmerge.evals.record import Evaluation, write_record
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.sweep import Candidate, best, group_scores, sweep
from cgmerge.evals.targets import open_targets
from cgmerge.evals.tasks import wordlists
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.data import read_data
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import load_base
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.training.listener import Silent
from cgmerge.modules.training.plan import make_plan as plan_training
from cgmerge.modules.training.run import RunOptions, train_expert
from cgmerge.modules.training.settings import TrainSettings

BASE = "smollm2-135m"
RANK, BATCH, LR, SEED = 16, 8, 1e-3, 0
SKILLS = tuple(wordlists.SKILLS)
RESULTS = Path(__file__).parent / "results" / "real_model.json"
GROUPS: dict[str, tuple[str, ...]] = {
    "single skills": SKILLS,
    "unseen pairs": ("pairs",),
    "other edits": ("other",),
}
CANDIDATES = [
    *[Candidate("task-arithmetic", (), scale) for scale in (1 / 3, 0.45, 0.6, 0.8)],
    *[Candidate("ties", (("density", 0.3),), scale) for scale in (0.8, 1.1, 1.5)],
]


class Steps(Silent):
    """Prints the loss now and then."""

    def __init__(self, skill: str) -> None:
        self.skill = skill

    def on_step(self, step: int, total: int, loss: float) -> None:
        """Print every twentieth step."""
        if step % 10 == 0 or step == total:
            print(f"  {self.skill} {step}/{total} loss {loss:.3f}", flush=True)


def write_data(folder: Path, steps: int) -> None:
    for skill in SKILLS:
        rng = random.Random(f"train {skill}")
        rows = wordlists.expert_rows(skill, rng, steps * BATCH)
        _write(folder / f"{skill}.train.jsonl", rows)
    splits: dict[wordlists.Split, tuple[int, int, int]] = {
        "validation": (10, 18, 10),
        "test": (30, 60, 30),
    }
    for split, (own, pairs, other) in splits.items():
        for skill in SKILLS:
            rng = random.Random(f"{split} {skill}")
            rows = wordlists.held_out_rows([(skill,)], rng, own, split)
            _write(folder / f"{skill}.{split}.jsonl", rows)
        for name, chains, count in (
            ("pairs", wordlists.skill_pairs(), pairs),
            ("other", wordlists.replay_chains(), other),
        ):
            rng = random.Random(f"{split} {name}")
            rows = wordlists.held_out_rows(chains, rng, count, split)
            _write(folder / f"{name}.{split}.jsonl", rows)


def _write(path: Path, rows: list[wordlists.Row]) -> None:
    fs.replace_file(path, ("\n".join(json.dumps(row) for row in rows) + "\n").encode())


def skill_sets(folder: Path, split: str) -> list[SkillSet]:
    found = []
    for name in (*SKILLS, "pairs", "other"):
        file = read_data(folder / f"{name}.{split}.jsonl")
        found.append(SkillSet(name, file.examples, file.path.name, file.sha256))
    return found


def train(skill: str, out: Path, steps: int) -> float:
    settings = TrainSettings(
        base=BASE,
        data=(out / "data" / f"{skill}.train.jsonl",),
        skill=skill,
        out=out / "experts" / skill,
        rank=RANK,
        steps=steps,
        batch_size=BATCH,
        lr=LR,
        seed=SEED,
    )
    options = RunOptions(overwrite=True)
    return train_expert(plan_training(settings), options, listener=Steps(skill)).loss


def compose(candidate: Candidate, out: Path) -> Path:
    recipe = Recipe(
        experts=tuple(ExpertRef(str(out / "experts" / skill)) for skill in SKILLS),
        method=candidate.method,
        params={**dict(candidate.params), "scale": candidate.scale},
        base=BASE,
    )
    return run_plan(make_plan(recipe), out / f"merged-{candidate.method}", overwrite=True).out


def table(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for target in evaluation.record.targets:
        groups = group_scores(evaluation, target.name, GROUPS)
        rows[target.name] = {name: round(group.score, 4) for name, group in groups.items()}
        rows[target.name] |= {
            r.skill: round(r.score, 4) for r in evaluation.record.results if r.target == target.name
        }
    return rows


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n{'':<28}" + "".join(f"{column:>15}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<28}" + "".join(f"{row[column]:>15.2f}" for column in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("cgmerge-real"))
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--keep-experts", action="store_true", help="do not train again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists() and any(out.iterdir()) and not (arguments.overwrite or arguments.keep_experts):
        print(f"{out} exists already; add --overwrite", file=sys.stderr)
        return 2
    started = time.monotonic()
    write_data(out / "data", arguments.steps)
    losses = {}
    for skill in SKILLS:
        if not (arguments.keep_experts and (out / "experts" / skill).exists()):
            losses[skill] = train(skill, out, arguments.steps)
    trained = time.monotonic() - started
    base = open_base(BASE)
    loaded = load_base(base)
    deltas = [open_expert(str(out / "experts" / skill)).deltas(base) for skill in SKILLS]
    factors = [{path: one[path] for path in one} for one in deltas]
    validation = sweep(loaded, factors, CANDIDATES, skill_sets(out / "data", "validation"))
    show("validation", table(validation))
    methods = dict.fromkeys(candidate.method for candidate in CANDIDATES)
    chosen = [
        best(validation, [c for c in CANDIDATES if c.method == method], GROUPS)
        for method in methods
    ]
    specs = [f"{skill}={out / 'experts' / skill}" for skill in SKILLS]
    specs += [f"{candidate.method}={compose(candidate, out)}" for candidate in chosen]
    test = evaluate_targets(
        loaded, open_targets(specs, base), skill_sets(out / "data", "test"), Settings()
    )
    show(f"test (chosen: {', '.join(c.name for c in chosen)})", table(test))
    write_record(out / "record.json", test, overwrite=True)
    seconds = time.monotonic() - started
    print(f"\n{trained:.0f} s of training, {seconds:.0f} s in all")
    content = {
        "base": {"ref": BASE, "fingerprint": base.fingerprint},
        "settings": {
            "steps": arguments.steps, "rank": RANK, "batch": BATCH, "lr": LR, "seed": SEED,
            "replay": 0.4,
        },
        "loss": losses,
        "chosen_on_validation": [candidate.name for candidate in chosen],
        "validation": table(validation),
        "test": table(test),
        "n": {skill.name: skill.n for skill in test.record.skills},
    }  # fmt: skip
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
