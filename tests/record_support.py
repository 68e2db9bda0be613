"""Evaluations made of strings: `1` is a right answer, `0` a wrong one."""

import hashlib

from cgmerge.evals.record import (
    BaseInfo,
    Evaluation,
    Item,
    Record,
    RunSettings,
    SkillInfo,
    TargetInfo,
    write_record,
)
from cgmerge.evals.summary import summarise


def make_evaluation(
    answers, *, kinds=None, base="fp1:00", metric="exact_match", order=None, sha="", digests=None
):
    """Make an evaluation of {target: {skill: "0110"}}; item n of a skill has the same id always."""
    kinds = kinds or {}
    items = []
    for target, skills in answers.items():
        for skill, row in skills.items():
            for n in order or range(len(row)):
                right = row[n] == "1"
                items.append(
                    Item(
                        id=hashlib.sha256(f"{skill} {n}".encode()).hexdigest()[:16],
                        skill=skill,
                        target=target,
                        correct=right,
                        loglik=-0.25 if right else -1.5,
                        prediction="yes <eos>" if right else "no <eos>",
                        expected="yes <eos>",
                    )
                )
    numbers = summarise(items, metric=metric)
    kind = {name: kinds.get(name, "base" if name == "base" else "merged") for name in answers}
    targets = [
        TargetInfo(
            name,
            kind[name],
            base if kind[name] == "base" else (digests or {}).get(name, f"digest of {name}"),
        )
        for name in answers
    ]
    skills = next(iter(answers.values()))
    record = Record(
        base=BaseInfo("tiny", base),
        settings=RunSettings(metric=metric),
        targets=tuple(targets),
        skills=tuple(
            SkillInfo(name, len(row), f"{name[:40]}.jsonl", sha or f"sha of {name}"[:64])
            for name, row in skills.items()
        ),
        results=numbers.results,
        means=numbers.means,
        versions={"cgmerge": "0"},
    )
    return Evaluation(record, tuple(items))


def write(path, answers, **more):
    """Write such an evaluation; returns its path."""
    write_record(path, make_evaluation(answers, **more))
    return path
