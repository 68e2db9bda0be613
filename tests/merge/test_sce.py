"""SCE: selection by variance, energies, erased minority signs."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts
from cgmerge.merge.deltas import Blocks
from cgmerge.merge.methods.sce import SceParams, prepare, spread

A, B = [1.0, -2.0, 3.0], [2.0, -1.0, -4.0]
SHAPES = {"b": (9, 7), "a": (4, 8), "c": (5,), "e": (1,)}


def merged(*rows, weights=None, dtype=torch.float64, **params):
    experts = [{"w": torch.tensor(row, dtype=dtype)} for row in rows]
    return merge_state_dicts("sce", experts, weights=weights, params=params)["w"].tolist()


def random_experts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64) * (place + 1)
            for name, shape in SHAPES.items()
        }
        for place in range(count)
    ]


def reference(rows, weights, density, tie):
    """One tensor, [experts, entries]."""
    rows, weights = np.array(rows), np.array(weights)
    own = rows * weights[:, None]
    if density < 1:
        variance = own.var(axis=0)
        varying = int((variance > 0).sum())
        count = max(1, int(density * varying + 1e-9))
        top = np.argsort(-variance, kind="stable")[:count]
        chosen = np.zeros(rows.shape[1], dtype=bool)
        chosen[top] = variance[top] > 0
        rows, own = rows * chosen, own * chosen
    energy = (rows**2).mean(axis=1)
    energy = energy / energy.sum()
    result = np.zeros(rows.shape[1])
    for j in range(rows.shape[1]):
        total = own[:, j].sum()
        sign = 1 if total > 0 or (total == 0 and tie == "positive") else -1 if total < 0 else 0
        agree = own[:, j] * sign > 0
        if agree.any():
            mass = energy[agree] * np.abs(weights[agree])
            result[j] = (energy[agree] * own[agree, j]).sum() / mass.sum()
    return result


def test_hand_checked():
    assert merged(A, B) == pytest.approx([1.6, -1.4, -4], abs=1e-15)
    assert merged(A, B, scale=0.5) == pytest.approx([0.8, -0.7, -2], abs=1e-15)
    found = prepare(Blocks([{"w": torch.tensor(A)}, {"w": torch.tensor(B)}]), [1, 1], SceParams())
    assert found["w"].energies == pytest.approx([0.4, 0.6])


def test_hand_checked_selection():
    # Variances 0.25, 0.25, 12.25: one of three kept; energies 9 and 16 there.
    assert merged(A, B, density=0.34) == [0, 0, -4]
    # Two of three: the lower index among the equal ones; energies 10 and 20.
    assert merged(A, B, density=0.67) == pytest.approx([5 / 3, 0, -4], abs=1e-15)


@pytest.mark.parametrize("density", [1.0, 0.9, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("weights", [[1.0] * 4, [0.3, 1.0, -0.7, 2.0], [1.0, 0.0, 1.0, 1.0]])
@pytest.mark.parametrize("tie", ["positive", "zero"])
def test_equals_the_dense_reference(density, weights, tie):
    experts = random_experts(4, seed=3)
    found = merge_state_dicts(
        "sce", experts, weights=weights, params={"density": density, "tie": tie}
    )
    for name, value in found.items():
        rows = [expert[name].numpy().ravel() for expert in experts]
        expected = reference(rows, weights, density, tie)
        assert np.abs(value.numpy().ravel() - expected).max() < 1e-12
        assert expected.any()


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_small_experts_are_weighed_by_energy_like_large_ones(density):
    # mergekit falls back to equal weights here.
    experts = random_experts(3, seed=5)
    small = [{name: value * 1e-9 for name, value in expert.items()} for expert in experts]
    expected = merge_state_dicts("sce", experts, params={"density": density})
    found = merge_state_dicts("sce", small, params={"density": density})
    for name, value in expected.items():
        assert torch.allclose(found[name] * 1e9, value, rtol=1e-9)


def test_very_unequal_experts_do_not_underflow():
    found = merged([1e-20, 0.0], [0.0, 1e10], dtype=torch.float32)
    assert found == pytest.approx([1e-20, 1e10], rel=1e-6)


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_equal_entries_have_no_variance(density):
    values = torch.tensor([[0.1, 0.7, 1 / 3]] * 3, dtype=torch.float64).unsqueeze(1)
    assert not spread(values, [1.0] * 3).any()
    assert torch.equal(values[:, 0, 0], torch.full((3,), 0.1, dtype=torch.float64))
    rows = ([0.1, 1.0, 2.0, 5.0], [0.1, 1.5, 4.0, 5.0], [0.1, 1.0, 9.0, 5.0])
    found = merged(*rows, density=density)
    # Two of four entries vary, half of those is one.
    assert [value != 0 for value in found] == (
        [False] * 2 + [True, False] if density < 1 else [1] * 4
    )


def test_duplicates_come_back_at_full_density_only():
    assert merged(A, A, A) == pytest.approx(A)
    assert merged(A, A, A, density=0.9) == [0, 0, 0]


def test_one_expert():
    assert merged(A) == pytest.approx(A, rel=1e-15)
    assert merged(A, density=0.5) == [0, 0, 0]
    assert merged(A, weights=[3]) == pytest.approx(A, rel=1e-15)
    assert merged(A, weights=[-3]) == pytest.approx([-value for value in A], rel=1e-15)


@pytest.mark.parametrize(("tie", "expected"), [("positive", [1, 2, 4]), ("zero", [0, 0, 0])])
def test_opposite_experts(tie, expected):
    assert merged([1.0, -2.0, 4.0], [-1.0, 2.0, -4.0], tie=tie) == expected


def test_zero_experts():
    zero = [0.0] * 3
    assert merged(A, zero) == pytest.approx(A)
    assert merged(zero, zero) == zero
    assert merged(zero, zero, density=0.5) == zero
    assert merged(A, B, weights=[0, 0]) == zero


def test_a_single_entry_is_kept_at_any_density():
    assert merged([2.0], [4.0], density=0.01) == pytest.approx([(4 * 2 + 16 * 4) / 20])


def test_weight_zero_leaves_the_expert_out_of_vote_and_mean():
    assert merged([1.0, 1.0], [-9.0, 9.0], weights=[1, 0]) == pytest.approx([1, 1])


def test_a_common_factor_of_the_weights_changes_nothing():
    experts = random_experts(3, seed=6)
    for density in (1.0, 0.4):
        params = {"density": density}
        once = merge_state_dicts("sce", experts, weights=[1, 2, 3], params=params)
        half = merge_state_dicts("sce", experts, weights=[0.5, 1, 1.5], params=params)
        assert all(torch.allclose(half[name], once[name], atol=1e-14) for name in once)


def test_tensors_are_independent():
    experts = random_experts(3, seed=7)
    together = merge_state_dicts("sce", experts, params={"density": 0.3})
    for name in SHAPES:
        alone = merge_state_dicts(
            "sce", [{name: expert[name]} for expert in experts], params={"density": 0.3}
        )
        assert torch.equal(alone[name], together[name])


def test_blocks_do_not_matter_when_entries_are_selected(monkeypatch):
    from cgmerge.merge import deltas

    experts = [
        {name: value.float().mul(2).round() for name, value in expert.items()}
        for expert in random_experts(3, seed=8)
    ]
    expected = merge_state_dicts("sce", experts, params={"density": 0.3})
    for size in (40, 16, 1):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        found = merge_state_dicts("sce", experts, params={"density": 0.3})
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_low_rank_experts_give_what_dense_ones_give():
    generator = torch.Generator().manual_seed(5)
    low = [
        {
            "w": LowRank(
                torch.randn(3, 20, generator=generator), torch.randn(30, 3, generator=generator)
            )
        }
        for _ in range(3)
    ]
    rows = [one["w"].dense().double().numpy().ravel() for one in low]
    found = Merger(make_rule("sce", 3, params={"density": 0.2}), low).dense("w").numpy().ravel()
    assert np.abs(found - reference(rows, [1] * 3, 0.2, "positive")).max() < 1e-5
    assert np.count_nonzero(found) == 120


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"density": 0}, "must be in"),
        ({"density": 1.5}, "must be in"),
        ({"density": float("nan")}, "must be in"),
        ({"tie": "majority"}, "one of positive, zero"),
    ],
)
def test_out_of_range_is_refused(params, words):
    with pytest.raises(UsageError, match=words):
        make_rule("sce", 2, params=params)
