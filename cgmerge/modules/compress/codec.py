"""Small whole numbers to few bytes and back: split-plane Golomb codes in pure numpy.

A tensor is coded as a series of yes/no questions, each a `bitplane` close to its entropy: is the
entry not 0; of those, is |value| above 1, above 2 …; the few largest magnitudes get a Rice code;
signs are stored as they are. Rows of like density form a group with its own parameters, found by
the coder, because components of a rotated expert differ by orders of magnitude.

Work goes in chunks of a million entries, so that memory is the tensor plus a few tens of MB.
A reader knows every length from the descriptions at the start of a section and checks their sum
against the section before it allocates anything of the tensor's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgmerge.modules.compress import bitplane, grouping
from cgmerge.modules.compress.bitplane import Array, Plane, Reader, Shape, damaged, number

SMALLEST_CHUNK, LARGEST_CHUNK = 16, 20
MAX_PLANES = 12
"""Thresholds that the encoder tries; a reader accepts up to 255."""

MAX_SHIFT = 30
DTYPES: dict[str, np.dtype[Any]] = {
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
}
_LARGEST = {"I8": 127, "I16": 32767, "I32": 2**31 - 1}
Rows = slice | Array
_FEW = 32
"""Below so many survivors another threshold's description costs more than it saves."""


def dtype_of(levels: Array) -> str:
    """Name the smallest of I8, I16, I32 that holds every magnitude.

    Raises:
        ValueError: A magnitude of 2³¹ or more.
    """
    peak = 0 if levels.size == 0 else max(-int(levels.min()), int(levels.max()))
    return _smallest(peak)


def encode(levels: Array) -> bytes:
    """Code a tensor of whole numbers.

    Args:
        levels: [rows, columns] of any signed integer type, magnitudes below 2³¹.

    Returns:
        The section: groups of rows, descriptions of all chunks, their bits. Equal levels give
        equal bytes on every machine.

    Raises:
        ValueError: Not a matrix of signed integers, or a magnitude of 2³¹ or more.
    """
    levels = _matrix(levels)
    if levels.size == 0:
        return b""
    plan = _plan(levels)
    heads, bodies = [plan.pack()], []
    for rows, columns in plan:
        planes = _planes(_flat(levels, rows, columns))
        heads += [plane.head for plane in planes]
        bodies.append(_pack([part for plane in planes for part in plane.parts()]))
    return b"".join(heads + bodies)


