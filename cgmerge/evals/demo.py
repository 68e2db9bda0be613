"""The whole story on the embedded base: train four experts, merge them, measure what happened.

Each step is the library call behind a command (`train`, `compose`, `eval`), so that the folder it
leaves behind is what a user would have made by hand.
"""

import json
import random
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cgmerge import fs
from cgmerge.evals.record import Evaluation, write_record
from cgmerge.evals.report.files import Curve, Point, Tuned, read_files
from cgmerge.evals.report.page import Report, render_page
from cgmerge.evals.report.sections import make_sections, open_source
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import GroupScore, group_scores
from cgmerge.evals.sweep import Candidate, best, sweep
from cgmerge.evals.targets import Target, open_targets
from cgmerge.evals.tasks import chains
from cgmerge.modules.data import read_data
from cgmerge.modules.training.listener import Silent
from cgmerge.modules.training.settings import TrainSettings
from cgmerge.outputs import foreign, is_ours, lost_files, refuse_here

if TYPE_CHECKING:
    from cgmerge.modules.loading import LoadedBase

SKILLS = tuple(chains.NEW)
STEPS = 160
BATCH = 32
LEARNING_RATE = 1e-3
RANK = 8
SCALES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
TIES_SCALES = (0.6, 0.8, 1.0, 1.2, 1.4)
GROUPS: dict[str, tuple[str, ...]] = {
    "new skills": SKILLS,
    "with a base skill": ("with base",),
    "unseen pairs": ("unseen pairs",),
    "base skills": ("base single", "base pairs"),
}
_SETS: dict[str, tuple[chains.Group, int]] = {
    "with base": ("mix2", 240),
    "unseen pairs": ("new2", 240),
    "base single": ("base1", 100),
    "base pairs": ("base2", 200),
}
_PER_SKILL = 60
_FILES = ("train", "validation", "test")


class Advance(Protocol):
    """Called after each training step."""

    def __call__(self, done: int, *, note: str = "") -> None:
        """Report the step and the loss."""


class Voice(Protocol):
    """Who is told how the demo goes."""

    def stage(self, text: str) -> None:
        """A new part of the story begins."""

    def training(self, skill: str, steps: int) -> AbstractContextManager[Advance]:
        """Open a progress display for one expert."""


class _Relay(Silent):
    """Passes training steps on to a progress display."""

    def __init__(self, advance: Advance) -> None:
        self.advance = advance

    def on_step(self, step: int, total: int, loss: float) -> None:  # noqa: ARG002
        """Show the step."""
        self.advance(step, note=f"loss {loss:.3f}")


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured.

    Attributes:
        out: Folder with data, experts, merges, record and report.
        evaluation: Test scores of base, experts and merges.
        validation: Scores of the sweep.
        chosen: Best candidate of each method, by validation.
        recommended: Name of the merge with the best validation score.
        checks: The numbers that `--json` promises.
    """

    out: Path
    evaluation: Evaluation
    validation: Evaluation
    chosen: dict[str, Candidate]
    recommended: str
    checks: dict[str, float]

    def rows(self) -> dict[str, dict[str, GroupScore]]:
        """Return group scores of every target on the test items."""
        names = [target.name for target in self.evaluation.record.targets]
        return {name: group_scores(self.evaluation, name, GROUPS) for name in names}


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that the demo may not write into, before any work is done.

    Raises:
        UsageError: A file, or a folder with something in it that no demo wrote.
        StorageError: Nothing can be made there.
    """
    out = fs.absolute(out)
    if out.is_dir() and any(out.iterdir()) and overwrite:
        refuse_here(out)
        lost = lost_files(out, _is_of_demo)
        if lost:
            raise foreign(out, "holds files that no demo wrote", lost)
        fs.check_target(out / "experts" / "x", overwrite=False)
    elif out.is_dir() and not any(out.iterdir()):
        fs.check_target(out / "data", overwrite=False)
    else:
        fs.check_target(out, overwrite=False)


