"""The choice among methods: what is tried, what it costs, what is composed."""

import learned_support as ls
import pytest
import torch

from cgmerge.errors import DataError
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.expert import open_expert
from cgmerge.modules.learned.auto import SCALES, affordable, candidates, choose, fits
from cgmerge.modules.learned.crossval import Candidate
from cgmerge.modules.learned.learn import opened
from cgmerge.modules.learned.presets import make_auto
from cgmerge.modules.loading import load_base

NAMES = ("e1", "e2", "e3")
CHEAP = {"folds": 2, "passes": 30}  # neither lorahub nor atlas


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return ls.make_place(tmp_path_factory.mktemp("auto"))


@pytest.fixture(scope="module")
def loaded(place):
    return ls.loaded_of(place)


def test_every_candidate_is_measured_as_it_would_be_composed(place, loaded, tmp_path):
    plan = ls.plan_of(place, *NAMES)
    examples = ls.support_of(place, loaded, "first", limit=4)
    weights = examples.weights()
    with opened(plan, loaded, examples, "loss") as (problem, active):
        everything = candidates(plan, problem, loaded, active, 2)
        fitted = {one.name: one.fit(weights) for one in everything if one.name != "atlas"}
        assert next(iter(fitted)) == "base"
        assert set(fitted) == {"base", *NAMES, "linear", "task-arithmetic", "ties", "lorahub"}
        nothing = torch.zeros(problem.shape)
        for name, one in fitted.items():
            if one.recipe is None:
                continue
            run_plan(make_plan(one.recipe), tmp_path / name)
            problem.mixture.set(nothing)
            with attached(loaded.model, open_expert(str(tmp_path / name)).deltas()):
                found = problem.measure()
            assert torch.allclose(found.loss, one.outcome.loss, atol=1e-4), name
        losses = {name: float((weights * f.outcome.loss).sum()) for name, f in fitted.items()}
    assert losses["lorahub"] < losses["base"]
    assert fitted["task-arithmetic"].note.startswith("scale ")


def test_ties_is_measured_without_a_rank_where_a_model_is_written(place, loaded, tmp_path):
    examples = ls.support_of(place, loaded, "first", limit=4)
    losses = {}
    for form in ("model", "adapter"):
        plan = ls.plan_of(place, *NAMES, form=form)
        before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
        with opened(plan, loaded, examples, "loss") as (problem, active):
            rule = next(c for c in candidates(plan, problem, loaded, active, 2) if c.name == "ties")
            fitted = rule.fit(examples.weights())
        after = loaded.model.state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        losses[form] = fitted.outcome.loss
        if form == "model":
            run_plan(make_plan(fitted.recipe), tmp_path / "out")
            written = load_base(open_base(str(tmp_path / "out")), device="cpu", dtype="float32")
            nothing = ls.plan_of(place, "e1")
            with opened(nothing, written, examples, "loss") as (problem, _):
                found = problem.outcome(torch.zeros(problem.shape, dtype=torch.float64)).loss
            assert torch.allclose(found, fitted.outcome.loss, atol=1e-5)
    assert (losses["model"] - losses["adapter"]).abs().max() > 1e-3  # the rank cuts visibly here


def test_the_scale_is_chosen_on_the_examples_that_count(place, loaded):
    plan = ls.plan_of(place, *NAMES)
    examples = ls.support_of(place, loaded, "first", limit=4)
    with opened(plan, loaded, examples, "loss") as (problem, active):
        rule = next(c for c in candidates(plan, problem, loaded, active, 2) if c.name == "ties")
        for kept in ([0], [1, 2], [3]):
            weights = examples.weights(kept)
            chosen = rule.fit(weights)
            values = [rule_at(rule, problem, s, plan, weights) for s in SCALES]
            assert float((weights * chosen.outcome.loss).sum()) == pytest.approx(min(values))


def rule_at(rule, problem, scale, plan, weights):
    """The loss of TIES at one scale, merged anew."""
    from dataclasses import replace

    recipe = replace(plan.recipe, method="ties", params={"scale": scale})
    merger = make_plan(recipe).merger()
    deltas = {name: merger.factors(name, plan.rank).delta for name in merger.names}
    problem.mixture.set(torch.zeros(problem.shape))
    with attached(problem.model, deltas):
        return float((weights * problem.measure().loss).sum())


def test_the_best_on_left_out_examples_is_composed(place, loaded):
    plan = ls.plan_of(place, *NAMES)
    examples = ls.support_of(place, loaded, "first", "second", limit=4)
    settings, seen = make_auto(CHEAP), []
    made = choose(plan, loaded, examples, settings, progress=seen.append)
    rows = {row.name: row for row in made.table}
    assert list(rows) == ["base", *[e.name for e in plan.experts], "linear", "task-arithmetic",
                          "ties"]  # fmt: skip
    tuning = made.recipe.tuning
    best = max((row for name, row in rows.items() if name != "base"), key=lambda row: row.rank)
    assert tuning["chosen"] == best.name
    assert tuning["left_out"] == ["lorahub", "atlas"]
    assert [n for n in made.notes if n.startswith("lorahub was not tried")]
    assert seen[-1] <= fits(plan, examples, settings)
    make_plan(made.recipe)


def test_a_single_expert_is_composed_alone(place, loaded, monkeypatch):
    from cgmerge.modules.learned import auto
    from cgmerge.modules.learned.crossval import Row

    def table(kept, *_):
        return [Row(one.name, float(one.name == "e2"), 1.0) for one in kept]

    monkeypatch.setattr(auto, "cross_validate", table)
    plan = ls.plan_of(place, *NAMES)
    examples = ls.support_of(place, loaded, "first", limit=4)
    made = choose(plan, loaded, examples, make_auto(CHEAP))
    assert [item.ref for item in made.recipe.experts] == [str(place / "e2")]
    assert made.recipe.tuning["note"] == "alone"
    monkeypatch.setattr(
        auto, "cross_validate", lambda kept, *_: [Row(one.name, 0.5, 1.0) for one in kept]
    )
    equal = choose(plan, loaded, examples, make_auto(CHEAP))
    assert equal.recipe.tuning["chosen"] == plan.experts[0].name  # the first of equals
    assert "no candidate is better than the base" in equal.notes[-1]


def test_one_example_is_too_few(place, loaded):
    plan = ls.plan_of(place, *NAMES)
    examples = ls.support_of(place, loaded, "first", limit=1)
    with pytest.raises(DataError, match="at least two different examples"):
        choose(plan, loaded, examples, make_auto())


def test_what_passes_allow():
    items = [Candidate(name, lambda w: w, passes) for name, passes in
             (("base", 1), ("a", 1), ("b", 10), ("c", 100), ("d", 5))]  # fmt: skip
    kept, left = affordable(items, 20)
    assert [one.name for one in kept] == ["base", "a", "b", "d"]
    assert [one.name for one in left] == ["c"]
    kept, _ = affordable(items, 1)
    assert [one.name for one in kept] == ["base", "a"]  # something must be there to choose
