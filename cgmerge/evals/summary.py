"""From items to numbers: scores with intervals, means over skills, paired comparisons.

The only way from items to a record: the runner uses it for what it has just measured, and anyone
can use it on a loaded record to check that every number follows from the items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cgmerge.errors import NotFound, UsageError
from cgmerge.evals.metrics import METRICS, MetricInfo
from cgmerge.evals.record import Comparison, Evaluation, Item, Mean, Metric, Result
from cgmerge.evals.stats import (
    Interval,
    bootstrap_mean,
    bootstrap_sums,
    discordant,
    holm,
    macro_wilson,
    mcnemar,
    mean_of,
    wilson,
)

Skills = dict[str, list[Item]]
"""Skill to items of one target, in the order of the items file."""

_Groups = dict[str, Skills]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a record."""

    results: tuple[Result, ...]
    means: tuple[Mean, ...]
    comparisons: tuple[Comparison, ...]


def summarise(
    items: Sequence[Item],
    *,
    metric: Metric = "exact_match",
    compare_to: str | None = None,
    seed: int = 0,
) -> Summary:
    """Compute every number of a record from its items.

    Args:
        items: Of all targets; every target has the same items in the same order, unless there
            is nothing to compare.
        metric: What `score` is.
        compare_to: Target that all others are compared to; None for no comparison.
        seed: Of the bootstrap.

    Returns:
        Results and means in the order in which targets and skills first appear.

    Raises:
        NotFound: No target is called `compare_to`.
        UsageError: Targets to compare that were not scored on the same items.
    """
    groups = by_target(items)
    results = [
        _result(group, metric, seed) for skills in groups.values() for group in skills.values()
    ]
    means = [_mean(skills, metric, seed) for skills in groups.values()]
    comparisons = _comparisons(groups, compare_to, metric, seed)
    return Summary(tuple(results), tuple(means), tuple(comparisons))


def by_target(items: Sequence[Item]) -> dict[str, Skills]:
    """Sort items by target and skill; each part keeps the order of the items file."""
    groups: _Groups = {}
    for item in items:
        groups.setdefault(item.target, {}).setdefault(item.skill, []).append(item)
    return groups


def _result(items: list[Item], metric: Metric, seed: int) -> Result:
    info, n = METRICS[metric], len(items)
    interval = interval_of([items], info, seed)
    result = Result(
        target=items[0].target,
        skill=items[0].skill,
        metric=metric,
        score=info.score(items),
        n=n,
        low=interval.low,
        high=interval.high,
        correct=sum(item.correct for item in items),
        loglik=_mean_loglik([item.loglik for item in items]),
    )
    if any(item.generated_correct is None for item in items):
        return result
    return replace(
        result,
        generated_correct=sum(item.generated_correct is True for item in items),
        agree=sum(item.generated_correct == item.correct for item in items),
    )