def _is_of_demo(name: str) -> bool:
    """Whether the demo writes a file of this relative name."""
    first, *more = Path(name).parts
    if not more:
        return re.fullmatch(r"(sweep|record)(\.json|\.items\.(jsonl|next))", first) is not None
    rest = Path(*more)
    if first == "data":
        parts = rest.name.split(".")
        known = {item.replace(" ", "-") for item in (*SKILLS, *_SETS)}
        return parts[0] in known and parts[1:] in [[split, "jsonl"] for split in _FILES]
    if first == "experts" and len(more) > 1:
        work = re.fullmatch(r"\.(\w+)\.training", more[0])
        return work[1] in SKILLS if work else more[0] in SKILLS and is_ours(str(Path(*more[1:])))
    return first.startswith("merged-") and is_ours(str(rest))


def run_demo(out: Path, *, seed: int, steps: int, voice: Voice) -> DemoResult:
    """Train, merge and measure; everything goes into `out`.

    Args:
        out: Folder; files of an earlier demo in it are replaced.
        seed: Of data and training.
        steps: Optimiser steps per expert.
        voice: Told about the stages.
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.expert import open_expert
    from cgmerge.modules.loading import load_base

    voice.stage("data")
    data = write_data(out / "data", seed)
    voice.stage("train")
    for skill in SKILLS:
        with voice.training(skill, steps) as advance:
            _train(_settings(skill, data, out, seed, steps), advance)
    voice.stage("sweep")
    base = open_base("tiny")
    loaded = load_base(base, device="cpu", dtype="float32")
    experts = [open_expert(str(out / "experts" / skill)) for skill in SKILLS]
    factors = [dict(expert.deltas(base)) for expert in experts]
    candidates = _candidates()
    ids = [expert.digest for expert in experts]
    validation = sweep(loaded, factors, candidates, skill_sets(data, "validation"), ids=ids)
    chosen = {
        method: best(validation, [c for c in candidates if c.method == method], GROUPS)
        for method in ("task-arithmetic", "ties")
    }
    voice.stage("compose")
    merges = {name: _compose(chosen[name], name, out) for name in chosen}
    voice.stage("eval")
    evaluation = _evaluate(loaded, out, merges, skill_sets(data, "test"))
    recommended = best(validation, list(chosen.values()), GROUPS).method
    write_record(out / "sweep.json", validation, overwrite=True)
    write_record(out / "record.json", evaluation, overwrite=True)
    _write_report(out, {name: _tuned(validation, candidates, one) for name, one in chosen.items()})
    checks = _checks(evaluation, recommended, list(merges))
    return DemoResult(out, evaluation, validation, chosen, recommended, checks)


def write_data(folder: Path, seed: int) -> Path:
    """Write training, validation and test files of every skill and group."""
    for number, skill in enumerate(SKILLS):
        rng = random.Random(f"{seed} train {skill} {number}")
        _write_rows(folder / f"{skill}.train.jsonl", chains.expert_rows(skill, rng, 4000))
    shares: dict[chains.Split, float] = {"validation": 0.5, "test": 1.0}
    for split, share in shares.items():
        for skill in SKILLS:
            rng = random.Random(f"{seed} {split} {skill}")
            count = round(_PER_SKILL * share)
            rows = chains.group_rows("new1", rng, count, split=split, skills=(skill,))
            _write_rows(folder / f"{skill}.{split}.jsonl", rows)
        for name, (group, size) in _SETS.items():
            rng = random.Random(f"{seed} {split} {name}")
            rows = chains.group_rows(group, rng, round(size * share), split=split)
            _write_rows(folder / f"{name.replace(' ', '-')}.{split}.jsonl", rows)
    return folder


def _write_rows(path: Path, rows: list[chains.Row]) -> None:
    # Without `skill`: one file is one skill, and evaluation would split a file by that column.
    lines = [json.dumps({"prompt": row["prompt"], "completion": row["completion"]}) for row in rows]
    fs.replace_file(path, ("\n".join(lines) + "\n").encode())


def skill_sets(folder: Path, split: chains.Split) -> list[SkillSet]:
    """Read the demo's rows of one split, one set per skill, pair and group."""
    sets = []
    for name in (*SKILLS, *_SETS):
        file = read_data(folder / f"{name.replace(' ', '-')}.{split}.jsonl")
        sets.append(SkillSet(name, file.examples, file.path.name, file.sha256))
    return sets


