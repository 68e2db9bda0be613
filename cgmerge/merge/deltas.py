"""Deltas: what an expert adds to a weight, as factors or as plain tensors, in one small algebra.

An expert's delta for a module is ΔW = scaling·B·A. Scaling is folded into B when the expert is
read, so that everything here is `b @ a`. Methods that only need weighted sums stay in factors
(`stack`); methods that look at single entries read the experts' dense deltas through `Blocks`, a
stream that never holds more than one block of rows of all experts.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_ENTRIES = 1 << 18
"""Entries (all experts together) in one block: small enough to stay in cache."""

_STRIDE = 16  # of the columns in a large sample


@dataclass(frozen=True, slots=True)
class LowRank:
    """ΔW = b @ a for one module.

    Attributes:
        a: Factor A, [rank, in].
        b: Factor B with the scaling folded in, [out, rank].
    """

    a: Float[Tensor, "rank in"]
    b: Float[Tensor, "out rank"]

    @property
    def rank(self) -> int:
        """Return the number of rank-one terms (an upper bound of the matrix rank)."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in)."""
        return self.b.shape[0], self.a.shape[1]

    def rows(self, first: int, last: int) -> Float[Tensor, "rows in"]:
        """Return rows `first:last` of ΔW in the factors' dtype."""
        return self.b[first:last] @ self.a

    def dense(self) -> Float[Tensor, "out in"]:
        """Return the whole ΔW."""
        return self.b @ self.a

    def norm(self) -> float:
        """Return the Frobenius norm, from the Gram matrices of the factors (float64)."""
        return math.sqrt(max(inner(self, self), 0.0))


class Rows(ABC):
    """A delta that is read in ranges of rows, so that it need never be in memory whole.

    Attributes:
        shape: Any shape. As a matrix a vector has one row, and axes after the first are columns.
    """

    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, first: int, last: int) -> Float[Tensor, "rows columns"]:
        """Read rows `first:last` of the matrix."""

    def read_into(self, out: Float[Tensor, "rows columns"], first: int, last: int) -> None:
        """Read rows `first:last` of the matrix into memory that is there already."""
        out.copy_(self.rows(first, last))

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def dense(self) -> Float[Tensor, "..."]:
        """Read the whole delta, in its own shape."""
        return self.rows(0, matrix_shape(self)[0]).reshape(self.shape)


Delta = LowRank | Tensor | Rows


def inner(x: LowRank, y: LowRank) -> float:
    """Return ⟨X, Y⟩ = trace(XᵀY) without forming either matrix, in float64."""
    left = x.b.double().T @ y.b.double()
    right = x.a.double() @ y.a.double().T
    return float((left * right).sum())


def stack(deltas: Sequence[LowRank], coefficients: Sequence[float]) -> LowRank:
    """Return Σ c_i·ΔW_i exactly, as factors of rank Σ r_i.

    Args:
        deltas: At least one, all of the same (out, in).
        coefficients: One finite number each; a zero drops the term.
    """
    kept = [(d, c) for d, c in zip(deltas, coefficients, strict=True) if c != 0.0]
    if not kept:
        out, into = deltas[0].shape
        like = deltas[0]
        return LowRank(like.a.new_zeros(0, into), like.b.new_zeros(out, 0))
    return LowRank(
        torch.cat([delta.a for delta, _ in kept], dim=0),
        torch.cat([delta.b * c for delta, c in kept], dim=1),
    )


def sizes_of(expert: Mapping[str, LowRank]) -> dict[str, tuple[int, int, int]]:
    """Return (out, in, rank) of every module; experts on disk know it without reading weights."""
    known = getattr(expert, "sizes", None)
    if isinstance(known, dict):
        return known
    return {name: (*delta.shape, delta.rank) for name, delta in expert.items()}


