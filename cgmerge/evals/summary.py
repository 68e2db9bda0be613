"""From items to numbers: scores with intervals, means over skills, paired comparisons.

The only way from items to a record: the runner uses it for what it has just measured, and anyone
can use it on a loaded record to check that every number follows from the items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cgmerge.errors import NotFound, UsageError
from cgmerge.evals.record import Comparison, Evaluation, Item, Mean, Metric, Result
from cgmerge.evals.stats import (
    Interval,
    bootstrap_mean,
    discordant,
    holm,
    macro_wilson,
    mcnemar,
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
    return Summary(tuple(results), tuple(means), tuple(_comparisons(groups, compare_to, seed)))


def by_target(items: Sequence[Item]) -> dict[str, Skills]:
    """Sort items by target and skill; each part keeps the order of the items file."""
    groups: _Groups = {}
    for item in items:
        groups.setdefault(item.target, {}).setdefault(item.skill, []).append(item)
    return groups


def _result(items: list[Item], metric: Metric, seed: int) -> Result:
    correct, n = sum(item.correct for item in items), len(items)
    loglik = sum(item.loglik for item in items) / n
    if metric == "exact_match":
        score, interval = correct / n, wilson(correct, n)
    else:
        score, interval = loglik, bootstrap_mean([[item.loglik for item in items]], seed=seed)
    result = Result(
        target=items[0].target,
        skill=items[0].skill,
        metric=metric,
        score=score,
        n=n,
        low=interval.low,
        high=interval.high,
        correct=correct,
        loglik=loglik,
    )
    if any(item.generated_correct is None for item in items):
        return result
    return replace(
        result,
        generated_correct=sum(item.generated_correct is True for item in items),
        agree=sum(item.generated_correct == item.correct for item in items),
    )


def _mean(skills: dict[str, list[Item]], metric: Metric, seed: int) -> Mean:
    groups = list(skills.values())
    if metric == "exact_match":
        counts = [(sum(item.correct for item in group), len(group)) for group in groups]
        score = sum(correct / n for correct, n in counts) / len(counts)
        interval = macro_wilson(counts)
    else:
        values = [[item.loglik for item in group] for group in groups]
        score = sum(sum(group) / len(group) for group in values) / len(values)
        interval = bootstrap_mean(values, seed=seed)
    return Mean(
        target=groups[0][0].target,
        metric=metric,
        score=score,
        low=interval.low,
        high=interval.high,
        n=sum(map(len, groups)),
        skills=len(groups),
    )


def _comparisons(groups: _Groups, against: str | None, seed: int) -> list[Comparison]:
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
    overall = [compare_skills(groups[name], groups[against], seed=seed) for name in others]
    each = [
        compare_skills(groups[name], groups[against], skill=skill, seed=seed)
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

    With exact match an item is won by the one that alone has it right, with log-likelihood by the
    one that gives the answer more; McNemar's exact test of the wins is then the sign test.

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
    differences = [
        [_value(a, metric) - _value(b, metric) for a, b in zip(group, against, strict=True)]
        for group, against in pairs
    ]
    flat = [difference for group in differences for difference in group]
    wins, losses = discordant([one > 0 for one in flat], [one < 0 for one in flat])
    interval: Interval = bootstrap_mean(differences, seed=seed)
    p = mcnemar(wins, losses)
    return Comparison(
        target=mine[0].target,
        against=other[0].target,
        skill=skill,
        n=len(mine),
        wins=wins,
        losses=losses,
        difference=sum(sum(group) / len(group) for group in differences) / len(differences),
        low=interval.low,
        high=interval.high,
        p=p,
        p_holm=p,
    )


def _value(item: Item, metric: Metric) -> float:
    return float(item.correct) if metric == "exact_match" else item.loglik


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
    """Pool the exact matches of one target on several skills, at least one."""
    correct = sum(result.correct for result in results)
    n = sum(result.n for result in results)
    interval = wilson(correct, n)
    return GroupScore(correct / n, correct, n, interval.low, interval.high)