def _settings(skill: str, data: Path, out: Path, seed: int, steps: int) -> TrainSettings:
    return TrainSettings(
        base="tiny",
        data=(data / f"{skill}.train.jsonl",),
        skill=skill,
        out=out / "experts" / skill,
        rank=RANK,
        alpha=2 * RANK,
        steps=steps,
        batch_size=BATCH,
        lr=LEARNING_RATE,
        seed=seed,
        device="cpu",
        dtype="float32",
    )


def _train(settings: TrainSettings, advance: Advance) -> None:
    from cgmerge.modules.training.plan import make_plan
    from cgmerge.modules.training.run import RunOptions, train_expert

    options = RunOptions(resume=False, overwrite=True)
    train_expert(make_plan(settings), options, listener=_Relay(advance))


def _candidates() -> list[Candidate]:
    return [
        *[Candidate("task-arithmetic", (), scale) for scale in SCALES],
        *[Candidate("ties", (("density", 0.2),), scale) for scale in TIES_SCALES],
    ]


def _compose(candidate: Candidate, name: str, out: Path) -> Path:
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe

    recipe = Recipe(
        experts=tuple(ExpertRef(str(out / "experts" / skill)) for skill in SKILLS),
        method=candidate.method,
        params={**dict(candidate.params), "scale": candidate.scale},
        base="tiny",
    )
    return run_plan(make_plan(recipe), out / f"merged-{name}", overwrite=True).out


def _evaluate(
    loaded: "LoadedBase", out: Path, merges: Mapping[str, Path], skills: list[SkillSet]
) -> Evaluation:
    specs = [f"{skill}={out / 'experts' / skill}" for skill in SKILLS]
    specs += [f"{name}={path}" for name, path in merges.items()]
    targets: list[Target] = open_targets(specs, loaded.base)
    return evaluate_targets(loaded, targets, skills, Settings())


def _tuned(validation: Evaluation, candidates: list[Candidate], chosen: Candidate) -> Tuned:
    """Return the scores over scales that the choice of a scale rests on."""
    points = []
    for one in (one for one in candidates if one.method == chosen.method):
        scores = group_scores(validation, one.name, GROUPS).values()
        points.append(Point(one.scale, sum(score.score for score in scores) / len(GROUPS)))
    data = tuple((skill.source, skill.sha256) for skill in validation.record.skills)
    return Tuned(data, (Curve("", tuple(points)),), chosen.scale)


def _write_report(out: Path, tuned: Mapping[str, Tuned]) -> None:
    sections = make_sections([open_source(out / "record.json")], GROUPS)
    places = {skill: str(out / "experts" / skill) for skill in SKILLS}
    places |= {name: str(out / f"merged-{name}") for name in tuned}
    files = read_files(places, sections)
    files |= {name: replace(files[name], tuned=one) for name, one in tuned.items()}
    report = Report("Four skills, merged", sections, files)
    fs.replace_file(out / "report.html", render_page(report))


def _checks(evaluation: Evaluation, recommended: str, merges: list[str]) -> dict[str, Any]:
    scores = {
        target.name: group_scores(evaluation, target.name, GROUPS)
        for target in evaluation.record.targets
    }
    own = {r.skill: r.score for r in evaluation.record.results if r.target == r.skill}
    pairs = {name: found["unseen pairs"].score for name, found in scores.items()}
    new = "new skills"
    return {
        "new_skill_gain": scores[recommended][new].score - scores["base"][new].score,
        "unseen_pair_gain": max(pairs[m] for m in merges) - max(pairs[s] for s in SKILLS),
        "own_skill_min": min(own.values()),
        "base_kept": scores[recommended]["base skills"].score,
    }
