"""Directions of experts: exact, without sign, and nothing for experts that do nothing."""

import hashlib
import subprocess
import sys

import pytest
import torch
from routing_support import expert

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.methods import FitInput, find_routed
from cgmerge.modules.routing.scores import Energy, Subspace
from cgmerge.modules.routing.spectral import leading_directions, spectral_router
from cgmerge.modules.routing.stack import Stack, stacks


def made(name, params, deltas):
    method = find_routed(name)
    given = method.make_params(params)
    names = [f"e{i}" for i in range(len(deltas))]
    return method.make(FitInput(names=names, stacks=stacks(deltas), params=given))


@pytest.mark.parametrize("shape", [(9, 7), (5, 12)])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_directions_are_those_of_a_dense_svd(shape, count):
    delta = expert({"m": shape}, rank=4, seed=3)["m"]
    found = leading_directions(delta, count).double()
    wanted = torch.linalg.svd(delta.dense().double()).Vh[: min(count, 4)]
    overlap = (found[: len(wanted)] * wanted).sum(dim=1).abs()
    assert torch.allclose(overlap, torch.ones(len(wanted)).double(), atol=1e-6)
    assert not found[len(wanted) :].any()


def test_directions_do_not_depend_on_how_a_delta_is_factored():
    delta = expert({"m": (9, 7)}, rank=3)["m"]
    turn = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    other = LowRank(torch.linalg.inv(turn) @ delta.a, delta.b @ turn)
    flipped = LowRank(-delta.a, delta.b)
    for same in (other, flipped):
        assert torch.allclose(leading_directions(same, 2), leading_directions(delta, 2), atol=1e-4)


def test_dependent_factors_have_fewer_directions():
    delta = LowRank(torch.ones(3, 4), torch.ones(5, 3))
    assert leading_directions(delta, 3).abs().sum(dim=1).tolist() == pytest.approx([2.0, 0, 0])


def test_an_expert_that_does_nothing_is_never_chosen():
    live, dead = expert({"m": (4, 4)}), {"m": LowRank(torch.ones(2, 4), torch.zeros(4, 2))}
    for params in ({"directions": "full"}, {"directions": 2}, {"normalise": "fro"}):
        scorer = made("spectral", params, [live, dead]).router.rules["m"].scorer
        assert scorer.present.tolist() == [True, False]
        assert all(bool(torch.isfinite(t).all()) for t in scorer.tensors().values())


def test_where_no_expert_does_anything_all_can_be_chosen():
    dead = {"m": LowRank(torch.zeros(2, 4), torch.ones(4, 2))}
    assert made("arrow", {}, [dead, dead]).router.rules["m"].scorer.present.tolist() == [True] * 2


def test_experts_of_different_modules_meet_where_both_are():
    one, two = expert({"a": (4, 4), "b": (4, 4)}, seed=1), expert({"b": (4, 4)}, seed=2)
    rules = made("arrow", {}, [one, two]).router.rules
    assert {path: rule.scorer.present.tolist() for path, rule in rules.items()} == {
        "a": [True, False],
        "b": [True, True],
    }


def test_parameters_choose_the_scorer():
    deltas = [expert({"m": (6, 6)}, seed=i) for i in range(3)]
    arrow = made("arrow", {"top_k": "2", "temperature": "0.5"}, deltas).router.rules["m"]
    assert isinstance(arrow.scorer, Subspace)
    assert (arrow.scorer.width, arrow.choice) == (1, Choice(2, 0.5))
    spectr = made("spectr", {}, deltas).router.rules["m"]
    assert isinstance(spectr.scorer, Energy)
    assert (spectr.scorer.weights, spectr.choice) == (None, Choice(None, 1.0))
    few = made("spectral", {"directions": 2, "top_k": "all"}, deltas).router.rules["m"]
    assert (few.scorer.width, few.choice.top_k) == (2, None)


def test_more_experts_than_there_are_is_said():
    fitted = made("arrow", {"top_k": 5}, [expert({"m": (4, 4)}, seed=i) for i in range(2)])
    assert fitted.router.choice.top_k is None
    assert fitted.warnings == ["top_k=5 is more than 2 experts: all are used"]


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", "0"), ("top_k", "some"), ("directions", "-1"), ("directions", "")]
)
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(UsageError, match="a whole number of at least 1"):
        find_routed("spectral").make_params({name: value})


_SCRIPT = """
import hashlib, sys, torch
sys.path.insert(0, "tests")
torch.set_num_threads(int(sys.argv[1]))
from routing_support import different_experts
from cgmerge.modules.routing.methods import FitInput, find_routed
from cgmerge.modules.routing.stack import stacks
method = find_routed("spectral")
made = method.make(FitInput(names=list("abc"), stacks=stacks(different_experts()),
                            params=method.make_params({"directions": 2})))
digest = hashlib.sha256()
for name, tensor in made.router.tensors().items():
    digest.update(name.encode() + tensor.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_threads_and_hash_seeds_change_nothing():
    found = set()
    for threads, seed in (("1", "1"), ("2", "2")):
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, threads],
            capture_output=True,
            text=True,
            check=True,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == len(hashlib.sha256().hexdigest())


def test_scores_have_no_sign():
    delta = expert({"m": (6, 5)}, seed=1)
    router = spectral_router({"m": Stack.of([delta["m"]])}, directions=1, choice=Choice())
    scorer, x = router.rules["m"].scorer, torch.randn(4, 5)
    mirrored = Subspace(rows=-scorer.rows, present=scorer.present)
    assert torch.equal(scorer.scores(x, x @ scorer.rows.T), mirrored.scores(x, x @ mirrored.rows.T))
