"""A knob turned to a window of sizes: smooth curves, jumps, and windows out of reach."""

import math

import pytest

from cgmerge.modules.compress.budget import MANY_PEAKS, ONE_PEAK, PEAK, fit, fit_density


def run(size_of, window, bounds=(1e-6, 1e6), start=1.0):
    tried = []

    def make(knob):
        assert bounds[0] <= knob <= bounds[1]
        tried.append(knob)
        return size_of(knob)

    found = fit(make, float, window, bounds, start)
    assert len(tried) <= 16
    return found


@pytest.mark.parametrize("power", [0.4, 1.0, 2.0])
@pytest.mark.parametrize("start", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("target", [3.0, 1234.5])
def test_smooth_curves_are_met(power, start, target):
    window = 0.99 * target, target
    found = run(lambda knob: 100.0 / knob**power, window, (1e-30, 1e30), start)
    assert found.below == found.above
    assert window[0] <= found.below <= window[1]


def test_jumps_give_both_sides():
    found = run(lambda knob: 100.0 if knob < 3.7 else 50.0, (79.0, 80.0))
    assert (found.below, found.above) == (50.0, 100.0)


def test_a_window_above_the_largest():
    found = run(lambda knob: 10.0 / (1 + knob), (1e9, 2e9))
    assert found.below == pytest.approx(10.0, rel=1e-5)
    assert found.above is None


def test_a_window_below_the_smallest():
    found = run(lambda knob: 2000.0 + 1 / knob, (1500.0, 1510.0))
    assert found.below is None
    assert found.above == pytest.approx(2000.0)


def test_empty_results_are_sizes_like_others():
    found = run(lambda knob: 0.0 if knob > 2e-3 else 7.0, (3.0, 4.0))
    assert (found.below, found.above) == (0.0, 7.0)


def sign_bits(p):
    """Entropy of zeros against signs, and one bit for each sign: 1 at density 1, log2(3) at 2/3."""
    h = 0.0 if p >= 1 else -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    return h + p


def test_the_peak_by_hand():
    assert sign_bits(PEAK) == pytest.approx(math.log2(3))
    assert sign_bits(PEAK) > max(sign_bits(PEAK - 1e-3), sign_bits(PEAK + 1e-3))


@pytest.mark.parametrize("densities", [(1e-4, *ONE_PEAK), (1e-4, *MANY_PEAKS)])
@pytest.mark.parametrize("target", [0.3, 0.95, 1.1, 1.5, 1.58])
def test_densities_of_signs_are_found_on_both_sides_of_the_peak(densities, target):
    rising = fit_density(sign_bits, lambda density: density, target, densities)
    falling = fit_density(sign_bits, lambda density: -density, target, densities)
    for found in (rising, falling):
        assert 0.99 * target <= sign_bits(found.below) <= target < sign_bits(found.above)
    assert rising.below < PEAK
    assert (falling.below > PEAK) == (target > 1.0)  # all signs take one bit


@pytest.mark.parametrize("densities", [(1e-4, *ONE_PEAK), (1e-4, *MANY_PEAKS)])
def test_the_largest_is_the_peak_not_the_highest_density(densities):
    found = fit_density(sign_bits, lambda density: 0.0, 2.0, densities)
    assert sign_bits(found.below) == pytest.approx(math.log2(3), rel=0.0101)
    assert found.above is None


def test_one_threshold_has_several_peaks():
    """The first half of the entries is ten times larger: it is all signs at density 1/2."""

    def size_of(density):
        first = min(2 * density, 1.0)
        return (sign_bits(first) + (sign_bits(2 * density - first) if density > 0.5 else 0.0)) / 2

    assert size_of(0.5) == 0.5 < size_of(1 / 3)
    found = fit_density(size_of, lambda density: 0.0, 0.78, (1e-4, *MANY_PEAKS))
    assert found.below < 0.5  # the first of equals
    assert 0.99 * 0.78 <= size_of(found.below) <= 0.78
    largest = fit_density(size_of, lambda density: 0.0, 5.0, (1e-4, *MANY_PEAKS))
    peak = (1 + math.log2(3)) / 2  # the first half all signs, two thirds of the second
    assert size_of(largest.below) == pytest.approx(peak, rel=0.0101)
    assert largest.below > 0.7


def test_where_nothing_is_left_is_no_size():
    found = fit_density(lambda d: 0.0 if d < 0.15 else 7.0 + d, lambda d: 0.0, 3.0, MANY_PEAKS)
    assert found.below is None
    assert found.above == pytest.approx(0.15, rel=2e-3)
