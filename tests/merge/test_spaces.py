"""Spaces: lossless projections, exact low rank, independence of the factors' gauge."""

import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts, plan_rank
from cgmerge.merge.spaces import into_space, project

RANKS = (2, 4, 3)


def loras(*, seed=0, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes or {"m": (9, 14), "n": (12, 5)}
    return [
        {
            name: LowRank(
                torch.randn(rank, into, generator=generator).double(),
                torch.randn(out, rank, generator=generator).double(),
            )
            for name, (out, into) in shapes.items()
        }
        for rank in RANKS
    ]


def dense(experts):
    return [{name: delta.dense() for name, delta in expert.items()} for expert in experts]


def regauged(experts):
    """Write every delta as (B·c, A/c) with a mixing matrix on top."""
    generator = torch.Generator().manual_seed(4)
    result = []
    for expert in experts:
        result.append({})
        for name, delta in expert.items():
            mix = torch.randn(delta.rank, delta.rank, generator=generator).double()
            mix += 4 * torch.eye(delta.rank).double()
            result[-1][name] = LowRank(torch.linalg.solve(mix, delta.a), delta.b @ mix)
    return result


@pytest.mark.parametrize("sides", ["both", "left", "none"])
def test_projection_loses_nothing(sides):
    deltas = [expert["m"] for expert in loras()]
    projected = project(deltas, sides)
    for delta, matrix in zip(deltas, projected.matrices, strict=True):
        assert torch.allclose(projected.lift(matrix), delta.dense(), atol=1e-12)


def test_projection_has_the_rank_of_all_experts_together():
    projected = project([expert["m"] for expert in loras()], "both")
    assert projected.matrices.shape == (3, 9, 9)
    assert projected.left.shape == (9, 9)
    assert projected.right.shape == (14, 9)
    small = loras(shapes={"m": (40, 30)})
    assert project([expert["m"] for expert in small], "both").matrices.shape == (3, 9, 9)
    assert project([expert["m"] for expert in small], "left").matrices.shape == (3, 9, 30)


def test_absent_experts_are_zero():
    one, _, three = (expert["m"] for expert in loras())
    projected = project([one, None, three], "both")
    assert torch.equal(projected.matrices[1], torch.zeros_like(projected.matrices[0]))
    assert torch.allclose(projected.lift(projected.matrices[2]), three.dense(), atol=1e-12)


@pytest.mark.parametrize("space", ["core", "knots"])
def test_a_space_is_lossless(space):
    deltas = [expert["m"] for expert in loras()]
    projected = into_space(deltas, space)
    for delta, matrix in zip(deltas, projected.matrices, strict=True):
        assert torch.allclose(projected.lift(matrix), delta.dense(), atol=1e-10)


def test_knots_coordinates_are_those_of_the_joint_svd():
    deltas = [expert["m"].dense() for expert in loras()]
    u, s, v = torch.linalg.svd(torch.cat(deltas, dim=1), full_matrices=False)
    kept = int((s > 1e-5 * s[0]).sum())
    found = into_space([expert["m"] for expert in loras()], "knots").matrices
    expected = torch.stack((s[:kept, None] * v[:kept]).split(14, dim=1))
    signs = torch.sign((found[0] * expected[0]).sum(dim=1))
    assert torch.allclose(found * signs[None, :, None], expected, atol=1e-10)
    assert torch.allclose(u[:, :kept] @ expected[1], deltas[1], atol=1e-10)


@pytest.mark.parametrize("space", ["core", "knots"])
@pytest.mark.parametrize("method", ["linear", "task-arithmetic"])
def test_sums_are_the_same_in_every_space(space, method):
    experts = dense(loras())
    plain = merge_state_dicts(method, experts)
    seen = merge_state_dicts(f"{space}+{method}", experts)
    assert all(torch.allclose(plain[name], seen[name], atol=1e-10) for name in plain)


@pytest.mark.parametrize("space", ["core", "knots"])
def test_ties_in_a_space_is_ties_on_the_coordinates(space):
    experts = loras(shapes={"m": (9, 14)})
    projected = into_space([expert["m"] for expert in experts], space)
    inner = merge_state_dicts(
        "ties", [{"m": matrix} for matrix in projected.matrices], params={"density": 0.5}
    )["m"]
    merger = Merger(make_rule(f"{space}+ties", 3, params={"density": 0.5}), experts, torch.float64)
    assert torch.allclose(merger.dense("m"), projected.lift(inner), atol=1e-10)


@pytest.mark.parametrize("space", ["core", "knots"])
def test_factors_and_plain_tensors_agree(space):
    experts = loras()
    rule = make_rule(f"{space}+ties", 3, params={"density": 0.4})
    expected = merge_state_dicts(f"{space}+ties", dense(experts), params={"density": 0.4})
    merger = Merger(rule, experts, torch.float64)
    for name in merger.names:
        assert torch.allclose(merger.dense(name), expected[name], atol=1e-9)
        exact = merger.factors(name, 99)
        assert torch.allclose(exact.delta.dense(), expected[name], atol=1e-9)


@pytest.mark.parametrize("space", ["core", "knots"])
def test_the_gauge_of_the_factors_does_not_matter(space):
    rule = make_rule(f"{space}+ties", 3, params={"density": 0.4})
    once = Merger(rule, loras(), torch.float64)
    again = Merger(rule, regauged(loras()), torch.float64)
    assert all(torch.allclose(once.dense(n), again.dense(n), atol=1e-9) for n in once.names)


def test_without_a_space_ties_differs():
    """Entry-wise rules do not commute with rotations: the space is a choice, not a detail."""
    experts = dense(loras())
    plain = merge_state_dicts("ties", experts, params={"density": 0.5})["m"]
    core = merge_state_dicts("core+ties", experts, params={"density": 0.5})["m"]
    assert torch.linalg.norm(plain - core) > 0.1 * torch.linalg.norm(plain)


def test_vectors_pass_through_a_space():
    experts = [{"v": torch.tensor([4.0, -1.0, 2.0])}, {"v": torch.tensor([2.0, 3.0, -2.5])}]
    params = {"density": 1.0}
    plain = merge_state_dicts("ties", experts, params=params)["v"]
    assert torch.equal(merge_state_dicts("core+ties", experts, params=params)["v"], plain)


def test_exact_rank_in_a_space_is_the_sum_of_the_ranks():
    experts = loras(shapes={"m": (40, 30)})
    assert plan_rank(make_rule("core+ties", 3), experts, "exact") == 9
    with pytest.raises(UsageError, match="entry by entry") as caught:
        plan_rank(make_rule("ties", 3), experts, "exact")
    assert "core+ties" in caught.value.hint


def test_zero_experts_stay_zero_in_a_space():
    zeros = [{"w": torch.zeros(4, 3)} for _ in range(2)]
    for space in ("core", "knots"):
        assert torch.equal(merge_state_dicts(f"{space}+ties", zeros)["w"], torch.zeros(4, 3))


def test_an_unknown_space_is_named():
    with pytest.raises(UsageError, match="unknown space `cor`") as caught:
        make_rule("cor+ties", 2)
    assert "core, knots" in caught.value.hint
