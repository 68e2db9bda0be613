"""Trim: exactly k entries, lowest index first, whatever the stream looks like."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.merge import deltas, sparsify
from cgmerge.merge.deltas import Blocks, LowRank
from cgmerge.merge.sparsify import count_kept, top_k_cuts, trim_


def reference(flat, kept):
    """Sort by (−|x|, index), keep the first k."""
    order = sorted(range(flat.numel()), key=lambda i: (-abs(float(flat[i])), i))
    mask = torch.zeros_like(flat)
    mask[order[:kept]] = 1
    return flat * mask


def trimmed(experts, density, dtype=torch.float32):
    blocks = Blocks(experts, dtype=dtype)
    cuts = top_k_cuts(blocks, density)
    parts = [[] for _ in experts]
    for block in blocks:
        for part, values, cut in zip(parts, block.values, cuts, strict=True):
            trim_(values, block.start, cut)
            part.append(values.reshape(-1).clone())
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize(
    ("density", "total", "kept"),
    [(0.2, 168, 33), (0.29, 100, 29), (0.7, 10, 7), (1.0, 5, 5), (0.01, 5, 1), (1 / 3, 9, 2)],
)
def test_count_is_what_the_user_wrote(density, total, kept):
    # 1/3 is written 0.333…3, so 9/3 is just below 3.
    assert count_kept(density, total) == kept


values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, -1e-40, 3e38]),
    st.floats(-10, 10, width=32),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(values, min_size=1, max_size=40),
    density=st.floats(0.01, 1.0),
    block=st.sampled_from([1, 3, 1 << 17]),
    remembered=st.sampled_from([0, 5, 1 << 20]),
)
def test_equals_a_sort(rows, density, block, remembered):
    flat = torch.tensor(rows, dtype=torch.float32)
    half = flat.numel() // 2
    expert = {"a": flat[:half], "b": flat[half:]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_ENTRIES", block)
        patch.setattr(sparsify, "_REMEMBERED", remembered)
        found = trimmed([expert], density)[0]
    # Zeros compare equal whatever their sign.
    assert torch.equal(found, reference(flat, count_kept(density, flat.numel())))


def test_double_precision_patterns():
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(1000, generator=generator, dtype=torch.float64)
    found = trimmed([{"w": flat}], 0.3, torch.float64)[0]
    assert torch.equal(found, reference(flat, 300))


@pytest.mark.fault("F23")
def test_all_magnitudes_equal_keeps_the_first():
    flat = torch.tensor([1.0, -1.0] * 50)
    found = trimmed([{"w": flat}], 0.25)[0]
    assert int((found != 0).sum()) == 25
    assert torch.equal(found[:25], flat[:25])


def test_fewer_nonzero_entries_than_k():
    flat = torch.zeros(100)
    flat[[3, 50]] = torch.tensor([1.0, -2.0])
    assert torch.equal(trimmed([{"w": flat}], 0.5)[0], flat)


def test_a_wrong_first_bracket_is_corrected():
    # The sample is tiny numbers, the data are large: the first bracket misses.
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 300, generator=generator) * 100
    search = sparsify.Search(1000, double=False)
    search.narrow_by_sample(torch.full((200,), 1e-6), 1000 / (64 * 300))
    for _ in range(6):
        if search.done:
            break
        search.count(matrix, 0)
        search.narrow()
    kept = int((matrix.abs() >= search.cut(None).value).sum())
    assert search.done
    assert kept == 1000


def test_low_rank_experts_and_dense_experts_are_cut_alike():
    generator = torch.Generator().manual_seed(3)
    delta = LowRank(
        torch.randn(3, 50, generator=generator), torch.randn(40, 3, generator=generator)
    )
    low = trimmed([{"w": delta}], 0.2)[0]
    dense = trimmed([{"w": delta.dense()}], 0.2)[0]
    assert torch.allclose(low, dense, atol=1e-5)
    assert int((low != 0).sum()) == int((dense != 0).sum()) == 400


def test_the_sampled_path_is_exact():
    # Large enough that the first bracket comes from a sample.
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(1200, 1000, generator=generator)
    found = trimmed([{"w": matrix}], 0.2)[0]
    kept = count_kept(0.2, matrix.numel())
    limit = matrix.abs().flatten().sort(descending=True).values[kept - 1]
    assert int((found != 0).sum()) == kept
    assert torch.equal(found.reshape(matrix.shape), matrix * (matrix.abs() >= limit))


def test_a_thousand_searches_share_the_memory_of_four():
    flat = torch.randn(64, generator=torch.Generator().manual_seed(3))
    many = [sparsify.Search(13, double=False, together=1000) for _ in range(1000)]
    assert (
        sum(search.histogram.nbytes for search in many)
        <= 4 * sparsify.Search(1, double=False).histogram.nbytes
    )
    search = many[0]
    while not search.done:
        search.count(flat.reshape(8, 8), 0)
        search.narrow()
    assert search.cut(None).value == flat.abs().sort(descending=True).values[12]
