"""Routers among the candidates of a choice: fitted on what counts, measured as they compose."""

import json
from dataclasses import replace

import learned_support as ls
import pytest
import torch
import train_support

from cgmerge.merge.params import build_params
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.learned import auto
from cgmerge.modules.learned.auto import choose, fits
from cgmerge.modules.learned.crossval import Row
from cgmerge.modules.learned.learn import opened
from cgmerge.modules.learned.objectives import Support
from cgmerge.modules.learned.presets import make_auto
from cgmerge.modules.learned.routed import Routable, counted, routed_candidate
from cgmerge.modules.routing import support as judged
from cgmerge.modules.routing.attach import routed
from cgmerge.modules.routing.fitting import FitInput, Labelled
from cgmerge.modules.routing.methods import find_routed
from cgmerge.modules.routing.stack import stacks

NAMES = ("e1", "e2")
CHEAP = {"folds": 3, "passes": 60}  # neither lorahub nor atlas, nor gate


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Each expert's examples are in its own words, and answered by it alone."""
    folder = ls.make_place(tmp_path_factory.mktemp("routed"))
    loaded, letters = ls.loaded_of(folder), train_support.LETTERS
    half = len(letters) // 2
    for name, *own in (("e1", "copy :", letters[:half]), ("e2", "reverse =", letters[half:])):
        rows = ls.answered_rows(loaded, folder, 12, 3, {name: 1.0}, own)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def loaded(place):
    return ls.loaded_of(place)


@pytest.fixture(scope="module")
def examples(place, loaded):
    return ls.support_of(place, loaded, *NAMES)


def routable(plan, name, **params):
    method = find_routed(name)
    deltas = [dict(expert.deltas()) for expert in plan.experts]
    names = tuple(expert.name for expert in plan.experts)
    return Routable(method, build_params(method.params, params, name), names, stacks(deltas), 7)


def labelled(examples):
    """The examples as `compose -m NAME` gives them to the method, by hand."""
    return [Labelled(name, [row for row, own in zip(examples.rows, examples.skills, strict=True)
                            if own == name]) for name in NAMES]  # fmt: skip


@pytest.mark.parametrize(("name", "params"), [("retrieval", {}), ("gate", {"steps": 3})])
def test_it_is_measured_as_it_would_be_composed(place, loaded, examples, name, params):
    plan = ls.plan_of(place, *NAMES)
    one = routable(plan, name, **params)
    with opened(plan, loaded, examples, "loss") as (problem, _):
        problem.mixture.set(torch.ones(problem.shape))  # what another candidate left behind
        before = problem.passes
        outcome = routed_candidate(one, plan, problem, loaded, 2).fit(examples.weights()).outcome
        assert problem.passes - before == one.passes(len(examples))
    fit = FitInput(names=one.names, stacks=one.stacks, loaded=loaded, examples=labelled(examples),
                   params=one.params, seed=7)  # fmt: skip
    router = one.method.make(fit).router
    alone = judged.Support(loaded, labelled(examples))
    with routed(loaded, one.stacks, router) as routing, torch.no_grad():
        for i, row in enumerate(examples.rows):
            routing.route([row.prompt_ids])
            (part,) = alone.parts([i])
            loss, right = judged.row_losses(loaded.model, part.batch)
            assert float(outcome.loss[i]) == pytest.approx(float(loss[0]), abs=1e-4)
            assert float(outcome.correct[i]) == float(right[0])


@pytest.mark.parametrize(("name", "params"), [("retrieval", {}), ("gate", {"steps": 3})])
def test_what_is_left_out_changes_nothing(place, loaded, examples, name, params):
    plan = ls.plan_of(place, *NAMES)
    kept = [0, 2, 3, 12, 13, 15]
    rows = list(examples.rows)
    for i in set(range(len(rows))) - set(kept):
        rows[i] = Encoded(rows[i].prompt_ids, [5, 6])
    found = []
    for support in (examples, replace(examples, rows=tuple(rows))):
        with opened(plan, loaded, support, "loss") as (problem, _):
            candidate = routed_candidate(routable(plan, name, **params), plan, problem, loaded, 2)
            found.append(candidate.fit(support.weights(kept)).outcome.loss[kept])
    assert torch.equal(*found)


