"""The three kernels against a loop, and stacks of experts that have little in common."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import expert

from cgmerge.errors import Incompatible
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.stack import Stack, stacks


def stack_of(ranks, out=6, into=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    deltas = [
        LowRank(torch.randn(r, into, generator=generator), torch.randn(out, r, generator=generator))
        if r
        else None
        for r in ranks
    ]
    return Stack.of(deltas), deltas


def loop(x, deltas, weights):
    """y[t] = Σ_e w[t, e]·B_e·(A_e·x[t]), one token and one expert at a time, float64."""
    out = next(d for d in deltas if d is not None).shape[0]
    result = torch.zeros(*x.shape[:-1], out, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).view(-1, x.dim() - 1):
        at = tuple(place.tolist())
        for number, delta in enumerate(deltas):
            if delta is not None:
                small = delta.a.double() @ x[at].double()
                result[at] += float(weights[at][number]) * (delta.b.double() @ small)
    return result


RANKS = [(2, 2, 2), (1, 3, 2), (0, 4, 1), (3,), (1, 0, 0, 2)]


@pytest.mark.parametrize("ranks", RANKS)
def test_dense_equals_a_loop(ranks):
    stack, deltas = stack_of(ranks)
    x, weights = torch.randn(2, 3, 5), torch.rand(2, 3, len(ranks))
    found = kernels.dense(x @ stack.a.T, stack, weights)
    assert torch.allclose(found.double(), loop(x, deltas, weights), atol=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("k", [1, 2])
def test_sparse_equals_a_loop(ranks, k):
    k = min(k, len(ranks))
    stack, deltas = stack_of(ranks)
    x = torch.randn(17, 5)
    chosen = torch.rand(17, len(ranks)).topk(k).indices
    weights = torch.rand(17, k)
    full = torch.zeros(17, len(ranks)).scatter(1, chosen, weights)
    found = kernels.sparse(x, stack, chosen, weights)
    assert torch.allclose(found.double(), loop(x, deltas, full), atol=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
def test_by_row_equals_a_loop(ranks):
    stack, deltas = stack_of(ranks)
    weights = torch.rand(4, len(ranks))
    weights[0] = 0.0
    weights[2, 1:] = 0.0
    x = torch.randn(4, 3, 5)
    found = kernels.by_row(x, stack, kernels.RowPlan.of(weights))
    spread = weights[:, None].expand(4, 3, -1)
    assert torch.allclose(found.double(), loop(x, deltas, spread), atol=1e-5)


def test_hand_example():
    """x=(1,2), weights (.25,.75): z=(0.25,1.5), y=(3.25,0.25)."""
    one = LowRank(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [1.0]]))
    two = LowRank(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0], [0.0]]))
    stack, weights = Stack.of([one, two]), torch.tensor([[0.25, 0.75]])
    x = torch.tensor([[1.0, 2.0]])
    assert kernels.weigh(x @ stack.a.T, stack, weights).tolist() == [[0.25, 1.5]]
    assert kernels.dense(x @ stack.a.T, stack, weights).tolist() == [[3.25, 0.25]]
    assert kernels.sparse(x, stack, torch.tensor([[0, 1]]), weights).tolist() == [[3.25, 0.25]]
    assert kernels.by_row(x[None], stack, kernels.RowPlan.of(weights)).tolist() == [[[3.25, 0.25]]]
    assert (stack.mixed(weights[0]).dense() @ x[0]).tolist() == [3.25, 0.25]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any), st.integers(0, 999))
def test_mixed_is_the_weighted_sum(ranks, seed):
    stack, deltas = stack_of(ranks, seed=seed)
    weights = torch.rand(len(ranks), generator=torch.Generator().manual_seed(seed)) - 0.5
    wanted = sum(
        (w * d.dense() for w, d in zip(weights, deltas, strict=True) if d is not None),
        start=torch.zeros(6, 5),
    )
    assert torch.allclose(stack.mixed(weights).dense(), wanted, atol=1e-5)


def test_bfloat16_differs_by_its_rounding_only():
    stack, deltas = stack_of((4, 4))
    half = stack.to(torch.device("cpu"), torch.bfloat16)
    x, weights = torch.randn(9, 5), torch.rand(9, 2)
    exact = loop(x, deltas, weights)
    found = kernels.dense(x.bfloat16() @ half.a.T, half, weights)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("ranks", RANKS)
def test_norms_after_orthonormal_are_those_of_the_outputs(ranks):
    stack, deltas = stack_of(ranks)
    turned, x = stack.orthonormal(), torch.randn(7, 5)
    found = kernels.norms(x @ turned.a.T, turned)
    for number, delta in enumerate(deltas):
        wanted = torch.zeros(7) if delta is None else (x @ delta.dense().T).norm(dim=1)
        assert torch.allclose(found[:, number], wanted, atol=1e-5)
        if delta is not None:
            assert torch.allclose(turned.delta(number).dense(), delta.dense(), atol=1e-5)


def test_a_rank_above_the_outputs_can_be_turned_too():
    stack, deltas = stack_of((4, 1), out=2)
    turned = stack.orthonormal()
    assert turned.ranks == (2, 1)
    assert torch.allclose(turned.delta(0).dense(), deltas[0].dense(), atol=1e-5)


def test_stack_knows_who_is_where():
    stack, deltas = stack_of((0, 4, 1))
    assert (stack.experts, stack.starts, stack.present) == (3, (0, 0, 4, 5), [False, True, True])
    assert stack.owner.tolist() == [1, 1, 1, 1, 2]
    assert stack.delta(0).rank == 0
    assert torch.equal(stack.delta(2).a, deltas[2].a)
    assert stack.only([2, 1]).ranks == (1, 4)
    assert (stack.uniform, stack_of((2, 2))[0].uniform) == (None, 2)


def test_blocks_are_the_experts_factors_without_a_copy():
    stack, deltas = stack_of((2, 2, 2))
    a, b = stack.blocks
    for number, delta in enumerate(deltas):
        assert torch.equal(a[number], delta.a)
        assert torch.equal(b[number], delta.b.T)
    assert a.data_ptr() == stack.a.data_ptr()
    assert b.data_ptr() == stack.b.data_ptr()
    half = stack.to(torch.device("cpu"), torch.bfloat16)
    assert half.blocks[1].data_ptr() == half.b.data_ptr()


def test_modules_of_any_expert_are_stacked():
    found = stacks([expert({"a": (2, 3)}, 1), expert({"b": (2, 2), "a": (2, 3)}, 2)])
    assert {path: stack.ranks for path, stack in found.items()} == {"a": (1, 2), "b": (0, 2)}


def test_other_shapes_are_refused():
    with pytest.raises(Incompatible, match="different shapes") as error:
        stacks([expert({"a": (2, 3)}), expert({"a": (3, 3)})])
    assert error.value.details["found"] == [[2, 3], [3, 3]]


def test_plans_repeat_rows_beside_each_other():
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75], [1.0, 0.0]])
    plan = kernels.RowPlan.of(weights)
    assert sorted(used for _, used, _ in plan.groups) == [(0,), (0, 1)]
    assert torch.equal(plan.weights(2), weights)
    assert torch.equal(plan.repeated(2).weights(2), weights.repeat_interleave(2, 0))
