"""What somebody may have meant by a name that does not exist; nothing rather than a wild guess."""

import difflib
from collections.abc import Iterable

_ALIKE = 0.75
"""Below this share of common letters people find a suggestion misleading."""


def nearest(word: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Return the names that are a slip of the keyboard away from a word, the nearest first.

    Args:
        word: What was written.
        known: What there is.
        count: At most this many.

    Example:
        >>> nearest("densty", ["density", "scale"])
        ['density']
    """
    lower: dict[str, str] = {}
    for name in known:
        lower.setdefault(name.casefold(), name)
    found = difflib.get_close_matches(word.casefold(), lower, n=count, cutoff=_ALIKE)
    # Two letters in the wrong order count as two mistakes, too many for a short name.
    swapped = [name for name in lower if _is_swapped(name, word.casefold())]
    return [lower[name] for name in dict.fromkeys([*found, *swapped])][:count]


def _is_swapped(one: str, other: str) -> bool:
    """Whether two words differ by two neighbouring letters in the other order."""
    places = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len(one) != len(other) or len(places) != 2 or places[1] != places[0] + 1:
        return False
    first = places[0]
    return one[first : first + 2] == other[first : first + 2][::-1]
