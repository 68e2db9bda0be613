"""Where sizes jump, whole terms are dropped: the ones that give least for their bits."""

import pytest
import torch
from compress_support import spectrum

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.modes import count_nonzero
from cgmerge.modules.compress.termfit import Decomposer, coded_terms, fit_terms
from cgmerge.modules.compress.terms import Terms
from cgmerge.modules.compress.ternary import ternary_terms


def diagonal(*values):
    """A delta with one entry for each value; its terms are the entries."""
    side = len(values)
    return LowRank(torch.eye(side), torch.diag(torch.tensor(values)))


def all_or_nothing(delta, knob):
    """Every entry is a term below knob 1, none above: a size that can only jump."""
    side = delta.rank if knob < 1.0 else 0
    eye = torch.eye(delta.rank, dtype=torch.int32)[:side]
    return Terms(eye, eye, delta.b.diagonal()[:side].double())


@pytest.mark.parametrize(("count", "kept"), [(8, {"a": [3.0, 5.0], "b": [4.0, 6.0]}),
                                             (5, {"a": [5.0], "b": [6.0]}),
                                             (2, {"a": [], "b": [6.0]})])  # fmt: skip
def test_the_terms_of_lowest_gain_go_first(count, kept):
    exact = {"a": diagonal(3.0, 1.0, 5.0), "b": diagonal(2.0, 4.0, 6.0)}
    make = Decomposer(exact, all_or_nothing)
    found = fit_terms(make, count_nonzero, float(count), (1e-3, 1e3, 0.5)).below
    assert {name: terms.d.tolist() for name, terms in found.items()} == kept
    assert count_nonzero(coded_terms(found)) <= count


def test_the_largest_there_is():
    make = Decomposer({"a": diagonal(3.0, 1.0)}, all_or_nothing)
    assert fit_terms(make, count_nonzero, 1e6, (1e-3, 1e3, 0.5)).below["a"].d.tolist() == [3.0, 1.0]


def test_a_flat_spectrum_is_cut_to_the_size():
    exact = {name: spectrum(80, 80, [1.0] * 12, seed) for seed, name in enumerate("abc")}
    entries = 3 * 12 * 160
    energy = sum(delta.norm() ** 2 for delta in exact.values())
    knobs = (1e-9 * energy, energy, energy / entries)
    for share in (0.1, 0.2, 0.3):
        found = fit_terms(
            Decomposer(exact, ternary_terms), count_nonzero, share * entries, knobs
        ).below
        reached = count_nonzero(coded_terms(found)) / entries
        assert 0.9 * share <= reached <= share
        for name, terms in found.items():
            gap = float((terms.delta().dense() - exact[name].dense().double()).norm())
            assert gap < exact[name].norm()
