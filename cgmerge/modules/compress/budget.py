"""Hit a size: the knob of a mode is turned until the result lies in a window of sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Result = TypeVar("Result")

CLOSE = 0.99
"""Share of a size at which the search for it ends."""

_MOST_TRIES = 12
_NARROW = 1e-3
_CLIMBS = 3

PEAK = 2 / 3
"""Density at which signs take most bits: below, zeros are cheaper to say, and above, there are
fewer of them (h(p) + p is largest where log2((1 − p) / p) = −1)."""

ONE_PEAK = (0.01, 0.1, PEAK, 1.0)
"""Where each tensor keeps the same share of its entries."""

MANY_PEAKS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, PEAK, 0.75, 0.85, 0.95, 1.0)
"""Where one threshold decides for all tensors: those of large entries are past their peak first."""


@dataclass(frozen=True, slots=True)
class Found(Generic[Result]):
    """The results on both sides of a window, the same one where it was hit.

    Attributes:
        below: The largest result found that is not above the window; None where all are.
        above: The smallest result found that is not below it; None where all are.
    """

    below: Result | None
    above: Result | None


def fit(
    make: Callable[[float], Result],
    measure: Callable[[Result], float],
    window: tuple[float, float],
    bounds: tuple[float, float],
    start: float,
) -> Found[Result]:
    """Turn a knob until the result's size lies in a window.

    The size falls as the knob rises, roughly like a power of it, which is what the next guess is
    taken from; the bracket of knobs shrinks in any case. Sizes may jump over the window.

    Args:
        make: The result for a knob.
        measure: Its size, in any unit.
        window: Lowest and highest size that will do, above 0.
        bounds: Lowest and highest knob, above 0; the highest gives the smallest result.
        start: First guess.
    """
    low, high = bounds
    knob = min(max(start, low), high)
    aim = math.sqrt(window[0] * window[1])
    below: tuple[float, float, Result] | None = None  # knob, size, result
    above: tuple[float, float, Result] | None = None
    for turn in range(_MOST_TRIES):
        result = make(knob)
        size = measure(result)
        if window[0] <= size <= window[1]:
            return Found(result, result)
        if size < window[0]:
            below, high = (knob, size, result), knob
            finished = knob <= low
        else:
            above, low = (knob, size, result), knob
            finished = knob >= high
        if finished or high / low < 1.0 + _NARROW:
            break
        if below is None or above is None:
            knob = _onwards(low, high, size / aim, turn)
        else:
            knob = _between(low, high, below[:2], above[:2], aim)
    return Found(below and below[2], above and above[2])


def _onwards(low: float, high: float, excess: float, turn: int) -> float:
    """Guess the next knob while only one side of the window was seen: ever longer steps."""
    longest, shortest = 8.0 ** (turn + 1), 2.0**turn
    if excess <= 0:
        return math.sqrt(low * high)
    step = min(max(math.pow(max(excess, 1 / excess), 1.5), shortest), longest)
    return min(low * step, high) if excess > 1 else max(high / step, low)


def _between(
    low: float, high: float, below: tuple[float, float], above: tuple[float, float], aim: float
) -> float:
    """Guess the next knob inside the bracket, from knob and size on both sides."""
    if below[1] <= 0:
        return math.sqrt(low * high)
    slope = math.log(above[1] / below[1]) / math.log(below[0] / above[0])
    if slope <= 0:
        return math.sqrt(low * high)
    guess = below[0] * math.exp(-math.log(aim / below[1]) / slope)
    # Stay off the ends, or one of them would never move.
    edge = math.pow(high / low, 0.05)
    return min(max(guess, low * edge), high / edge)


@dataclass(frozen=True, slots=True)
class Densities:
    """Densities on both sides of a size.

    Attributes:
        below: Whose size comes closest from below; None where nothing is that small.
        above: Whose size is the next one above; None where nothing is larger.
    """

    below: float | None
    above: float | None


def fit_density(
    size_of: Callable[[float], float],
    error_of: Callable[[float], float],
    target: float,
    densities: Sequence[float],
) -> Densities:
    """Find the density at which signs take just less than a size.

    Sizes do not rise with the density all the way: signs without a zero among them are smaller
    than those of two thirds. So one size can have several densities; the one of least error is
    taken.

    Args:
        size_of: Size at a density; 0 where nothing is left of the expert.
        error_of: What is lost there; asked only of densities whose sizes are within a percent.
        target: The size.
        densities: Rising, in (0, 1]; between two neighbours sizes rise or fall.
    """
    sizes = {density: size_of(density) for density in densities}
    for _ in range(_CLIMBS):
        top = max(sizes, key=lambda density: sizes[density])
        if sizes[top] >= CLOSE * target:
            break
        order = sorted(sizes)
        place = order.index(top)
        for other in order[max(place - 1, 0) : place + 2]:
            if other != top:
                sizes[(top + other) / 2] = size_of((top + other) / 2)
    for low, high in pairwise(sorted(sizes)):
        if (sizes[low] > target) != (sizes[high] > target):
            sizes |= _crossed(size_of, sizes, (low, high), target)
    fits = {density: size for density, size in sizes.items() if 0 < size <= target}
    more = {density: size for density, size in sizes.items() if size > target}
    above = min(more, key=lambda density: more[density]) if more else None
    if not fits:
        return Densities(None, above)
    best = max(fits.values())
    floor = CLOSE * (target if best >= CLOSE * target else best)
    close = sorted(density for density, size in fits.items() if size >= floor)
    return Densities(close[0] if len(close) == 1 else min(close, key=error_of), above)


def _crossed(
    size_of: Callable[[float], float],
    sizes: dict[float, float],
    ends: tuple[float, float],
    target: float,
) -> dict[float, float]:
    """Return the sizes tried between two densities until one is just below the target."""
    inside, outside = ends if sizes[ends[0]] <= target else ends[::-1]
    tried: dict[float, float] = {}
    for _ in range(_MOST_TRIES):
        middle = math.sqrt(inside * outside)
        size = tried[middle] = size_of(middle)
        if CLOSE * target <= size <= target:
            break
        inside, outside = (middle, outside) if size <= target else (inside, middle)
        if max(inside, outside) < min(inside, outside) * (1.0 + _NARROW):
            break
    return tried
