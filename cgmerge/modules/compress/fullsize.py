"""A full fine-tune's delta in a file of a given size: the density is turned until it fits.

Sizes are exact: those of levels and scales come from the codec without writing a bit, and what is
around them is taken from files that are written where nobody looks.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cgmerge.modules.compress.budget import MANY_PEAKS, ONE_PEAK, fit_density
from cgmerge.modules.compress.codec import coded_bits
from cgmerge.modules.compress.fulldelta import encode_tensors, measure_tensors
from cgmerge.modules.compress.modes import Options
from cgmerge.modules.compress.pack import USED, settle_size, too_small
from cgmerge.modules.compress.packfull import FullPlan, write_full
from cgmerge.modules.compress.rate import SCALE_BITS

_SPARE, _MARGIN = 64, 1.03
_SAMPLE = 0.01  # a density that is quick to write

Progress = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Settled:
    """What to encode a full model with.

    Attributes:
        options: Density and strength.
        next_bytes: Where a size was asked for and is missed by far, the bytes of the next file
            above it; None where there is none.
    """

    options: Options
    next_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Fitted:
    options: Options
    above: Options | None


def settle(
    plan: FullPlan, scores: list[dict[str, Any]] | None = None, progress: Progress | None = None
) -> Settled:
    """Return what to encode with: the density asked for, or the one that meets a size from below.

    Args:
        plan: From `plan_full`.
        scores: Entries of `eval` as long as those that will be written.
        progress: Called after each pass over the model with a density and the bytes it takes.

    Raises:
        UsageError: A size that cannot be reached.
        Incompatible: The model is the base.
    """
    options, target = plan.options(), plan.target
    if target is None:
        return Settled(options)
    sample = replace(options, density=_SAMPLE)
    spare = _MARGIN * (_file_bytes(plan, sample, scores) - _payload(plan, sample)) + _SPARE

    def measure(found: _Fitted) -> tuple[int, float]:
        return _file_bytes(plan, found.options, scores), _payload(plan, found.options)

    def make(room: float) -> _Fitted:
        return _fitted(plan, room, scores, progress)

    size, found = settle_size(plan.mode, target, spare, make, measure)
    if size >= USED * target or found.above is None:
        return Settled(found.options)
    above = _file_bytes(plan, found.above, scores)
    if above <= target:  # its names and shapes take less than was thought
        return Settled(found.above)
    return Settled(found.options, above)


def _fitted(
    plan: FullPlan,
    target: float,
    scores: list[dict[str, Any]] | None,
    progress: Progress | None,
) -> _Fitted:
    """Return the density whose levels and scales take just below `target` bytes."""

    def at(density: float) -> Options:
        return replace(plan.options(), density=density)

    def size_of(density: float) -> float:
        size = _payload(plan, at(density))
        if progress:
            progress(density, size)
        return size

    def error_of(density: float) -> float:
        return measure_tensors(plan.mode, plan.deltas, at(density)).fidelity.error

    densities = (1.0 / plan.entries, *(MANY_PEAKS if plan.mode == "compeft" else ONE_PEAK))
    found = fit_density(size_of, error_of, target, densities)
    above = None if found.above is None else at(found.above)
    if found.below is None:
        assert above is not None
        assert plan.target is not None
        size = _file_bytes(plan, above, scores)
        if size > plan.target:
            raise too_small(plan.mode, size, _payload(plan, above), plan.target)
        return _Fitted(above, None)  # more room was left for names and shapes than they take
    return _Fitted(at(found.below), above)


def _payload(plan: FullPlan, options: Options) -> float:
    """Return the bytes of levels and scales, one tensor at a time in memory."""
    parts = encode_tensors(plan.mode, plan.deltas, options)
    return sum(coded_bits(part.levels) + SCALE_BITS * part.scales.size for part in parts) / 8.0


def _file_bytes(plan: FullPlan, options: Options, scores: list[dict[str, Any]] | None) -> int:
    """Return the bytes that a file would have, by writing it where nobody looks."""
    with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
        return write_full(plan, Path(folder) / "size.cge", options, scores).size
