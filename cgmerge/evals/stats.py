"""How sure a score is: intervals, paired tests, correction for many comparisons.

Scores here are small counts on the same items, so the exact or well-behaved method is used each
time: Wilson instead of p ± 2·se (which has no width at 0 % and 100 %), the exact McNemar test
instead of its chi-square approximation, Holm for several comparisons, a paired bootstrap that
keeps every skill's number of items. All functions are pure; the random one takes a seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, ndtri

from cgmerge.errors import UsageError

CONFIDENCE = 0.95
DRAWS = 2_000
_BLOCK_ENTRIES = 4_000_000
"""Random numbers held at once by the bootstrap (32 MB)."""
_FEW = 8


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, `low` ≤ `high`."""

    low: float
    high: float


def wilson(correct: int, n: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Return the Wilson score interval of a proportion.

    Args:
        correct: Items that were right, 0 to `n`.
        n: Items in all, at least 1.
        confidence: Between 0 and 1.

    Returns:
        An interval inside [0, 1] that holds `correct / n`.

    Raises:
        UsageError: No items, a count outside 0..n, or a confidence outside (0, 1).

    Source:
        Wilson 1927. Equal to `scipy.stats.binomtest(...).proportion_ci(method="wilson")`, which
        takes 2 ms a call because it also computes a test.

    Example:
        >>> interval = wilson(9, 10)
        >>> round(interval.low, 6), round(interval.high, 6)
        (0.59585, 0.982124)
    """
    if n < 1 or not 0 <= correct <= n:
        raise UsageError(f"{correct} of {n} is not a proportion", code="count")
    if not 0 < confidence < 1:
        raise UsageError(f"a confidence of {confidence} is outside (0, 1)", code="confidence")
    z = float(ndtri((1 + confidence) / 2))
    centre = correct + z * z / 2
    half = z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    share = correct / n
    # Rounding may carry a bound one step past the proportion itself at 0 and 1.
    return Interval(
        min(max((centre - half) / (n + z * z), 0.0), share),
        max(min((centre + half) / (n + z * z), 1.0), share),
    )


def macro_wilson(counts: Sequence[tuple[int, int]], *, confidence: float = CONFIDENCE) -> Interval:
    """Return an interval of the unweighted mean of several independent proportions.

    With d_i the distances of each Wilson bound from its proportion, the mean of k proportions
    lies within sqrt(Σ d_i²) / k. For one proportion it is the Wilson interval itself, and it
    keeps a width when all are 0 % or 100 %, where a bootstrap has none.

    Args:
        counts: (correct, n) of each skill, at least one.
        confidence: Between 0 and 1.

    Returns:
        An interval inside [0, 1] that holds the mean.

    Raises:
        UsageError: No proportions, or one that `wilson` refuses.

    Source:
        Variance recovery from single intervals (MOVER; Zou & Donner 2008), Wilson as the parts.
    """
    if not counts:
        raise UsageError("a mean of no skills has no interval", code="count")
    shares = np.array([correct / n for correct, n in counts])
    parts = [wilson(correct, n, confidence=confidence) for correct, n in counts]
    below = np.array([part.low for part in parts]) - shares
    above = np.array([part.high for part in parts]) - shares
    mean, k = float(shares.mean()), len(counts)
    return Interval(
        max(mean - float(np.sqrt((below**2).sum())) / k, 0.0),
        min(mean + float(np.sqrt((above**2).sum())) / k, 1.0),
    )


def mcnemar(wins: int, losses: int) -> float:
    """Return the two-sided exact p-value for two models on the same items.

    Args:
        wins: Items that only the first model has right.
        losses: Items that only the second model has right.

    Returns:
        Probability of a split at least this uneven when neither is better; 1 without any
        difference.

    Raises:
        UsageError: A negative count.

    Source:
        McNemar 1947 in its exact form: twice the lower tail of Binomial(wins + losses, 1/2).
        Equal to `scipy.stats.binomtest(wins, wins + losses)`.

    Example:
        >>> mcnemar(0, 6)
        0.03125
    """
    if wins < 0 or losses < 0:
        raise UsageError(f"{wins} wins and {losses} losses are not counts", code="count")
    if wins == losses:
        return 1.0
    return min(2 * float(bdtr(min(wins, losses), wins + losses, 0.5)), 1.0)


def discordant(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int]:
    """Count the items that only the first, and only the second, has right.

    Args:
        first: Right or wrong, per item.
        second: The same items in the same order.

    Raises:
        UsageError: Different numbers of items.
    """
    if len(first) != len(second):
        raise UsageError(
            f"paired items are needed, found {len(first)} and {len(second)}", code="paired"
        )
    pairs = list(zip(first, second, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm's step-down method).

    Args:
        p_values: Each in [0, 1].

    Returns:
        Adjusted values in the order given, each in [0, 1] and not below its own p-value.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    floor = 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min((len(p_values) - rank) * p_values[i], 1.0))
        adjusted[i] = floor
    return adjusted


def bootstrap_mean(
    groups: Sequence[Sequence[float]],
    *,
    seed: int,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return a percentile interval of the mean of group means, resampling inside each group.

    For two models on the same items give the differences of their item scores: the bootstrap is
    then paired.

    Args:
        groups: One sequence of finite item scores per skill, none empty.
        seed: Same seed, same interval; every group has its own stream.
        draws: Resamples.
        confidence: Between 0 and 1.

    Returns:
        The interval; without width where no group varies.

    Raises:
        UsageError: No groups, or an empty one.
    """
    if not groups or any(len(group) == 0 for group in groups):
        raise UsageError("a bootstrap needs at least one item in every skill", code="count")
    total = np.zeros(draws)
    streams = np.random.SeedSequence(seed).spawn(len(groups))
    for group, stream in zip(groups, streams, strict=True):
        values = np.asarray(group, dtype=np.float64)
        total += _resampled_means(values, np.random.default_rng(stream), draws)
    tail = (1 - confidence) / 2
    low, high = np.quantile(total / len(groups), [tail, 1 - tail])
    return Interval(float(low), float(high))


def bootstrap_sums(
    groups: Sequence[NDArray[np.float64]],
    statistic: Callable[[list[NDArray[np.float64]]], NDArray[np.float64]],
    *,
    seed: int,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return a percentile interval of anything that follows from sums over the items of skills.

    Args:
        groups: One array per skill, [columns, items]: what is added up. Several columns of one
            item are drawn together, which is what makes a comparison paired.
        statistic: From the sums of each skill, [columns, draws], to the statistic, [draws]. Draws
            for which it is not finite (a ratio over zero) are left out.
        seed: Same seed, same interval; every group has its own stream.
        draws: Resamples.
        confidence: Between 0 and 1.

    Returns:
        The interval; None where the statistic is finite for less than half of the draws.

    Raises:
        UsageError: No groups, or an empty one.
    """
    if not groups or any(group.shape[1] == 0 for group in groups):
        raise UsageError("a bootstrap needs at least one item in every skill", code="count")
    streams = np.random.SeedSequence(seed).spawn(len(groups))
    sums = [
        _resampled_sums(group, np.random.default_rng(stream), draws)
        for group, stream in zip(groups, streams, strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(sums)
    values = values[np.isfinite(values)]
    if 2 * len(values) < draws:
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def mean_of(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean of several arrays of one shape, entry by entry."""
    mean: NDArray[np.float64] = np.vstack(rows).mean(axis=0)
    return mean


def _resampled_sums(
    columns: NDArray[np.float64], rng: np.random.Generator, draws: int
) -> NDArray[np.float64]:
    """Return sums of resamples, [columns, draws]; few distinct items are drawn by their number."""
    n = columns.shape[1]
    distinct, counts = np.unique(columns, axis=1, return_counts=True)
    few = len(counts) <= max(_FEW, n // _FEW)
    sums = np.empty((len(columns), draws))
    block = max(1, _BLOCK_ENTRIES // (len(counts) if few else n))
    for first in range(0, draws, block):
        size = min(block, draws - first)
        if few:
            drawn = rng.multinomial(n, counts / n, size=size)
            sums[:, first : first + size] = distinct @ drawn.T
        else:
            chosen = rng.integers(n, size=(size, n))
            for place, column in enumerate(columns):
                sums[place, first : first + size] = column[chosen].sum(axis=1)
    return sums


def _resampled_means(
    values: NDArray[np.float64], rng: np.random.Generator, draws: int
) -> NDArray[np.float64]:
    """Return means of resamples, [draws].

    For few distinct values (right or wrong) it draws how often each occurs, which is multinomial:
    the same resample at two or three numbers a draw, however many items there are.
    """
    distinct, counts = np.unique(values, return_counts=True)
    few = len(distinct) <= _FEW
    n = len(values)
    means = np.empty(draws)
    block = max(1, _BLOCK_ENTRIES // (len(distinct) if few else n))
    for first in range(0, draws, block):
        size = min(block, draws - first)
        if few:
            sums = rng.multinomial(n, counts / n, size=size) @ distinct
        else:
            sums = values[rng.integers(n, size=(size, n))].sum(axis=1)
        means[first : first + size] = sums / n
    return means
