"""EMR: the unified vector, and masks and rescalers of the tasks."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, deltas, make_rule, merge_state_dicts
from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.methods.emr import EmrParams, task_deltas, task_masks, task_rescalers, unify

A, B = [1.0, -2.0, 3.0], [2.0, -1.0, -4.0]
SHAPES = {"b": (9, 7), "a": (4, 8), "c": (5,)}


def merged(*rows, weights=None, **params):
    experts = [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]
    return merge_state_dicts("emr", experts, weights=weights, params=params)["w"].tolist()


def blocks_of(*rows):
    return Blocks(
        [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows], dtype=torch.float64
    )


def random_experts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64)
            for name, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def reference(experts, weights):
    """Return unified, masks and rescalers over the concatenated vectors."""
    own = np.stack(
        [
            weight * np.concatenate([expert[name].numpy().ravel() for name in sorted(expert)])
            for expert, weight in zip(experts, weights, strict=True)
        ]
    )
    sign = np.where(own.mean(0) > 0, 1, -1)
    unified = np.zeros(own.shape[1])
    for j in range(own.shape[1]):
        agreeing = [abs(value) for value in own[:, j] if value * sign[j] > 0]
        unified[j] = sign[j] * max(agreeing, default=0.0)
    masks = own * sign > 0
    rescalers = [
        np.abs(vector).sum() / np.abs(mask * unified).sum()
        for vector, mask in zip(own, masks, strict=True)
    ]
    return unified, masks, rescalers


def test_hand_checked_unified_vector():
    assert merged(A, B) == [2, -2, -4]
    assert merged(A, B, scale=0.5) == [1, -1, -2]


def test_hand_checked_masks_and_rescalers():
    values = torch.tensor([A, B])
    unified = unify(values, "negative")
    masks = task_masks(values, unified)
    assert masks.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert task_rescalers(blocks_of(A, B), [1, 1]) == [1.5, 0.875]


def test_hand_checked_task_models():
    block = Block("w", 0, torch.tensor([A, B]).unsqueeze(1))
    found = task_deltas(block, [1, 1], EmrParams(), [1.5, 0.875]).squeeze(1)
    assert found.tolist() == [[3, -3, 0], [1.75, -1.75, -3.5]]


@pytest.mark.parametrize("weights", [[1.0] * 4, [0.3, 1.0, -0.7, 2.0]])
def test_equals_the_dense_reference(weights):
    experts = random_experts(4, seed=2)
    unified, masks, rescalers = reference(experts, weights)
    found = merge_state_dicts("emr", experts, weights=weights)
    flat = torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
    assert np.abs(flat - unified).max() < 1e-14
    blocks = Blocks(experts, dtype=torch.float64)
    found_rescalers = task_rescalers(blocks, weights)
    assert found_rescalers == pytest.approx(rescalers, rel=1e-13)
    assert len(set(found_rescalers)) == 4
    parts = [
        task_deltas(block, weights, EmrParams(), found_rescalers).flatten(1).clone()
        for block in blocks
    ]
    expected = masks * unified * np.array(rescalers)[:, None]
    assert np.abs(torch.cat(parts, dim=1).numpy() - expected).max() < 1e-13


def test_rescalers_keep_the_mass_of_every_expert():
    experts = random_experts(3, seed=4)
    blocks = Blocks(experts, dtype=torch.float64)
    rescalers = task_rescalers(blocks, [1, 1, 1])
    mass = sum(
        task_deltas(b, [1, 1, 1], EmrParams(), rescalers).abs().flatten(1).sum(1) for b in blocks
    )
    own = [sum(float(value.abs().sum()) for value in expert.values()) for expert in experts]
    assert mass.tolist() == pytest.approx(own, rel=1e-12)


def test_rescalers_are_flat_over_the_model_not_per_tensor():
    first = {"u": torch.tensor([1.0, 1.0]), "v": torch.tensor([10.0])}
    second = {"u": torch.tensor([3.0, 5.0]), "v": torch.tensor([2.0])}
    # unified: u = [3, 5], v = [10]; own mass 12 and 10 of 18.
    assert task_rescalers(Blocks([first, second]), [1, 1]) == pytest.approx([12 / 18, 10 / 18])


def test_rescalers_do_not_depend_on_blocks_or_threads(monkeypatch):
    experts = random_experts(3, seed=9)
    expected = task_rescalers(Blocks(experts, dtype=torch.float64), [1, 1, 1])
    for size in (40, 16, 1):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        assert task_rescalers(Blocks(experts, dtype=torch.float64), [1, 1, 1]) == expected


def test_one_expert_is_its_own_unified_vector():
    assert merged(A) == A
    assert task_rescalers(blocks_of(A), [1]) == [1.0]


def test_duplicates_come_back():
    assert merged(A, A, A) == A
    assert task_rescalers(blocks_of(A, A), [1, 1]) == [1.0, 1.0]


def test_a_zero_expert_has_an_empty_mask():
    zero = [0.0] * 3
    assert merged(A, zero) == A
    assert task_rescalers(blocks_of(A, zero), [1, 1]) == [1.0, 0.0]


def test_an_outvoted_expert_has_an_empty_mask():
    assert task_rescalers(blocks_of([1.0, -1.0], [-3.0, 2.0]), [1, 1]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("tie", "expected", "rescalers"),
    [
        # The losing half of each expert is what the rescaler makes up for.
        ("negative", [-1, -2, -4], [7 / 2, 7 / 5]),
        ("positive", [1, 2, 4], [7 / 5, 7 / 2]),
        ("zero", [0, 0, 0], [0, 0]),
    ],
)
def test_cancelled_votes(tie, expected, rescalers):
    rows = [1.0, -2.0, 4.0], [-1.0, 2.0, -4.0]
    assert merged(*rows, tie=tie) == expected
    assert task_rescalers(blocks_of(*rows), [1, 1], EmrParams(tie=tie)) == pytest.approx(rescalers)


def test_entries_that_nobody_has_are_plain_zero():
    for tie in ("negative", "positive", "zero"):
        found = unify(torch.zeros(2, 3), tie)
        assert not torch.signbit(found).any()
        assert not found.any()


def test_disjoint_supports_give_the_sum():
    assert merged([1.0, 0.0, -2.0], [0.0, 3.0, 0.0]) == [1, 3, -2]


def test_tiny_numbers_keep_their_masks():
    # The product of value and unified is 0 in float32.
    values = torch.tensor([[1e-30, -1e-30], [2e-30, 1e-31]])
    masks = task_masks(values, unify(values, "negative"))
    assert masks.tolist() == [[True, True], [True, False]]


def test_weights_vote_and_stretch():
    assert merged([1.0], [-1.5], weights=[5, 1]) == [5]
    assert merged([1.0], [4.0], weights=[-1, 0.1]) == pytest.approx([-1.0])
    assert merged(A, B, weights=[2, 2]) == [4, -4, -8]


def test_absent_names_count_as_zero():
    experts = [{"a": torch.tensor([1.0, -2.0])}, {"b": torch.tensor([3.0, 4.0])}]
    found = merge_state_dicts("emr", experts)
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, -2], [3, 4])
    assert task_rescalers(Blocks(experts), [1, 1]) == [1.0, 1.0]


def test_inputs_with_empty_tensors():
    experts = [{"a": torch.zeros(0, 4), "b": torch.ones(2)}] * 2
    assert task_rescalers(Blocks(experts), [1, 1]) == [1.0, 1.0]


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
    dense = [{"w": one["w"].dense().double()} for one in low]
    expected = merge_state_dicts("emr", dense)["w"]
    found = Merger(make_rule("emr", 3), low).dense("w").double()
    assert torch.allclose(found, expected, atol=1e-5)
    assert task_rescalers(Blocks(low), [1] * 3) == pytest.approx(
        task_rescalers(Blocks(dense, dtype=torch.float64), [1] * 3), rel=1e-5
    )


def test_out_of_range_is_refused():
    with pytest.raises(UsageError, match="one of negative, zero, positive"):
        make_rule("emr", 2, params={"tie": "majority"})
    with pytest.raises(UsageError, match="no parameter"):
        make_rule("emr", 2, params={"density": 0.5})
