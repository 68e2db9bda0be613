"""What using a single expert gives: columns that are made of experts' answers, at no cost.

Two ways to pick: once, on validation data (what a user could have done), or for each skill on the
scored items themselves (an oracle that nobody has, an upper bound of picking).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from cgmerge.errors import UsageError
from cgmerge.evals.metrics import METRICS, MetricInfo
from cgmerge.evals.record import Evaluation, Item, TargetInfo
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import Skills, by_target, summarise
from cgmerge.evals.targets import Target

ORACLE = "oracle"
"""Name of the column of the best expert of each skill."""
CHOSEN = "best-single"
"""Name of the column of the expert that is best on validation data."""


def best_single(validation: Evaluation) -> str:
    """Return the expert with the best mean over the skills of validation data.

    Args:
        validation: An evaluation with experts among its targets.

    Returns:
        Its name; the first of equals.

    Raises:
        UsageError: Fewer than two experts.
    """
    experts = experts_of(validation)
    info = METRICS[validation.record.settings.metric]
    means = {one.target: one.score for one in validation.record.means}
    return max(experts, key=lambda one: info.rank(means[one.name])).name


def best_by_skill(groups: dict[str, Skills], experts: Sequence[str], info: MetricInfo) -> list[str]:
    """Return the expert that is best on each skill, in order; the first of equals."""
    return [
        max(experts, key=lambda one: info.rank(info.score(groups[one][skill])))
        for skill in groups[experts[0]]
    ]


def experts_of(evaluation: Evaluation) -> list[TargetInfo]:
    """Return the targets that are experts.

    Raises:
        UsageError: Fewer than two: there is nothing to pick from.
    """
    found = [one for one in evaluation.record.targets if one.kind == "expert"]
    _check_count(len(found))
    return found


def check_picks(
    targets: Sequence[Target], validation: Sequence[SkillSet], skills: Sequence[SkillSet]
) -> None:
    """Refuse to pick where there is nothing to pick from, or on what is scored.

    Args:
        targets: Of which some are experts.
        validation: What one expert is picked on; may be empty.
        skills: What is scored.

    Raises:
        UsageError: Fewer than two experts, or a data file that is in both.
    """
    _check_count(sum(one.kind == "expert" for one in targets))
    scored = {one.sha256 for one in skills if one.sha256}
    for one in validation:
        if one.sha256 in scored:
            raise UsageError(
                f"{one.source} is scored and cannot be validation data too",
                code="validation",
                hint="pick on other data, or take --oracle for the best on the scored items",
                found=one.source,
            )


def _check_count(count: int) -> None:
    if count < 2:
        raise UsageError(
            f"to pick an expert at least two are needed, found {count}",
            code="experts",
            hint="name the experts that were merged as targets too",
            found=count,
        )


def with_baselines(
    evaluation: Evaluation, *, oracle: bool = False, validation: Evaluation | None = None
) -> Evaluation:
    """Add columns of picked experts to an evaluation.

    Args:
        evaluation: With at least two experts.
        oracle: Add the best expert of each skill, picked on these very items.
        validation: Add the expert that is best here: the same experts and metric on other data.

    Returns:
        The evaluation with the columns last, and all numbers computed again.

    Raises:
        UsageError: Fewer than two experts.
    """
    record, groups = evaluation.record, by_target(evaluation.items)
    metric = record.settings.metric
    experts = {one.name: one for one in experts_of(evaluation)}
    targets, items = list(record.targets), list(evaluation.items)
    if validation is not None:
        name = best_single(validation)
        files = ", ".join(
            f"{one.source or one.name} (sha256 {one.sha256[:12]})"
            for one in validation.record.skills
        )
        note = f"{name}, which has the best mean on {files}"
        targets.append(TargetInfo(CHOSEN, "baseline", experts[name].digest, note=note))
        items += [replace(one, target=CHOSEN) for one in _flat(groups[name])]
    if oracle:
        best = best_by_skill(groups, list(experts), METRICS[metric])
        skills = list(groups[best[0]])
        note = "picked on these very items: " + ", ".join(
            f"{name} on {skill}" for skill, name in zip(skills, best, strict=True)
        )
        digests = "".join(experts[name].digest for name in best)
        digest = hashlib.sha256(digests.encode()).hexdigest()
        targets.append(TargetInfo(ORACLE, "baseline", digest, note=note))
        items += [
            replace(item, target=ORACLE)
            for skill, name in zip(skills, best, strict=True)
            for item in groups[name][skill]
        ]
    settings = record.settings
    numbers = summarise(items, metric=metric, compare_to=settings.compare_to, seed=settings.seed)
    made = replace(
        record,
        targets=tuple(targets),
        results=numbers.results,
        means=numbers.means,
        comparisons=numbers.comparisons,
    )
    return Evaluation(made, tuple(items))


def _flat(skills: Skills) -> list[Item]:
    return [item for group in skills.values() for item in group]
