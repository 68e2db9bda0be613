"""The codec: exact round trips, near the entropy, and no stream that does harm."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cgmerge.errors import Damaged
from cgmerge.modules.compress.codec import coded_bits, decode, dtype_of, encode


def entropy(levels):
    """Bits of the whole tensor when each value takes -log2 of its share."""
    _, counts = np.unique(levels, return_counts=True)
    return float((counts * np.log2(levels.size / counts)).sum())


def ternary(rows, columns, density, seed=0):
    generator = np.random.default_rng(seed)
    signs = np.where(generator.random((rows, columns)) < 0.5, -1, 1)
    return (signs * (generator.random((rows, columns)) < density)).astype(np.int8)


def gauss(rows, columns, spread, seed=0):
    values = np.random.default_rng(seed).normal(0, 1, (rows, columns)) * spread
    return np.rint(values).astype(np.int32)


def check(levels):
    section = encode(levels)
    assert coded_bits(levels) == 8 * len(section)
    found = decode(section, *levels.shape, dtype_of(levels))
    assert found.dtype.name == {"I8": "int8", "I16": "int16", "I32": "int32"}[dtype_of(levels)]
    assert np.array_equal(found, levels)
    assert encode(found) == section
    return section


def test_a_tensor_by_hand():
    """Chunk 2^16, one group, 3 of 12 are not 0: mask as it is; none above 1; signs - + -."""
    levels = np.zeros((3, 4), np.int8)
    levels[0, 1], levels[1, 2], levels[2, 3] = -1, 1, -1
    mask, signs = "010000100001", "101"
    body = int((mask + signs).ljust(16, "0"), 2).to_bytes(2, "big")
    assert encode(levels) == bytes([16, 1, 3, 0, 1, 0]) + body
    check(levels)


def test_gaps_by_hand():
    """Ones at 10 and 17 of 40 are gaps of 10 and 6; by M = 6, q = 1, 1 and rests 4, 0.

    M = 3·2: rest 4 is 2·2 + 0, so its three-way digit is 2 (bits 1, 1), that of 0 is 0 (bit 0).
    """
    levels = np.zeros((1, 40), np.int8)
    levels[0, [10, 17]] = 1
    unary, above, two, low, signs = "0101", "10", "1", "00", "00"
    body = int((unary + above + two + low + signs).ljust(16, "0"), 2).to_bytes(2, "big")
    head = bytes([16, 1, 2, 2 + 3, 2, 1, 1, 0])
    section = head + body
    assert np.array_equal(decode(section, 1, 40, "I8"), levels)


def test_magnitudes_by_hand():
    """All entries kept: 1 -2 5 3. Thresholds cost more than the tail: |v| - 1 = 0 1 4 2, unary."""
    levels = np.array([[1, -2, 5, 3]])
    body = int(("0100" + "10100001001").ljust(16, "0"), 2).to_bytes(2, "big")
    assert encode(levels) == bytes([16, 1, 4, 0, 0, 7]) + body
    check(levels)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.fault("F23")
def test_no_entries(shape):
    assert check(np.zeros(shape, np.int8)) == b""
    with pytest.raises(Damaged, match="without entries"):
        decode(b"\x10", *shape, "I8")


@pytest.mark.parametrize("value", [0, 1, -1, 127, -127, -128, 32767, -32768, 2**31 - 1, 1 - 2**31])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (17, 200)])
@pytest.mark.fault("F23")
def test_constant_tensors(value, shape):
    check(np.full(shape, value, np.int64))


@pytest.mark.parametrize("levels", [np.array([[2**31]]), np.array([[-(2**31)]])])
def test_magnitudes_that_do_not_fit(levels):
    with pytest.raises(ValueError, match="2,147,483,648"):
        encode(levels)


@pytest.mark.parametrize("levels", [np.zeros((2, 2)), np.zeros(3, np.int8), np.ones((1, 1), bool)])
def test_only_matrices_of_whole_numbers(levels):
    with pytest.raises(ValueError, match="matrix of integers"):
        encode(levels)


@settings(max_examples=200, deadline=None)
@given(
    st.data(),
    arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=90),
    st.sampled_from([1, 2, 3, 20, 127, 30_000, 2**31 - 1]),
)
@pytest.mark.fault("F23")
def test_round_trips(data, shape, largest):
    """Sparse and dense matrices of every type, as hypothesis likes them."""
    dtype = np.int64 if largest > 2**15 else np.int16
    values = st.integers(-largest, largest)
    levels = data.draw(arrays.arrays(dtype, shape, elements=values, fill=st.just(0)))
    check(levels)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("density", [0, 1e-5, 0.01, 0.2, 0.36, 0.42, 0.5, 0.6, 0.8, 0.99, 1])
def test_chunks_and_groups(density, seed):
    """Several chunks, rows of several densities, rows longer than a chunk."""
    mixed = np.concatenate([ternary(7, 30_000, density, seed), ternary(3, 30_000, 0.02, seed + 9)])
    check(np.random.default_rng(seed).permutation(mixed))
    check(ternary(2, 150_001, density, seed))
    check(ternary(150_001, 2, density, seed))


def test_transposed_input_is_coded_as_it_reads():
    levels = ternary(70, 300, 0.3)
    assert encode(levels.T) == encode(np.ascontiguousarray(levels.T))


DENSITIES = [0.01, 0.0149, 0.02, 0.0296, 0.05, 0.0584, 0.1, 0.1134, 0.15, 0.2, 0.2138, 0.25,
             0.3, 0.34, 0.36, 0.382, 0.4, 0.43, 0.45, 0.5]  # fmt: skip


@pytest.mark.parametrize("density", DENSITIES)
def test_ternary_within_two_percent_of_the_entropy(density):
    """The bar, and at the densities where Rice codes alone miss it."""
    levels = ternary(16, 40_000, density)
    assert coded_bits(levels) <= 1.02 * entropy(levels)


def test_sign_only_is_one_bit_an_entry():
    levels = ternary(16, 40_000, 1)
    assert coded_bits(levels) <= 1.002 * levels.size


@pytest.mark.parametrize("spread", [0.4, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 40, 300, 10_000])
def test_many_levels_near_the_entropy(spread):
    levels = gauss(16, 40_000, spread)
    assert coded_bits(levels) <= 1.03 * entropy(levels)


def test_rows_of_unlike_density_cost_what_each_costs():
    """Per row, not per tensor: less than two thirds of the entropy that ignores rows."""
    levels = gauss(16, 16_384, 2 * 0.7 ** np.arange(16)[:, None])
    rows = sum(entropy(row) for row in levels)
    assert coded_bits(levels) <= 1.035 * rows
    assert coded_bits(levels) <= 0.7 * entropy(levels)
    shuffled = np.random.default_rng(1).permutation(levels)
    assert coded_bits(shuffled) <= 1.035 * rows


def test_memory_is_the_tensor_and_little_more():
    levels = ternary(16, 1_000_000, 0.2)
    section = encode(levels)
    tracemalloc.start()
    decode(section, *levels.shape, "I8")
    decoding = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    encode(levels)
    encoding = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert decoding < levels.nbytes + (64 << 20)
    assert encoding < 3 * len(section) + (64 << 20)


SMALL = {
    "ternary": ternary(5, 80, 0.1),
    "dense": ternary(6, 90, 0.9),
    "blocks": ternary(4, 100, 0.4),
    "levels": gauss(5, 70, 2.0),
    "tail": gauss(3, 70, 300.0),
    "groups": np.concatenate([ternary(8, 400, 0.02), ternary(8, 400, 0.7, 1)]),
    "zero": np.zeros((4, 5), np.int8),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.fault("F06")
def test_truncated_and_appended_streams(name):
    levels = SMALL[name]
    section, dtype = encode(levels), dtype_of(levels)
    for size in range(len(section)):
        with pytest.raises(Damaged):
            decode(section[:size], *levels.shape, dtype)
    with pytest.raises(Damaged):
        decode(section + b"\0", *levels.shape, dtype)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.fault("F06")
def test_flipped_streams_decode_to_something_or_are_refused(name):
    """A checksum finds the flip; the codec alone must only stay within its bounds."""
    levels = SMALL[name]
    section, dtype = encode(levels), dtype_of(levels)
    refused = 0
    for bit in range(8 * len(section)):
        flipped = bytearray(section)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(flipped), *levels.shape, dtype)
        except Damaged as error:
            assert error.code == "damaged.codec"
            refused += 1
        else:
            assert found.shape == levels.shape
            # The size of chunks is the one thing that can be said in several ways.
            assert bit < 8 or not np.array_equal(found, levels)
    assert refused > 0


@pytest.mark.parametrize("wrong", [(5, 81), (4, 80), (10, 40), (400, 1)])
def test_another_shape_never_passes_unseen(wrong):
    levels = SMALL["ternary"]
    try:
        found = decode(encode(levels), *wrong, "I8")
    except Damaged:
        return
    assert found.shape == wrong


def test_a_type_that_is_not_the_smallest():
    with pytest.raises(Damaged, match="declared I16"):
        decode(encode(SMALL["ternary"]), 5, 80, "I16")
    with pytest.raises(Damaged, match="beyond the type"):
        decode(encode(SMALL["tail"]), 3, 70, "I8")


LIES = {
    "chunks of 2^15": ([15, 1, 0], "chunks of 2\\^15"),
    "no groups": ([16, 0, 0], "has 0 groups"),
    "more groups than rows": ([16, 3, 0x40, 0, 0], "has 3 groups of 2 rows"),
    "a group without rows": ([16, 2, 0x00, 0, 0], "out of order"),
    "groups out of order": ([16, 2, 0x80, 0, 0], "out of order"),
    "padding of groups": ([16, 2, 0x41, 0, 0], "padding"),
    "more ones than entries": ([16, 1, 201, 1], "at most 200"),
    "groups of short rows": ([16, 2, 0x40, 0, 0], "groups of rows of 63"),
    "a list of groups that ends": ([16, 2], "ends inside its list"),
    "a head that ends": ([16, 1, 5], "ends inside its description"),
    "a number too long": ([16, 1, 0x80, 0x80, 0x80, 0x80, 0x80, 1], "more than five bytes"),
    "a number not shortest": ([16, 1, 0x80, 0], "shortest form"),
    "an unknown kind": ([16, 1, 5, 63], "unknown kind 63"),
    "a kind below all": ([16, 1, 5, 255], "unknown kind 255"),
    "a kind above all": ([16, 1, 1, 42, 0, 1, 0, 128, 0, 0], "unknown kind 42"),
    "a flipped raw plane": ([16, 1, 5, 64, 1, 0, 0xF8, *[0] * 25], "flips a plane"),
    "quotients beyond the plane": ([16, 1, 5, 2, 100, 1, 0], "100 where at most 97"),
    "a tail of 31 low bits": ([16, 1, 200, 1, 0, 31, 0], "31 low bits"),
    "a bit after the end of blocks": (
        [16, 1, 1, 1, 2, 0, 1, 0, 0b11010000],
        "after the end of a plane",
    ),
    "thresholds for nothing": ([16, 1, 200, 1, 2, 0, 0, *[0] * 25], "nothing reaches"),
    "seventeen thresholds": ([16, 1, 200, 1, 17, *[200, 1] * 16, 0, *[0] * 25], "17 thresholds"),
    "remainders that are not so many": ([16, 1, 2, 3, 0, 1, 1, 0, 0b11111000], "remainder plane"),
    "a bomb of chunks": ([16, 1], "bytes for"),
}


def test_the_lies_are_lies_in_one_thing():
    """Next to some of them stands the truth, which is read."""
    true = decode(bytes([16, 1, 1, 1, 1, 0, 1, 0, 0b10000000]), 2, 2, "I8")
    assert true.tolist() == [[1, 0], [0, 0]]
    assert decode(bytes([16, 1, 1, 40, 0, 1, 0, 128, 0, 0]), 2, 100, "I8")[0, 0] == 1
    found = decode(bytes([16, 1, 5, 0, 1, 0, 0xF8, *[0] * 25]), 2, 100, "I8")
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", LIES)
@pytest.mark.fault("F06")
def test_lying_descriptions(name):
    shapes = {"a bomb of chunks": (2, 1 << 40), "groups of short rows": (2, 63)}
    shapes["a bit after the end of blocks"] = (2, 2)
    rows, columns = shapes.get(name, (2, 100))
    section, reason = LIES[name]
    with pytest.raises(Damaged, match=reason):
        decode(bytes(section), rows, columns, "I8")


@pytest.mark.parametrize(("count", "good"), [(64, True), (65, False)])
def test_at_most_64_groups(count, good):
    fields = np.unpackbits(np.arange(count, dtype=np.uint8)[:, None], axis=1)
    fields = fields[:, 8 - (count - 1).bit_length() :]
    section = bytes([16, count]) + np.packbits(fields.reshape(-1)).tobytes() + bytes(count)
    if good:
        assert not decode(section, count, 64, "I8").any()
    else:
        with pytest.raises(Damaged, match="has 65 groups of 65 rows"):
            decode(section, count, 64, "I8")


@pytest.mark.fault("F05")
def test_lies_about_a_huge_tensor_allocate_nothing():
    tracemalloc.start()
    for rows, columns in [(1 << 40, 1 << 20), (1, 1 << 50), (1 << 31, 1)]:
        with pytest.raises(Damaged):
            decode(bytes([20, 1, 0, 0, 0]), rows, columns, "I8")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
