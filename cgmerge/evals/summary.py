"""From items to numbers: scores with intervals, means over skills, paired comparisons.

The only way from items to a record: the runner uses it for what it has just measured, and anyone
can use it on a loaded record to check that every number follows from the items.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cgmerge.errors import NotFound, UsageError
from cgmerge.evals.record import Comparison, Item, Mean, Metric, Result
from cgmerge.evals.stats import (
    Interval,
    bootstrap_mean,
    discordant,
    holm,
    macro_wilson,
    mcnemar,
    wilson,
)

_Groups = dict[str, dict[str, list[Item]]]
"""Target to skill to items, all in the order of the items file."""


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
    groups: _Groups = {}
    for item in items:
        groups.setdefault(item.target, {}).setdefault(item.skill, []).append(item)
    results = [
        _result(group, metric, seed) for skills in groups.values() for group in skills.values()
    ]
    means = [_mean(skills, metric, seed) for skills in groups.values()]
    return Summary(tuple(results), tuple(means), tuple(_comparisons(groups, compare_to, seed)))


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
    overall = [_compare(groups, name, against, None, seed) for name in others]
    each = [
        _compare(groups, name, against, skill, seed) for name in others for skill in groups[name]
    ]
    return _corrected(overall) + _corrected(each)


def _compare(groups: _Groups, name: str, against: str, skill: str | None, seed: int) -> Comparison:
    skills = list(groups[name]) if skill is None else [skill]
    pairs = [(groups[name][one], groups[against].get(one, [])) for one in skills]
    ours = [item for mine, _ in pairs for item in mine]
    theirs = [item for _, other in pairs for item in other]
    if [item.id for item in ours] != [item.id for item in theirs]:
        raise UsageError(f"{name} and {against} were not scored on the same items", code="paired")
    differences = [
        [float(a.correct) - float(b.correct) for a, b in zip(mine, other, strict=True)]
        for mine, other in pairs
    ]
    wins, losses = discordant([item.correct for item in ours], [item.correct for item in theirs])
    interval: Interval = bootstrap_mean(differences, seed=seed)
    p = mcnemar(wins, losses)
    return Comparison(
        target=name,
        against=against,
        skill=skill,
        n=len(ours),
        wins=wins,
        losses=losses,
        difference=sum(sum(group) / len(group) for group in differences) / len(differences),
        low=interval.low,
        high=interval.high,
        p=p,
        p_holm=p,
    )


def _corrected(comparisons: list[Comparison]) -> list[Comparison]:
    adjusted = holm([comparison.p for comparison in comparisons])
    return [
        replace(comparison, p_holm=p) for comparison, p in zip(comparisons, adjusted, strict=True)
    ]
