"""A row of bits in close to its entropy, by vector operations alone.

Whichever value is rarer is coded by the gaps between its places, with a Golomb code of parameter
M = 2·2^s or 3·2^s. A Golomb code is serial as usually written (unary quotient, remainder, next
gap); here all quotients come first, then all remainder bits, plane by plane, so that numpy reads
it without a loop. Powers of two alone (Rice) are up to 3 % above the entropy between two
parameters; with the threefold ones the worst is about 1 %. Near 38 % no Golomb code is good, and
blocks of three bits get a fixed prefix code instead.

Every length follows from the description of a plane, so a reader knows how many bits there must
be before it looks at one of them.

Source: Golomb (1966), Gallager and van Voorhis (1975); the split order is this format's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgmerge.errors import Damaged

Array = np.ndarray[Any, Any]

RAW, TRIPLE, GOLOMB = 0, 1, 2
FLIPPED = 64
"""Added to the kind where the zeros are the ones that are coded."""

MAX_STEP = 39
"""Largest i of M = (2 or 3)·2^(i // 2); M then reaches the length of a chunk."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits that are ready to be written.

    Attributes:
        head: The description: kind and lengths.
        bits: How many bits `parts` makes.
        parts: Makes the bits, as arrays of 0 and 1 in the order of the file.
    """

    head: bytes
    bits: int
    parts: Callable[[], list[Array]]

    @property
    def cost(self) -> int:
        """Return the bits of description and body together."""
        return 8 * len(self.head) + self.bits


@dataclass(frozen=True, slots=True)
class Shape:
    """What the description of a plane says, checked as far as that goes without its bits.

    Attributes:
        length: Bits of the plane itself.
        ones: How many of them are 1.
        kind: RAW, TRIPLE or GOLOMB + i, without the flip; -1 where all bits are equal.
        flipped: Whether the zeros are coded.
        first: Sum of quotients (Golomb), or third code bits (triple).
        second: Remainders that are not 0 (threefold Golomb), or fourth code bits (triple).
    """

    length: int
    ones: int
    kind: int = -1
    flipped: bool = False
    first: int = 0
    second: int = 0

    @property
    def coded(self) -> int:
        """Return how many places are coded: of the ones, or of the zeros."""
        return self.length - self.ones if self.flipped else self.ones

    @property
    def bits(self) -> int:
        """Return how many bits the body has."""
        if self.kind < 0:
            return 0
        if self.kind == RAW:
            return self.length
        if self.kind == TRIPLE:
            return 2 * -(-self.length // 3) + self.first + self.second
        step = self.kind - GOLOMB
        return self.coded * (2 + step // 2) + self.first + self.second


class Reader:
    """Reads numbers from the descriptions; refuses to run over the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def byte(self) -> int:
        """Read one byte."""
        if self.place >= len(self.data):
            raise damaged("ends inside its description")
        self.place += 1
        return self.data[self.place - 1]

    def number(self, largest: int) -> int:
        """Read a number of seven bits a byte, low ones first, that may be at most `largest`."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 28:
                raise damaged("holds a number of more than five bytes")
        if byte == 0 and shift:
            raise damaged("holds a number that is not in its shortest form")
        if value > largest:
            raise damaged(f"holds the number {value:,} where at most {largest:,} is possible")
        return value


def number(value: int) -> bytes:
    """Write a number, seven bits a byte, low ones first; the high bit says that more follow."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def damaged(what: str) -> Damaged:
    """Make the error of a stream that no encoder writes; the container adds the tensor."""
    return Damaged(f"coded data {what}", code="codec")


def parameter(step: int) -> int:
    """Return M = 2, 3, 4, 6, 8, 12, 16 and so on, of step 0, 1, 2."""
    return (2 + (step & 1)) << (step >> 1)


def nearest_step(ones: int, zeros: int) -> int:
    """Return the step whose M is about 0.7 times the mean gap, in whole numbers only."""
    step = 0
    while step < MAX_STEP and 10 * parameter(step) * ones < 7 * zeros:
        step += 1
    return step


def choose(mask: Array, places: Array) -> Plane:
    """Describe bits by the cheapest code, by exact count.

    Args:
        mask: bool [length].
        places: Where it is true, ascending.
    """
    length, ones = len(mask), len(places)
    if ones in (0, length):
        return Plane(b"", 0, list)
    best = Plane(bytes([RAW]), length, lambda: [mask])
    flip = 2 * ones > length
    rare = length - ones if flip else ones
    if 100 * rare >= 45 * length:
        return best
    target = ~mask if flip else mask
    flag = FLIPPED if flip else 0
    coded = np.flatnonzero(target) if flip else places
    if 100 * rare >= 33 * length:
        best = min(best, _triple(target, flag), key=lambda plane: plane.cost)
    gaps = np.empty(rare, np.uint32)
    gaps[0] = coded[0]
    np.subtract(coded[1:], coded[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= np.uint32(1)
    near = nearest_step(rare, length - rare)
    for step in range(max(near - 1, 0), min(near + 1, MAX_STEP) + 1):
        best = min(best, _golomb(gaps, step, flag), key=lambda plane: plane.cost)
    return best


def read_shape(reader: Reader, length: int, ones: int) -> Shape:
    """Read the description of a plane and check it against its length and number of ones.

    Raises:
        Damaged: An unknown kind, or lengths that no plane has.
    """
    if ones in (0, length):
        return Shape(length, ones)
    byte = reader.byte()
    kind, flipped = byte & ~FLIPPED, bool(byte & FLIPPED)
    if kind == RAW:
        if flipped:
            raise damaged("flips a plane that is stored as it is")
        return Shape(length, ones, RAW)
    if kind == TRIPLE:
        blocks = -(-length // 3)
        third = reader.number(blocks)
        return Shape(length, ones, TRIPLE, flipped, third, reader.number(third))
    step = kind - GOLOMB
    if not 0 <= step <= MAX_STEP:
        raise damaged(f"has a plane of the unknown kind {byte}")
    coded = length - ones if flipped else ones
    quotients = reader.number((length - coded) // parameter(step))
    remainders = reader.number(coded) if step & 1 else 0
    return Shape(length, ones, kind, flipped, quotients, remainders)


def read_mask(shape: Shape, bits: Array) -> Array:
    """Decode a plane.

    Args:
        shape: From `read_shape`.
        bits: uint8 [shape.bits], 0 or 1.

    Returns:
        bool [shape.length] with exactly `shape.ones` true entries.

    Raises:
        Damaged: Bits that contradict the description.
    """
    if shape.kind < 0:
        return np.full(shape.length, shape.ones > 0)
    if shape.kind == RAW:
        mask = bits.view(bool)
    elif shape.kind == TRIPLE:
        mask = _read_triple(shape, bits)
    else:
        mask = np.full(shape.length, shape.flipped)
        mask[_read_golomb(shape, bits)] = not shape.flipped
    if int(np.count_nonzero(mask)) != shape.ones:
        raise damaged(f"has a plane without the {shape.ones:,} ones that it announces")
    return mask


def read_places(shape: Shape, bits: Array) -> Array:
    """Decode a plane to the places of its ones, ascending; see `read_mask`."""
    if shape.kind >= GOLOMB and not shape.flipped:
        return _read_golomb(shape, bits)
    return np.flatnonzero(read_mask(shape, bits))


def _golomb(gaps: Array, step: int, flag: int) -> Plane:
    base, shift = 2 + (step & 1), step >> 1
    quotients = (gaps >> np.uint32(shift)) // np.uint32(base)
    total = int(quotients.sum(dtype=np.int64))
    head = bytes([GOLOMB + step + flag]) + number(total)
    bits = len(gaps) * (2 + shift) + total
    rests = (gaps >> np.uint32(shift)) - quotients * np.uint32(base)
    if base == 3:
        more = int(np.count_nonzero(rests))
        head += number(more)
        bits += more

    def parts() -> list[Array]:
        unary = np.zeros(len(gaps) + total, np.uint8)
        unary[np.cumsum(quotients, dtype=np.int64) + np.arange(len(gaps))] = 1
        planes = [unary, rests > 0]
        if base == 3:
            planes.append(rests[np.flatnonzero(rests)] == 2)
        planes += [gaps >> np.uint32(bit) & np.uint32(1) for bit in reversed(range(shift))]
        return planes

    return Plane(head, bits, parts)


def _read_golomb(shape: Shape, bits: Array) -> Array:
    step, count = shape.kind - GOLOMB, shape.coded
    base, shift = 2 + (step & 1), step >> 1
    place = count + shape.first
    ends = np.flatnonzero(bits[:place].view(bool))  # several times faster than for numbers
    if len(ends) != count or not bits[place - 1]:
        raise damaged(f"has a unary plane without the {count:,} ends that it announces")
    rest = bits[place : place + count]
    place += count
    if base == 3:
        more = np.flatnonzero(rest.view(bool))
        if len(more) != shape.second:
            raise damaged("has a remainder plane without the ones that it announces")
        rest = rest.copy()
        rest[more] += bits[place : place + shape.second]
        place += shape.second
    if shift:
        rest = rest.astype(np.uint8 if parameter(step) <= 32 else np.int32)
        for _ in range(shift):
            rest <<= 1
            rest |= bits[place : place + count]
            place += count
    # Gap i is M·q + rest, and Σq up to i is where the unary code of gap i ends, less i; the i-th
    # place is Σ(gap + 1) - 1 = M·(end - i) + Σrest + i.
    scale = parameter(step)
    places = _prefix_sums(rest) if scale <= 32 else np.cumsum(rest, dtype=np.int64)
    ends *= scale
    places += ends
    places -= np.arange(0, count * (scale - 1), scale - 1)
    if places[-1] >= shape.length:
        raise damaged(f"has an entry at {int(places[-1]):,} of a plane of {shape.length:,}")
    return places


def _prefix_sums(small: Array) -> Array:
    """Add up uint8 [count] below 32: int64 [count], the sum up to and with each.

    Eight neighbours are added within a 64-bit word by one product, which leaves numpy's slow
    serial sum an eighth of the work.
    """
    words = -(-len(small) // 8)
    padded = np.zeros(8 * words, np.uint8)
    padded[: len(small)] = small
    within = padded.view("<u8") * np.uint64(0x0101010101010101)
    totals = np.cumsum((within >> np.uint64(56)).astype(np.int64))
    totals[1:] = totals[:-1]
    totals[:1] = 0
    sums: Array = within.view(np.uint8).reshape(words, 8) + totals[:, None]
    return sums.reshape(-1)[: len(small)]


def _thirds(target: Array) -> tuple[Array, Array, Array]:
    """Cut bits into three rows, the i-th block being the i-th of each; 0 after the end."""
    count = -(-len(target) // 3)
    last = np.zeros(count, bool)
    last[: len(target) - 2 * count] = target[2 * count :]
    middle = np.zeros(count, bool)
    middle[: len(target) - count] = target[count : 2 * count]
    return target[:count], middle, last


def _triple(target: Array, flag: int) -> Plane:
    """Code blocks of three bits: 000 as 00, 001 as 110, 11x as 111x, all others as they are."""
    x, y, z = _thirds(target)
    any_set, both = x | y | z, x & y
    alone = z & ~(x | y)
    third, fourth = int(np.count_nonzero(any_set)), int(np.count_nonzero(both))
    head = bytes([TRIPLE + flag]) + number(third) + number(fourth)

    def parts() -> list[Array]:
        thirds = ((z | both) & ~alone)[np.flatnonzero(any_set)]
        return [x | alone, y | alone, thirds, z[np.flatnonzero(both)]]

    return Plane(head, 2 * len(x) + third + fourth, parts)


def _read_triple(shape: Shape, bits: Array) -> Array:
    count = -(-shape.length // 3)
    flags = bits.view(bool)
    x, y = flags[:count], flags[count : 2 * count]
    place = 2 * count
    third = _spread(x | y, flags[place : place + shape.first])
    both = x & y
    fourth = _spread(both & third, flags[place + shape.first :])
    alone = both & ~third
    mask = np.concatenate([x ^ alone, y ^ alone, (third & ~both) | alone | fourth])
    if mask[shape.length :].any():
        raise damaged("has bits after the end of a plane")
    mask = mask[: shape.length]
    return ~mask if shape.flipped else mask


def _spread(where: Array, values: Array) -> Array:
    """Put bits where they were taken from."""
    places = np.flatnonzero(where)
    if len(places) != len(values):
        raise damaged("has a block plane of another length than it announces")
    out = np.zeros(len(where), bool)
    out[places] = values
    return out
