"""A full fine-tune's delta in a file of a given size: the density is turned until it fits.

Sizes are exact: those of levels and scales come from the codec without writing a bit, and what is
around them is taken from files that are written where nobody looks.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgmerge.errors import UsageError
from cgmerge.modules.compress.budget import fit
from cgmerge.modules.compress.codec import coded_bits
from cgmerge.modules.compress.fulldelta import encode_tensors
from cgmerge.modules.compress.modes import Options
from cgmerge.modules.compress.packfull import FullPlan, write_full
from cgmerge.modules.compress.rate import SCALE_BITS
from cgmerge.modules.compress.termfit import CLOSE

_TRIES = 4
_SPARE, _MARGIN = 64, 1.03
_SAMPLE = 0.01  # a density that is quick to write
_START = 10.0  # one entry in so many is the first guess

Progress = Callable[[float, float], None]


def settle(
    plan: FullPlan, scores: list[dict[str, Any]] | None = None, progress: Progress | None = None
) -> Options:
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
        return options
    sample = replace(options, density=_SAMPLE)
    spare = _MARGIN * (_file_bytes(plan, sample, scores) - _payload(plan, sample)) + _SPARE
    for _ in range(_TRIES):
        if spare >= target:
            break
        found = _fitted(plan, target - spare, progress)
        size = _file_bytes(plan, found, scores)
        if size <= target:
            return found
        spare += size - target + _SPARE
    raise UsageError(
        f"a file of {target:,.0f} bytes cannot be made: {spare:,.0f} go to names, shapes and the"
        " manifest alone",
        code="target",
        hint="ask for more bytes",
        expected=target,
    )


def _fitted(plan: FullPlan, target: float, progress: Progress | None) -> Options:
    """Return the density whose levels and scales take just below `target` bytes."""

    def make(knob: float) -> tuple[float, float]:
        density = 1.0 / knob
        size = _payload(plan, replace(plan.options(), density=density))
        if progress:
            progress(density, size)
        return density, size

    # The knob is 1 / density: sizes fall as it rises.
    window, bounds = (CLOSE * target, target), (1.0, float(plan.entries))
    found = fit(make, lambda result: result[1], window, bounds, _START)
    if found.below is None:
        assert found.above is not None
        raise UsageError(
            f"the smallest that mode {plan.mode} gives is {found.above[1]:,.0f} bytes, asked are"
            f" {target:,.0f}",
            code="target",
            hint="ask for more bytes",
            expected=target,
            found=found.above[1],
        )
    return replace(plan.options(), density=found.below[0])


def _payload(plan: FullPlan, options: Options) -> float:
    """Return the bytes of levels and scales, one tensor at a time in memory."""
    parts = encode_tensors(plan.mode, plan.deltas, options)
    return sum(coded_bits(part.levels) + SCALE_BITS * part.scales.size for part in parts) / 8.0


def _file_bytes(plan: FullPlan, options: Options, scores: list[dict[str, Any]] | None) -> int:
    """Return the bytes that a file would have, by writing it where nobody looks."""
    with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
        return write_full(plan, Path(folder) / "size.cge", options, scores).size
