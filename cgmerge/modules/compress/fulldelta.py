"""The delta of a full fine-tune as signs: one tensor of one model in memory at a time.

`ternary` keeps the largest entries of every tensor, with the mean magnitude of the survivors as
the tensor's scale, which is the scale of least squared error; `compeft` takes one threshold and
one scale for all. There are no factors, so that nothing shrinks twice and no multiplier is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cgmerge.errors import Damaged, UsageError
from cgmerge.merge.deltas import Delta, LowRank, matrix_shape
from cgmerge.merge.engine import one_thread
from cgmerge.modules.compress.compeft import global_signs, sample_deviation
from cgmerge.modules.compress.fidelity import Fidelity, Likeness
from cgmerge.modules.compress.modes import DENSITY, Mode, Options
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.topk import top_k_signs

FULL_MODES: tuple[Mode, ...] = ("ternary", "compeft")


@dataclass(frozen=True, slots=True)
class Measured:
    """What compression keeps of a task vector.

    Attributes:
        fidelity: Likeness of every tensor.
        entries: Of all tensors.
        kept: Entries that are not zero.
    """

    fidelity: Fidelity
    entries: int
    kept: int

    @property
    def density(self) -> float:
        """Return the share of entries that are not zero."""
        return self.kept / self.entries


def encode_tensors(mode: Mode, deltas: Mapping[str, Delta], options: Options) -> Iterator[Coded]:
    """Compress named tensors one by one.

    Args:
        mode: `ternary` or `compeft`.
        deltas: Name to tensor of any shape, or `Rows`; read twice or more in mode compeft.
        options: Density, and α or multiplier; no size.

    Yields:
        One coded matrix for each name, sorted; a vector has one row, axes after the first are
        columns.

    Raises:
        UsageError: A mode that needs factors, or a size.
        Damaged: NaN or infinity, with the tensor's name.
    """
    if mode not in FULL_MODES:
        raise UsageError(
            f"mode {mode} needs low-rank factors; a full fine-tune has none",
            code="mode",
            hint=f"use --mode {' or '.join(FULL_MODES)}, or make an adapter with `cgmerge extract`",
        )
    if options.target is not None:
        raise UsageError(
            "a size cannot be asked for with full fine-tunes; the density decides",
            code="target",
            hint="use --density",
        )
    density = DENSITY if options.density is None else options.density
    with one_thread():
        if mode == "ternary":
            factor = 1.0 if options.multiplier is None else options.multiplier
            for name in sorted(deltas):
                found = top_k_signs(_values(deltas, name), density)
                yield _coded(name, found.levels, found.scale * factor)
            return
        for name in deltas:
            _values(deltas, name)
        scale = options.alpha * sample_deviation(deltas)
        for signs in global_signs(deltas, density):
            yield _coded(signs.name, signs.levels, scale)


def measure_tensors(mode: Mode, deltas: Mapping[str, Delta], options: Options) -> Measured:
    """Compress without keeping the result, and say what it would keep.

    Args:
        mode: As for `encode_tensors`.
        deltas: As there.
        options: As there.
    """
    modules: dict[str, Likeness] = {}
    entries = kept = 0
    for part in encode_tensors(mode, deltas, options):
        values = _values(deltas, part.name).astype(np.float64)
        levels, scale = part.levels, float(part.scales[0])
        count = int(np.count_nonzero(levels))
        modules[part.name] = Likeness(
            float((values * values).sum()), scale**2 * count, scale * float((values * levels).sum())
        )
        entries += levels.size
        kept += count
    return Measured(Fidelity(modules), entries, kept)


def _values(deltas: Mapping[str, Delta], name: str) -> np.ndarray:
    """Read one tensor as a float32 matrix."""
    delta = deltas[name]
    dense = delta if isinstance(delta, torch.Tensor) else delta.dense()
    shape = delta.shape if isinstance(delta, LowRank) else matrix_shape(delta)
    if not torch.isfinite(dense).all():
        bad = int((~torch.isfinite(dense)).sum())
        raise Damaged(
            f"{name} holds {bad} values that are NaN or infinite",
            code="not_finite",
            hint="the fine-tune is broken (often a diverged training); train it again",
            tensor=name,
            found=bad,
        )
    matrix: np.ndarray = dense.float().numpy().reshape(shape)
    return matrix


def _coded(name: str, levels: np.ndarray, scale: float) -> Coded:
    used = scale if levels.any() else 1.0
    return Coded(name, levels, np.array([used], dtype=np.float32))
