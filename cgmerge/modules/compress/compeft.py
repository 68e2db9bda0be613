"""ComPEFT as published: one threshold and one scalar for the whole task vector.

Every tensor of the expert goes into one vector τ (for LoRA the raw factors A and B, scaling left
out). The ⌊density·entries⌋ entries of largest magnitude are kept as α·σ·sign(τ), σ being the
sample standard deviation of all of τ before anything is dropped.

Source: Yadav, Choshen, Raffel & Bansal (arXiv:2311.13171) and the authors' `ties_utils.py`. The
differences are deliberate: exactly k entries are kept, the lowest index first among equals (names
sorted, row-major), where their code keeps k + 1 and everything equal to the threshold; and
density 1 gives signs, where their code gives the expert back.

Note that the result depends on how ΔW is split into A and B: with (2B, A/2) the threshold falls
on other entries, and a whole factor can vanish. `ternary` has no such trap.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int8

from cgmerge.merge.deltas import Blocks, Delta
from cgmerge.merge.sparsify import top_k_cuts, trim_


@dataclass(frozen=True, slots=True)
class GlobalSigns:
    """One tensor of the sparsified task vector.

    Attributes:
        name: Of the tensor.
        levels: −1, 0 or 1, as a matrix (a vector has one row).
    """

    name: str
    levels: Int8[np.ndarray, "rows columns"]


def sample_deviation(vectors: Mapping[str, Delta]) -> float:
    """Return the standard deviation (n − 1) over all entries of all tensors together, float64.

    Args:
        vectors: Name to tensor or `Rows`; read twice, in blocks.
    """
    stream = Blocks([vectors])
    total = stream.total
    if total < 2:
        return 0.0
    mean = math.fsum(float(b.values.double().sum()) for b in stream) / total
    squares = math.fsum(float((b.values.double() - mean).square().sum()) for b in stream)
    return math.sqrt(squares / (total - 1))


def global_signs(vectors: Mapping[str, Delta], density: float) -> Iterator[GlobalSigns]:
    """Trim the whole task vector by one threshold and yield the signs, tensor by tensor.

    Args:
        vectors: Name to tensor or `Rows`, finite; not modified.
        density: Share kept, in (0, 1].

    Yields:
        One item for each name, sorted; only one block of values is in memory besides its signs.
    """
    stream = Blocks([vectors])
    (cut,) = top_k_cuts(stream, density)
    for name in stream.names:
        shape = stream.shapes[name]
        levels = np.empty(shape[0] * shape[1], dtype=np.int8)
        for block in stream.only(name):
            values = block.values[0]
            trim_(values, block.start, cut)
            signs = np.sign(values.numpy()).reshape(-1)
            levels[block.offset : block.offset + signs.size] = signs
        yield GlobalSigns(name, levels.reshape(shape))
