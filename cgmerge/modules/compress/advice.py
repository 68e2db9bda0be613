"""Which option keeps every module of an expert: tried out, never guessed."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cgmerge.errors import Incompatible
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.modes import DENSITY, Mode, Options, encode

_DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

MOST_ENTRIES = 300_000
"""Of experts that are tried out: above, each of the few tries takes many seconds."""


def keeping_all(mode: Mode, factors: Mapping[str, LowRank], options: Options) -> str | None:
    """Return the option with which no module is emptied.

    Args:
        mode: That emptied some.
        factors: As for `encode`.
        options: With which it did; no size.

    Returns:
        `--density X`, the lowest of a few that works; where none does, `--gauge raw` if that
        works; None where that does not either, or where trying takes too long.
    """
    if sum(delta.a.numel() + delta.b.numel() for delta in factors.values()) > MOST_ENTRIES:
        return None
    options = replace(options, target=None, progress=None)
    asked = DENSITY if options.density is None else options.density
    higher = [density for density in _DENSITIES if density > asked]
    found = _lowest(
        higher, lambda density: _keeps(mode, factors, replace(options, density=density))
    )
    if found is not None:
        return f"--density {found:g}"
    raw = mode == "ternary" and options.gauge == "svd"
    if raw and _keeps(mode, factors, replace(options, gauge="raw")):
        return "--gauge raw"
    return None


def _lowest(densities: list[float], keeps: Callable[[float], bool]) -> float | None:
    """Return the lowest density that was seen to work, the highest tried first."""
    if not densities or not keeps(densities[-1]):
        return None
    low, high = 0, len(densities) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(densities[middle]) else (middle + 1, high)
    return densities[high]


def _keeps(mode: Mode, factors: Mapping[str, LowRank], options: Options) -> bool:
    try:
        return not encode(mode, factors, options).fidelity.emptied
    except Incompatible:
        return False
