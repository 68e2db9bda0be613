"""Hit a size: the knob of a mode is turned until the result lies in a window of sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")

_MOST_TRIES = 12
_NARROW = 1e-3


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
