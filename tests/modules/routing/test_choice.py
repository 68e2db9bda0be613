"""From scores to weights: sums, ties, experts that cannot be chosen."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_support import choose

from cgmerge.modules.routing.choice import Choice, Sigmoid, first_best

SCORES = st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(SCORES, st.integers(1, 8))
def test_weights_are_those_of_a_sorted_list(scores, k):
    found = Choice(k, 0.7).weights(torch.tensor([scores]))[0]
    assert torch.allclose(found, choose(scores, k, 0.7), atol=1e-6)
    assert int((found > 0).sum()) == min(k, len(scores))


@settings(max_examples=100, deadline=None)
@given(SCORES, st.integers(1, 8))
def test_one_token_is_chosen_for_as_many_are(scores, k):
    choice = Choice(k, 0.7)
    chosen, weights = choice.best(torch.tensor([scores]))
    found = choice.best_of(scores)
    assert [expert for expert, _ in found] == chosen[0].tolist()
    assert [weight for _, weight in found] == pytest.approx(weights[0].tolist(), abs=1e-6)


def test_one_token_by_hand():
    assert Choice(2).best_of([0.0, math.log(3.0), -5.0]) == [
        (1, pytest.approx(0.75)), (0, pytest.approx(0.25))
    ]  # fmt: skip
    assert Choice(2).best_of([-math.inf, 1.0]) == [(1, 1.0), (0, 0.0)]
    assert all(math.isnan(w) for _, w in Choice(2).best_of([-math.inf, -math.inf, -math.inf]))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_of_equal_scores_the_first_experts_are_kept(k, tokens):
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0, 2.0, 2.0]]).repeat(tokens, 1)
    chosen, values = first_best(scores, k)
    assert chosen.tolist() == [[1, 2, 3, 5, 6, 0, 4][:k]] * tokens
    assert torch.equal(values, scores.gather(1, chosen))


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_experts_that_are_not_there_get_nothing(k, tokens):
    row = [-math.inf, 1.0, -math.inf, -math.inf, -math.inf, -math.inf]
    for choice in (Choice(k), Choice()):
        found = choice.weights(torch.tensor([row]).repeat(tokens, 1))
        assert found.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * tokens


def test_more_than_there_are_means_all():
    scores = torch.randn(3, 4)
    assert torch.equal(Choice(9).weights(scores), Choice().weights(scores))
    assert Choice(9).best(scores)[0].shape == (3, 4)


def test_best_and_weights_agree():
    scores = torch.randn(2, 5, 6)
    chosen, kept = Choice(2, 0.5).best(scores)
    full = torch.zeros_like(scores).scatter(-1, chosen, kept)
    assert torch.equal(full, Choice(2, 0.5).weights(scores))


def test_a_small_temperature_is_sharp_and_a_large_one_even():
    scores = torch.tensor([0.0, 1.0])
    assert Choice(None, 0.01).weights(scores)[1] > 0.999
    assert abs(float(Choice(None, 1e4).weights(scores)[1]) - 0.5) < 1e-4


def test_sigmoid_asks_nobody_else():
    assert Sigmoid().weights(torch.tensor([0.0, 0.0])).tolist() == [0.5, 0.5]
    assert Sigmoid().weights(torch.tensor([math.log(3.0)]))[0] == pytest.approx(0.75)
