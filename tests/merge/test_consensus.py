"""Consensus merging: masks, votes, both multi-task vectors."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts
from cgmerge.merge.methods.consensus import task_masks

A, B = [1.0, 0.2], [0.1, 1.0]
SHAPES = {"b": (9, 7), "a": (4, 8), "c": (5,)}


def merged(*rows, weights=None, dtype=torch.float64, **params):
    experts = [{"w": torch.tensor(row, dtype=dtype)} for row in rows]
    return merge_state_dicts("consensus", experts, weights=weights, params=params)["w"].tolist()


def random_experts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64)
            for name, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def reference(experts, weights, threshold, agree, multi, density):
    """Dense, over the concatenated vectors."""
    raw = np.stack([np.concatenate([e[n].numpy().ravel() for n in sorted(e)]) for e in experts])
    own = raw * np.array(weights)[:, None]
    if multi == "sum":
        total = own.sum(0)
    else:
        kept = np.zeros_like(own)
        for row, (vector, weighted) in enumerate(zip(raw, own, strict=True)):
            top = np.argsort(-np.abs(vector), kind="stable")[
                : int(round(density * 1000) * vector.size // 1000)
            ]
            kept[row, top] = weighted[top]
        sign = np.sign(kept.sum(0))
        total = np.where(np.sign(kept) == sign, kept, 0).sum(0)
    chosen = sum(
        (np.abs(vector) > threshold * np.abs(total - vector)).astype(int) for vector in own
    )
    return np.where(chosen >= agree, total, 0.0)


@pytest.mark.parametrize(("agree", "expected"), [(0, [1.1, 1.2]), (1, [1.1, 1.2]), (2, [0, 0])])
def test_hand_checked(agree, expected):
    assert merged(A, B, threshold=0.5, agree=agree) == pytest.approx(expected, abs=1e-15)


def test_hand_checked_masks():
    values = torch.tensor([A, B])
    assert task_masks(values, values.sum(0), 0.5).tolist() == [[True, False], [False, True]]
    # At 0.05 everybody selects everything, at 6 only those with ten times the rest do.
    assert task_masks(values, values.sum(0), 0.05).all()
    assert task_masks(values, values.sum(0), 6).tolist() == [[True, False], [False, False]]


def test_defaults():
    params = make_rule("consensus", 2).params
    assert (params.threshold, params.agree, params.multi) == (0.4, 2, "sum")


@pytest.mark.parametrize("multi", ["sum", "ties"])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.6, 1.5])
@pytest.mark.parametrize("agree", [1, 2, 4])
def test_equals_the_dense_reference(multi, threshold, agree):
    for weights in ([1.0] * 4, [0.3, 1.0, -0.7, 2.0]):
        experts = random_experts(4, seed=agree)
        params = {"threshold": threshold, "agree": agree, "multi": multi, "density": 0.4}
        found = merge_state_dicts("consensus", experts, weights=weights, params=params)
        flat = torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
        expected = reference(experts, weights, threshold, agree, multi, 0.4)
        assert np.abs(flat - expected).max() < 1e-12
    if agree < 4 or threshold < 0.5:
        assert np.count_nonzero(expected), "the comparison is empty"


def test_agree_zero_is_task_arithmetic():
    experts = random_experts(3, seed=1)
    found = merge_state_dicts("consensus", experts, params={"agree": 0})
    expected = merge_state_dicts("task-arithmetic", experts)
    assert all(torch.allclose(found[name], expected[name], atol=1e-14) for name in expected)


def test_more_votes_than_experts_are_refused():
    with pytest.raises(UsageError, match="`agree` is 4, but there are 3 experts"):
        merge_state_dicts("consensus", random_experts(3, seed=1), params={"agree": 4})


def test_one_expert_alone():
    assert merged([1.0, -2.0, 0.0], agree=1) == [1, -2, 0]
    with pytest.raises(UsageError, match="`agree` is 2, but there are 1 experts"):
        merged([1.0, -2.0, 0.0])


def test_disjoint_supports_have_no_consensus():
    assert merged([1.0, 0.0, 2.0], [0.0, 3.0, 0.0]) == [0, 0, 0]
    assert merged([1.0, 0.0, 2.0], [0.0, 3.0, 0.0], agree=1) == [1, 3, 2]


def test_duplicates_agree_everywhere():
    assert merged([1.0, -2.0], [1.0, -2.0]) == [2, -4]


def test_equality_is_not_selection():
    # Three equal experts: |τ| = 0.5·|3τ - τ| exactly.
    assert merged([1.0], [1.0], [1.0], threshold=0.5) == [0]
    assert merged([1.0], [1.0], [1.0], threshold=0.499) == [3]


def test_opposite_experts_give_zero():
    for multi in ("sum", "ties"):
        assert merged([1.0, -2.0], [-1.0, 2.0], multi=multi, density=1) == [0, 0]


def test_a_zero_expert_selects_nothing():
    assert merged([1.0], [0.0]) == [0]
    assert merged([1.0], [5.0], weights=[1, 0]) == [0]
    assert merged([1.0], [5.0], weights=[1, 0], agree=1) == [1]


def test_a_common_factor_of_the_weights_goes_through():
    experts = random_experts(3, seed=6)
    once = merge_state_dicts("consensus", experts, weights=[1, 2, 3])
    half = merge_state_dicts("consensus", experts, weights=[0.5, 1, 1.5])
    assert all(torch.allclose(half[name] * 2, once[name], atol=1e-14) for name in once)


def test_ties_sum_leaves_the_minority_and_the_trimmed_out():
    rows = ([4.0, 1.0, -1.0], [3.0, -1.5, -2.0], [-2.0, 0.1, 5.0])
    # Kept at 2/3: [4, 1, 0] (lowest index first), [3, 0, -2], [-2, 0, 5]; signs +, +, +.
    assert merged(*rows, multi="ties", density=0.67, agree=0) == [7, 1, 5]


def test_ties_trims_over_the_whole_vector():
    expert = {"big": torch.tensor([10.0, 20.0]), "small": torch.tensor([1.0, 2.0])}
    params = {"multi": "ties", "density": 0.5, "agree": 1}
    found = merge_state_dicts("consensus", [expert], params=params)
    assert found["big"].tolist() == [10, 20]
    assert found["small"].tolist() == [0, 0]


def test_absent_names_count_as_zero():
    found = merge_state_dicts(
        "consensus", [{"a": torch.tensor([1.0])}, {"b": torch.tensor([2.0])}], params={"agree": 1}
    )
    assert (found["a"].tolist(), found["b"].tolist()) == ([1], [2])


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
    expected = merge_state_dicts(
        "consensus", [{"w": one["w"].dense().double()} for one in low], params={"agree": 2}
    )["w"]
    found = Merger(make_rule("consensus", 3), low).dense("w").double()
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"threshold": -0.1}, "must be in"),
        ({"threshold": float("nan")}, "must be in"),
        ({"agree": -1}, "must be in"),
        ({"agree": 1.5}, "whole number"),
        ({"multi": "mean"}, "one of sum, ties"),
        ({"density": 0}, "must be in"),
        ({"density": 1.1}, "must be in"),
    ],
)
def test_out_of_range_is_refused(params, words):
    with pytest.raises(UsageError, match=words):
        make_rule("consensus", 2, params=params)
