"""Comparing experts: hand-checked values and dense float64 references."""

import math

import pytest
import torch

from cgmerge.merge import LowRank
from cgmerge.merge.compare import compare, cosines


def delta(rows):
    matrix = torch.tensor(rows, dtype=torch.float32)
    return LowRank(torch.eye(matrix.shape[1]), matrix)


def random_experts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "m": LowRank(
                torch.randn(rank, 20, generator=generator),
                torch.randn(30, rank, generator=generator),
            )
        }
        for rank in (3, 5)
    ]


def test_hand_checked_pair():
    x = {"w": delta([[3.0, 0.0], [0.0, 4.0]])}
    y = {"w": delta([[3.0, 0.0], [0.0, -4.0]])}
    found = compare([x, y])["w"]
    assert found.norms == pytest.approx([5.0, 5.0])
    assert cosines(found.gram)[0, 1] == pytest.approx((9 - 16) / 25)
    # Two entries count, one of them is opposite.
    assert found.conflicts[0, 1] == 0.5
    assert found.conflicts[0, 0] == 0.0
    assert found.counted.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert found.spectrum.tolist() == pytest.approx([6.0, 0.0], abs=1e-6)
    assert found.exact_rank == 1
    shares = torch.tensor([16 / 25, 9 / 25])
    assert found.effective_ranks[0] == pytest.approx(math.exp(-(shares * shares.log()).sum()))


def test_subspaces_that_share_one_direction_of_two():
    x = {"w": delta([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])}
    y = {"w": delta([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])}
    found = compare([x, y])["w"]
    assert found.left_overlap[0, 1] == pytest.approx(0.5)
    assert found.right_overlap[0, 1] == pytest.approx(0.5)
    assert found.left_overlap[0, 0] == pytest.approx(1.0)


def test_against_dense_matrices():
    experts = random_experts()
    dense = [expert["m"].dense().double() for expert in experts]
    found = compare(experts, [0.5, -2.0])["m"]
    assert found.norms == pytest.approx([float(torch.linalg.norm(m)) for m in dense], rel=1e-5)
    assert found.gram[0, 1] == pytest.approx(float((dense[0] * dense[1]).sum()), rel=1e-4)
    expected = torch.linalg.svdvals(0.5 * dense[0] - 2.0 * dense[1])
    assert torch.allclose(found.spectrum, expected[:8], rtol=1e-4)
    assert found.exact_rank == 8
    assert found.lost(4) == pytest.approx(float((expected[4:] ** 2).sum()), rel=1e-4)
    opposite = (dense[0] * dense[1] < 0).double().mean()
    assert found.conflicts[0, 1] == pytest.approx(float(opposite), abs=1e-9)
    u = [
        torch.linalg.svd(m, full_matrices=False)[0][:, :r]
        for m, r in zip(dense, (3, 5), strict=True)
    ]
    expected = float((u[0].T @ u[1]).square().sum()) / 3
    assert found.left_overlap[0, 1] == pytest.approx(expected, rel=1e-4)


def test_missing_modules_and_zero_deltas():
    one = {"a": delta([[1.0, 2.0]]), "b": delta([[0.0, 0.0]])}
    two = {"a": delta([[2.0, 4.0]])}
    found = compare([one, two])
    assert sorted(found) == ["a", "b"]
    assert found["b"].norms == [0.0, 0.0]
    assert found["b"].effective_ranks == [0.0, 0.0]
    assert found["b"].exact_rank == 0
    assert cosines(found["b"].gram).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert cosines(found["a"].gram)[0, 1] == pytest.approx(1.0)
    assert found["a"].conflicts[0, 1] == 0.0


def test_the_gauge_does_not_matter():
    experts = random_experts()
    turned = [{"m": LowRank(e["m"].a / 7.0, e["m"].b * 7.0)} for e in experts]
    once, again = compare(experts)["m"], compare(turned)["m"]
    assert torch.allclose(once.gram, again.gram, rtol=1e-4)
    assert once.effective_ranks == pytest.approx(again.effective_ranks, rel=1e-4)
    assert torch.allclose(once.spectrum, again.spectrum, rtol=1e-4)
