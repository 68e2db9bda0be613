"""Names from records as they can be shown: bounded, without control characters, each once."""

from collections.abc import Iterable

from cgmerge.errors import readable

_LONGEST = 48
_TAIL = 12


def label(name: str, longest: int = _LONGEST) -> str:
    """Return a name for a table: one line, nothing invisible, the middle of a long one left out.

    Example:
        >>> label("a" * 60 + "\\u202eb")
        'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…aaaaa\\\\u202eb'
    """
    head, tail = longest - _TAIL - 1, _TAIL
    shown = " ".join(readable(name[:longest], 4 * longest).split()) or "(no name)"
    if len(name) <= longest and len(shown) <= longest:
        return shown
    end = " ".join(readable(name[-tail:]).split())
    return f"{shown[:head]}…{end[-tail:]}"


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return a label for each of several different names; labels differ too."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        first = shown = label(name)
        count = 1
        while shown in taken:
            count += 1
            shown = f"{first} ({count})"
        taken.add(shown)
        found[name] = shown
    return found


def p_value(p: float) -> str:
    """Write a p-value: three digits, or that it is smaller."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
