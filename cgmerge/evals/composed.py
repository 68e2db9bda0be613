"""Composition and confidence: do parts make a whole, where do scores fall, are models sure.

From items of one target: the compositionality gap and the weakest link where rows name their parts
(`part_ids`), scores over a number of each row or the answer's length, calibration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cgmerge.errors import UsageError
from cgmerge.evals.columns import TOKENS
from cgmerge.evals.metrics import MetricInfo, picked
from cgmerge.evals.record import Item
from cgmerge.evals.stats import Interval, wilson
from cgmerge.evals.summary import Skills, interval_of

BINS = 10
"""Of a calibration: equal widths of confidence."""
_MOST_VALUES = 8
_PARTS_OF_A_CURVE = 6


@dataclass(frozen=True, slots=True)
class Gap:
    """Wholes that are wrong although every part is right.

    Attributes:
        skill: Of the wholes; None for all together.
        wholes: Items that name parts.
        n: Of these, the ones whose parts are all right.
        wrong: Of these, the ones that are wrong themselves.
        gap: `wrong` / `n`; None where no whole has all parts right.
        low: Lower end of its 95 % Wilson interval.
        high: Upper end.
    """

    skill: str | None
    wholes: int
    n: int
    wrong: int
    gap: float | None
    low: float | None
    high: float | None


def composition_gaps(skills: Skills, info: MetricInfo) -> list[Gap]:
    """Return the compositionality gap of each skill of wholes, then of all where several are.

    Args:
        skills: Items of one target.
        info: The metric; what is right is an exact answer where it has no right and wrong.

    Source:
        Press et al. 2023: P(composite wrong | all sub-answers right), with its denominator.
    """
    right = {item.id: info.is_right(item) for items in skills.values() for item in items}
    found = []
    for skill, items in skills.items():
        wholes = [item for item in items if item.parts]
        if wholes:
            known = [one for one in wholes if all(right[part] for part in one.parts or ())]
            wrong = sum(not right[one.id] for one in known)
            found.append(_gap(skill, len(wholes), len(known), wrong))
    if len(found) > 1:
        total = [sum(getattr(one, key) for one in found) for key in ("wholes", "n", "wrong")]
        found.append(_gap(None, *total))
    return found


def _gap(skill: str | None, wholes: int, n: int, wrong: int) -> Gap:
    if not n:
        return Gap(skill, wholes, 0, 0, None, None, None)
    interval = wilson(wrong, n)
    return Gap(skill, wholes, n, wrong, wrong / n, interval.low, interval.high)


Link = Literal["below both", "nearer weak", "nearer strong", "above both"]


@dataclass(frozen=True, slots=True)
class WeakestLink:
    """A skill made of others, beside the weakest and the strongest of them."""

    skill: str
    parts: tuple[str, ...]
    score: float
    weak: float
    strong: float
    link: Link


def link_of(score: float, weak: float, strong: float) -> Link:
    """Say where a crossed skill stands between the weaker and the stronger of its parts.

    Between the two it is nearer the weak one below their middle, from there on nearer the strong.

    Args:
        score: Of the crossed skill; more is better.
        weak: Lowest score of a part.
        strong: Highest, not below `weak`.

    Source:
        CrossEval (Zhong et al. 2024), the law of the weakest link.

    Example:
        >>> link_of(0.4, 0.3, 0.9)
        'nearer weak'
    """
    if score < weak:
        return "below both"
    if score > strong:
        return "above both"
    return "nearer weak" if score < (weak + strong) / 2 else "nearer strong"


def weakest_links(skills: Skills, info: MetricInfo) -> list[WeakestLink]:
    """Compare each skill whose items name parts with the skills of these parts.

    Args:
        skills: Items of one target.
        info: The metric, of which more must be better; otherwise there are none.

    Returns:
        One for each skill whose parts are of at least two other skills.
    """
    if info.lower_is_better:
        return []
    owner = {item.id: skill for skill, items in skills.items() for item in items}
    found = []
    for skill, items in skills.items():
        parts = dict.fromkeys(owner[part] for item in items for part in item.parts or ())
        parts.pop(skill, None)
        if len(parts) < 2:
            continue
        score, singles = info.score(items), [info.score(skills[part]) for part in parts]
        weak, strong = min(singles), max(singles)
        link = link_of(score, weak, strong)
        found.append(WeakestLink(skill, tuple(parts), score, weak, strong, link))
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """The score of the items whose number lies from `first` to `last`, both included."""

    first: float
    last: float
    n: int
    score: float
    low: float
    high: float


def spans(numbers: Sequence[float]) -> list[tuple[float, float]]:
    """Cut numbers into spans: each value for itself, or six of about equally many items.

    Args:
        numbers: At least one.

    Returns:
        (first, last) of each span, ascending; equal numbers are never parted.
    """
    values = sorted(set(numbers))
    if len(values) <= _MOST_VALUES:
        return [(value, value) for value in values]
    ordered = sorted(numbers)
    found: list[tuple[float, float]] = []
    start = 0
    for place in range(1, _PARTS_OF_A_CURVE + 1):
        end = round(place * len(ordered) / _PARTS_OF_A_CURVE)
        while end < len(ordered) and end > 0 and ordered[end] == ordered[end - 1]:
            end += 1
        if end > start:
            found.append((ordered[start], ordered[end - 1]))
            start = end
    return found


def curve(
    items: Sequence[Item],
    numbers: Mapping[str, float],
    cuts: Sequence[tuple[float, float]],
    info: MetricInfo,
    *,
    seed: int = 0,
) -> list[Point]:
    """Return scores over a number of each item, items of all skills pooled.

    Args:
        items: Of one target.
        numbers: By the item's id, see `numbers_of`.
        cuts: From `spans`.
        info: The metric.
        seed: Of the bootstrap.
    """
    found = []
    for first, last in cuts:
        part = [item for item in items if first <= numbers[item.id] <= last]
        interval: Interval = interval_of([part], info, seed)
        score = info.score(part)
        found.append(Point(first, last, len(part), score, interval.low, interval.high))
    return found


def numbers_of(items: Sequence[Item], name: str) -> dict[str, float]:
    """Return the number that each item has in a column, by its id; `tokens` is the answer's length.

    Raises:
        UsageError: An item has none.
    """
    found = {}
    for item in items:
        number = item.tokens if name == TOKENS else (item.at or {}).get(name)
        if number is None:
            raise UsageError(
                f"the record does not hold {name!r} of every item",
                code="by",
                hint=f"evaluate with --by {name}",
                found=name,
            )
        found[item.id] = float(number)
    return found


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far confidence and being right are apart.

    Attributes:
        ece: Expected calibration error: Σ over bins of |right − confidence| · share of items.
        confidence: Mean confidence.
        right: Share of items right.
        n: Items.
        bins: Bins of equal width.
        about: What the confidence is one in.
    """

    ece: float
    confidence: float
    right: float
    n: int
    bins: int
    about: Literal["choices", "answers"]


