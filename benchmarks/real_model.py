"""Three word-list skills on SmolLM2-135M-Instruct: train, merge, measure; honest whatever it shows.

    python benchmarks/real_model.py --out cgmerge-real [--overwrite] [--skills reverse,sort]

Uses the library calls behind `cgmerge train`, `compose` and `eval`. First a warm-up that all
experts start from, then one expert per skill, then merges. Scales are chosen on validation rows;
the table is about test rows. Ends with benchmarks/results/real_model.json.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cgmerge import fs
from cgmerge.evals.record import Evaluation, write_record
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import group_scores
from cgmerge.evals.sweep import Candidate, best, sweep
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
RANK, BATCH, SEED, REPLAY, TRACE = 16, 8, 0, 0.4, 0.12
WARM_STEPS, WARM_LR = 80, 1e-3
STEPS, LR = 60, 5e-4
RESULTS = Path(__file__).parent / "results" / "real_model.json"
CANDIDATES = [
    *[Candidate("task-arithmetic", (), scale) for scale in (1 / 3, 0.7, 0.9, 1.1, 1.3)],
    *[Candidate("ties", (("density", 0.2),), scale) for scale in (1.0, 1.4, 1.8)],
]


class Steps(Silent):
    """Prints the loss now and then."""

    def __init__(self, skill: str) -> None:
        self.skill = skill

    def on_step(self, step: int, total: int, loss: float) -> None:
        """Print every twentieth step."""
        if step % 10 == 0 or step == total:
            print(f"  {self.skill} {step}/{total} loss {loss:.3f}", flush=True)


def write_data(folder: Path, skills: Sequence[str]) -> None:
    """Write the training rows of warm-up and experts, and the validation and test rows."""
    warm = wordlists.warmup_rows(skills, random.Random("warm"), WARM_STEPS * BATCH, trace=TRACE)
    _write(folder / "warm.train.jsonl", warm)
    for skill in skills:
        rng = random.Random(f"train {skill}")
        rows = wordlists.expert_rows(skill, rng, STEPS * BATCH, replay=REPLAY)
        _write(folder / f"{skill}.train.jsonl", rows)
    chains: dict[str, list[tuple[str, ...]]] = {skill: [(skill,)] for skill in skills}
    chains |= {"pairs": wordlists.skill_pairs(skills), "other": wordlists.replay_chains()}
    splits: dict[wordlists.Split, dict[str, int]] = {
        "validation": {"pairs": 24, "other": 10, "": 12},
        "test": {"pairs": 60, "other": 20, "": 30},
    }
    for split, counts in splits.items():
        for name, asked in chains.items():
            rng = random.Random(f"{split} {name}")
            rows = wordlists.held_out_rows(asked, rng, counts.get(name, counts[""]), split)
            _write(folder / f"{name}.{split}.jsonl", rows)


def _write(path: Path, rows: list[wordlists.Row]) -> None:
    fs.replace_file(path, ("\n".join(json.dumps(row) for row in rows) + "\n").encode())


def skill_sets(folder: Path, split: str, skills: Sequence[str]) -> list[SkillSet]:
    found = []
    for name in (*skills, "pairs", "other"):
        file = read_data(folder / f"{name}.{split}.jsonl")
        found.append(SkillSet(name, file.examples, file.path.name, file.sha256))
    return found


def train(name: str, base: str, out: Path, steps: int, lr: float) -> float:
    settings = TrainSettings(
        base=base,
        data=(out / "data" / f"{name}.train.jsonl",),
        skill=name,
        out=out / "experts" / name,
        rank=RANK,
        steps=steps,
        batch_size=BATCH,
        lr=lr,
        seed=SEED,
    )
    options = RunOptions(overwrite=True)
    return train_expert(plan_training(settings), options, listener=Steps(name)).loss


def train_all(skills: Sequence[str], out: Path) -> tuple[str, dict[str, float]]:
    """Train the warm-up on the base, fold it in, and train every expert on the result."""
    losses = {"warm": train("warm", BASE, out, WARM_STEPS, WARM_LR)}
    recipe = Recipe(
        experts=(ExpertRef(str(out / "experts" / "warm")),),
        method="linear",
        base=BASE,
        form="model",
    )
    warm = run_plan(make_plan(recipe), out / "warm-base", overwrite=True).out
    for skill in skills:
        losses[skill] = train(skill, str(warm), out, STEPS, LR)
    return str(warm), losses


def compose(candidate: Candidate, base: str, skills: Sequence[str], out: Path) -> Path:
    recipe = Recipe(
        experts=tuple(ExpertRef(str(out / "experts" / skill)) for skill in skills),
        method=candidate.method,
        params={**dict(candidate.params), "scale": candidate.scale},
        base=base,
    )
    return run_plan(make_plan(recipe), out / f"merged-{candidate.method}", overwrite=True).out


def score_groups(skills: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {"single skills": tuple(skills), "unseen pairs": ("pairs",), "other edits": ("other",)}


def table(evaluation: Evaluation, skills: Sequence[str]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for target in evaluation.record.targets:
        groups = group_scores(evaluation, target.name, score_groups(skills))
        rows[target.name] = {name: round(group.score, 4) for name, group in groups.items()}
        rows[target.name] |= {
            r.skill: round(r.score, 4)
            for r in evaluation.record.results
            if r.target == target.name and r.skill in skills
        }
    return rows


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n{'':<28}" + "".join(f"{column:>15}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<28}" + "".join(f"{row[column]:>15.2f}" for column in columns))


def measure(base: str, skills: Sequence[str], out: Path) -> dict[str, Any]:
    """Choose scales on validation rows, compose, and score everything on test rows."""
    opened = open_base(base)
    loaded = load_base(opened)
    experts = [open_expert(str(out / "experts" / skill)) for skill in skills]
    factors = [dict(expert.deltas(opened)) for expert in experts]
    rows = skill_sets(out / "data", "validation", skills)
    ids = [expert.digest for expert in experts]
    validation = sweep(loaded, factors, CANDIDATES, rows, ids=ids)
    show("validation", table(validation, skills))
    chosen = [
        best(validation, [c for c in CANDIDATES if c.method == method], score_groups(skills))
        for method in dict.fromkeys(candidate.method for candidate in CANDIDATES)
    ]
    specs = [f"original={BASE}"]
    specs += [f"{skill}={out / 'experts' / skill}" for skill in skills]
    specs += [f"{c.method}={compose(c, base, skills, out)}" for c in chosen]
    test = evaluate_targets(
        loaded, open_targets(specs, opened), skill_sets(out / "data", "test", skills), Settings()
    )
    show(f"test (chosen: {', '.join(c.name for c in chosen)})", table(test, skills))
    write_record(out / "record.json", test, overwrite=True)
    return {
        "base_fingerprint": opened.fingerprint,
        "chosen_on_validation": [candidate.name for candidate in chosen],
        "validation": table(validation, skills),
        "test": table(test, skills),
        "n": {skill.name: skill.n for skill in test.record.skills},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("cgmerge-real"))
    parser.add_argument("--skills", default=",".join(wordlists.DEFAULT_SKILLS))
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--keep-experts", action="store_true", help="do not train again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    skills = arguments.skills.split(",")
    if out.exists() and any(out.iterdir()) and not (arguments.overwrite or arguments.keep_experts):
        print(f"{out} exists already; add --overwrite", file=sys.stderr)
        return 2
    started = time.monotonic()
    write_data(out / "data", skills)
    base, losses = str(out / "warm-base"), dict[str, float]()
    if not arguments.keep_experts:
        base, losses = train_all(skills, out)
    trained = time.monotonic() - started
    measured = measure(base, skills, out)
    seconds = time.monotonic() - started
    print(f"\n{trained:.0f} s of training, {seconds:.0f} s in all")
    settings = {
        "base": BASE, "skills": skills, "rank": RANK, "batch": BATCH, "seed": SEED,
        "replay": REPLAY, "trace": TRACE, "warm_steps": WARM_STEPS, "warm_lr": WARM_LR,
        "steps": STEPS, "lr": LR,
    }  # fmt: skip
    content = {"settings": settings, "loss": losses, **measured}
    content["seconds"] = {"training": round(trained), "all": round(seconds)}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
