"""What is wrong with a compressed expert, from what its file says: no tensor, no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cgmerge.errors import readable
from cgmerge.shown import some_of

LEAST_KEPT = 0.5
"""Share of the gain below which a compressed expert is warned of."""


def warnings_of(
    fidelity: Mapping[str, Any] | None,
    modules: Mapping[str, Sequence[float | None]],
    scores: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return a sentence for each thing that the owner of a compressed expert should know.

    Args:
        fidelity: Of the manifest; the number of modules without effect is taken from it.
        modules: Name to error and cosine, from the index; None where it does not tell.
        scores: Entries of `eval` in the manifest, as compress writes them; others are left out.
    """
    count = (fidelity or {}).get("emptied")
    dead = [name for name, known in modules.items() if list(known) == [1.0, 0.0]]
    found = [emptied_warning(dead, len(modules))] if dead else []
    if not found and type(count) is int and count > 0:
        found.append(f"{count} modules have no effect any more")
    return [*found, *lost_gains(scores)]


def emptied_warning(emptied: Sequence[str], modules: int) -> str:
    """Name the modules that had an effect and have none any more."""
    return readable(
        f"{len(emptied)} of {modules} modules have no effect any more: {some_of(emptied)}"
    )


def lost_gains(scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell of each suite on which less than half of the gain is left."""
    for entry in scores:
        known = [entry.get(key) for key in ("base", "original", "compressed")]
        numbers = [float(one) for one in known if isinstance(one, int | float)]
        if len(numbers) < len(known):
            continue
        base, before, after = numbers
        gain = before - base
        if gain > 0 and after - base < LEAST_KEPT * gain:
            suite = readable(str(entry.get("suite", "the calibration data")), 100)
            yield (
                f"little is left of what the expert had learned: {before:.3f} before and"
                f" {after:.3f} after on {suite}, {base:.3f} without it"
            )
