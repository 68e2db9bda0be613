"""Truncation: optimal where it must be, and the reported error is the error."""

import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, inner, make_rule, pad_rank, stack, truncate, truncate_dense
from cgmerge.merge.engine import plan_rank
from cgmerge.merge.lowrank import main_rows


def random_delta(out, into, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return LowRank(
        torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator)
    )


def dense64(delta):
    return delta.b.double() @ delta.a.double()


def tail(matrix, rank):
    values = torch.linalg.svdvals(matrix.double())
    return float(values[rank:].square().sum())


@pytest.mark.parametrize(("out", "into"), [(40, 23), (23, 40), (30, 30), (6, 50)])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_truncate_is_the_best_approximation(out, into, rank):
    delta = stack([random_delta(out, into, 4, seed) for seed in range(3)], [1.0, -0.5, 2.0])
    result = truncate(delta, rank)
    gap = float((dense64(result.delta) - dense64(delta)).square().sum())
    best = tail(dense64(delta), rank)
    assert result.delta.rank == rank
    assert gap == pytest.approx(best, rel=1e-4)
    assert result.error_sq == pytest.approx(best, rel=1e-4)
    assert result.norm_sq == pytest.approx(float(dense64(delta).square().sum()), rel=1e-5)


def test_truncate_keeps_small_factors_as_they_are():
    delta = random_delta(10, 8, 3)
    assert truncate(delta, 5).delta is delta
    assert truncate(delta, 5).error_sq == 0.0


def test_truncate_handles_equal_and_cancelling_experts():
    delta = random_delta(20, 15, 4)
    doubled = truncate(stack([delta, delta], [0.5, 0.5]), 4)
    assert torch.allclose(doubled.delta.dense(), delta.dense(), atol=1e-5)
    assert doubled.error_sq < 1e-10 * doubled.norm_sq
    gone = truncate(stack([delta, delta], [1.0, -1.0]), 4)
    assert gone.norm_sq < 1e-10 * doubled.norm_sq


def test_more_terms_than_dimensions():
    delta = stack([random_delta(6, 5, 4, seed) for seed in range(4)], [1.0] * 4)
    result = truncate(delta, 16)
    assert result.delta.rank == 5
    assert torch.allclose(dense64(result.delta), dense64(delta), atol=1e-5)


@pytest.mark.parametrize(("out", "into"), [(90, 64), (64, 90), (12, 200), (200, 12)])
def test_truncate_dense_reports_the_true_error_and_is_near_the_optimum(out, into):
    generator = torch.Generator().manual_seed(1)
    base = random_delta(out, into, 6).dense()
    matrix = base + 0.3 * torch.randn(out, into, generator=generator)
    result = truncate_dense(matrix, 6, random_delta(out, into, 6).a)
    gap = float((dense64(result.delta) - matrix.double()).square().sum())
    assert result.error_sq == pytest.approx(gap, rel=1e-3)
    assert gap <= 1.02 * tail(matrix, 6)


def test_truncate_dense_without_a_guess():
    matrix = random_delta(80, 70, 5).dense()
    result = truncate_dense(matrix, 5, matrix.new_zeros(0, 70))
    assert torch.allclose(result.delta.dense(), matrix, atol=1e-4)
    assert result.error_sq <= 1e-8 * result.norm_sq


def test_truncate_dense_of_zero():
    result = truncate_dense(torch.zeros(30, 40), 4, torch.zeros(2, 40))
    assert result.error_sq == 0.0
    assert torch.equal(result.delta.dense(), torch.zeros(30, 40))


def test_factors_are_balanced():
    result = truncate(stack([random_delta(20, 30, 4, s) for s in range(2)], [1.0, 1.0]), 3).delta
    left = torch.linalg.svdvals(result.b)
    right = torch.linalg.svdvals(result.a)
    assert torch.allclose(left, right, rtol=1e-4)


def test_stack_is_the_exact_sum():
    deltas = [random_delta(9, 7, rank, rank) for rank in (2, 5)]
    total = stack(deltas, [0.25, -3.0])
    expected = 0.25 * dense64(deltas[0]) - 3.0 * dense64(deltas[1])
    assert total.rank == 7
    assert torch.allclose(dense64(total), expected, atol=1e-5)


