"""Statistics against published reference values, independent formulas, and their own laws."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.errors import UsageError
from cgmerge.evals.stats import (
    bootstrap_mean,
    discordant,
    holm,
    macro_wilson,
    mcnemar,
    wilson,
)

counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (9, 10, 0.595850, 0.982124),
        (10, 10, 0.722467, 1.0),
        (50, 100, 0.403832, 0.596168),
        (95, 100, 0.888250, 0.978456),
        (180, 200, 0.850594, 0.934330),
    ],
)
def test_wilson_reference_values(correct, n, low, high):
    found = wilson(correct, n)
    assert found.low == pytest.approx(low, abs=5e-7)
    assert found.high == pytest.approx(high, abs=5e-7)


@given(counts)
def test_wilson_stays_inside_and_holds_its_proportion(count):
    correct, n = count
    found = wilson(correct, n)
    assert 0.0 <= found.low <= correct / n <= found.high <= 1.0
    assert found.high > found.low  # never without width, not even at 0 % or 100 %


def test_wilson_equals_scipy():
    from scipy.stats import binomtest

    for correct, n, confidence in [(0, 1, 0.95), (7, 9, 0.8), (333, 400, 0.99), (12, 12, 0.95)]:
        theirs = binomtest(correct, n).proportion_ci(confidence, method="wilson")
        ours = wilson(correct, n, confidence=confidence)
        assert [ours.low, ours.high] == pytest.approx([theirs.low, theirs.high], abs=1e-12)
    for wins, losses in [(0, 1), (13, 4), (150, 190)]:
        p = binomtest(wins, wins + losses).pvalue
        assert mcnemar(wins, losses) == pytest.approx(p, rel=1e-9)


@given(counts)
def test_wilson_mirrors(count):
    correct, n = count
    found, mirrored = wilson(correct, n), wilson(n - correct, n)
    assert found.low == pytest.approx(1 - mirrored.high, abs=1e-12)


def test_wilson_narrows_with_n_and_widens_with_confidence():
    assert wilson(90, 100).high - wilson(90, 100).low < wilson(9, 10).high - wilson(9, 10).low
    assert wilson(9, 10, confidence=0.99).low < wilson(9, 10, confidence=0.9).low


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_proportion(correct, n):
    with pytest.raises(UsageError) as caught:
        wilson(correct, n)
    assert caught.value.code == "usage.count"


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_wilson_refuses_confidence(confidence):
    with pytest.raises(UsageError, match="outside"):
        wilson(1, 2, confidence=confidence)


@given(counts)
def test_macro_wilson_of_one_skill_is_wilson(count):
    assert macro_wilson([count]).low == pytest.approx(wilson(*count).low, abs=1e-12)
    assert macro_wilson([count]).high == pytest.approx(wilson(*count).high, abs=1e-12)


@given(st.lists(counts, min_size=1, max_size=6))
def test_macro_wilson_holds_the_mean(many):
    found = macro_wilson(many)
    mean = sum(k / n for k, n in many) / len(many)
    assert 0.0 <= found.low <= mean + 1e-12
    assert mean - 1e-12 <= found.high <= 1.0


def test_macro_wilson_by_hand():
    # Two skills at 50/100: each bound is 0.096168 away, so the mean's is 0.096168 / sqrt(2).
    found = macro_wilson([(50, 100), (50, 100)])
    assert found.high == pytest.approx(0.5 + 0.096168 / math.sqrt(2), abs=1e-6)
    assert macro_wilson([(10, 10), (10, 10)]).low == pytest.approx(
        1 - 0.277533 / math.sqrt(2), abs=1e-6
    )
    with pytest.raises(UsageError):
        macro_wilson([])


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(10, 2, 0.038574), (5, 5, 1.0), (0, 6, 0.03125), (15, 5, 0.041389), (0, 0, 1.0), (1, 0, 1.0)],
)
def test_mcnemar_reference_values(wins, losses, p):
    assert mcnemar(wins, losses) == pytest.approx(p, abs=5e-7)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_symmetric_and_equals_the_binomial_tail(wins, losses):
    p = mcnemar(wins, losses)
    assert p == mcnemar(losses, wins)
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1)) / 2**n
    assert p == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(UsageError):
        mcnemar(-1, 2)


def test_discordant_counts_each_direction():
    first = [True, True, False, False, True]
    second = [True, False, True, False, False]
    assert discordant(first, second) == (2, 1)
    assert discordant(second, first) == (1, 2)
    with pytest.raises(UsageError) as caught:
        discordant([True], [True, False])
    assert caught.value.code == "usage.paired"


def test_holm_by_hand():
    # Sorted 0.005, 0.011, 0.02, 0.04 times 4, 3, 2, 1, then never falling.
    assert holm([0.04, 0.005, 0.02, 0.011]) == pytest.approx([0.04, 0.02, 0.04, 0.033])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values):
    adjusted = holm(p_values)
    assert all(p <= q <= 1.0 for p, q in zip(p_values, adjusted, strict=True))
    for (p, q), (r, s) in itertools.combinations(zip(p_values, adjusted, strict=True), 2):
        if p < r:
            assert q <= s


def test_bootstrap_agrees_with_item_by_item_resampling():
    values = np.random.default_rng(3).normal(size=40)
    found = bootstrap_mean([values], seed=1, draws=20_000)
    rng = np.random.default_rng(9)
    plain = values[rng.integers(40, size=(20_000, 40))].mean(1)
    assert [found.low, found.high] == pytest.approx(np.quantile(plain, [0.025, 0.975]), abs=0.02)


def test_bootstrap_of_proportions_agrees_with_the_binomial():
    # 30 of 40: the resampled mean has standard deviation sqrt(.75·.25/40) = 0.0685.
    found = bootstrap_mean([[1.0] * 30 + [0.0] * 10], seed=0, draws=20_000)
    assert found.low == pytest.approx(0.75 - 1.96 * 0.0685, abs=0.03)
    assert found.high == pytest.approx(0.75 + 1.96 * 0.0685, abs=0.03)


def test_bootstrap_weighs_skills_equally_and_repeats():
    groups = [[1.0] * 100, [0.0, 1.0]]
    first = bootstrap_mean(groups, seed=7)
    assert first == bootstrap_mean(groups, seed=7)
    assert first.low == 0.5  # the small skill at its worst counts one half
    assert first.high == 1.0
    assert bootstrap_mean([[0.25] * 5], seed=0).low == 0.25
    noise = list(np.random.default_rng(0).normal(size=30))
    assert bootstrap_mean([noise], seed=1) != bootstrap_mean([noise], seed=2)


def test_bootstrap_blocks_do_not_change_what_is_covered(monkeypatch):
    monkeypatch.setattr("cgmerge.evals.stats._BLOCK_ENTRIES", 64)
    noise = list(np.random.default_rng(0).normal(size=30))
    found = bootstrap_mean([noise], seed=1)
    assert found.low < float(np.mean(noise)) < found.high


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_bootstrap_stays_between_the_extremes(groups, seed):
    found = bootstrap_mean(groups, seed=seed, draws=50)
    lowest = sum(min(group) for group in groups) / len(groups)
    highest = sum(max(group) for group in groups) / len(groups)
    assert lowest - 1e-9 <= found.low <= found.high <= highest + 1e-9


def test_bootstrap_refuses_empty_skills():
    for groups in ([], [[1.0], []]):
        with pytest.raises(UsageError):
            bootstrap_mean(groups, seed=0)