def _mean_loglik(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def mean_scores(results: Sequence[Result]) -> tuple[float, float]:
    """Return the means over skills of score and log-likelihood.

    Args:
        results: Of one target, at least one, from an evaluation that measured both.
    """
    loglik = _mean_loglik([one.loglik for one in results])
    assert loglik is not None
    return sum(one.score for one in results) / len(results), loglik


def _mean(skills: dict[str, list[Item]], metric: Metric, seed: int) -> Mean:
    groups = list(skills.values())
    info = METRICS[metric]
    interval = interval_of(groups, info, seed)
    return Mean(
        target=groups[0][0].target,
        metric=metric,
        score=sum(info.score(group) for group in groups) / len(groups),
        low=interval.low,
        high=interval.high,
        n=sum(map(len, groups)),
        skills=len(groups),
    )


def interval_of(groups: Sequence[Sequence[Item]], info: MetricInfo, seed: int) -> Interval:
    """Return the 95 % interval of the mean of the scores of skills.

    Args:
        groups: Items of each skill, none empty.
        info: The metric.
        seed: Of the bootstrap.
    """
    if info.binary:
        counts = [(round(sum(map(info.value, group))), len(group)) for group in groups]
        return wilson(*counts[0]) if len(counts) == 1 else macro_wilson(counts)
    if not info.weighted:
        return bootstrap_mean([[info.value(item) for item in group] for group in groups], seed=seed)

    def mean(sums: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return mean_of([info.scores(one[0] / one[1]) for one in sums])

    return _known(bootstrap_sums([info.columns(group) for group in groups], mean, seed=seed))


def _known(interval: Interval | None) -> Interval:
    """Return an interval of sums that are divided by numbers of tokens, which are above zero."""
    assert interval is not None
    return interval


def _comparisons(
    groups: _Groups, against: str | None, metric: Metric, seed: int
) -> list[Comparison]:
    """Compare over all skills first, then skill by skill; each family has its own correction."""
    if against is None:
        return []
    if against not in groups:
        raise NotFound(
            f"no target is called {against!r}",
            code="target",
            hint=f"targets are {', '.join(groups)}",
        )
    others = [name for name in groups if name != against]
    overall = [
        compare_skills(groups[name], groups[against], metric=metric, seed=seed) for name in others
    ]
    each = [
        compare_skills(groups[name], groups[against], skill=skill, metric=metric, seed=seed)
        for name in others
        for skill in groups[name]
    ]
    return corrected(overall) + corrected(each)


def compare_skills(
    ours: Skills,
    theirs: Skills,
    *,
    skill: str | None = None,
    metric: Metric = "exact_match",
    seed: int = 0,
) -> Comparison:
    """Compare two targets item by item.

    Where items are right or wrong, one is won by the target that alone has it right, else by the
    one whose value is higher; McNemar's exact test of the wins is then the sign test.

    Args:
        ours: Items of the target that is judged, by skill.
        theirs: The same items of the other one, in the same order.
        skill: One skill; None for all, each weighing the same in the difference.
        metric: What is compared.
        seed: Of the bootstrap.

    Returns:
        The comparison; `difference` is above zero where ours is better, `p_holm` is still `p`.

    Raises:
        UsageError: Different items.
    """
    skills = list(ours) if skill is None else [skill]
    pairs = [(ours[one], theirs.get(one, [])) for one in skills]
    mine = [item for group, _ in pairs for item in group]
    other = [item for _, group in pairs for item in group]
    if [item.id for item in mine] != [item.id for item in other]:
        raise UsageError(
            f"{_name(ours)} and {_name(theirs)} were not scored on the same items", code="paired"
        )
    info = METRICS[metric]
    values = [
        [(info.value(a), info.value(b)) for a, b in zip(*pair, strict=True)] for pair in pairs
    ]
    flat = [value for group in values for value in group]
    wins, losses = discordant([a > b for a, b in flat], [a < b for a, b in flat])
    gains = [info.gain(info.score(group), info.score(against)) for group, against in pairs]
    if info.weighted:
        interval = _paired_interval(pairs, info, seed)
    else:
        interval = bootstrap_mean([[a - b for a, b in group] for group in values], seed=seed)
    p = mcnemar(wins, losses)
    return Comparison(
        target=mine[0].target,
        against=other[0].target,
        skill=skill,
        n=len(mine),
        wins=wins,
        losses=losses,
        difference=sum(gains) / len(gains),
        low=interval.low,
        high=interval.high,
        p=p,
        p_holm=p,
    )


def _paired_interval(
    pairs: Sequence[tuple[Sequence[Item], Sequence[Item]]], info: MetricInfo, seed: int
) -> Interval:
    """Return the interval of a mean gain in scores per token; items are drawn for both at once."""
    sign = info.rank(1.0)

    def gain(sums: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        ones = [info.scores(one[0] / one[1]) - info.scores(one[2] / one[3]) for one in sums]
        return sign * mean_of(ones)

    columns = [np.vstack([info.columns(a), info.columns(b)]) for a, b in pairs]
    return _known(bootstrap_sums(columns, gain, seed=seed))


def _name(skills: Skills) -> str:
    return next((group[0].target for group in skills.values()), "nothing")


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Fill in `p_holm`: Holm's correction over these comparisons."""
    adjusted = holm([comparison.p for comparison in comparisons])
    return [
        replace(comparison, p_holm=p) for comparison, p in zip(comparisons, adjusted, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class GroupScore:
    """Pooled score of several skills, with its 95 % Wilson interval."""

    score: float
    correct: int
    n: int
    low: float
    high: float


def group_scores(
    evaluation: Evaluation, target: str, groups: Mapping[str, Sequence[str]]
) -> dict[str, GroupScore]:
    """Pool the exact matches of one target over groups of skills."""
    results = {r.skill: r for r in evaluation.record.results if r.target == target}
    return {group: pooled([results[skill] for skill in skills]) for group, skills in groups.items()}


def pooled(results: Sequence[Result]) -> GroupScore:
    """Pool the right items of one target on several skills, at least one.

    Right is what the metric says where it calls items right or wrong, else an exact answer.
    """
    correct = sum(
        round(one.score * one.n) if METRICS[one.metric].binary else one.correct for one in results
    )
    n = sum(result.n for result in results)
    interval = wilson(correct, n)
    return GroupScore(correct / n, correct, n, interval.low, interval.high)