def coded_bits(levels: Array) -> int:
    """Return the exact size of `encode(levels)` in bits, without making the bits."""
    levels = _matrix(levels)
    if levels.size == 0:
        return 0
    plan = _plan(levels)
    size = len(plan.pack())
    for rows, columns in plan:
        planes = _planes(_flat(levels, rows, columns))
        size += sum(len(plane.head) for plane in planes)
        size += -(-sum(plane.bits for plane in planes) // 8)
    return 8 * size


def decode(section: bytes, rows: int, columns: int, dtype: str) -> Array:
    """Decode a section.

    The caller vouches for the shape: this allocates rows · columns entries, though not before
    all lengths in the section have been found to agree with it.

    Args:
        section: From `encode`, or from a stranger.
        rows: Rows of the tensor.
        columns: Columns of the tensor.
        dtype: I8, I16 or I32; the smallest that holds the levels.

    Returns:
        [rows, columns] of that type.

    Raises:
        Damaged: Bytes that `encode` does not write for such a shape.
    """
    if rows * columns == 0:
        if section:
            raise damaged(f"has {len(section):,} bytes for a tensor without entries")
        return np.zeros((rows, columns), DTYPES[dtype])
    reader = Reader(section)
    plan = _read_plan(reader, rows, columns)
    chunks = _read_chunks(reader, plan)
    needed = reader.place + sum(chunk.bytes for chunk in chunks)
    if needed != len(section):
        raise damaged(f"has {len(section):,} bytes; its descriptions need {needed:,}")
    levels = np.zeros((rows, columns), DTYPES[dtype])
    place, peak = reader.place, 0
    for chunk, (members, span) in zip(chunks, plan, strict=True):
        bits = np.unpackbits(np.frombuffer(section, np.uint8, chunk.bytes, place))
        place += chunk.bytes
        if bits[chunk.bits :].any():
            raise damaged("has padding that is not 0")
        target = _flat(levels, members, span)
        peak = max(peak, _decode_chunk(chunk, bits, target))
        if not np.may_share_memory(target, levels):
            levels[members, span] = target.reshape(-1, span.stop - span.start)
    if dtype != _smallest(peak):
        raise damaged(f"is declared {dtype} though its levels fit {_smallest(peak)}")
    return levels


@dataclass(frozen=True, slots=True)
class _Plan:
    """In which order entries are coded: group by group, in chunks of at most 2^exponent.

    Attributes:
        groups: int [rows], or None where all rows are one group.
        rows: Rows of the tensor.
        columns: Columns of the tensor.
        exponent: Of the largest chunk.
    """

    groups: Array | None
    rows: int
    columns: int
    exponent: int

    @property
    def height(self) -> int:
        """Return how many rows a chunk has; a row longer than a chunk is cut instead."""
        return max(1, (1 << self.exponent) // self.columns)

    @property
    def width(self) -> int:
        return min(self.columns, 1 << self.exponent)

    def __len__(self) -> int:
        counts = [self.rows] if self.groups is None else np.bincount(self.groups).tolist()
        return sum(-(-count // self.height) for count in counts) * -(-self.columns // self.width)

    def __iter__(self) -> Iterator[tuple[Rows, slice]]:
        for members in self._members():
            for start in range(0, self.columns, self.width):
                yield members, slice(start, min(start + self.width, self.columns))

    def _members(self) -> Iterator[Rows]:
        if self.groups is None:
            for first in range(0, self.rows, self.height):
                yield slice(first, min(first + self.height, self.rows))
            return
        for group in range(int(self.groups.max()) + 1):
            members = np.flatnonzero(self.groups == group)
            for first in range(0, len(members), self.height):
                part = members[first : first + self.height]
                start, stop = int(part[0]), int(part[-1]) + 1
                yield slice(start, stop) if stop - start == len(part) else part

    def pack(self) -> bytes:
        return bytes([self.exponent]) + grouping.pack(self.groups)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The description of one chunk: which entries are not 0, thresholds, and the tail."""

    kept: Shape
    above: tuple[Shape, ...]
    shift: int
    tail: int
    quotients: int

    @property
    def bits(self) -> int:
        planes = self.kept.bits + self.kept.ones + sum(shape.bits for shape in self.above)
        return planes + self.tail * (1 + self.shift) + self.quotients

    @property
    def bytes(self) -> int:
        return -(-self.bits // 8)


def _matrix(levels: Array) -> Array:
    if levels.ndim != 2 or levels.dtype.kind != "i":
        raise ValueError(f"levels must be a matrix of integers, not {levels.dtype} {levels.shape}")
    dtype_of(levels)  # refuses what does not fit
    return np.ascontiguousarray(levels)


def _plan(levels: Array) -> _Plan:
    """Choose groups, and chunks of about ten thousand entries that are not 0.

    Below that descriptions weigh too much; above it the arrays leave the fast caches.
    """
    rows, columns = levels.shape
    counts = grouping.histograms(levels)
    kept = max(levels.size - int(counts[:, 0].sum(dtype=np.int64)), 1)
    exponent = SMALLEST_CHUNK
    while exponent < LARGEST_CHUNK and kept << exponent < levels.size << 13:
        exponent += 1
    return _Plan(grouping.group_rows(counts, columns), rows, columns, exponent)


def _read_plan(reader: Reader, rows: int, columns: int) -> _Plan:
    exponent = reader.byte()
    if not SMALLEST_CHUNK <= exponent <= LARGEST_CHUNK:
        raise damaged(f"has chunks of 2^{exponent} entries")
    return _Plan(grouping.unpack(reader, rows), rows, columns, exponent)


def _flat(levels: Array, rows: Rows, columns: slice) -> Array:
    """Return a chunk's entries [entries]: a view where they lie one after the other."""
    flat: Array = levels[rows, columns].reshape(-1)
    return flat


def _planes(block: Array) -> list[Plane]:
    """Describe one chunk [entries]; the descriptions joined are what `_read_chunk` reads."""
    mask = block != 0
    places = np.flatnonzero(mask)
    ones = len(places)
    planes = [Plane(number(ones), 0, list), bitplane.choose(mask, places)]
    if ones == 0:
        return planes
    values = block[places]
    planes.append(Plane(b"", ones, lambda: [values < 0]))
    if values.dtype != np.int8 or values.min() == -128:
        magnitudes = np.abs(values.astype(np.int64)).astype(np.uint32)
    else:
        magnitudes = np.abs(values).view(np.uint8)
    return planes + _thresholds(magnitudes)


def _thresholds(magnitudes: Array) -> list[Plane]:
    """Choose how many thresholds come before the tail, by exact count."""
    if magnitudes.max() == 1:
        return [Plane(b"\x01" + number(0), 0, list)]
    passed: list[Plane] = []
    spent, best_cost, best = 0, -1, [Plane(b"", 0, list)]
    # Where magnitudes are large, thresholds one by one say nothing and the tail says it all.
    large = int(magnitudes.sum(dtype=np.int64)) >= 8 * len(magnitudes)
    for level in range(1 if large else MAX_PLANES + 1):
        tail = _tail(magnitudes, level)
        if best_cost < 0 or spent + tail.cost < best_cost:
            best_cost = spent + tail.cost
            best = [Plane(bytes([level]), 0, list), *passed, tail]
        if level and len(magnitudes) < _FEW:
            break
        mask = magnitudes > level + 1
        places = np.flatnonzero(mask)
        plane = bitplane.choose(mask, places)
        passed += [Plane(number(len(places)), 0, list), plane]
        spent += 8 * len(number(len(places))) + plane.cost
        magnitudes = magnitudes[places]
    return best


def _tail(magnitudes: Array, level: int) -> Plane:
    """Describe magnitudes above `level` by the best Rice code."""
    if len(magnitudes) == 0:
        return Plane(b"", 0, list)
    rest = magnitudes - magnitudes.dtype.type(level + 1)
    total = int(rest.sum(dtype=np.int64))
    near = max((total // len(rest)).bit_length() - 1, 0)
    best: tuple[int, int, int] | None = None
    for shift in range(max(near - 1, 0), min(near + 1, MAX_SHIFT) + 1):
        quotients = int((rest >> rest.dtype.type(shift)).sum(dtype=np.int64))
        cost = len(rest) * (1 + shift) + quotients
        if best is None or cost < best[0]:
            best = (cost, shift, quotients)
    assert best is not None
    bits, shift, quotients = best

    def parts() -> list[Array]:
        unary = np.zeros(len(rest) + quotients, np.uint8)
        ends = np.cumsum(rest >> rest.dtype.type(shift), dtype=np.int64)
        unary[ends + np.arange(len(rest))] = 1
        one = rest.dtype.type(1)
        return [unary, *(rest >> rest.dtype.type(bit) & one for bit in reversed(range(shift)))]

    return Plane(bytes([shift]) + number(quotients), bits, parts)


def _pack(parts: list[Array]) -> bytes:
    bits = np.empty(sum(len(part) for part in parts), np.uint8)
    place = 0
    for part in parts:
        bits[place : place + len(part)] = part
        place += len(part)
    return np.packbits(bits).tobytes()


def _read_chunks(reader: Reader, plan: _Plan) -> list[_Chunk]:
    """Read all descriptions; there cannot be more chunks than bytes."""
    needed = len(plan)
    if needed > len(reader.data) - reader.place:
        raise damaged(f"has {len(reader.data):,} bytes for {needed:,} chunks")
    chunks = []
    for rows, columns in plan:
        height = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        chunks.append(_read_chunk(reader, height * (columns.stop - columns.start)))
    return chunks


def _read_chunk(reader: Reader, length: int) -> _Chunk:
    kept = _read_plane(reader, length)
    if kept.ones == 0:
        return _Chunk(kept, (), 0, 0, 0)
    above: list[Shape] = []
    tail = kept.ones
    for _ in range(reader.byte()):
        above.append(_read_plane(reader, tail))
        tail = above[-1].ones
    if tail == 0:
        return _Chunk(kept, tuple(above), 0, 0, 0)
    shift = reader.byte()
    if shift > MAX_SHIFT:
        raise damaged(f"has magnitudes of {shift} low bits; at most {MAX_SHIFT} are possible")
    return _Chunk(kept, tuple(above), shift, tail, reader.number((1 << 31) - 1))


def _read_plane(reader: Reader, length: int) -> Shape:
    ones = reader.number(length)
    return bitplane.read_shape(reader, length, ones)


def _decode_chunk(chunk: _Chunk, bits: Array, target: Array) -> int:
    """Fill `target` [entries], which holds zeros; return the largest magnitude."""
    kept = chunk.kept
    if kept.ones == 0:
        return 0
    places: Any = slice(None)
    if kept.kind >= 0:
        places = bitplane.read_places(kept, bits[: kept.bits])
    place = kept.bits + kept.ones
    signs = bits[kept.bits : place]
    if len(chunk.above) == 1 and chunk.tail == 0:
        signs = signs.view(np.int8)
        target[places] = 1 - 2 * signs
        return 1
    magnitudes = _magnitudes(chunk, bits[place:])
    peak = int(magnitudes.max())
    if peak > np.iinfo(target.dtype).max:
        raise damaged(f"has a magnitude of {peak:,}, beyond the type of the tensor")
    values = magnitudes.astype(target.dtype)
    np.negative(values, out=values, where=signs.view(bool))
    target[places] = values
    return peak


def _magnitudes(chunk: _Chunk, bits: Array) -> Array:
    """Decode the magnitudes of the entries that are not 0."""
    tail = _read_tail(chunk, bits, sum(shape.bits for shape in chunk.above))
    place = sum(shape.bits for shape in chunk.above)
    # From the largest down: survivors of each threshold are put among those that it stopped.
    for level in range(len(chunk.above), 0, -1):
        shape = chunk.above[level - 1]
        place -= shape.bits
        values = np.full(shape.length, level, tail.dtype)
        values[bitplane.read_places(shape, bits[place : place + shape.bits])] = tail
        tail = values
    return tail


def _read_tail(chunk: _Chunk, bits: Array, place: int) -> Array:
    count, level = chunk.tail, len(chunk.above)
    if count == 0:
        return np.zeros(0, np.uint8)
    end = place + count + chunk.quotients
    ends = np.flatnonzero(bits[place:end].view(bool))
    if len(ends) != count or not bits[end - 1]:
        raise damaged(f"has magnitudes without the {count:,} ends that they announce")
    values = np.diff(ends, prepend=-1)
    values -= 1
    for _ in range(chunk.shift):
        values <<= 1
        values |= bits[end : end + count]
        end += count
    values += level + 1
    return values if int(values.max()) > 255 else values.astype(np.uint8)


def _smallest(peak: int) -> str:
    for name, largest in _LARGEST.items():
        if peak <= largest:
            return name
    raise ValueError(f"levels reach {peak:,}; at most {2**31 - 1:,} can be coded")
