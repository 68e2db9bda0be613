"""Scores, counts and lists as people read them, the same in every table, page and message."""

import math
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal

_NOISE = 12
"""Digits behind the point beyond which a float holds what arithmetic left there: 0.7 - 0.675."""


def score_text(value: float, digits: int = 2, *, plus: bool = False) -> str:
    """Write a score, or a difference of scores, to so many digits; halves away from zero.

    Formats of Python round the binary number: 0.725 to 0.72, but 0.025 to 0.03.

    Args:
        value: Any number; what is not finite is written as Python does.
        digits: Behind the point.
        plus: Write a sign before positive numbers and zero too.

    Returns:
        The number; a minus sign only where something is below zero.

    Example:
        >>> score_text(0.725), score_text(0.8 - 0.775, plus=True), score_text(-0.001)
        ('0.73', '+0.03', '0.00')
    """
    if not math.isfinite(value):
        return f"{value:+.{digits}f}" if plus else f"{value:.{digits}f}"
    exact = Decimal(f"{value:.{_NOISE}f}")
    # Not `quantize`, which raises where a number has more digits than its context.
    rounded = exact.scaleb(digits).to_integral_value(ROUND_HALF_UP).scaleb(-digits)
    rounded = abs(rounded) if rounded == 0 else rounded
    return f"{rounded:+.{digits}f}" if plus else f"{rounded:.{digits}f}"


def share_text(value: float) -> str:
    """Write a share as whole percent.

    Example:
        >>> share_text(0.125)
        '13%'
    """
    return f"{score_text(100.0 * value, 0)}%"


def some_of(names: Iterable[str], most: int = 5, *, between: str = ", ") -> str:
    """Join names for a message; of a long list the first ones, and how many more there are.

    Args:
        names: In their order.
        most: So many are written.
        between: What separates them; with a line end in it the rest has a line of its own.

    Example:
        >>> some_of("abc", 2), some_of("ab", 2)
        ('a, b and 1 more', 'a, b')
    """
    known = list(names)
    text = between.join(known[:most])
    more = len(known) - most
    if more <= 0:
        return text
    return f"{text}{between if chr(10) in between else ' '}and {more:,} more"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Write a number of things.

    Example:
        >>> counted(1, "expert"), counted(1200, "expert"), counted(0, "entry", "entries")
        ('1 expert', '1,200 experts', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
