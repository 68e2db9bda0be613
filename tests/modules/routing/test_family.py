"""Modules that read the same input decide together, and only then."""

import pytest
import torch
from routing_support import expert

from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.family import SPARSE_TOKENS, Family, together
from cgmerge.modules.routing.kernels import sparse, weigh
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Energy, Gate
from cgmerge.modules.routing.spectral import spectral_router
from cgmerge.modules.routing.stack import Stack, stacks

INTO = 6


def members(count, experts=3, *, choice=None, seed=0, ranks=(2, 1, 3), gate=False):
    """Stacks and rules of modules that read the same input."""
    shapes = {f"m{i}": (4 + i, INTO) for i in range(count)}
    deltas = [expert(shapes, ranks[e % len(ranks)], seed + e) for e in range(experts)]
    found = stacks(deltas)
    if gate:
        generator = torch.Generator().manual_seed(seed)
        rules = {
            path: TokenRule(Gate(rows=torch.randn(experts, INTO, generator=generator)), choice)
            for path in found
        }
    else:
        rules = spectral_router(found, directions=1, choice=choice or Choice(2)).rules
    return [(found[path], rules[path]) for path in found]


def alone(member, x):
    """What one module of a family must get, from its own stack and rule."""
    stack, rule = member
    scores = rule.scorer.scores(x, x @ rule.scorer.rows.T)
    return weigh(x @ stack.a.T, stack, rule.choice.weights(scores))


@pytest.mark.parametrize("shape", [(INTO,), (1, 1, INTO), (2, 5, INTO), (7, INTO)])
def test_each_gets_what_it_would_get_alone(shape):
    group = members(3)
    family, x = Family(group), torch.randn(shape)
    for number, member in enumerate(group):
        assert torch.allclose(family.part(x, number), alone(member, x), atol=1e-5)


def test_another_input_is_computed_anew():
    group = members(2)
    family, one, two = Family(group), torch.randn(3, INTO), torch.randn(3, INTO)
    family.part(one, 0)
    assert torch.allclose(family.part(two, 1), alone(group[1], two), atol=1e-5)
    assert torch.allclose(family.part(one, 0), alone(group[0], one), atol=1e-5)
    assert torch.allclose(family.part(one, 0), alone(group[0], one), atol=1e-5)  # asked again


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_changed_in_place_is_computed_anew(inference):
    group = members(2)
    family = Family(group)
    with torch.inference_mode(inference):
        x = torch.randn(3, INTO)
        family.part(x, 0)
        x.mul_(-2.0).add_(1.0)
        assert torch.allclose(family.part(x, 1), alone(group[1], x), atol=1e-5)


def test_nothing_is_kept_when_all_have_asked():
    family, x = Family(members(2)), torch.randn(3, INTO)
    family.part(x, 1)
    assert family._seen[0] is x
    family.part(x, 0)
    assert family._seen is None
    assert family._parts == [None, None]


@pytest.mark.parametrize("ranks", [(2,), (2, 1)])
def test_many_tokens_and_few_experts_give_the_same(ranks):
    group = members(2, experts=8, choice=Choice(2), ranks=ranks)
    family, x = Family(group), torch.randn(SPARSE_TOKENS, INTO)
    assert family.sparse
    with torch.no_grad():
        for number, (stack, rule) in enumerate(group):
            few = family.part(x, number)
            found = sparse(x, stack, few.chosen, few.weights)
            assert torch.allclose(found, alone((stack, rule), x) @ stack.b.T, atol=1e-5)
            assert isinstance(family.part(x[:3], number), torch.Tensor)
    assert isinstance(family.part(x, 0), torch.Tensor)  # with gradients: all experts at once


