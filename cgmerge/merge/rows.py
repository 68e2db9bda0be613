"""Order of magnitudes within each row; equal ones are ordered by index, the lowest first."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor


def top_of_rows(magnitudes: NDArray[Any], count: int) -> Bool[np.ndarray, "rows columns"]:
    """Mark the `count` largest entries of every row, by selection, not by sorting.

    Args:
        magnitudes: Not negative, [rows, columns].
        count: From 0 to the number of columns.
    """
    columns = magnitudes.shape[-1]
    if count == 0:
        return np.zeros(magnitudes.shape, dtype=np.bool_)
    place = columns - count
    limit = np.partition(magnitudes, place, axis=-1)[..., place : place + 1]
    above: NDArray[np.bool_] = magnitudes > limit
    equal = magnitudes == limit
    missing = count - above.sum(axis=-1, keepdims=True)
    if (equal.sum(axis=-1, keepdims=True) > missing).any():
        equal &= equal.cumsum(axis=-1) <= missing
    above |= equal
    return above


def ranks_of_rows(values: Float[Tensor, "rows columns"]) -> Int[np.ndarray, "rows columns"]:
    """Return the rank of every entry's magnitude in its row: 0 for the smallest.

    Among equal ones the lowest index has the highest rank, as if it were the larger.
    """
    magnitudes = values.abs().cpu().numpy()
    columns = magnitudes.shape[-1]
    if magnitudes.dtype == np.float32:
        # One unsigned number holds magnitude and index: three times faster than a stable sort.
        # Turning all bits around turns the order around; so the largest magnitude comes first.
        high = (~magnitudes.view(np.uint32)).astype(np.uint64) << np.uint64(32)
        keys = high | np.arange(columns, dtype=np.uint64)
        keys.sort(axis=-1)
        order = (keys & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    else:
        order = np.argsort(-magnitudes, axis=-1, kind="stable")
    ranks = np.empty_like(order)
    falling = np.broadcast_to(np.arange(columns - 1, -1, -1), order.shape)
    np.put_along_axis(ranks, order, falling, axis=-1)
    return ranks
