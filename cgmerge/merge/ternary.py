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

from cgmerge.merge.deltas import Block, Delta, Rows, matrix_shape

MOST_EXPERTS = 8
"""Beyond, the table of 3ⁿ patterns would no longer stay in cache."""

Signs = np.ndarray[Any, np.dtype[np.int8]]

_HALF = 4  # trits that are gathered in one byte: 3⁴ = 81 patterns
_THREE = np.int8(3)
_ENTRIES = 1 << 17  # in one block: smaller ones wait for calls, larger ones leave the cache


class Ternary(Rows):
    """A delta with entries -scale, 0 and +scale.

    Attributes:
        scale: Above 0.
    """

    scale: float

    @abstractmethod
    def trits(self, first: int, last: int) -> Signs:
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
    """Merge one tensor of ternary experts; yields blocks of rows, valid until the next one.

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
    step = min(rows, max(1, _ENTRIES // max(1, columns)))
    number = _Patterns(len(present), step * columns)
    memory = np.empty(step * columns, table.dtype)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        index = number([delta.trits(first, last).reshape(-1) for delta in present])
        found = memory[: len(index)]
        # numpy looks up four times faster than torch; "wrap" spares it a check of every index.
        table.take(index, mode="wrap", out=found)
        yield torch.from_numpy(found).reshape(-1, columns)


def _patterns(experts: int) -> Tensor:
    """Return all patterns in the order of `_Patterns`, [experts, 3ⁿ]."""
    number = torch.arange(3**experts)
    powers = [3 ** (experts - 1 - place) for place in range(experts)]
    return torch.stack([number // power % 3 - 1 for power in powers])


class _Patterns:
    """Reads the trits of entries as numbers in base 3, the first expert's most significant.

    Digits are signed while bytes are at work: four of them are within ±40, and no step is needed
    to make them positive but one at the end (numpy looks up negative places far more slowly).
    What is in between stays in memory that is used again, small enough for the cache.

    Args:
        experts: How many, at most `MOST_EXPERTS`.
        entries: Of the largest block.
    """

    def __init__(self, experts: int, entries: int) -> None:
        self.centre = np.int16((3**experts - 1) // 2)
        self.step = np.int16(3 ** max(0, experts - _HALF))
        self.halves = np.empty((2, entries), np.int8)
        self.wide = np.empty(entries, np.int16)
        self.index = np.empty(entries, np.intp)

    def __call__(self, trits: Sequence[Signs]) -> "np.ndarray[Any, np.dtype[np.intp]]":
        """Return the pattern of every entry; valid until the next call.

        Args:
            trits: One vector for each expert.
        """
        entries = len(trits[0])
        wide, index = self.wide[:entries], self.index[:entries]
        np.copyto(wide, _digits(trits[:_HALF], self.halves[0, :entries]))
        if len(trits) > _HALF:
            np.multiply(wide, self.step, out=wide)
            np.add(wide, _digits(trits[_HALF:], self.halves[1, :entries]), out=wide)
        np.add(wide, self.centre, out=wide)
        np.copyto(index, wide)
        return index


def _digits(trits: Sequence[Signs], out: Signs) -> Signs:
    """Horner's rule on bytes."""
    if len(trits) == 1:
        return trits[0]
    np.multiply(trits[0], _THREE, out=out)
    for one in trits[1:-1]:
        np.add(out, one, out=out)
        np.multiply(out, _THREE, out=out)
    return np.add(out, trits[-1], out=out)
