"""All analyses of an evaluation, target by target: what reports and JSON results show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cgmerge.evals.analysis import Effects, Roles, effects_of, roles_of
from cgmerge.evals.composed import (
    Calibration,
    Gap,
    Point,
    WeakestLink,
    calibration,
    composition_gaps,
    curve,
    numbers_of,
    spans,
    weakest_links,
)
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Evaluation, Metric
from cgmerge.evals.summary import Skills, by_target


@dataclass(frozen=True, slots=True)
class Statement:
    """What follows from the items of one target.

    Attributes:
        target: Its name.
        roles: Of the skills, as its base sees them.
        effects: What it kept, lost and carried over; None for a base.
        calibration: None where an older record lacks the numbers of tokens.
        gaps: Where rows name their parts.
        links: The same, skill by skill.
        curves: By column.
    """

    target: str
    roles: Roles
    effects: Effects | None
    calibration: Calibration | None
    gaps: tuple[Gap, ...]
    links: tuple[WeakestLink, ...]
    curves: Mapping[str, tuple[Point, ...]]


@dataclass(frozen=True, slots=True)
class Analysed:
    """A target to analyse.

    Attributes:
        items: By skill, those of all targets in the same order.
        kind: As recorded.
        base: Name of its base among the targets, if that was scored.
    """

    items: Skills
    kind: str
    base: str | None


def analyse(
    targets: Mapping[str, Analysed],
    metric: Metric,
    *,
    by: Sequence[str] = (),
    trained: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Statement]:
    """Analyse several targets that were scored on the same items.

    Args:
        targets: By name.
        metric: What scores are.
        by: Columns that scores are read over.
        trained: Skills that experts were trained on; None for those that one is named after.
        seed: Of the bootstrap.

    Raises:
        UsageError: A column that the items do not hold.
    """
    info = METRICS[metric]
    items = {name: one.items for name, one in targets.items()}
    experts = [name for name, one in targets.items() if one.kind == "expert"]
    known = {
        base: roles_of(items, experts, base, info, trained)
        for base in {one.base for one in targets.values()} | {None}
    }
    first = [item for group in next(iter(items.values())).values() for item in group]
    numbers = {name: numbers_of(first, name) for name in by}
    cuts = {name: spans(list(found.values())) for name, found in numbers.items()}
    found = []
    for name, one in targets.items():
        flat = [item for group in one.items.values() for item in group]
        roles = known[name if one.kind == "base" and name in known else one.base]
        merged = one.kind not in ("base", "expert")
        effects = (
            effects_of(one.items, items, roles, one.base, info, merged=merged, seed=seed)
            if one.kind != "base"
            else None
        )
        curves = {
            column: tuple(curve(flat, numbers[column], cuts[column], info, seed=seed))
            for column in by
        }
        found.append(
            Statement(
                name, roles, effects, calibration(flat),
                tuple(composition_gaps(one.items, info)), tuple(weakest_links(one.items, info)),
                curves,
            )
        )  # fmt: skip
    return found


def analyse_evaluation(evaluation: Evaluation) -> list[Statement]:
    """Analyse all targets of an evaluation, as its own settings say."""
    record, items = evaluation.record, by_target(evaluation.items)
    base = next((one.name for one in record.targets if one.kind == "base"), None)
    targets = {
        one.name: Analysed(items[one.name], one.kind, None if one.kind == "base" else base)
        for one in record.targets
    }
    settings = record.settings
    return analyse(targets, settings.metric, by=settings.by, seed=settings.seed)
