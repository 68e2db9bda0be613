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
    return [lower[name] for name in found]