@pytest.mark.parametrize("shape", [(INTO,), (1, INTO), (1, 1, INTO)])
@pytest.mark.parametrize("gate", [False, True])
def test_one_token_reads_the_factors_of_its_experts_only(shape, gate):
    group = members(3, experts=5, ranks=(2,), choice=Choice(2), gate=gate)
    family = Family(group)
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            for number, (stack, rule) in enumerate(group):
                terms = family.part(x, number).terms
                weights = rule.choice.weights(rule.scorer.scores(x, x @ rule.scorer.rows.T))
                chosen = weights.flatten().nonzero().flatten().tolist()
                assert sorted(expert for expert, _, _ in terms) == chosen
                for expert, weight, _ in terms:
                    assert weight == pytest.approx(float(weights.flatten()[expert]), rel=1e-5)
                found = sum(w * (stack.blocks[1][e].T @ z) for e, w, z in terms)
                whole = alone((stack, rule), x) @ stack.b.T
                assert torch.allclose(found.view(whole.shape), whole, atol=1e-5)


def test_one_token_of_experts_of_different_ranks_weighs_all():
    group = members(2, experts=5, ranks=(2, 1), choice=Choice(2))
    with torch.no_grad():
        x = torch.randn(1, INTO)
        assert torch.allclose(Family(group).part(x, 1), alone(group[1], x), atol=1e-5)


def test_who_watches_sees_the_weights_of_every_module():
    for tokens, ranks in ((2, (2, 1, 3)), (1, (2,)), (SPARSE_TOKENS, (2, 1, 3))):
        group, seen = members(2, experts=8, ranks=ranks), {}
        with torch.no_grad():
            Family(group, seen.__setitem__).part(torch.randn(tokens, INTO), 0)
        assert sorted(seen) == [0, 1]
        for weights in seen.values():
            assert weights.shape == (tokens, 8)
            assert torch.allclose(weights.sum(-1), torch.ones(tokens))
            assert ((weights > 0).sum(-1) == 2).all()


def test_what_is_being_learned_is_read_anew():
    group = members(2, gate=True, choice=Choice())
    for _, rule in group:
        rule.scorer.rows.requires_grad_()
    family, x = Family(group), torch.randn(4, INTO)
    family.part(x, 0)
    with torch.no_grad():
        for _, rule in group:
            rule.scorer.rows.mul_(-1.0)
    y = x.clone()
    found = family.part(y, 1)
    assert torch.allclose(found, alone(group[1], y), atol=1e-5)
    found.sum().backward()
    assert group[1][1].scorer.rows.grad.abs().sum() > 0


def test_energies_come_from_the_factors():
    shapes = {"m": (9, INTO)}
    found = stacks([expert(shapes, 2, 1), expert(shapes, 3, 2)])["m"]
    rule = TokenRule(Energy(present=torch.tensor([True, True])), Choice())
    x = torch.randn(5, INTO)
    energies = torch.stack([(x @ found.delta(e).dense().T).norm(dim=1) for e in range(2)], dim=1)
    turned = found.orthonormal()
    wanted = sum(
        w[:, None] * (x @ found.delta(e).dense().T)
        for e, w in enumerate(energies.softmax(-1).unbind(-1))
    )
    assert torch.allclose(Family([(turned, rule)]).part(x, 0) @ turned.b.T, wanted, atol=1e-5)


def test_together_only_what_is_alike():
    (stack, rule), other = members(2)
    assert together((stack, rule), other)
    wider = Stack(torch.randn(6, INTO + 1), stack.b, stack.ranks)
    assert not together((stack, rule), (wider, rule))
    assert not together((stack, rule), (stack, TokenRule(rule.scorer, Choice(1))))
    gate = TokenRule(Gate(rows=torch.randn(3, INTO)), rule.choice)
    assert not together((stack, rule), (stack, gate))
    added = TokenRule(rule.scorer, rule.choice, torch.zeros(3))
    assert not together((stack, rule), (stack, added))
    half = stack.to(torch.device("cpu"), torch.bfloat16)
    assert not together((stack, rule), (half, rule))


def test_bfloat16_inputs_are_scored_in_float32():
    stack, rule = members(1)[0]
    half = stack.to(torch.device("cpu"), torch.bfloat16)
    seen = {}
    x = torch.randn(4, INTO).bfloat16()
    Family([(half, rule)], seen.__setitem__).part(x, 0)
    scores = rule.scorer.scores(x.float(), x.float() @ rule.scorer.rows.T)
    assert seen[0].dtype == torch.float32
    assert torch.allclose(seen[0], rule.choice.weights(scores), atol=1e-6)
