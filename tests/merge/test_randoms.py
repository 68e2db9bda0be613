"""Draws that belong to an entry, changed streams, and order within rows."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.merge import deltas
from cgmerge.merge.deltas import Block, Blocks, LowRank
from cgmerge.merge.randoms import draws, keep_mask, thin_
from cgmerge.merge.rows import ranks_of_rows, top_of_rows
from cgmerge.merge.sparsify import top_k_cuts, trim_
from cgmerge.merge.streams import Changed

WORD = (1 << 64) - 1


def philox(key, counter):
    """One step of Philox 4 x 64 with ten rounds, in whole numbers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter & WORD, counter >> 64 & WORD, 0, 0
    for _ in range(10):
        x, y = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (y >> 64) ^ c1 ^ k0, y & WORD, (x >> 64) ^ c3 ^ k1, x & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFFFFFF, word >> 32)]


def reference_draw(seed, expert, tensor, place):
    text = json.dumps([seed, expert, tensor]).encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"cgmerge-draws-1").digest()
    key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return philox(key, place // 8 + 1)[place % 8]


@pytest.mark.parametrize("place", [0, 1, 7, 8, 13, 12_345, 2**33 + 5])
def test_draws_are_philox_at_the_place_of_the_entry(place):
    found = draws(3, "poet", "layer.0", place, 2)
    wanted = [reference_draw(3, "poet", "layer.0", place + i) for i in range(2)]
    assert found.tolist() == wanted


def test_draws_never_change_between_versions():
    # Merges of older versions must come out the same: these numbers are part of the format.
    assert draws(0, "0", "w", 0, 4).tolist() == [3265314209, 136579678, 1509304608, 2353987861]


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 50), count=st.integers(0, 40), piece=st.integers(1, 13))
def test_any_stretch_is_part_of_the_same_sequence(start, count, piece):
    whole = draws(1, "x", "w", 0, 100)
    parts = [
        draws(1, "x", "w", at, min(piece, start + count - at))
        for at in range(start, start + count, piece)
    ]
    found = np.concatenate([*parts, whole[:0]])
    assert found.tolist() == whole[start : start + count].tolist()


def test_every_part_of_the_key_counts():
    keys = [
        (0, "a", "bc"),
        (1, "a", "bc"),
        (0, "ab", "c"),
        (0, "bc", "a"),
        (0, 'a", "b', "c"),
        (0, "é", "w"),
        (0, "e", "w"),
    ]
    found = {tuple(draws(*key, 0, 4).tolist()) for key in keys}
    assert len(found) == len(keys)


def test_draws_are_uniform_and_independent():
    count = 200_000
    x = draws(0, "x", "w", 0, count) / 2.0**32
    y = draws(0, "y", "w", 0, count) / 2.0**32
    z = draws(0, "x", "v", 0, count) / 2.0**32
    s = draws(1, "x", "w", 0, count) / 2.0**32
    # Counts in ten bins: variance n·0.1·0.9; correlations: standard error 1/√n. Five of them.
    bins = np.bincount((x * 10).astype(int), minlength=10)
    assert abs(bins - count / 10).max() < 5 * (count * 0.09) ** 0.5
    for other in (y, z, s, np.roll(x, 1), np.roll(x, 8)):
        assert abs(np.corrcoef(x, other)[0, 1]) < 5 / count**0.5


def block_of(values, name="w", offset=0, ids=("x", "y")):
    return Block(name, 0, values, offset, ids)


def test_a_mask_keeps_the_asked_share():
    block = block_of(torch.zeros(2, 100, 1000))
    for share in (0.1, 0.5, 0.9):
        kept = int(keep_mask(block, 0, 0, share).sum())
        assert abs(kept - 1e5 * share) < 5 * (1e5 * share * (1 - share)) ** 0.5
    assert keep_mask(block, 0, 0, 1.0).all()
    assert not torch.equal(keep_mask(block, 0, 0, 0.5), keep_mask(block, 1, 0, 0.5))


def test_a_mask_follows_a_share_for_every_entry():
    share = np.linspace(0.01, 1.0, 200_000).reshape(200, 1000)
    mask = keep_mask(block_of(torch.zeros(1, 200, 1000)), 0, 4, share).double().numpy()
    deviation = (mask - share).reshape(20, -1).sum(axis=1)
    allowed = (share * (1 - share)).reshape(20, -1).sum(axis=1) ** 0.5
    assert (abs(deviation) <= 5 * allowed).all()
    # A larger share keeps what a smaller one keeps.
    smaller = keep_mask(block_of(torch.zeros(1, 200, 1000)), 0, 4, share * 0.5).numpy()
    assert (mask >= smaller).all()


