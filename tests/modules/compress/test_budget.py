"""A knob turned to a size: smooth curves, steps, and targets that cannot be met."""

import pytest

from cgmerge.errors import UsageError
from cgmerge.modules.compress.budget import fit


def run(size_of, target, bounds=(1e-6, 1e6), start=1.0):
    tried = []

    def make(knob):
        tried.append(knob)
        return size_of(knob)

    knob, size = fit(make, float, target, bounds, start)
    assert size == size_of(knob)
    assert bounds[0] <= knob <= bounds[1]
    return size, len(tried)


@pytest.mark.parametrize("power", [0.4, 1.0, 2.0])
@pytest.mark.parametrize("start", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("target", [3.0, 1234.5])
def test_smooth_curves_are_met_within_one_percent(power, start, target):
    size, tries = run(lambda knob: 100.0 / knob**power, target, (1e-30, 1e30), start)
    assert 0.99 * target <= size <= target
    assert tries <= 16


def test_steps_are_met_from_below():
    size, tries = run(lambda knob: 100.0 if knob < 3.7 else 50.0, 80.0)
    assert size == 50.0
    assert tries <= 16


def test_the_lowest_knob_ends_the_search():
    assert run(lambda knob: 10.0 / (1 + knob), 1e9)[0] == pytest.approx(10.0, rel=1e-5)


def test_a_target_below_the_smallest_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match=r"smallest this mode gives is 2,000, the target 1,500"):
        run(lambda knob: 2000.0 + 1 / knob, 1500.0)


def test_only_the_highest_knob_fits():
    assert run(lambda knob: 1.0 if knob >= 1e6 else 100.0, 5.0)[0] == 1.0
