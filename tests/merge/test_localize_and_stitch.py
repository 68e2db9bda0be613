"""Localize-and-Stitch without data: top entries of each expert, overlaps averaged."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, deltas, make_rule, merge_state_dicts

NAME = "localize-and-stitch"
SHAPES = {"b.w": (7, 5), "a.w": (4, 9), "c": (11,), "d": ()}
WEIGHTS = [1.0, 0.7, -0.4]


def merged(*rows, weights=None, **params):
    made = [{"w": torch.tensor(row)} for row in rows]
    return merge_state_dicts(NAME, made, weights=weights, params=params)["w"].tolist()


def flat(expert):
    return np.concatenate([expert[name].reshape(-1).double().numpy() for name in sorted(expert)])


def experts(count=3, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in SHAPES.items()}
        for _ in range(count)
    ]


def reference(rows, weights, kept):
    """Σ w m τ / Σ |w| m with masks from a sort; entries that are 0 are in no mask."""
    masks = []
    for row in rows:
        mask = np.zeros(row.size)
        mask[sorted(range(row.size), key=lambda i, row=row: (-abs(row[i]), i))[:kept]] = 1
        masks.append(mask * (row != 0))
    total = sum(w * m * row for w, m, row in zip(weights, masks, rows, strict=True))
    count = sum(abs(w) * m for w, m in zip(weights, masks, strict=True))
    return np.divide(total, count, out=np.zeros_like(total), where=count > 0)


def test_by_hand():
    # Two of four each: {4, 3} and {-5, 3}; they overlap in entry 1.
    first, second = [4.0, 3.0, 1.0, 0.5], [2.0, 3.5, -5.0, 0.1]
    assert merged(first, second, density=0.5) == [4, 3.25, -5, 0]
    assert merged(first, second, density=0.5, weights=[3, 1]) == [4, 3.125, -5, 0]


def test_nothing_is_scaled_by_default():
    assert make_rule(NAME, 2).params.scale == 1
    assert make_rule(NAME, 2).params.density == 0.05
    assert merged([4.0, 1.0], density=0.5, scale=0.5) == [2, 0]


def test_disjoint_supports_are_summed():
    first, second = [4.0, 0.0, 0.0, 1.0], [0.0, -2.0, 3.0, 0.0]
    assert merged(first, second, density=0.5) == [4, -2, 3, 1]
    # Zeros never count in an overlap, even where everything is kept.
    assert merged(first, second, density=1) == [4, -2, 3, 1]


def test_opposite_experts_cancel_and_duplicates_do_not_add():
    row = [4.0, -3.0, 1.0, 0.5]
    assert merged(row, [-value for value in row], density=0.5) == [0, 0, 0, 0]
    assert merged(row, row, row, density=0.5) == [4, -3, 0, 0]


@pytest.mark.parametrize(
    ("density", "kept"), [(0.05, 4), (0.2, 16), (0.5, 41), (1.0, 83), (0.001, 1)]
)
def test_it_equals_the_formula(density, kept):
    made = experts()
    rows = [flat(expert) for expert in made]
    expected = reference(rows, WEIGHTS, kept)
    found = merge_state_dicts(NAME, made, weights=WEIGHTS, params={"density": density})
    assert np.abs(flat(found) - expected).max() < 1e-12
    assert np.count_nonzero(expected)


def test_single_precision_many_equal_magnitudes_and_small_blocks(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    made = [
        {k: torch.randint(-2, 3, s, generator=generator).float() for k, s in SHAPES.items()}
        for _ in range(3)
    ]
    expected = reference([flat(expert) for expert in made], [1, 1, 1], 24)
    for size in (1, 30, 1 << 18):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        found = merge_state_dicts(NAME, made, params={"density": 0.3})
        assert np.abs(flat(found) - expected).max() < 1e-6


def test_the_share_is_of_the_whole_expert():
    made = [{"big": torch.tensor([10.0, 20.0]), "small": torch.tensor([1.0, 2.0])}]
    found = merge_state_dicts(NAME, made, params={"density": 0.5})
    assert found["big"].tolist() == [10, 20]
    assert found["small"].tolist() == [0, 0]
    assert merge_state_dicts(NAME, made)["big"].tolist() == [0, 20]


def test_weights_are_relative():
    made = experts()
    once = merge_state_dicts(NAME, made, weights=WEIGHTS, params={"density": 0.4})
    doubled = [2 * weight for weight in WEIGHTS]
    twice = merge_state_dicts(NAME, made, weights=doubled, params={"density": 0.4})
    assert all(torch.allclose(once[name], twice[name], atol=1e-14) for name in SHAPES)
    assert merged([4.0, 1.0], weights=[0.25], density=1) == [4, 1]
    assert merged([4.0, 1.0], weights=[-1], density=1) == [-4, -1]
    assert merged([4.0, 1.0], [8.0, 8.0], weights=[1, 0], density=1) == [4, 1]


def test_zero_experts_and_single_entries():
    zero = [0.0, 0.0, 0.0]
    assert merged(zero, zero) == zero
    assert merged([1.0, -2.0, 3.0], zero, density=1) == [1, -2, 3]
    assert merged(-3.0) == -3


def test_low_rank_experts():
    generator = torch.Generator().manual_seed(2)
    made = [
        {
            "w": LowRank(
                torch.randn(2, 9, generator=generator), torch.randn(8, 2, generator=generator)
            )
        }
        for _ in range(2)
    ]
    merger = Merger(make_rule(NAME, 2, params={"density": 0.3}), made)
    rows = [expert["w"].dense().double().flatten().numpy() for expert in made]
    expected = reference(rows, [1, 1], 21)
    assert np.abs(merger.dense("w").flatten().numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan")])
def test_bad_density_is_refused(density):
    with pytest.raises(UsageError, match="density"):
        make_rule(NAME, 2, params={"density": density})
