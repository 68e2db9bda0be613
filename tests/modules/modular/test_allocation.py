"""Draws, rows, prior and measures of an allocation, against numbers made by hand."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.modules.modular import allocation


def column(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_rows_by_hand():
    found = allocation.rows(column(1.0, -1.0, 0.0).sigmoid())
    assert found[0].tolist() == pytest.approx([0.4874, 0.1793, 0.3333], abs=5e-5)
    assert allocation.rows(column(0.0, 0.0)).tolist() == [[0.0, 0.0]]  # never 0/0


def test_a_draw_of_one_half_changes_nothing():
    logits = column(1.0, -1.0, 0.0)
    halves = torch.full_like(logits, 0.5)
    assert torch.allclose(allocation.relaxed(logits, halves), logits.sigmoid())


def test_a_draw_by_hand():
    assert float(allocation.relaxed(column(1.0), column(0.9))) == pytest.approx(0.9607, abs=5e-5)
    cold = allocation.relaxed(column(1.0), column(0.9), temperature=0.5)
    assert float(cold) == pytest.approx(1 / (1 + math.exp(-2 * (1 + math.log(9)))), abs=1e-9)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_the_ends_of_the_draws_are_finite(uniform):
    logits = torch.zeros(1, 2, requires_grad=True)
    drawn = allocation.rows(allocation.relaxed(logits, torch.full((1, 2), uniform)))
    assert drawn.tolist()[0] == pytest.approx([0.5, 0.5], abs=1e-4)
    drawn[0, 0].backward()
    assert torch.isfinite(logits.grad).all()


def test_draws_are_below_one_half_as_often_as_they_should():
    uniform = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(1))
    drawn = allocation.relaxed(torch.full((20_000, 1), 1.0), uniform)
    assert float((drawn > 0.5).double().mean()) == pytest.approx(1 / (1 + math.exp(-1)), abs=0.01)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([[1, 1], [1, 1], [1, 1]], -math.log(2)),
        ([[1, 0], [1, 1], [0, 1]], 0.0),
        ([[1, 0], [1, 0], [1, 0]], -math.log(2)),  # (3 − 1)!, and a skill that nobody uses
        ([[0, 0], [0, 0]], 0.0),
        ([[0.9, 0.2], [0.6, 0.8], [0.4, 0.7]], 0.0),  # rounded: the second of these
    ],
)
def test_the_prior_by_hand(shares, expected):
    found = allocation.neg_log_ibp(torch.tensor(shares, dtype=torch.float64))
    assert float(found) == pytest.approx(expected, abs=1e-9)


@given(
    st.integers(1, 5).flatmap(
        lambda skills: st.lists(
            st.lists(st.booleans(), min_size=skills, max_size=skills), min_size=1, max_size=6
        )
    )
)
def test_the_prior_is_its_formula(rows):
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    same = sum(math.lgamma(count + 1) for count in Counter(columns).values())
    terms = sum(math.lgamma(len(rows) - sum(c) + 1) + math.lgamma(sum(c)) for c in columns)
    found = allocation.neg_log_ibp(torch.tensor(rows, dtype=torch.float64))
    assert float(found) == pytest.approx(same - terms, abs=1e-9)


def test_the_prior_takes_layers_one_by_one():
    one = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    two = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    found = allocation.neg_log_ibp(torch.stack([one, two]))
    assert found.tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-6)


def test_the_slope_of_the_prior_goes_straight_through():
    """d/dm of −[log (T − m)! + log (m − 1)!] is ψ(T − m + 1) − ψ(m): 3/2 at m=1 of 3, 0 at 2."""
    shares = torch.tensor([[0.9, 0.9, 0.1], [0.1, 0.8, 0.2], [0.2, 0.3, 0.3]], dtype=torch.float64)
    shares.requires_grad_()
    allocation.neg_log_ibp(shares).backward()
    assert shares.grad[:, 0].tolist() == pytest.approx([1.5] * 3)
    assert shares.grad[:, 1].tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    assert shares.grad[:, 2].tolist() == [0.0] * 3  # used by nobody: no slope, and no NaN


def test_measures_by_hand():
    coin, sure = torch.full((2, 3), 0.5), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert allocation.discreteness(coin) == pytest.approx(1.0)
    assert allocation.discreteness(sure) == 0.0
    assert allocation.discreteness(torch.tensor([[0.9]])) == pytest.approx(0.4690, abs=5e-5)
    assert allocation.sparsity(torch.tensor([[0.9, 0.5], [0.4, 0.6]])) == 0.5
    assert allocation.usage(sure) == pytest.approx(1.0)
    assert allocation.usage(torch.tensor([[1.0, 0.0], [1.0, 0.0]])) == 0.0
    assert allocation.usage(torch.tensor([[1.0, 0.5], [0.5, 0.0]])) == pytest.approx(
        0.8113, abs=5e-5
    )
    assert allocation.usage(torch.tensor([[0.3], [0.4]])) == 1.0
