"""Top-k signs of one tensor: exactly k entries are kept, the lowest index first among equals."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int8

from cgmerge.merge.sparsify import count_kept

_SIGN_BIT_CLEARED = np.int32(0x7FFF_FFFF)


@dataclass(frozen=True, slots=True)
class Signs:
    """A tensor as sign times one scale.

    Attributes:
        levels: −1, 0 or 1, in the tensor's shape.
        scale: Mean magnitude of the entries that were kept: the scale of least squared error for
            these signs. 0.0 where nothing is kept.
    """

    levels: Int8[np.ndarray, "..."]
    scale: float


def top_k_signs(values: Float[np.ndarray, "..."], density: float) -> Signs:
    """Keep the largest entries of a tensor as signs.

    Args:
        values: float32, finite, any shape; not modified.
        density: Share kept, in (0, 1]: ⌊density·entries⌋, at least one.

    Returns:
        The signs and their scale. Zeros are never kept, so a tensor with fewer non-zero entries
        than asked for keeps all of them.

    Source: the per-tensor form of ComPEFT's trimming (arXiv:2311.13171) with the mean magnitude of
    the survivors, which is what least squares gives; the published rule keeps one entry more.
    """
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    kept = top_k_mask(flat, count_kept(density, flat.size) if flat.size else 0)
    survivors = np.abs(flat[kept])
    # Correctly rounded, so that no order of summation and no machine can make a difference.
    scale = math.fsum(survivors.tolist()) / survivors.size if survivors.size else 0.0
    levels = np.where(kept, np.sign(flat), 0).astype(np.int8)
    return Signs(levels.reshape(values.shape), scale)


def top_k_mask(flat: Float[np.ndarray, "entries"], count: int) -> Bool[np.ndarray, "entries"]:
    """Mark the `count` entries of largest magnitude, the lowest index first among equals.

    Args:
        flat: float32, finite.
        count: At most as many as there are; zeros are not marked, whatever the count.
    """
    if count <= 0:
        return np.zeros(flat.shape, dtype=np.bool_)
    # Magnitudes compare like their bit patterns, and whole numbers are selected much faster.
    patterns = flat.view(np.int32) & _SIGN_BIT_CLEARED
    cut = np.partition(patterns, flat.size - count)[flat.size - count]
    mask: Bool[np.ndarray, entries] = patterns > max(cut, 0)
    if cut > 0:
        equal = np.flatnonzero(patterns == cut)
        mask[equal[: count - int(np.count_nonzero(mask))]] = True
    return mask
