"""Tuning finds the best of a known score, once, and leaves what is fixed alone."""

import math

import pytest
from compress_support import spectrum

from cgmerge.modules.compress.modes import Options, coded_bytes, decode, encode
from cgmerge.modules.compress.tuning import (
    ALPHAS,
    DENSITIES,
    FACTORS,
    Search,
    tune_multiplier,
    tune_published,
    with_alpha,
)


@pytest.fixture(scope="module")
def expert():
    return {f"m{i}": spectrum(48, 40, [0.7**j for j in range(6)], seed=i) for i in range(3)}


def norm(factors):
    return math.sqrt(sum(delta.norm() ** 2 for delta in factors.values()))


def wants(size):
    """A score that is best where the whole delta has a given norm."""
    calls = []

    def score(factors):
        calls.append(norm(factors))
        return (-abs(math.log(calls[-1] / size)),)

    return score, calls


@pytest.mark.parametrize("share", [0.6, 1.0, 1.3, 2.6])
def test_the_factor_comes_close_to_the_best(expert, share):
    size = norm(expert)
    encoded = encode("ternary", expert, Options(density=0.2))
    score, calls = wants(share * size)
    tuned = tune_multiplier(encoded, score)
    assert norm(decode(tuned.encoded.coded)) == pytest.approx(share * size, rel=0.05)
    assert len(calls) == len(tuned.trials) <= len(FACTORS) + 4
    assert tuned.best.score == max(trial.score for trial in tuned.trials)
    assert tuned.encoded.multiplier == pytest.approx(tuned.best.multiplier)
    # The scales carry it; levels and therefore bytes stay.
    assert coded_bytes(tuned.encoded.coded) == coded_bytes(encoded.coded)


def test_among_equal_scores_the_first_factor_wins(expert):
    encoded = encode("ternary", expert, Options(density=0.2))
    assert tune_multiplier(encoded, lambda _: (1.0,)).best.multiplier == pytest.approx(
        encoded.multiplier * FACTORS[0]
    )


def test_the_published_grid_is_searched_whole(expert):
    score, calls = wants(0.8 * norm(expert))
    tuned = tune_published(expert, Options(), score)
    assert len(calls) == len(DENSITIES) * len(ALPHAS)
    best = min(calls, key=lambda size: abs(math.log(size / (0.8 * norm(expert)))))
    assert norm(decode(tuned.encoded.coded)) == pytest.approx(best)


def test_alpha_acts_on_both_factors(expert):
    unit = encode("compeft", expert, Options(density=0.3))
    direct = encode("compeft", expert, Options(density=0.3, alpha=3.0))
    scaled = with_alpha(unit, 3.0)
    assert scaled.alpha == direct.alpha == 3.0
    assert scaled.fidelity.error == pytest.approx(direct.fidelity.error, rel=1e-6)
    for one, two in zip(scaled.coded, direct.coded, strict=True):
        assert one.scales == pytest.approx(two.scales, rel=1e-6)
    assert norm(decode(scaled.coded)) == pytest.approx(9 * norm(decode(unit.coded)), rel=1e-5)


def test_a_search_is_made_once_and_used_for_other_sizes(expert):
    search = Search("ternary", expert)
    score, calls = wants(1.3 * norm(expert))
    assert search.count(Options()) == 13
    search.tune(Options(density=0.2), score)
    made = len(calls)
    other = search.make(Options(density=0.3))
    plain = encode("ternary", expert, Options(density=0.3))
    assert other.multiplier / plain.multiplier == pytest.approx(1.3, rel=0.05)
    assert len(calls) == made


def test_a_search_of_the_published_mode(expert):
    search = Search("compeft", expert)
    score, _ = wants(0.8 * norm(expert))
    found = search.tune(Options(), score).encoded
    again = search.make(Options())
    assert again.alpha == found.alpha
    assert again.density == pytest.approx(found.density, abs=0.01)
    assert search.count(Options(density=0.2)) == len(ALPHAS)


def test_what_is_fixed_is_not_searched(expert):
    assert Search("svdq", expert, multiplier=1.5).count(Options()) == 0
    fixed = Search("compeft", expert, alpha=2.0)
    assert fixed.count(Options(density=0.1)) == 0
    assert fixed.make(Options(density=0.1)).alpha == 2.0
