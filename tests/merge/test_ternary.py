"""Ternary experts merge by looking patterns up, with the numbers of the dense route."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.merge import Merger, make_rule, ternary
from cgmerge.merge.deltas import Rows
from cgmerge.merge.ternary import Ternary, all_ternary


class Signs(Ternary):
    """Trits in memory; counts how often they are read."""

    def __init__(self, trits, scale):
        self.values = np.asarray(trits, dtype=np.int8)
        self.scale = float(np.float32(scale))
        self.shape = self.values.shape
        self.reads = 0

    def trits(self, first, last):
        self.reads += 1
        return self.values[first:last]


class Plain(Rows):
    """The same values without their secret."""

    def __init__(self, signs):
        self.whole = torch.from_numpy(signs.values.astype(np.float32)) * signs.scale
        self.shape = signs.shape

    def rows(self, first, last):
        return self.whole[first:last]


class Counted(dict):
    """A sparse expert that knows how many entries it has."""

    @property
    def nonzeros(self):
        return {name: int(np.count_nonzero(delta.values)) for name, delta in self.items()}


def draw(experts, shape, density, seed):
    rng = np.random.default_rng(seed)
    chance = [density / 2, 1 - density, density / 2]
    return [
        Signs(rng.choice([-1, 0, 1], size=shape, p=chance), rng.uniform(0.5, 2.0))
        for _ in range(experts)
    ]


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 8),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 70)),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    rule=st.sampled_from(
        [
            ("linear", {}),
            ("task-arithmetic", {"scale": 0.3}),
            ("ties", {"density": 1.0}),
            ("ties", {"density": 1.0, "tie": "majority"}),
            ("ties", {"density": 0.3, "tie": "positive"}),
            ("ties", {"density": 0.3, "trim": "tensor", "normalize": False}),
        ]
    ),
    seed=st.integers(0, 99),
)
def test_equals_the_dense_route_bit_for_bit(experts, shape, density, rule, seed):
    first, second = draw(experts, shape, density, seed), draw(experts, (3, 5), density, seed + 1)
    weights = [1.0, -0.5, 2.0, 0.25, 1.0, 3.0, 0.1, 1.5][:experts]
    name, params = rule
    made = make_rule(name, experts, weights=weights, params=params)
    looked_up = [Counted(w=a, v=b) for a, b in zip(first, second, strict=True)]
    looked_up[0].pop("v") if experts > 1 else None
    plain = [{key: Plain(delta) for key, delta in expert.items()} for expert in looked_up]
    for key in ("w", "v"):
        expected = Merger(made, plain).dense(key)
        assert torch.equal(Merger(made, looked_up).dense(key), expected)
        pieces = torch.cat([piece.clone() for piece in Merger(made, looked_up).pieces(key)])
        assert torch.equal(pieces, expected)


def test_numbers_by_hand():
    # Votes +2·1, -1·1, 0: the sum of the agreeing one over its weight.
    experts = [{"w": Signs([[1, 1, 0]], 2.0)}, {"w": Signs([[-1, 1, 0]], 1.0)}]
    merged = Merger(make_rule("ties", 2, params={"density": 1.0}), experts).dense("w")
    assert merged.tolist() == [[2.0, 1.5, 0.0]]
    total = Merger(make_rule("task-arithmetic", 2), experts).dense("w")
    assert total.tolist() == [[1.0, 3.0, 0.0]]


def test_patterns_count_in_base_three():
    trits = [np.array([value], dtype=np.int8) for value in (1, 0, -1, 1, -1, 1)]
    number = ternary._Patterns(6, 1)
    assert number(trits).tolist() == [2 * 243 + 81 + 0 + 2 * 9 + 0 + 2]
    patterns = ternary._patterns(6)
    assert patterns[:, 587].tolist() == [1, 0, -1, 1, -1, 1]


@pytest.mark.parametrize("experts", range(1, 9))
def test_every_pattern_has_its_own_number(experts):
    trits = list(ternary._patterns(experts).to(torch.int8).numpy())
    before = [part.copy() for part in trits]
    assert ternary._Patterns(experts, 3**experts + 5)(trits).tolist() == list(range(3**experts))
    assert all(map(np.array_equal, trits, before))


@pytest.mark.parametrize("shape", [(5, 30_000), (3, 140_000), (1, 1), (300, 1000)])
def test_blocks_of_any_form(shape):
    # The last block is smaller, a row may be longer than a block, and pieces are read at once.
    experts = draw(5, shape, 0.5, 3)
    made = make_rule("linear", 5, weights=[1.0, 2.0, -1.0, 0.5, 0.25])
    expected = Merger(made, [{"w": Plain(delta)} for delta in experts]).dense("w")
    row = 0
    for piece in Merger(made, [{"w": delta} for delta in experts]).pieces("w"):
        assert torch.equal(piece, expected[row : row + len(piece)])
        row += len(piece)
    assert row == shape[0]


def test_sparse_experts_are_not_searched_for_a_cut():
    experts = [Counted(w=signs) for signs in draw(3, (40, 50), 0.1, 0)]
    Merger(make_rule("ties", 3, params={"density": 0.2}), experts).state  # noqa: B018
    assert [expert["w"].reads for expert in experts] == [0, 0, 0]
    Merger(make_rule("ties", 3, params={"density": 0.05}), experts).state  # noqa: B018
    assert all(expert["w"].reads for expert in experts)


@pytest.mark.parametrize("count", [8, 9])
def test_many_experts_take_the_dense_route(count):
    deltas = draw(count, (4, 4), 0.5, 0)
    assert all_ternary(deltas) == (count <= 8)
    assert not all_ternary([*deltas[:2], torch.zeros(4, 4)])
    merged = Merger(make_rule("linear", count), [{"w": delta} for delta in deltas]).dense("w")
    expected = sum(delta.rows(0, 4).double() for delta in deltas) / count
    assert torch.allclose(merged.double(), expected, atol=1e-6)
