"""One step for all directions: hand numbers, the entropy rule against brute force, spectra."""

import math

import numpy as np
import pytest
import torch
from compress_support import random_expert, rescaled, spectrum
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.rate import entropy_bits
from cgmerge.modules.compress.svdq import (
    MOST_LEVELS,
    entropy_rounded,
    quantised_terms,
)
from cgmerge.modules.compress.terms import balanced


def error(found, delta):
    return float((found.delta().dense() - delta.dense().double()).norm()) / delta.norm()


def test_rounding_by_hand():
    # Every level occurs equally often, so that bits hardly matter: plain rounding.
    values = torch.tensor([0.1, 1.1, -1.9, 3.2, -0.2, 0.9, 2.1, -2.8], dtype=torch.float64)
    levels, bits = entropy_rounded(values, 1e-9)
    assert levels.tolist() == [0, 1, -2, 3, 0, 1, 2, -3]
    assert bits == pytest.approx(8 * 2 + 6)  # four sizes of two each, six signs


def test_a_price_leaves_more_zeros():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4000, generator=generator, dtype=torch.float64)
    counts, costs, errors = [], [], []
    for price in (1e-9, 0.1, 0.3, 1.0):
        levels, bits = entropy_rounded(values, price)
        counts.append(int((levels == 0).sum()))
        costs.append(bits)
        errors.append(float((levels - values).square().sum()))
        assert bits == pytest.approx(entropy_bits(levels.numpy()), rel=0.01)
    assert counts == sorted(counts)
    assert costs == sorted(costs, reverse=True)
    assert errors == sorted(errors)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=60), st.floats(0, 2))
@example([19.0, 20.0, 20.0], 2.0)  # another 20 would be cheaper than the 19
@settings(deadline=None)
def test_levels_are_zero_or_a_neighbour(values, price):
    exact = torch.tensor(values, dtype=torch.float64)
    levels, bits = entropy_rounded(exact, price)
    near = (levels.abs() - exact.abs()).abs() < 1.0
    assert (near | (levels == 0)).all()
    assert (levels * exact >= 0).all()
    assert bits >= 0


def test_the_entropy_rule_beats_plain_rounding_at_equal_rate():
    """Lower error at the same bits, on the Gaussian entries that directions have."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(20_000, generator=generator, dtype=torch.float64)
    plain = []
    for step in np.geomspace(0.8, 3.0, 40):
        levels = torch.round(values / step)
        plain.append((entropy_bits(levels.numpy()), float((levels * step - values).square().sum())))
    plain.sort()
    for step in (0.9, 1.2, 1.6):
        levels, _ = entropy_rounded(values / step, 0.15)
        found = float((levels * step - values).square().sum())
        bits = entropy_bits(levels.numpy())
        assert found < np.interp(bits, *zip(*plain, strict=True))


def test_balanced_is_the_singular_decomposition():
    delta = spectrum(30, 20, [4.0, 1.0, 0.25], seed=4)
    left, right = balanced(delta)
    assert torch.allclose(left @ right.T, delta.dense().double(), atol=1e-6)
    for side in (left, right):
        assert torch.allclose(
            side.T @ side, torch.diag(torch.tensor([4.0, 1, 0.25]).double()), atol=1e-5
        )
    peaks = left.gather(0, left.abs().argmax(dim=0, keepdim=True))
    assert (peaks > 0).all()


def test_a_fine_step_is_exact():
    delta = random_expert(40, 30, 6, 1)
    found = quantised_terms(delta, 1e-3)
    assert error(found, delta) < 3e-4
    assert int(found.x.abs().max()) <= 2 * MOST_LEVELS


def test_levels_stay_in_range_for_any_step():
    delta = random_expert(40, 30, 6, 1)
    found = quantised_terms(delta, 1e-30)
    assert int(found.x.abs().max()) <= 2 * MOST_LEVELS
    assert error(found, delta) < 1e-3


def test_weak_directions_vanish():
    delta = spectrum(64, 64, [1.0, 1.0, 0.01, 0.01], seed=1)
    assert quantised_terms(delta, 0.1).d.numel() == 2
    assert quantised_terms(delta, 10.0).d.numel() == 0


@pytest.mark.parametrize("factor", [2.0**-12, 0.5, 2.0**9])
def test_how_delta_is_split_into_factors_does_not_matter(factor):
    delta = spectrum(64, 48, [0.7**i for i in range(8)], seed=3)
    plain, other = quantised_terms(delta, 0.05), quantised_terms(rescaled(delta, factor), 0.05)
    assert torch.equal(plain.x, other.x)
    assert torch.equal(plain.y, other.y)
    assert torch.allclose(plain.d, other.d, rtol=1e-6)


def test_zero_and_rank_deficient_modules():
    assert quantised_terms(LowRank(torch.ones(2, 5), torch.zeros(4, 2)), 0.1).d.numel() == 0
    one = random_expert(20, 10, 1, 2)
    doubled = LowRank(torch.cat([one.a, one.a]), torch.cat([one.b, 2 * one.b], dim=1))
    found = quantised_terms(doubled, 0.01 * doubled.norm())
    assert error(found, doubled) < 0.05


def at_error(delta, wanted):
    """Bits at which the mode reaches an error: a bisection on the step."""
    low, high = 1e-4, 10.0
    for _ in range(40):
        step = math.sqrt(low * high)
        found = quantised_terms(delta, step)
        if error(found, delta) > wanted:
            high = step
        else:
            low = step
    return sum(entropy_bits(row.numpy()) for row in (*found.x, *found.y))


def test_better_than_rounding_one_decomposition():
    """Taking directions from the rest saves bits against rounding U·Σ and V·Σ at once."""
    delta = spectrum(200, 160, [0.8**i for i in range(12)], seed=6)
    left, right = balanced(delta)
    root = left.norm(dim=0)  # √σ
    step = 0.06
    x, y = torch.round(left * root / step), torch.round(right * root / step)
    kept = (x.abs().sum(0) > 0) & (y.abs().sum(0) > 0)
    x, y = x[:, kept], y[:, kept]
    gain = (step / root[kept]) ** 2
    plain = float(((x * gain) @ y.T - delta.dense().double()).norm()) / delta.norm()
    bits = sum(entropy_bits(column.numpy()) for column in (*x.T, *y.T))
    assert at_error(delta, plain) < 0.95 * bits
