"""Experts that are alike: cosines from factors, k-means that is the same everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import different_experts, expert

from cgmerge.errors import UsageError
from cgmerge.merge import cluster as module
from cgmerge.merge.cluster import cluster, similarity
from cgmerge.merge.deltas import LowRank

SHAPES = {"a": (6, 5), "b": (4, 7)}


def dense_cosines(experts, shapes):
    flat = torch.stack(
        [
            torch.cat(
                [
                    own[p].dense().double().flatten() if p in own else torch.zeros(o * i).double()
                    for p, (o, i) in shapes.items()
                ]
            )
            for own in experts
        ]
    )
    flat = torch.nn.functional.normalize(flat, dim=1)
    return flat @ flat.T


def test_similarity_is_the_cosine_of_dense_deltas(monkeypatch):
    experts = [expert(SHAPES, 2, 1), expert(SHAPES, 4, 2), expert({"b": (4, 7)}, 1, 3)]
    wanted = dense_cosines(experts, SHAPES)
    assert torch.allclose(similarity(experts), wanted, atol=1e-6)
    monkeypatch.setattr(module, "_ENTRIES", 8)  # one row of the products at a time
    assert torch.allclose(similarity(experts), wanted, atol=1e-6)


def test_similarity_does_not_see_how_a_delta_is_factored():
    own = expert(SHAPES, 2, 1)
    turned = {p: LowRank(-2.0 * d.a, -0.5 * d.b) for p, d in own.items()}
    negative = {p: LowRank(d.a, -d.b) for p, d in own.items()}
    found = similarity([own, turned, negative])
    assert torch.allclose(found[0], torch.tensor([1.0, 1.0, -1.0]).double(), atol=1e-6)


def test_a_zero_expert_is_like_nobody():
    own = expert(SHAPES, 2, 1)
    zero = {p: LowRank(d.a, torch.zeros_like(d.b)) for p, d in own.items()}
    assert similarity([own, zero])[1].tolist() == [0.0, 0.0]
    assert similarity(different_experts()).shape == (3, 3)


def families(sizes, noise=0.3):
    """Experts of some families: a common delta and a small own one beside it."""
    experts = []
    for family, size in enumerate(sizes):
        common = expert(SHAPES, 2, 100 + family)
        for number in range(size):
            own = expert(SHAPES, 1, 10 * family + number, std=0.3)
            experts.append(
                {
                    p: LowRank(
                        torch.cat([d.a, own[p].a]), torch.cat([d.b, noise * own[p].b], dim=1)
                    )
                    for p, d in common.items()
                }
            )
    return experts


def test_families_are_found_in_any_order():
    experts, wanted = families([3, 4, 2]), [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert cluster(similarity(experts), 3) == wanted
    order = [4, 8, 0, 5, 2, 7, 3, 1, 6]
    mixed = cluster(similarity([experts[i] for i in order]), 3)
    names = {}
    assert mixed == [names.setdefault(wanted[i], len(names)) for i in order]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 99), st.data())
def test_every_group_has_a_member_and_seeds_repeat(count, seed, data):
    groups = data.draw(st.integers(1, count))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 3, (count, 2), generator=generator).float()  # many of them equal
    found = cluster(rows, groups, seed=seed)
    assert sorted(set(found)) == list(range(groups))
    assert list(dict.fromkeys(found)) == list(range(groups))  # numbered as they appear
    assert cluster(rows, groups, seed=seed) == found


def test_groups_are_best_on_a_line():
    rows = torch.tensor([[0.0], [0.1], [5.0], [5.2], [9.0]])
    assert cluster(rows, 3) == [0, 0, 1, 1, 2]
    assert cluster(rows, 5) == [0, 1, 2, 3, 4]
    assert cluster(rows, 1) == [0] * 5


def test_no_global_random_numbers_are_used():
    before = torch.get_rng_state()
    cluster(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [0, 4, -1])
def test_impossible_numbers_of_groups_are_refused(count):
    with pytest.raises(UsageError, match=f"3 experts cannot make {count} groups") as error:
        cluster(torch.eye(3), count)
    assert error.value.hint == "a number from 1 to 3"
