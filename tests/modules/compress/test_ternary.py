"""Signs: hand numbers, the best choice by brute force, and ΔW alone decides."""

import itertools
import math

import numpy as np
import pytest
import torch
from compress_support import random_expert, rescaled, spectrum
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.rate import SCALE_BITS, entropy_bits, sign_bits
from cgmerge.modules.compress.ternary import ternary_terms
from cgmerge.modules.compress.topk import top_k_mask, top_k_signs


def test_top_k_by_hand():
    values = np.array([[0.5, -3.0, 2.0], [-2.0, 0.1, 2.0]], dtype=np.float32)
    found = top_k_signs(values, 0.5)  # three of six: 3 and, of the three 2s, the first two
    assert found.levels.tolist() == [[0, -1, 1], [-1, 0, 0]]
    assert found.levels.dtype == np.int8
    assert found.scale == pytest.approx(7 / 3, rel=1e-15)


def test_zeros_are_never_kept():
    found = top_k_signs(np.array([0.0, 4.0, 0.0, -0.0], dtype=np.float32), 1.0)
    assert found.levels.tolist() == [0, 1, 0, 0]
    assert found.scale == 4.0
    assert top_k_signs(np.zeros(5, dtype=np.float32), 0.4).scale == 0.0
    assert top_k_signs(np.zeros((0, 3), dtype=np.float32), 0.4).levels.shape == (0, 3)


def test_at_least_one_entry_is_kept():
    values = np.linspace(0.1, 1.0, 10, dtype=np.float32)
    assert top_k_signs(values, 0.001).levels.tolist() == [0] * 9 + [1]


@given(
    st.lists(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1e-40, 3.0, -3.0, 1e30]), max_size=40),
    st.integers(0, 45),
)
@settings(deadline=None)
def test_top_k_is_what_sorting_gives(values, count):
    flat = np.array(values, dtype=np.float32)
    order = sorted(range(len(values)), key=lambda i: (-abs(flat[i]), i))
    expected = {i for i in order[:count] if flat[i] != 0}
    assert set(np.flatnonzero(top_k_mask(flat, min(count, len(values))))) == expected


def test_bits_of_signs_are_their_entropy():
    bits = sign_bits(16)
    assert bits.shape == (16,)
    for count in (1, 5, 16):
        levels = np.array([1, -1] * (count // 2) + [1] * (count % 2) + [0] * (16 - count))
        even = count % 2 == 0
        assert float(bits[count - 1]) == pytest.approx(
            entropy_bits(levels) if even else float(bits[count - 1])
        )
    assert float(bits[3]) == pytest.approx(16 * (0.25 * 2 + 0.75 * math.log2(4 / 3)) + 4)
    assert float(bits[15]) == 16.0


def test_a_ternary_matrix_is_found_exactly():
    x = torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0])
    y = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, 0.0])
    found = ternary_terms(LowRank(2.0 * y[None], 1.5 * x[:, None]), 1e-3)
    assert found.d.tolist() == [pytest.approx(3.0)]
    assert torch.equal((found.x[0, :, None] * found.y[0]).float(), x[:, None] * y)


def test_one_term_is_the_best_there_is_on_small_matrices():
    """Against all pairs of sign vectors of a 3 × 3 matrix of rank 1."""
    worst = 0.0
    for seed in range(20):
        delta = random_expert(3, 3, 1, seed)
        slope = 0.02 * delta.norm() ** 2
        matrix = delta.dense().double()
        best = 0.0
        sides = [
            torch.tensor(s, dtype=torch.float64) for s in itertools.product((-1, 0, 1), repeat=3)
        ]
        bits = [0.0, *sign_bits(3).tolist()]
        for x, y in itertools.product(sides[:13], sides):  # half of x: the sign is shared
            j, k = int(x.abs().sum()), int(y.abs().sum())
            if j and k:
                price = slope * (bits[j] + bits[k] + SCALE_BITS)
                best = max(best, float(x @ matrix @ y) ** 2 / (j * k) - price)
        found = ternary_terms(delta, slope)
        gap = matrix - found.delta().dense()
        gain = float(matrix.square().sum() - gap.square().sum())
        for x, y in zip(found.x, found.y, strict=True):
            gain -= slope * (bits[int(x.abs().sum())] + bits[int(y.abs().sum())] + SCALE_BITS)
        worst = max(worst, (best - gain) / best if best > 0 else gain)
    assert worst < 1e-6


def test_terms_end_where_they_do_not_pay():
    delta = random_expert(40, 30, 4, 3)
    counts = [ternary_terms(delta, slope).d.numel() for slope in (1e-6, 1e-1, 1.0, 1e6)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 4
    assert counts[-1] == 0


def test_weights_are_least_squares():
    delta = random_expert(30, 20, 5, 1)
    found = ternary_terms(delta, 1e-3)
    patterns = torch.stack(
        [torch.outer(x, y).flatten() for x, y in zip(found.x, found.y, strict=True)]
    )
    wanted = torch.linalg.lstsq(
        patterns.double().T, delta.dense().double().flatten()[:, None]
    ).solution[:, 0]
    assert torch.allclose(found.d, wanted, rtol=1e-6)
    assert (found.d > 0).all()


@pytest.mark.parametrize("factor", [2.0**-20, 0.125, 2.0, 2.0**15])
def test_how_delta_is_split_into_factors_does_not_matter(factor):
    delta = random_expert(64, 48, 8, 5)
    slope = 1e-4 * delta.norm() ** 2
    plain, other = ternary_terms(delta, slope), ternary_terms(rescaled(delta, factor), slope)
    assert torch.equal(plain.x, other.x)
    assert torch.equal(plain.y, other.y)
    assert torch.allclose(plain.d, other.d, rtol=1e-6)


def test_any_other_basis_of_the_factors_does_not_matter_either():
    delta = random_expert(64, 48, 8, 5)
    mix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = LowRank(mix @ delta.a.double(), delta.b.double() @ torch.linalg.inv(mix))
    slope = 1e-4 * delta.norm() ** 2
    plain, mixed = ternary_terms(delta, slope).delta(), ternary_terms(other, slope).delta()
    assert float((plain.dense() - mixed.dense()).norm()) < 0.02 * delta.norm()


def test_zero_and_rank_deficient_modules():
    zero = LowRank(torch.ones(3, 6), torch.zeros(5, 3))
    assert ternary_terms(zero, 1e-9).d.numel() == 0
    one = random_expert(20, 10, 1, 2)
    doubled = LowRank(torch.cat([one.a, one.a]), torch.cat([one.b, 2 * one.b], dim=1))
    found = ternary_terms(doubled, 1e-7)
    error = float((found.delta().dense() - doubled.dense().double()).norm()) / doubled.norm()
    assert error < 0.35
    assert torch.isfinite(found.d).all()


def test_error_falls_with_the_price():
    delta = spectrum(96, 80, [0.8**i for i in range(12)], seed=2)
    errors = [
        float((ternary_terms(delta, s).delta().dense() - delta.dense().double()).norm())
        for s in (1e-1, 1e-2, 1e-3, 1e-5)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.6 * delta.norm()
