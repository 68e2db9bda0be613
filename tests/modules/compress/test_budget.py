"""A knob turned to a window of sizes: smooth curves, jumps, and windows out of reach."""

import pytest

from cgmerge.modules.compress.budget import fit


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
