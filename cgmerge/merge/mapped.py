"""Streams of values computed from experts, and what must be known about a whole stream.

Some rules rank something else than the experts' own entries: the variance between them, a score
that competes with other scores. `MappedBlocks` shows such values as a stream like `Blocks`, never
more than one block at a time, so that the radix selection of `sparsify` works on it: exact order
statistics of billions of entries without a sort and without holding them.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks, LowRank, Rows
from cgmerge.merge.sparsify import Cut, Search, cuts_of, select


class MappedBlocks(Blocks):
    """A stream of values computed, entry by entry, from the blocks of another stream.

    It iterates, restricts (`only`), samples and repeats blocks (`block_at`) exactly as its source
    does, with the same block borders; it has no factors, so `fetch` and `gram` are refused.

    Args:
        source: Where the experts' values come from; may itself be mapped.
        function: From [experts, rows, columns] to [streams, rows, columns] of type `dtype`, entry
            by entry; may overwrite what it is given.
        streams: How many values it makes of one entry.
        dtype: Float type of the values; default that of the source.
    """

    def __init__(
        self,
        source: Blocks,
        function: Callable[[Tensor], Tensor],
        *,
        streams: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        empty: Mapping[str, LowRank | Tensor] = {}
        super().__init__([empty] * streams, names=source.names, dtype=dtype or source.dtype)
        self.all_names = source.all_names
        self.shapes = source.shapes
        self.source = source
        self.function = function

    def fetch(self, name: str) -> list[LowRank | Tensor | Rows | None]:
        """Refuse: there is nothing stored behind computed values."""
        raise TypeError(f"{name!r}: mapped blocks can only be streamed")

    def rows_per_block(self, columns: int) -> int:
        """Return the rows of a block: those of the source."""
        return self.source.rows_per_block(columns)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """Return a function from a range of rows to computed values."""
        read = self.source.reader(name)
        return lambda first, last: self.function(read(first, last))


def cuts_at(blocks: Blocks, kept: Sequence[int]) -> list[Cut]:
    """Find, for each stream, the cut that keeps exactly its `kept` largest magnitudes.

    Args:
        blocks: The stream; read one to six times.
        kept: How many to keep of each stream, 1 to `blocks.total`; lowest index first among equals.
    """
    double = blocks.dtype == torch.float64
    searches = [Search(count, double=double, together=len(kept)) for count in kept]
    select(blocks, list(enumerate(searches)))
    return cuts_of(blocks, searches)


def magnitudes_at(blocks: Blocks, ranks: Sequence[int]) -> list[list[float]]:
    """Find exact order statistics of the magnitudes of each stream, all in the same passes.

    Args:
        blocks: The stream, not empty; read one to six times.
        ranks: From 1, the largest magnitude, to `blocks.total`, the smallest.

    Returns:
        For each stream, the magnitude at each rank.
    """
    double = blocks.dtype == torch.float64
    together = len(blocks.experts) * len(ranks)
    searches: list[list[Search | _Largest]] = [
        [
            _Largest() if rank == 1 else Search(rank, double=double, together=together)
            for rank in ranks
        ]
        for _ in blocks.experts
    ]
    select(blocks, [(place, one) for place, row in enumerate(searches) for one in row])
    return [[search.cut(None).value for search in row] for row in searches]


def values_at(blocks: Blocks, ranks: Sequence[int]) -> list[list[float]]:
    """Find exact order statistics of the signed values of each stream.

    Args:
        blocks: The stream, not empty; read one to twelve times.
        ranks: From 1, the largest value, to `blocks.total`, the smallest.

    Returns:
        For each stream, the value at each rank.
    """
    # The k-th largest value is the k-th largest of max(x, 0) if that is positive; otherwise, seen
    # from the other end, minus the (d-k+1)-th largest of max(-x, 0).
    count = len(blocks.experts)
    above = MappedBlocks(blocks, lambda values: values.clamp_min(0.0), streams=count)
    found = magnitudes_at(above, ranks)
    if all(value > 0 for row in found for value in row):
        return found
    below = MappedBlocks(blocks, lambda values: values.neg().clamp_min_(0.0), streams=count)
    other = magnitudes_at(below, [blocks.total - rank + 1 for rank in ranks])
    return [
        [high - low for high, low in zip(*pair, strict=True)]
        for pair in zip(found, other, strict=True)
    ]


def tensor_sums(
    blocks: Blocks, function: Callable[[Block], Tensor], *, streams: int
) -> dict[str, list[float]]:
    """Sum a function of the entries over each tensor; the bits do not depend on block borders.

    Args:
        blocks: The stream; read once.
        function: From a block to [streams, rows, columns]; may overwrite its values.
        streams: How many values it makes of one entry.

    Returns:
        For each tensor, the sum of each stream, in float64. Holds one number per row of one tensor.
    """
    sums: dict[str, list[float]] = {}
    for name in blocks.names:
        # Set aside at once: small tensors kept from every block would fragment the heap.
        rows = torch.zeros(streams, blocks.shapes[name][0], dtype=torch.float64)
        done = 0
        for block in blocks.only(name):
            here = block.values.shape[1]
            rows[:, done : done + here] = function(block).double().sum(dim=-1)
            done += here
        # Rows are never split between blocks, and fsum rounds once: any blocks give the same.
        sums[name] = [math.fsum(row) for row in rows.tolist()]
    return sums


class _Largest:
    """The magnitude of rank 1, found in one pass; stands in for a `Search`."""

    def __init__(self) -> None:
        self.kept = 1
        self.done = False
        self.value = 0.0

    def narrow_by_sample(self, values: Tensor, share: float) -> None:
        """Need no bracket."""

    def count(self, values: Float[Tensor, "rows columns"], _start: int) -> None:
        """Look at one block."""
        if values.numel():
            self.value = max(self.value, float(values.abs().max()))

    def narrow(self) -> None:
        """Finish: everything was seen."""
        self.done = True

    def cut(self, last: int | None) -> Cut:
        """Return the value as a cut that keeps it."""
        return Cut(self.value, math.nextafter(self.value, 0.0), last)
