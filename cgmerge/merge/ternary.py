"""Experts whose entries are -s, 0 or +s: merged by looking their pattern up.

With n such experts an entry's merged value depends on nothing but the pattern of its n trits, one
of 3ⁿ. So a rule that treats every entry alike runs once, on a table of all patterns, through the
same kernel as any other expert, and the entries are looked up: the numbers are those of the dense
route, bit for bit, at the cost of a few byte operations per expert.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import BLOCK_ENTRIES, Block, Delta, Rows, matrix_shape

MOST_EXPERTS = 8
"""Beyond, the table of 3ⁿ patterns would no longer stay in cache."""

_HALF = 4  # trits that are gathered in one byte: 3⁴ = 81 patterns


class Ternary(Rows):
    """A delta with entries -scale, 0 and +scale.

    Attributes:
        scale: Above 0.
    """

    scale: float

    @abstractmethod
    def trits(self, first: int, last: int) -> "np.ndarray[Any, np.dtype[np.int8]]":
        """Return rows `first:last` of the signs, int8 in {-1, 0, 1}, [rows, columns]."""

    def rows(self, first: int, last: int) -> Float[Tensor, "rows columns"]:
        """Return rows as float32."""
        return torch.from_numpy(self.trits(first, last)).float().mul_(self.scale)


def all_ternary(deltas: Sequence[Delta | None]) -> bool:
    """Whether `merge_patterns` can take these deltas of one tensor."""
    if len(deltas) > MOST_EXPERTS:
        return False
    return all(delta is None or isinstance(delta, Ternary) for delta in deltas)


def merge_patterns(
    name: str,
    deltas: Sequence[Delta | None],
    kernel: Callable[[Block], Tensor],
    *,
    dtype: torch.dtype,
    ids: tuple[str, ...] = (),
) -> Iterator[Float[Tensor, "rows columns"]]:
    """Merge one tensor of ternary experts; yields blocks of rows.

    Args:
        name: The tensor.
        deltas: One per expert, `Ternary` or None where absent; see `all_ternary`.
        kernel: Merges a block; an entry's result must depend on that entry's values alone.
        dtype: What the kernel computes in.
        ids: What each expert is called.
    """
    present = [delta for delta in deltas if isinstance(delta, Ternary)]
    rows, columns = matrix_shape(present[0])
    scales = [d.scale if isinstance(d, Ternary) else 0.0 for d in deltas if d is not None]
    patterns = _patterns(len(present)).to(dtype) * torch.tensor(scales, dtype=dtype)[:, None]
    values = torch.zeros(len(deltas), 1, patterns.shape[1], dtype=dtype)
    values[[place for place, delta in enumerate(deltas) if delta is not None], 0] = patterns
    table = kernel(Block(name, 0, values, 0, ids)).reshape(-1).cpu().numpy()
    step = max(1, BLOCK_ENTRIES // max(1, columns))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        index = _index([delta.trits(first, last) for delta in present])
        # numpy looks up four times faster than torch; "wrap" spares it a check of every index.
        yield torch.from_numpy(table.take(index, mode="wrap")).reshape(-1, columns)


def _patterns(experts: int) -> Tensor:
    """Return all patterns in the order of `_index`, [experts, 3ⁿ]."""
    number = torch.arange(3**experts)
    powers = [3 ** (experts - 1 - place) for place in range(experts)]
    return torch.stack([number // power % 3 - 1 for power in powers])


def _index(trits: Sequence["np.ndarray[Any, np.dtype[np.int8]]"]) -> "np.ndarray[Any, Any]":
    """Read the trits of every entry as a number in base 3, the first expert's most significant."""
    index = _digits(trits[:_HALF]).astype(np.intp)
    if len(trits) > _HALF:
        index *= 3 ** (len(trits) - _HALF)
        index += _digits(trits[_HALF:])
    return index


def _digits(trits: Sequence["np.ndarray[Any, np.dtype[np.int8]]"]) -> "np.ndarray[Any, Any]":
    """Horner's rule on bytes: the largest number is 3⁴ - 1, and tripling is two additions."""
    total = trits[0].reshape(-1).view(np.uint8) + np.uint8(1)
    for one in trits[1:]:
        tripled = total + total
        total += tripled
        total += one.reshape(-1).view(np.uint8)
        total += np.uint8(1)
    return total
