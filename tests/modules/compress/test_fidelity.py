"""Error and cosine from Gram matrices against dense matrices in float64."""

import math

import pytest
import torch
from compress_support import random_expert

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.fidelity import Likeness, fidelity, likeness


def test_against_dense_matrices():
    before, after = random_expert(30, 20, 4, 1), random_expert(30, 20, 6, 2)
    x, y = (d.b.double() @ d.a.double() for d in (before, after))
    found = likeness(before, after)
    assert found.error == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-9)
    assert found.cosine == pytest.approx(float((x * y).sum() / x.norm() / y.norm()), rel=1e-9)
    half = found.scaled(0.5)
    assert half.error == pytest.approx(float((x - 0.5 * y).norm() / x.norm()), rel=1e-9)
    assert half.cosine == pytest.approx(found.cosine, rel=1e-12)


def test_by_hand():
    part = Likeness(norm_sq=25.0, coded_sq=4.0, overlap=8.0)
    assert part.error == pytest.approx(math.sqrt(13) / 5)
    assert part.cosine == pytest.approx(0.8)
    assert not part.emptied


def test_zero_modules():
    zero = LowRank(torch.zeros(2, 5), torch.zeros(4, 2))
    some = random_expert(4, 5, 2, 1)
    assert (likeness(zero, zero).error, likeness(zero, zero).cosine) == (0.0, 1.0)
    assert (likeness(some, zero).error, likeness(some, zero).cosine) == (1.0, 0.0)
    assert likeness(some, zero).emptied
    assert not likeness(zero, zero).emptied
    assert likeness(zero, some).error == math.inf


def test_a_whole_expert():
    before = {name: random_expert(10, 8, 2, seed) for seed, name in enumerate("abc")}
    after = {
        "a": before["a"],
        "b": LowRank(before["b"].a, before["b"].b * 0.0),
        "c": LowRank(before["c"].a, before["c"].b * 0.5),
    }
    found = fidelity(before, after)
    norms = {name: delta.norm() ** 2 for name, delta in before.items()}
    expected = math.sqrt((norms["b"] + 0.25 * norms["c"]) / sum(norms.values()))
    assert found.error == pytest.approx(expected, rel=1e-6)
    assert found.emptied == ["b"]
    assert found.cosine_min == 0.0
    assert found.cosine_mean == pytest.approx(2 / 3)
    assert fidelity({}, {}).cosine_min == 1.0


def test_rounding_never_gives_a_negative_root():
    delta = random_expert(50, 40, 3, 9)
    assert likeness(delta, delta).error < 1e-7
    assert likeness(delta, delta).cosine <= 1.0
