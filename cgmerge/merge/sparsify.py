"""Trim: keep the k entries of largest magnitude, exactly k, lowest index first among equals.

The k-th largest magnitude is found by radix selection on the bit patterns of |x| (for
non-negative floats their order is the order of the numbers): a histogram over a bracket of
patterns, narrowed until it holds one pattern. A small sample gives the first bracket, so that one
pass over the stream is enough for ordinary data; memory does not depend on the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks

_BINS = 1 << 20  # of one search; narrower histograms only cost more passes
_ALL_BINS = 1 << 22
_REMEMBERED = 1 << 23  # entries within the brackets of all searches whose blocks are remembered
_SAMPLE = 350_000  # entries of each expert that give the first bracket
_ALL_SAMPLES = 4_000_000
_SAMPLE_SLACK = 0.004
_DEVIATIONS = 2.5  # times 1/√entries: five standard deviations of a share of one half


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one expert is cut: keep |x| > value, and |x| == value up to flat index `last`."""

    value: float
    below: float
    """The next smaller number of the same float type: |x| > below is |x| >= value."""
    last: int | None
    """Flat index of the last kept entry among those equal to `value`; None keeps all of them."""


_NO_CUT = Cut(0.0, 0.0, None)


def count_kept(density: float, total: int) -> int:
    """Return ⌊density·total⌋ in exact decimal arithmetic, at least 1.

    `0.29 * 100` is 28.999… in binary; the user wrote 0.29 and means 29.
    """
    return max(1, min(total, int(Decimal(repr(density)) * total)))


def top_k_cuts(blocks: Blocks, density: float) -> list[Cut]:
    """Find, for each expert, the cut that keeps the top `density` share of its whole task vector.

    Args:
        blocks: The stream; read one to four times.
        density: In (0, 1].

    Returns:
        One cut per expert. All zeros, or density 1: everything is kept.
    """
    total = blocks.total
    kept = count_kept(density, total)
    if kept >= total:
        return [_NO_CUT for _ in blocks.experts]
    double = blocks.dtype == torch.float64
    together = len(blocks.experts)
    searches = [Search(kept, double=double, together=together) for _ in blocks.experts]
    for expert, search in zip(blocks.experts, searches, strict=True):
        counts = getattr(expert, "nonzeros", None)  # sparse experts know without being read
        if counts is not None and sum(counts.get(name, 0) for name in blocks.names) <= kept:
            search.keep_all()
    select(blocks, list(enumerate(searches)))
    return cuts_of(blocks, searches)


