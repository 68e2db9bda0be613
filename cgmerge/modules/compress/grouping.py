"""Which rows of a tensor share their codes: those of like density, as far as that pays."""

import numpy as np

from cgmerge.modules.compress.bitplane import Array, Reader, damaged

MAX_GROUPS = 64
_MIN_COLUMNS = 64
_SYMBOLS = 8
"""Magnitudes told apart when rows are compared; the tail behaves like the last."""

_BLOCK = 1 << 18
_OCTAVES = 20
_HEAD_BITS, _LEVEL_BITS = 40, 32
"""What the descriptions of another group cost, about: for itself and for each magnitude in it."""


def group_rows(counts: Array, columns: int) -> Array | None:
    """Divide rows into groups that are coded apart.

    Rows are sorted by density, and the division into runs of like density is the one with the
    least total entropy, descriptions included.

    Args:
        counts: From `histograms`, [rows, symbols].
        columns: Entries of each row.

    Returns:
        int [rows]: the group of each row, numbered in the order in which they first appear; None
        where one group is best.
    """
    rows = len(counts)
    if rows == 1 or columns < _MIN_COLUMNS:
        return None
    keys = _keys(counts[:, 0], columns)
    kinds, kind_of_row = np.unique(keys, return_inverse=True)
    if len(kinds) == 1:
        return None
    sums = np.zeros((len(kinds), _SYMBOLS), np.int64)
    np.add.at(sums, kind_of_row, counts)
    cuts, cost = _divide(sums)
    groups_per_kind = np.zeros(len(kinds), np.int64)
    for group, first in enumerate(cuts):
        groups_per_kind[first:] = group
    map_bits = rows * (len(cuts) - 1).bit_length()
    if len(cuts) == 1 or cost + map_bits >= _cost(sums.sum(axis=0, keepdims=True))[0]:
        return None
    return _in_order(groups_per_kind[kind_of_row])


def histograms(levels: Array) -> Array:
    """Count magnitudes of whole numbers per row, the largest together.

    Args:
        levels: [rows, columns], contiguous.

    Returns:
        int32 [rows, symbols]; one row for the whole tensor where rows are too short to tell
        apart (then int64).
    """
    rows, columns = levels.shape
    if columns < _MIN_COLUMNS:
        zeros = levels.size - np.count_nonzero(levels)
        return np.array([[zeros, levels.size - zeros]], np.int64)
    counts = np.zeros((rows, _SYMBOLS), np.int32)
    width = min(columns, _BLOCK)
    height = max(1, _BLOCK // columns)
    for first in range(0, rows, height):
        for start in range(0, columns, width):
            block = levels[first : first + height, start : start + width]
            counts[first : first + height] += _histogram(block)
    return counts


def pack(groups: Array | None) -> bytes:
    """Write the groups: their number, then one field of few bits per row."""
    if groups is None:
        return b"\x01"
    count = int(groups.max()) + 1
    width = (count - 1).bit_length()
    fields = groups[:, None] >> np.arange(width - 1, -1, -1) & 1
    return bytes([count]) + np.packbits(fields.astype(np.uint8).reshape(-1)).tobytes()


def unpack(reader: Reader, rows: int) -> Array | None:
    """Read the groups of `rows` rows.

    Raises:
        Damaged: More groups than rows, groups without rows, or numbered out of order.
    """
    count = reader.byte()
    if not 1 <= count <= min(rows, MAX_GROUPS):
        raise damaged(f"has {count} groups of {rows:,} rows")
    if count == 1:
        return None
    width = (count - 1).bit_length()
    size = -(-rows * width // 8)
    if size > len(reader.data) - reader.place:
        raise damaged(f"ends inside its list of {rows:,} rows")
    bits = np.unpackbits(np.frombuffer(reader.data, np.uint8, size, reader.place))
    reader.place += size
    if bits[rows * width :].any():
        raise damaged("has padding that is not 0")
    fields = bits[: rows * width].reshape(rows, width)
    groups = fields @ (1 << np.arange(width - 1, -1, -1))
    found, firsts = np.unique(groups, return_index=True)
    if len(found) != count or int(found[-1]) != count - 1 or (np.diff(firsts) < 0).any():
        raise damaged("numbers its groups out of order")
    return groups


def _histogram(block: Array) -> Array:
    """Count by comparing and counting bits, many times faster than entry by entry."""
    low = np.minimum(block, _SYMBOLS - 1)  # first, as there is no int8 128
    magnitudes = np.abs(np.maximum(low, 1 - _SYMBOLS))
    above = np.zeros((len(block), _SYMBOLS), np.int32)
    for level in range(_SYMBOLS - 1):
        bits = np.packbits(magnitudes > level, axis=1)
        above[:, level] = np.bitwise_count(bits).sum(axis=1, dtype=np.int32)
        if not above[:, level].any():
            break
    # How many are above each level, to how many are at it.
    return -np.diff(above, prepend=np.int32(block.shape[1]))


def _keys(zeros: Array, columns: int) -> Array:
    """Give each row a number that grows with its density, two to a factor of two of the odds."""
    zeros = zeros.astype(np.int64)
    keys = np.zeros(len(zeros), np.int64)
    for octave in range(-_OCTAVES, _OCTAVES + 1):
        for over, under in ((1, 1), (99, 70)):  # 1 and about the root of 2: no logarithm decides
            ones = (columns - zeros) * under << max(-octave, 0)
            keys += ones > zeros * over << max(octave, 0)
    return keys


def _divide(sums: Array) -> tuple[list[int], float]:
    """Find the cheapest division of kinds [kinds, symbols] into runs: firsts, and the cost."""
    totals = np.concatenate([np.zeros((1, _SYMBOLS), np.int64), np.cumsum(sums, axis=0)])
    best = np.zeros(1)
    choice = [0]
    for end in range(1, len(totals)):
        costs = best + _cost(totals[end] - totals[:end])
        choice.append(int(np.argmin(costs)))
        best = np.append(best, costs[choice[-1]])
    cuts, end = [], len(sums)
    while end:
        end = choice[end]
        cuts.append(end)
    return cuts[::-1], float(best[-1])


def _cost(counts: Array) -> Array:
    """Estimate the bits of entries of such magnitudes [cases, symbols]: [cases].

    Entropy, signs and descriptions; rounded, so that the last digit of a machine's logarithm
    decides nothing.
    """
    total = counts.sum(axis=1, keepdims=True)
    entropy = counts * (np.log2(np.maximum(total, 1)) - np.log2(np.maximum(counts, 1)))
    levels = np.count_nonzero(counts[:, 1:], axis=1)
    signs = total[:, 0] - counts[:, 0]
    bits: Array = np.round(entropy.sum(axis=1), 3) + signs + _HEAD_BITS + _LEVEL_BITS * levels
    return bits


def _in_order(groups: Array) -> Array:
    """Number groups in the order in which they first appear."""
    _, firsts, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(firsts))
    ordered: Array = rank[inverse]
    return ordered