def calibration(items: Sequence[Item], *, bins: int = BINS) -> Calibration | None:
    """Return the expected calibration error of one target.

    Where items offer choices, the confidence is the picked one's share of the probability of all
    of them. Elsewhere it is the probability of the whole right answer, exp(log-likelihood of all
    its tokens), against whether greedy decoding writes that answer: a model that knows an answer
    gives it much, one that does not gives it little.

    Args:
        items: Of one target.
        bins: Bins of equal width on [0, 1]; the first holds 0, each other one its upper end.

    Returns:
        The error; None where an older record lacks the numbers of tokens.

    Raises:
        UsageError: No items, or no bins.

    Source:
        Naeini et al. 2015; Guo et al. 2017 use 15 bins. A bin is (low, high] as there.
    """
    if not items or bins < 1:
        raise UsageError(f"{len(items)} items in {bins} bins have no calibration", code="bins")
    about: Literal["choices", "answers"] = "choices" if items[0].choices else "answers"
    if about == "choices":
        sure = [_confidence(item) for item in items]
    else:
        if any(item.tokens is None or item.loglik is None for item in items):
            return None
        sure = [
            (math.exp(min((item.loglik or 0.0) * (item.tokens or 0), 0.0)), item.correct)
            for item in items
        ]
    gaps = [0.0] * bins
    for confidence, right in sure:
        gaps[max(math.ceil(confidence * bins) - 1, 0)] += right - confidence
    n = len(items)
    return Calibration(
        ece=sum(map(abs, gaps)) / n,
        confidence=sum(confidence for confidence, _ in sure) / n,
        right=sum(right for _, right in sure) / n,
        n=n,
        bins=bins,
        about=about,
    )


def _confidence(item: Item) -> tuple[float, bool]:
    """Return the share of the most probable choice, and whether it is the right one."""
    values = [one.loglik for one in item.choices or ()]
    best = max(values)
    share = 1.0 / sum(math.exp(value - best) for value in values)
    return share, picked(item) == item.choice