def test_a_mask_depends_on_names_not_on_places():
    values = torch.zeros(2, 6, 7)
    turned = block_of(values, ids=("y", "x"))
    assert torch.equal(
        keep_mask(block_of(values), 0, 0, 0.5),
        keep_mask(turned, 1, 0, 0.5),
    )
    # Rows 2 to 4 alone.
    part = block_of(values[:, 2:4], offset=14)
    assert torch.equal(keep_mask(part, 0, 0, 0.5), keep_mask(block_of(values), 0, 0, 0.5)[2:4])
    # Without names the place is the name.
    bare = keep_mask(block_of(values, ids=()), 1, 0, 0.5)
    assert torch.equal(bare, keep_mask(block_of(values, ids=("0", "1")), 1, 0, 0.5))


def test_a_mask_does_not_depend_on_dtype_or_values():
    single = keep_mask(block_of(torch.zeros(1, 9, 9)), 0, 0, 0.3)
    double = keep_mask(block_of(torch.ones(1, 9, 9, dtype=torch.float64)), 0, 0, 0.3)
    assert torch.equal(single, double)


def test_thinning_by_hand():
    keep = torch.tensor([True, False])
    assert thin_(torch.tensor([2.0, -4.0]), keep, 0.5).tolist() == [4, 0]
    shares = torch.tensor([0.25, 0.5])
    assert thin_(torch.tensor([2.0, -4.0]), ~keep, shares).tolist() == [0, -8]


def halved(block):
    """Double what is at even places of the tensor, negate the rest: depends on the offset."""
    flat = torch.arange(block.offset, block.offset + block.values[0].numel())
    block.values.mul_(torch.where(flat % 2 == 0, 2.0, -1.0).reshape(block.values.shape[1:]))


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("size", [1, 64, 1 << 18])
def test_a_changed_stream_shows_the_same_everywhere(monkeypatch, low_rank, size):
    monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
    generator = torch.Generator().manual_seed(0)
    experts = []
    for _ in range(2):
        factors = LowRank(
            torch.randn(2, 5, generator=generator), torch.randn(8, 2, generator=generator)
        )
        other = torch.randn(3, 3, generator=generator)
        experts.append({"b": factors if low_rank else factors.dense(), "a": other})
    stream = Changed(Blocks(experts), halved)
    parts = {"a": [], "b": []}
    for block in stream:
        assert torch.allclose(stream.block_at(block.start).values, block.values)
        parts[block.name].append(block.values.clone())
    for name, shape in (("a", (3, 3)), ("b", (8, 5))):
        whole = torch.cat(parts[name], dim=1)
        for place, expert in enumerate(experts):
            plain = expert[name].dense() if isinstance(expert[name], LowRank) else expert[name]
            factor = torch.where(torch.arange(plain.numel()) % 2 == 0, 2.0, -1.0).reshape(shape)
            assert torch.allclose(whole[place], plain * factor, atol=1e-6)
        alone = torch.cat([block.values.clone() for block in stream.only(name)], dim=1)
        assert torch.equal(alone, whole)
    sample = stream.sample(3)
    rows = [torch.cat(parts["a"], 1)[:, 1], *torch.cat(parts["b"], 1)[:, [1, 4, 7]].unbind(1)]
    assert torch.allclose(sample, torch.cat(rows, dim=1), atol=1e-6)
    assert stream.total == 49


def test_cuts_of_a_changed_stream_are_exact_where_a_sample_is_taken():
    matrix = torch.randn(1100, 1000, generator=torch.Generator().manual_seed(1))
    cuts = top_k_cuts(Changed(Blocks([{"w": matrix}]), halved), 0.3)
    factor = torch.where(torch.arange(matrix.numel()) % 2 == 0, 2.0, -1.0)
    changed = matrix * factor.reshape(matrix.shape)
    limit = changed.abs().flatten().sort(descending=True).values[330_000 - 1]
    found = changed.clone()
    trim_(found, 0, cuts[0])
    assert torch.equal(found, changed * (changed.abs() >= limit))


number = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, 3e38]), st.floats(-9, 9, width=32)
)


@settings(max_examples=100, deadline=None)
@given(row=st.lists(number, min_size=1, max_size=20), share=st.floats(0, 1), double=st.booleans())
def test_order_within_a_row_equals_a_sort(row, share, double):
    dtype = torch.float64 if double else torch.float32
    values = torch.tensor([row, row[::-1]], dtype=dtype)
    count = int(share * len(row))
    ranks, top = ranks_of_rows(values), top_of_rows(values.abs().numpy(), count)
    for place, line in enumerate(values.tolist()):
        order = sorted(range(len(line)), key=lambda i: (-abs(line[i]), i))
        assert [int(ranks[place][i]) for i in order] == list(range(len(row) - 1, -1, -1))
        assert sorted(np.flatnonzero(top[place]).tolist()) == sorted(order[:count])