def test_stack_drops_zero_weights():
    deltas = [random_delta(9, 7, rank, rank) for rank in (2, 5)]
    assert stack(deltas, [1.0, 0.0]).rank == 2
    assert stack(deltas, [0.0, 0.0]).dense().abs().max() == 0


def test_inner_product_without_the_matrices():
    x, y = random_delta(9, 7, 2, 1), random_delta(9, 7, 4, 2)
    expected = float((dense64(x) * dense64(y)).sum())
    assert inner(x, y) == pytest.approx(expected, rel=1e-6)
    assert x.norm() == pytest.approx(float(dense64(x).norm()), rel=1e-6)


def test_padding_changes_nothing():
    delta = random_delta(9, 7, 2)
    padded = pad_rank(delta, 6)
    assert padded.rank == 6
    assert torch.equal(padded.dense(), delta.dense())
    assert pad_rank(delta, 1) is delta


def test_rank_rules():
    one = {"m": random_delta(30, 40, 4), "n": random_delta(5, 40, 4)}
    two = {"m": random_delta(30, 40, 6), "n": random_delta(5, 40, 6)}
    rule = make_rule("linear", 2)
    assert plan_rank(rule, [one, two], "exact") == 10
    assert plan_rank(rule, [one, two], "auto") == 10
    assert plan_rank(rule, [one, two], 3) == 3
    big = [{"m": random_delta(200, 200, 40, s)} for s in range(3)]
    assert plan_rank(make_rule("linear", 3), big, "exact") == 120
    assert plan_rank(make_rule("linear", 3), big, "auto") == 64
    with pytest.raises(UsageError, match="entry by entry"):
        plan_rank(make_rule("ties", 2), [one, two], "exact")


@pytest.mark.parametrize(("out", "into"), [(300, 500), (500, 300)])
@pytest.mark.parametrize("guess", ["good", "zero", "wrong", "none"])
def test_the_iteration_ends_near_the_optimum_from_any_start(out, into, guess):
    generator = torch.Generator().manual_seed(2)
    values = torch.linspace(1.0, 0.2, 300)  # falls slowly: the hard case
    left = torch.linalg.qr(torch.randn(out, 300, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(into, 300, generator=generator)).Q
    matrix = (left * values) @ right.T
    rows = {
        "good": right[:, :16].T,
        "zero": torch.zeros(16, into),
        "wrong": right[:, -16:].T,
        "none": matrix.new_zeros(0, into),
    }[guess]
    result = truncate_dense(matrix, 8, rows)
    gap = float((dense64(result.delta) - matrix.double()).square().sum())
    assert result.delta.shape == (out, into)
    assert result.error_sq == pytest.approx(gap, rel=1e-4)
    assert gap <= 1.01 * float(values[8:].square().sum())


def test_small_matrices_are_cut_exactly():
    matrix = torch.randn(200, 900, generator=torch.Generator().manual_seed(5))
    result = truncate_dense(matrix, 8, matrix.new_zeros(0, 900))
    assert result.error_sq == pytest.approx(tail(matrix, 8), rel=1e-6)


@pytest.mark.parametrize(("out", "into"), [(40, 90), (90, 40)])
def test_main_rows_span_the_row_space_of_the_best_approximation(out, into):
    delta = random_delta(out, into, 12)
    best = truncate(delta, 5)
    rows = main_rows(delta, 5).double()
    assert rows.shape == (5, into)
    gram = rows @ rows.T
    matrix = delta.b.double() @ delta.a.double()
    left = matrix - matrix @ rows.T @ torch.linalg.solve(gram, rows)
    assert float(left.square().sum()) == pytest.approx(best.error_sq, rel=1e-4)


def test_main_rows_of_dependent_factors_are_finite():
    delta = random_delta(30, 20, 3)
    twice = LowRank(torch.cat([delta.a, delta.a]), torch.cat([delta.b, -delta.b], dim=1))
    rows = main_rows(twice, 4)  # the zero matrix
    assert rows.shape == (4, 20)
    assert torch.isfinite(rows).all()
