"""Streams of computed values: exact order statistics and sums, whatever the blocks look like."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.merge import deltas, mapped, sparsify
from cgmerge.merge.deltas import Blocks, LowRank
from cgmerge.merge.mapped import MappedBlocks, cuts_at, magnitudes_at, tensor_sums, values_at
from cgmerge.merge.sparsify import trim_

numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-40, -1e-40, 3e38]),
    st.floats(-10, 10, width=32),
)


def experts(count=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b": (7, 5), "a": (3, 8), "c": (6,), "d": (0, 4)}
    return [
        {name: torch.randn(*s, generator=generator, dtype=dtype) for name, s in shapes.items()}
        for _ in range(count)
    ]


def flat(blocks):
    return torch.cat([block.values.flatten(1).clone() for block in blocks], dim=1)


def product(values):
    """Two streams from two experts, in float64; overwrites what it is given, as functions may."""
    result = torch.stack([values[0].double() * values[1].double(), values.double().sum(0)])
    values.zero_()
    return result


def product_of(blocks):
    return MappedBlocks(blocks, product, streams=2, dtype=torch.float64)


def test_a_mapped_stream_is_the_function_of_the_stream(monkeypatch):
    given_experts = experts()
    raw = flat(Blocks(given_experts)).double()
    expected = torch.stack([raw[0] * raw[1], raw[0] + raw[1]])
    for size in (1 << 18, 16):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        stream = product_of(Blocks(given_experts))
        assert torch.equal(flat(stream), expected)
        assert torch.equal(flat(stream), expected), "the stream is not repeatable"
        assert stream.total == raw.shape[1] == 65
        assert len(stream.experts) == 2
        assert stream.dtype == torch.float64


def test_only_block_at_and_positions_are_those_of_the_source(monkeypatch):
    monkeypatch.setattr(deltas, "BLOCK_ENTRIES", 16)
    source = Blocks(experts())
    stream = product_of(source)
    assert stream.names == source.names == ["a", "b", "c", "d"]
    assert [b.start for b in stream] == [b.start for b in source]
    part = stream.only("b")
    assert part.total == 35
    blocks = [(block.start, block.offset, block.values.clone()) for block in part]
    assert blocks[0][:2] == (24, 0)
    for start, offset, values in blocks:
        again = stream.block_at(start)
        assert (again.name, again.offset) == ("b", offset)
        assert torch.equal(again.values, values)


def test_mapping_only_part_of_a_stream():
    source = Blocks(experts())
    stream = product_of(source.only("b"))
    assert stream.names == ["b"]
    assert {block.name for block in stream} == {"b"}
    assert next(iter(stream)).start == 24


def test_sample_takes_rows_of_every_tensor():
    stream = product_of(Blocks([{"w": torch.arange(12.0).reshape(6, 2)}] * 2))
    # Every third row from the middle of the first three: rows 1 and 4.
    assert stream.sample(3).tolist() == [[4, 9, 64, 81], [4, 6, 16, 18]]


def test_maps_nest():
    inner_stream = product_of(Blocks(experts()))
    outer = MappedBlocks(inner_stream, lambda values: values[:1].neg(), streams=1)
    assert outer.dtype == torch.float64
    assert torch.equal(flat(outer), -flat(inner_stream)[:1])


def test_there_are_no_factors_behind_a_mapped_stream():
    stream = product_of(Blocks(experts()))
    with pytest.raises(TypeError, match="streamed"):
        stream.fetch("a")
    with pytest.raises(TypeError, match="streamed"):
        stream.gram("a")


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(numbers, min_size=1, max_size=40),
    block=st.sampled_from([1, 3, 1 << 17]),
    remembered=st.sampled_from([0, 5, 1 << 20]),
    bins=st.sampled_from([2, 1 << 6, 1 << 14]),
    data=st.data(),
)
def test_order_statistics_equal_a_sort(rows, block, remembered, bins, data):
    both = torch.tensor([rows, rows[::-1]], dtype=torch.float32) * torch.tensor([[1.0], [0.5]])
    half = both.shape[1] // 2
    given_experts = [{"a": row[:half], "b": row[half:]} for row in both]
    ranks = data.draw(st.lists(st.integers(1, len(rows)), min_size=1, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_ENTRIES", block)
        patch.setattr(sparsify, "_REMEMBERED", remembered)
        patch.setattr(sparsify, "_BINS", bins)
        magnitudes = magnitudes_at(Blocks(given_experts), ranks)
        signed = values_at(Blocks(given_experts), ranks)
    for row, found_magnitudes, found_signed in zip(both, magnitudes, signed, strict=True):
        by_size = sorted(row.abs().tolist(), reverse=True)
        by_value = sorted(row.tolist(), reverse=True)
        assert found_magnitudes == [by_size[rank - 1] for rank in ranks]
        assert found_signed == [by_value[rank - 1] for rank in ranks]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(numbers, min_size=2, max_size=30),
    block=st.sampled_from([1, 3, 1 << 17]),
    data=st.data(),
)
def test_cuts_keep_exactly_k_lowest_index_first(rows, block, data):
    both = torch.tensor([rows, rows[::-1]], dtype=torch.float32)
    kept = [data.draw(st.integers(1, len(rows))) for _ in both]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_ENTRIES", block)
        patch.setattr(sparsify, "_BINS", 1 << 10)
        blocks = Blocks([{"w": row.unsqueeze(1)} for row in both])
        cuts = cuts_at(blocks, kept)
        found = [[], []]
        for one in blocks:
            for part, values, cut in zip(found, one.values, cuts, strict=True):
                trim_(values, one.start, cut)
                part.extend(values.flatten().tolist())
    for row, k, result in zip(both.tolist(), kept, found, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k]
        assert result == [value if i in order else 0.0 for i, value in enumerate(row)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sampled_path_is_exact_at_both_ends(dtype):
    # Large enough that brackets come from a sample; entries of many orders of magnitude.
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(1100, 1000, generator=generator, dtype=dtype) ** 5
    total = matrix.numel()
    ranks = [1, 2, 110, total // 2, total - 110, total - 1, total]
    blocks = Blocks([{"w": matrix}], dtype=dtype)
    by_size = matrix.abs().flatten().sort(descending=True).values
    assert magnitudes_at(blocks, ranks)[0] == [float(by_size[rank - 1]) for rank in ranks]
    by_value = matrix.flatten().sort(descending=True).values
    assert values_at(blocks, ranks)[0] == [float(by_value[rank - 1]) for rank in ranks]


def test_low_rank_experts_are_read_in_blocks():
    generator = torch.Generator().manual_seed(3)
    delta = LowRank(
        torch.randn(3, 700, generator=generator), torch.randn(900, 3, generator=generator)
    )
    seen = []

    def look(values):
        seen.append(values.numel())
        return values

    blocks = MappedBlocks(Blocks([{"w": delta}]), look, streams=1)
    expected = delta.dense().abs().flatten().sort(descending=True).values[62_999]
    assert magnitudes_at(blocks, [63_000])[0][0] == pytest.approx(float(expected), rel=1e-5)
    assert max(seen) <= deltas.BLOCK_ENTRIES < delta.b.shape[0] * delta.a.shape[1]


def test_sums_are_exact_and_the_same_for_all_blocks(monkeypatch):
    given_experts = experts(3, seed=8)
    expected = None
    for size in (1 << 18, 40, 16, 1):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        sums = tensor_sums(Blocks(given_experts), lambda b: b.values.square_(), streams=3)
        expected = expected or sums
        assert sums == expected
    for name, found in expected.items():
        for value, expert in zip(found, given_experts, strict=True):
            squares = expert[name].square().double().flatten().tolist()
            assert value == pytest.approx(math.fsum(squares), rel=1e-14, abs=0)
    assert expected["d"] == [0.0, 0.0, 0.0]


def test_sums_may_make_more_streams_than_experts():
    blocks = Blocks([{"v": torch.tensor([1.0, -2.0]), "w": torch.zeros(0, 3)}])
    found = tensor_sums(
        blocks, lambda b: torch.cat([b.values, b.values.abs(), b.values * 0]), streams=3
    )
    assert found == {"v": [-1.0, 3.0, 0.0], "w": [0.0, 0.0, 0.0]}


def test_rank_one_needs_one_pass():
    passes = []

    class Counted(Blocks):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    assert mapped.magnitudes_at(Counted(experts(1)), [1])[0][0] > 0
    assert len(passes) == 1