def pad_rank(delta: LowRank, rank: int) -> LowRank:
    """Append zero rows and columns up to `rank`; the product does not change."""
    missing = rank - delta.rank
    if missing <= 0:
        return delta
    out, into = delta.shape
    return LowRank(
        torch.cat([delta.a, delta.a.new_zeros(missing, into)], dim=0),
        torch.cat([delta.b, delta.b.new_zeros(out, missing)], dim=1),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive entries of all experts' deltas.

    Attributes:
        name: Tensor the entries belong to.
        start: Flat index of the first entry within the whole task vector (names sorted,
            row-major), so that rules such as "lowest index first" do not depend on blocks.
        offset: Flat index of the first entry within its tensor.
        ids: What each expert is called.
        values: [experts, rows, columns], float32 or float64; may be written to, and is valid
            until the next block is read.
    """

    name: str
    start: int
    values: Float[Tensor, "experts rows columns"]
    offset: int = 0
    ids: tuple[str, ...] = ()


class Blocks:
    """All experts' deltas as a repeatable stream of row blocks; absent modules are zero.

    Args:
        experts: One mapping per expert, module name to `LowRank`, a tensor of any shape, or
            `Rows`.
        names: Which names to stream; default the sorted union. Positions (`Block.start`) always
            count over the sorted union.
        dtype: What blocks are computed in: float32, or float64 for float64 inputs.
        ids: What each expert is called; default its position.
    """

    def __init__(
        self,
        experts: Sequence[Mapping[str, Delta]],
        *,
        names: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        ids: Sequence[str] | None = None,
    ) -> None:
        self.experts = experts
        self.ids = tuple(map(str, range(len(experts)))) if ids is None else tuple(ids)
        self.dtype = dtype
        self.all_names = sorted(set().union(*[set(expert) for expert in experts]))
        self.names = self.all_names if names is None else list(names)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (rows, columns) of every name; a vector has one row, a scalar one entry."""
        found: dict[str, tuple[int, int]] = {}
        for expert in self.experts:
            known = getattr(expert, "sizes", None)
            for name in expert:
                if name not in found:
                    found[name] = known[name][:2] if known else matrix_shape(expert[name])
        return found

    @property
    def total(self) -> int:
        """Return the number of entries that one expert has in this stream."""
        return sum(self.shapes[name][0] * self.shapes[name][1] for name in self.names)

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks in the order of names and rows."""
        start = 0
        wanted = set(self.names)
        for name in self.all_names:
            rows, columns = self.shapes[name]
            if name in wanted:
                yield from self._module(name, start)
            start += rows * columns

    def only(self, name: str) -> "Blocks":
        """Return the same stream restricted to one name."""
        part = copy.copy(self)  # keeps the cached shapes
        part.names = [name]
        return part

    def sample(self, share: int) -> Float[Tensor, "experts entries"]:
        """Return about one entry in `share` of all experts, evenly spaced, some of every tensor.

        Entries of a row depend on each other, so that many rows with some of their columns tell
        more than few whole rows.
        """
        parts: list[Tensor] = []
        for name in self.names:
            rows, columns = self.shapes[name]
            stride = min(_STRIDE, math.isqrt(share))
            step = max(1, min(share // stride, rows))
            group = max(1, min(4, step // 8))  # neighbours come in one read
            read = self.reader(name)
            for turn, first in enumerate(range(step * group // 2, rows, step * group)):
                last = min(first + group, rows)
                values = self._seen(Block(name, 0, read(first, last), first * columns, self.ids))
                parts.append(values[:, :, turn % min(stride, columns) :: stride].flatten(1).clone())
        return torch.cat(parts, dim=1)

    def _seen(self, block: Block) -> Tensor:
        """Return the values of a block as the stream shows them."""
        return block.values

    def block_at(self, start: int) -> Block:
        """Return the block of the stream that begins at a flat index, computed again."""
        offset = 0
        for name in self.all_names:
            rows, columns = self.shapes[name]
            if start < offset + rows * columns:
                first = (start - offset) // columns
                last = min(first + self.rows_per_block(columns), rows)
                values = self.reader(name)(first, last)
                return Block(name, start, values, first * columns, self.ids)
            offset += rows * columns
        raise IndexError(start)

    def gram(self, name: str) -> Float[Tensor, "experts experts"]:
        """Return the inner products ⟨ΔW_i, ΔW_j⟩ of one module, float64, without dense deltas."""
        deltas = self.fetch(name)
        if all(delta is None or isinstance(delta, LowRank) for delta in deltas):
            gram = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
            for i, x in enumerate(deltas):
                for j, y in enumerate(deltas[: i + 1]):
                    if isinstance(x, LowRank) and isinstance(y, LowRank):
                        gram[i, j] = gram[j, i] = inner(x, y)
            return gram
        rows = (block.values.flatten(1).double() for block in self.only(name))
        start = torch.zeros(len(deltas), len(deltas), dtype=torch.float64)
        return sum((row @ row.T for row in rows), start=start)

    def fetch(self, name: str) -> list[Delta | None]:
        """Return one module of every expert, None where absent (may read from disk)."""
        return [expert.get(name, None) for expert in self.experts]

    def _module(self, name: str, start: int) -> Iterator[Block]:
        rows, columns = self.shapes[name]
        read, step = self.reader(name), self.rows_per_block(columns)
        for first in range(0, rows, step):
            values = read(first, min(first + step, rows))
            yield Block(name, start + first * columns, values, first * columns, self.ids)

    def rows_per_block(self, columns: int) -> int:
        """Return the rows of a block: from shapes alone, so that results depend on no more."""
        return max(1, BLOCK_ENTRIES // max(1, columns * len(self.experts)))

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """Return a function from a range of rows to values, [experts, rows, columns]."""
        deltas = self.fetch(name)
        low_rank = [delta for delta in deltas if isinstance(delta, LowRank)]
        if len(low_rank) == sum(delta is not None for delta in deltas):
            # One batched product is much faster than one small product per expert; factors of
            # different ranks are padded with zeros, which add nothing.
            rank = max(delta.rank for delta in low_rank)
            out, into = low_rank[0].shape
            a = low_rank[0].a.new_zeros(len(deltas), rank, into, dtype=self.dtype)
            b = low_rank[0].b.new_zeros(len(deltas), out, rank, dtype=self.dtype)
            for place, delta in enumerate(deltas):
                if isinstance(delta, LowRank):
                    a[place, : delta.rank] = delta.a
                    b[place, :, : delta.rank] = delta.b
            memory = a.new_empty(0)

            def multiply(first: int, last: int) -> Tensor:
                nonlocal memory
                if memory.shape[1:2] != (last - first,):
                    memory = a.new_empty(len(deltas), last - first, into)
                return torch.bmm(b[:, first:last], a, out=memory)

            return multiply

        return self._copier(deltas, self.shapes[name][1])

    def _copier(self, deltas: Sequence[Delta | None], columns: int) -> Callable[[int, int], Tensor]:
        """Return what `reader` does for deltas that are not all factors."""
        device = next(_device(delta) for delta in deltas if delta is not None)
        kept = torch.empty(0, dtype=self.dtype, device=device)

        def copy_rows(first: int, last: int) -> Tensor:
            nonlocal kept
            if kept.shape[1:2] != (last - first,):
                # Fresh memory for every block would cost more than the arithmetic.
                kept = kept.new_empty(len(deltas), last - first, columns)
            for place, delta in zip(kept, deltas, strict=True):
                if isinstance(delta, Rows):
                    delta.read_into(place, first, last)
                elif isinstance(delta, LowRank):
                    place.copy_(delta.rows(first, last))
                elif delta is None:
                    place.zero_()
                else:
                    place.copy_(delta.reshape(matrix_shape(delta))[first:last])
            return kept

        return copy_rows


def _device(delta: Delta) -> torch.device:
    if isinstance(delta, Rows):
        return torch.device("cpu")
    return delta.a.device if isinstance(delta, LowRank) else delta.device


def matrix_shape(delta: Delta) -> tuple[int, int]:
    """Return (rows, columns): a vector has one row, a scalar one entry, other axes are columns."""
    shape = tuple(delta.shape)
    if len(shape) == 0:
        return 1, 1
    if len(shape) == 1:
        return 1, shape[0]
    return shape[0], int(torch.Size(shape[1:]).numel())
