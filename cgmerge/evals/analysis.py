"""What a merge kept, lost and carried over, and what composing costs: from items to statements.

Skills play one of three roles. Experts were *trained* on some; the base already *had* others (it
answers at least half of their items); the rest is *unseen*. What is kept is read on the trained
ones, forgetting on those that the base had, transfer on the unseen ones. All functions are pure;
intervals come from resampling items inside each skill, for all models of a statement at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgmerge.evals.metrics import MetricInfo
from cgmerge.evals.record import Item
from cgmerge.evals.stats import Interval, bootstrap_sums, discordant, mcnemar, mean_of
from cgmerge.evals.summary import Skills

HAD = 0.5
"""Share of a skill's items that a base must answer exactly to be said to have had it."""
_SURE = 0.05
_Sums = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Roles:
    """Which skills say what.

    Attributes:
        experts: Trained skill to its expert: the one of its name, else the best on these items.
        had: Skills without an expert that the base answers.
        unseen: All others.
    """

    experts: Mapping[str, str]
    had: tuple[str, ...]
    unseen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over skills.

    Attributes:
        value: Each skill weighing the same.
        low: Lower end of its 95 % bootstrap interval; None where it has none.
        high: Upper end.
        skills: Skills it is about.
        left_out: Skills for which it is not defined, or lost in noise.
    """

    value: float
    low: float | None
    high: float | None
    skills: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Effects:
    """What became of the skills in one model; None where there is nothing to say.

    Attributes:
        normalised: Score as a share of the expert's, on trained skills.
        recovered: Share of the gain from base to expert that is kept, on trained skills where
            that gain is sure.
        interference: Score of the expert minus that of the model, on trained skills.
        forgetting: Score of the base minus that of the model, on skills that the base had.
        transfer: Score of the model minus that of the base, on unseen skills.
        relative_gain: Gain over the base as a share of its score, over all skills (CrossFit's
            ARG, with the base in the place of direct training).
    """

    normalised: Estimate | None
    recovered: Estimate | None
    interference: Estimate | None
    forgetting: Estimate | None
    transfer: Estimate | None
    relative_gain: Estimate | None


def roles_of(
    targets: Mapping[str, Skills],
    experts: Sequence[str],
    base: str | None,
    info: MetricInfo,
    trained: Sequence[str] | None = None,
) -> Roles:
    """Say which skills were trained, which the base had and which are new.

    Args:
        targets: Items by target and skill.
        experts: Targets that are experts.
        base: The target that is the base, if it was scored.
        info: The metric.
        trained: Skills that experts were trained on; None for those that an expert is named
            after.
    """
    skills = list(next(iter(targets.values())))
    named = [skill for skill in skills if skill in experts] if trained is None else trained
    owners = {
        skill: skill
        if skill in experts
        else max(experts, key=lambda one: info.rank(info.score(targets[one][skill])))
        for skill in (named if experts else ())
    }
    rest = [skill for skill in skills if skill not in owners]
    had = tuple(skill for skill in rest if base is not None and _has(targets[base][skill]))
    return Roles(owners, had, tuple(skill for skill in rest if skill not in had))


def _has(items: Sequence[Item]) -> bool:
    return sum(item.correct for item in items) >= HAD * len(items)


def effects_of(
    model: Skills,
    targets: Mapping[str, Skills],
    roles: Roles,
    base: str | None,
    info: MetricInfo,
    *,
    merged: bool = True,
    seed: int = 0,
) -> Effects:
    """Say what became of all skills in one model.

    Args:
        model: Its items by skill.
        targets: Of the base and the experts, the same items in the same order.
        roles: From `roles_of`.
        base: Name of the base, if it was scored.
        info: The metric.
        merged: Whether it is made of experts, so that they are what it is measured by.
        seed: Of the bootstrap.
    """
    owned = [(model[s], targets[expert][s]) for s, expert in roles.experts.items() if merged]
    before = {} if base is None else targets[base]
    return Effects(
        normalised=ratio(owned, info, seed=seed),
        recovered=recovered(
            [(model[s], before[s], targets[e][s]) for s, e in roles.experts.items() if before]
            if merged
            else [],
            info,
            seed=seed,
        ),
        interference=gain([(expert, mine) for mine, expert in owned], info, seed=seed),
        forgetting=gain([(before[s], model[s]) for s in roles.had], info, seed=seed),
        transfer=gain([(model[s], before[s]) for s in roles.unseen if before], info, seed=seed),
        relative_gain=ratio(
            [(model[s], before[s]) for s in model if before], info, relative=True, seed=seed
        ),
    )


_Pair = tuple[Sequence[Item], Sequence[Item]]


def gain(pairs: Sequence[_Pair], info: MetricInfo, *, seed: int = 0) -> Estimate | None:
    """Return the mean over skills of how much better the first of two models is.

    Args:
        pairs: Items of both on each skill.
        info: The metric.
        seed: Of the bootstrap.

    Returns:
        The mean; None without skills.
    """
    sign = info.rank(1.0)
    return _estimate(pairs, info, lambda a, b: sign * (a - b), seed=seed)


def ratio(
    pairs: Sequence[_Pair], info: MetricInfo, *, relative: bool = False, seed: int = 0
) -> Estimate | None:
    """Return the mean over skills of the first score as a share of the second.

    It is a mean of ratios, not a ratio of means. Skills whose second score is 0 are left out, as
    it is not defined there.

    Args:
        pairs: Items of both on each skill.
        info: A metric of scores from 0 up, of which more is better.
        relative: Return the gain as a share: the ratio minus 1.
        seed: Of the bootstrap.

    Returns:
        The mean; None for other metrics, or without skills where it is defined.

    Source:
        Normalised accuracy of the merging papers; with `relative` the average relative gain of
        CrossFit (Ye et al. 2021).
    """
    if info.lower_is_better or info.low < 0:
        return None
    defined = [pair for pair in pairs if info.score(pair[1]) > 0]
    shift = 1.0 if relative else 0.0
    left_out = len(pairs) - len(defined)
    return _estimate(defined, info, lambda a, b: a / b - shift, left_out=left_out, seed=seed)


def recovered(
    triples: Sequence[tuple[Sequence[Item], Sequence[Item], Sequence[Item]]],
    info: MetricInfo,
    *,
    seed: int = 0,
) -> Estimate | None:
    """Return the mean over skills of the kept share of the gain from base to expert.

    (model − base) / (expert − base): 1 where a merge is as good as the expert, 0 where it is the
    base, below 0 where it is worse. Skills whose gain is not sure (exact McNemar or sign test,
    p ≥ 0.05) are left out: the ratio would be one of two noises.

    Args:
        triples: Items of model, base and expert on each skill.
        info: The metric.
        seed: Of the bootstrap.

    Returns:
        The mean; None without such skills.
    """
    sure = [one for one in triples if _surely_better(one[2], one[1], info)]
    left_out = len(triples) - len(sure)
    return _estimate(sure, info, lambda m, b, e: (m - b) / (e - b), left_out=left_out, seed=seed)


def _surely_better(ours: Sequence[Item], theirs: Sequence[Item], info: MetricInfo) -> bool:
    pairs = [(info.value(a), info.value(b)) for a, b in zip(ours, theirs, strict=True)]
    wins, losses = discordant([a > b for a, b in pairs], [a < b for a, b in pairs])
    better = info.gain(info.score(ours), info.score(theirs)) > 0
    return better and wins > losses and mcnemar(wins, losses) < _SURE


def _estimate(
    skills: Sequence[tuple[Sequence[Item], ...]],
    info: MetricInfo,
    statistic: Callable[..., _Sums],
    *,
    left_out: int = 0,
    seed: int,
) -> Estimate | None:
    """Return the mean over skills of a statistic of several models' scores, with its interval."""
    if not skills:
        return None
    columns = [np.vstack([info.columns(items) for items in models]) for models in skills]

    def mean(sums: list[_Sums]) -> _Sums:
        return mean_of([statistic(*_scores(one, info)) for one in sums])

    value = float(mean([column.sum(axis=1, keepdims=True) for column in columns])[0])
    interval: Interval | None = bootstrap_sums(columns, mean, seed=seed)
    low, high = (interval.low, interval.high) if interval else (None, None)
    return Estimate(value, low, high, len(skills), left_out)


def _scores(sums: _Sums, info: MetricInfo) -> list[_Sums]:
    """Return the scores of several models from their totals and weights, [2 models, draws]."""
    return [info.scores(sums[place] / sums[place + 1]) for place in range(0, len(sums), 2)]