def test_only_examples_with_a_weight_are_given_in_order():
    rows = tuple(Encoded([i], [9]) for i in range(6))
    support = Support(rows, ("a", "a", "b", "b", "a", "a"), (True,) * 6)
    assert counted(support, support.weights([0, 1, 3, 5])) == [
        Labelled("a", [rows[0], rows[1]]), Labelled("b", [rows[3]]), Labelled("a", [rows[5]])
    ]  # fmt: skip


def test_passes_by_hand(place):
    plan = ls.plan_of(place, *NAMES)
    gate = routable(plan, "gate")
    assert gate.passes(20) == 200 * 3 + 5  # start, end, both experts, one expert, the result
    assert gate.passes(128) == 200 * 3 // 2 + 200 // 2 + 5  # half of them in a step
    assert routable(ls.plan_of(place, "e1"), "gate").passes(20) == 4  # nothing to learn
    assert routable(plan, "retrieval").passes(20) == 3


def test_passes_are_those_that_are_made(place, loaded, examples):
    plan, seen = ls.plan_of(place, *NAMES), []
    one = routable(plan, "gate", steps=4)
    with opened(plan, loaded, examples, "loss") as (problem, _):
        candidate = routed_candidate(one, plan, problem, loaded, 2)
        handle = loaded.model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        candidate.fit(examples.weights())
        handle.remove()
    assert len(seen) + 2 * sum(seen) == one.passes(len(examples))
    assert candidate.passes == 3 * one.passes(len(examples))


def test_a_router_is_chosen_where_skills_have_to_stay_apart(place, loaded, examples):
    plan, seen = ls.plan_of(place, *NAMES), []
    settings = make_auto(CHEAP)
    one = [routable(plan, "retrieval"), routable(plan, "gate")]
    made = choose(plan, loaded, examples, settings, routed=one, progress=seen.append)
    rows = {row.name: row for row in made.table}
    experts = [expert.name for expert in plan.experts]
    assert list(rows) == ["base", *experts, "linear", "task-arithmetic", "ties", "retrieval"]
    assert rows["retrieval"].loss < 0.6 * min(r.loss for n, r in rows.items() if n != "retrieval")
    assert (made.recipe.method, made.recipe.params) == ("retrieval", {})
    tuning = made.recipe.tuning
    assert (tuning["chosen"], tuning["note"], tuning["learned"]) == ("retrieval", "", None)
    assert tuning["left_out"] == ["lorahub", "atlas", "gate"]
    assert [n for n in made.notes if n.startswith("gate was not tried: it takes about 2,420")]
    assert seen[-1] == 3 * 7 <= fits(plan, examples, settings, one)


def test_a_chosen_router_is_left_to_who_composes_it(place, loaded, examples, monkeypatch):
    plan = ls.plan_of(place, *NAMES)
    one = routable(plan, "gate")

    def refuse(_fit):
        raise AssertionError("fitted, though the composition does that")

    never = replace(one, method=replace(one.method, make=refuse))
    monkeypatch.setattr(auto, "cross_validate", lambda kept, *_: [
        Row(c.name, float(c.name == "gate"), 1.0) for c in kept
    ])  # fmt: skip
    made = choose(plan, loaded, examples, make_auto({"folds": 2}), routed=[never])
    assert made.recipe.method == "gate"


def test_an_expert_with_one_example_has_none_in_some_part(place, loaded, examples):
    plan = ls.plan_of(place, *NAMES)
    few = [*range(12), 12, 12]  # of e2 the same row twice
    support = Support(
        tuple(examples.rows[i] for i in few),
        tuple(examples.skills[i] for i in few),
        tuple(examples.answered[i] for i in few),
    )
    one = [routable(plan, "retrieval")]
    made = choose(plan, loaded, support, make_auto(CHEAP), routed=one)
    assert "retrieval" not in [row.name for row in made.table]
    assert made.recipe.tuning["left_out"] == ["lorahub", "atlas", "retrieval"]
    assert made.notes[2] == (
        "retrieval was not tried: e2 has no second example that differs from its first"
    )
    assert routable(plan, "gate").lacks(support, [[12, 13]]) is None
