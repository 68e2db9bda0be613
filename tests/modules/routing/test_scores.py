"""Scorers by hand, and joined for several modules with the same input."""

import pytest
import torch
from routing_support import choose

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import SCORERS, Energy, Gate, Standardised, Subspace
from cgmerge.modules.routing.spectral import spectral_router
from cgmerge.modules.routing.stack import Stack

DIAGONALS = Stack.of(
    [
        LowRank(torch.eye(2), torch.diag(torch.tensor([3.0, 1.0]))),
        LowRank(torch.eye(2), torch.diag(torch.tensor([1.0, 2.0]))),
    ]
)
H = torch.tensor([[0.6, -0.8]])


def scores(scorer, x, stack=None):
    if scorer.rows is not None:
        return scorer.scores(x, x @ scorer.rows.T)
    turned = stack.orthonormal()
    return scorer.scores(x, kernels.norms(x @ turned.a.T, turned))


def rule_of(**options):
    return spectral_router({"m": DIAGONALS}, choice=Choice(), **options).rules["m"]


def test_arrow_by_hand():
    found = scores(rule_of(directions=1).scorer, H)
    assert found[0].tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
    assert Choice().weights(found)[0].tolist() == pytest.approx([0.4502, 0.5498], abs=1e-4)
    assert Choice(1).weights(found)[0].tolist() == [0.0, 1.0]


def test_spectr_by_hand():
    plain = scores(rule_of(directions=None).scorer, H, DIAGONALS)
    assert plain[0].tolist() == pytest.approx([1.970, 1.709], abs=1e-3)
    fair = scores(rule_of(directions=None, normalise=True).scorer, H, DIAGONALS)
    assert fair[0].tolist() == pytest.approx([0.623, 0.764], abs=1e-3)


def test_two_directions_of_two_see_everything():
    assert scores(rule_of(directions=2).scorer, H)[0].tolist() == pytest.approx([1.0, 1.0])


def test_phatgoose_by_hand():
    gates = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]])
    found = scores(Standardised.of(gates, [True, True]), torch.tensor([[2.0, 0.0, -2.0]]))
    assert found[0].tolist() == pytest.approx([1.732, 0.866], abs=1e-3)
    assert Choice().weights(found)[0].tolist() == pytest.approx([0.7039, 0.2961], abs=1e-4)


def test_phatgoose_is_two_layer_norms():
    gates, x = torch.randn(3, 8), torch.randn(5, 8) * 4 + 1
    norm = torch.nn.functional.layer_norm
    wanted = norm(x, (8,)) @ norm(gates, (8,)).T / 8**0.5
    assert torch.allclose(scores(Standardised.of(gates, [True] * 3), x), wanted, atol=1e-5)


def test_gates_are_linear():
    x, rows, bias = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2)
    assert torch.allclose(scores(Gate(rows=rows, bias=bias), x), x @ rows.T + bias)


def test_who_is_not_there_cannot_be_chosen():
    gate = Gate(rows=torch.randn(3, 2), present=torch.tensor([True, False, True]))
    assert scores(gate, torch.randn(5, 2))[:, 1].tolist() == [-torch.inf] * 5


def scorers(kind):
    generator = torch.Generator().manual_seed(4)
    present = torch.tensor([True, True, False])

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "gate":
        return Gate(rows=rand(3, 4), bias=rand(3)), Gate(rows=rand(3, 4))
    if kind == "standardised":
        return (
            Standardised.of(rand(3, 4), [True] * 3),
            Standardised.of(rand(3, 4), [True, False, True]),
        )
    return (
        Subspace(rows=rand(6, 4), present=present, width=2),
        Subspace(rows=rand(6, 4), present=~present, weights=rand(3), width=2),
    )


@pytest.mark.parametrize("kind", ["gate", "standardised", "subspace"])
def test_joined_scorers_score_as_each_alone(kind):
    one, two = scorers(kind)
    assert one.joins(two)
    x = torch.randn(5, 4)
    wanted = torch.cat([scores(one, x), scores(two, x)], dim=1)
    assert torch.allclose(scores(one.joined([two]), x), wanted, atol=1e-6)


def test_other_kinds_or_widths_are_not_joined():
    gate, _ = scorers("gate")
    wide, _ = scorers("subspace")
    narrow = Subspace(rows=torch.randn(3, 4), present=torch.tensor([True] * 3))
    assert not gate.joins(wide)
    assert not wide.joins(narrow)
    assert not wide.joins(gate)


def test_joined_rules_keep_what_is_added_afterwards():
    one, two = (TokenRule(s, Choice(), torch.randn(3)) for s in scorers("gate"))
    assert torch.equal(one.joined([two]).after, torch.cat([one.after, two.after]))
    assert one.joined([]) is one


@pytest.mark.parametrize("kind", ["gate", "standardised", "subspace"])
def test_tensors_make_the_same_scorer_again(kind):
    for scorer in scorers(kind):
        again = SCORERS[scorer.form].of_tensors(scorer.tensors())
        x = torch.randn(5, 4)
        assert torch.equal(scores(again, x), scores(scorer, x))


def test_energy_multiplies_norms():
    energy = Energy(weights=torch.tensor([1.0, 0.5]), present=torch.tensor([True, True]))
    found = energy.scores(torch.zeros(1, 2), torch.tensor([[2.0, 3.0]]))
    assert found.tolist() == [[2.0, 1.5]]
    assert torch.allclose(Choice(1).weights(found)[0], choose([2.0, 1.5], 1))