def select(blocks: Blocks, searches: Sequence[tuple[int, "Selection"]]) -> None:
    """Run searches, each on one stream of the blocks, over common passes until all are done.

    Args:
        blocks: The stream; read until the last search has its answer.
        searches: Position of the stream, and what looks at it.
    """
    pending = [(place, search) for place, search in searches if not search.done]
    most = min(_SAMPLE, max(1 << 14, _ALL_SAMPLES // len(blocks.experts)))
    share = max(1, blocks.total // most, min(64, blocks.total >> 16))
    if share > 1 and pending:
        sample = blocks.sample(share)
        for place, search in pending:
            search.narrow_by_sample(sample[place], search.kept / blocks.total)
    while pending:
        for block in blocks:
            for place, search in pending:
                search.count(block.values[place], block.start)
        for _, search in pending:
            search.narrow()
        pending = [(place, search) for place, search in pending if not search.done]


class Selection(Protocol):
    """What `select` drives: counts the entries of a bracket and narrows it, pass by pass."""

    kept: int
    done: bool

    def narrow_by_sample(self, values: Tensor, share: float) -> None:
        """Guess the first bracket from a sample."""

    def count(self, values: Tensor, start: int, /) -> None:
        """Look at one block."""

    def narrow(self) -> None:
        """Use what was counted."""


def trim_(values: Float[Tensor, "rows columns"], start: int, cut: Cut) -> None:
    """Set to zero, in place, what does not survive the cut.

    Args:
        values: The block of one expert.
        start: Flat index of its first entry.
        cut: From `top_k_cuts`.
    """
    if cut.value <= 0:
        return
    limit = cut.below
    if cut.last is not None and cut.last < start + values.numel() - 1:
        if cut.last < start:
            limit = cut.value  # none of the equal ones is kept here
        else:
            late = values.reshape(-1)[cut.last - start + 1 :]
            late[late.abs() == cut.value] = 0
    # In place: hardshrink keeps |x| > limit.
    torch.ops.aten.hardshrink.out(values, limit, out=values)


class Search:
    """Radix selection of the k-th largest bit pattern of one expert.

    Args:
        kept: k.
        double: Whether the values are float64.
        together: How many searches run at once; they share the memory for histograms.
    """

    def __init__(self, kept: int, *, double: bool, together: int = 1) -> None:
        self.kept = kept
        self.bin_bits = max(1, min(_BINS, _ALL_BINS // together).bit_length() - 1)
        self.remembered = _REMEMBERED // together
        self.bits: type[np.signedinteger[Any]] = np.int64 if double else np.int32
        self.top = 0x7FF0_0000_0000_0001 if double else 0x7F80_0001  # one above +inf
        self.scratch = np.empty(0, dtype=np.float64 if double else np.float32)
        self.masks = np.empty((2, 0), dtype=np.bool_)
        self.low, self.high = 0, self.top
        self.done = False
        self.wanted_ties = 0
        self.last_block: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.shift = max(0, (self.high - self.low - 1).bit_length() - self.bin_bits)
        bins = ((self.high - self.low - 1) >> self.shift) + 1
        self.above = 0
        self.histogram = np.zeros(bins, dtype=np.int64)
        self.found: list[np.ndarray[Any, Any]] = []
        self.starts: list[int] = []
        self.found_size = 0
        self.counted = 0

    def keep_all(self) -> None:
        """Finish at once: no more than k entries are other than 0."""
        self.low, self.done = 0, True

    def narrow_by_sample(self, values: Tensor, share: float) -> None:
        """Guess a bracket that very likely holds the k-th value; `narrow` corrects a wrong one."""
        patterns = self.patterns(values)
        count = patterns.size
        slack = max(_SAMPLE_SLACK, _DEVIATIONS / math.sqrt(count))
        first = min(count - 1, max(0, int((share - slack) * count)))
        last = min(count - 1, int((share + slack) * count))
        ends = [count - 1 - first, count - 1 - last]
        high, low = (int(value) for value in np.partition(patterns, ends)[ends])
        high += 1
        self.high = self.top if share <= slack else high
        self.low = 0 if share + slack >= 1 else low
        self._reset()

    def count(self, values: Tensor, start: int) -> None:
        """Add one block, which begins at flat index `start`, to the histogram of the bracket."""
        # numpy: its selection is many times faster than torch's on one thread. Comparing floats
        # is faster than comparing patterns; above +inf lies NaN, which nothing reaches.
        magnitudes = self.magnitudes(values)
        low, high = np.array([self.low, self.high], dtype=self.bits).view(magnitudes.dtype)
        above, mask = (part[: magnitudes.size] for part in self.masks)
        np.greater_equal(magnitudes, high, out=above)
        np.greater_equal(magnitudes, low, out=mask)
        inside = magnitudes[np.flatnonzero(np.not_equal(mask, above, out=mask))].view(self.bits)
        inside -= self.low
        self.above += int(np.count_nonzero(above))
        self.found.append(inside >> self.shift)
        self.starts.append(start)
        self.found_size += inside.size
        if self.found_size > self.remembered:
            self._flush()

    def _flush(self) -> None:
        """Move what was found into the histogram; where it was found is forgotten."""
        if self.found:
            found = np.concatenate(self.found)
            self.histogram += np.bincount(found, minlength=self.histogram.size)
            self.counted += found.size
        self.found, self.starts, self.found_size = [], [], 0

    def narrow(self) -> None:
        """Move to the right bracket, or into the right bin of it, or finish."""
        remembered = self.found, self.starts
        complete = self.counted == 0
        self._flush()
        inside = int(self.histogram.sum())
        if self.above >= self.kept:
            self.low, self.high = self.high, self.top
        elif self.above + inside < self.kept:
            self.low, self.high = 0, self.low
        else:
            # Entries at or above each bin, from the top down.
            reached = self.histogram[::-1].cumsum()
            place = int(np.searchsorted(reached, self.kept - self.above))
            bin_index = self.histogram.size - 1 - place
            higher = int(reached[place - 1]) if place else 0
            if self.shift == 0:
                ties = int(self.histogram[bin_index])
                wanted = self.kept - self.above - higher
                self.low += bin_index
                # Zeros are the same kept or not, so their order does not matter.
                self.wanted_ties = wanted if wanted < ties and self.low else 0
                if complete:
                    self._locate(bin_index, *remembered)
                self.done = True
                return
            self.high = min(self.high, self.low + ((bin_index + 1) << self.shift))
            self.low += bin_index << self.shift
        self._reset()

    def _locate(self, pattern: int, found: list[np.ndarray[Any, Any]], starts: list[int]) -> None:
        """Find the block that holds the last wanted one of the equal entries."""
        for part, start in zip(found, starts, strict=True):
            if not self.wanted_ties:
                return
            here = int(np.count_nonzero(part == pattern))
            if here >= self.wanted_ties:
                self.last_block = start
                return
            self.wanted_ties -= here

    def last_in(self, block: Block, place: int) -> int | None:
        """Count down the wanted ties in a block; return the flat index when the last is there."""
        equal = np.flatnonzero(self.patterns(block.values[place]) == self.low)
        if equal.size >= self.wanted_ties:
            return block.start + int(equal[self.wanted_ties - 1])
        self.wanted_ties -= equal.size
        return None

    def cut(self, last: int | None) -> Cut:
        """Turn the found bit pattern into a cut."""
        if self.low == 0:
            return _NO_CUT
        number = np.float64 if self.bits is np.int64 else np.float32
        below, value = np.array([self.low - 1, self.low], dtype=self.bits).view(number)
        return Cut(float(value), float(below), last)

    def magnitudes(self, values: Tensor) -> np.ndarray[Any, Any]:
        """Return |x|, flat; valid until the next call."""
        flat = values.cpu().numpy().reshape(-1)
        if self.scratch.size < flat.size:
            # Fresh memory for every block would cost more than the arithmetic.
            self.scratch = np.empty(flat.size, dtype=self.scratch.dtype)
            self.masks = np.empty((2, flat.size), dtype=np.bool_)
        found = self.scratch[: flat.size]
        np.abs(flat, out=found)
        return found

    def patterns(self, values: Tensor) -> np.ndarray[Any, Any]:
        """Return the bit patterns of the magnitudes, flat; valid until the next call."""
        return self.magnitudes(values).view(self.bits)


def cuts_of(blocks: Blocks, searches: Sequence[Search]) -> list[Cut]:
    """Return the cuts that finished searches found, one per expert of the stream.

    Turns "the first m of the equal ones" into a flat index, reading again only what is needed.
    """
    last: list[int | None] = [None] * len(searches)
    for place, search in enumerate(searches):
        if not search.wanted_ties:
            continue
        known = search.last_block
        for block in blocks if known is None else [blocks.block_at(known)]:
            last[place] = search.last_in(block, place)
            if last[place] is not None:
                break
    return [s.cut(index) for s, index in zip(searches, last, strict=True)]
