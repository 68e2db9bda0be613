"""Hit a size: the knob of a mode is turned until the result is just below the target."""

import math
from collections.abc import Callable
from typing import TypeVar

from cgmerge.errors import UsageError

Result = TypeVar("Result")

SLACK = 0.01
"""How far below the target the result may stay."""

_MOST_TRIES = 16
_NARROW = 1e-5


def fit(
    make: Callable[[float], Result],
    measure: Callable[[Result], float],
    target: float,
    bounds: tuple[float, float],
    start: float,
) -> tuple[float, Result]:
    """Find a knob whose result measures at most `target`, and at least 99 % of it where possible.

    The measure falls as the knob rises, roughly like a power of it, which is what the next guess
    is taken from; the bracket of knobs shrinks in any case.

    Args:
        make: The result for a knob.
        measure: Its size, in any unit.
        target: Above 0.
        bounds: Lowest and highest knob, above 0; the highest gives the smallest result.
        start: First guess.

    Returns:
        The knob and its result; below 99 % of the target where sizes jump, or where the lowest
        knob gives no more.

    Raises:
        UsageError: The smallest result is larger than the target.
    """
    low, high = bounds
    knob = min(max(start, low), high)
    best: tuple[float, Result] | None = None
    below = above = None  # (knob, size) of the bracket's ends once measured
    for _ in range(_MOST_TRIES):
        result = make(knob)
        size = measure(result)
        if size <= target:
            best = knob, result
            if size >= (1.0 - SLACK) * target or knob <= low:
                return best
            high, below = knob, (knob, size)
        else:
            if knob >= high:
                break
            low, above = knob, (knob, size)
        if high / low < 1.0 + _NARROW:
            break
        knob = _next(low, high, below, above, (1.0 - SLACK / 2) * target)
    if best is not None:
        return best
    result = make(high)
    if measure(result) <= target:
        return high, result
    raise UsageError(
        f"the smallest this mode gives is {measure(result):,.0f}, the target {target:,.0f}",
        code="target",
        hint="raise the target",
        expected=target,
        found=measure(result),
    )


def _next(
    low: float,
    high: float,
    below: tuple[float, float] | None,
    above: tuple[float, float] | None,
    aim: float,
) -> float:
    """Guess the next knob inside the bracket."""
    middle = math.sqrt(low * high)
    if below is None or above is None:
        # One side is unknown: go on from the known one, a factor at a time.
        known = below or above
        if known is None or known[1] <= 0:
            return middle
        guess = known[0] * min(max(math.pow(known[1] / aim, 1.5), 1 / 8), 8.0)
        return guess if low < guess < high else middle
    if below[1] <= 0:
        return middle
    slope = math.log(above[1] / below[1]) / math.log(below[0] / above[0])
    if slope <= 0:
        return middle
    guess = below[0] * math.exp(-math.log(aim / below[1]) / slope)
    # Stay off the ends, or one of them would never move.
    edge = math.pow(high / low, 0.05)
    return min(max(guess, low * edge), high / edge)
