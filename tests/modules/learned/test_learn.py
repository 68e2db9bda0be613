"""Learned on a real model: better than what is simple, and the same when it is written."""

import json
import os
import subprocess
import sys

import learned_support as ls
import pytest
import support
import torch

from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.attach import attached
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.expert import open_expert
from cgmerge.modules.learned.learn import check_learnable, learn, opened, points, static_recipe
from cgmerge.modules.learned.objectives import Support
from cgmerge.modules.learned.presets import make_learner

NAMES = ("e1", "e2", "e3")
QUICK = {
    "lorahub": {"evaluations": 15},
    "atlas": {"steps": 6, "lr": 0.1},
    "adamerging": {"steps": 4, "lr": 0.05},
    "soups": {"steps": 4},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return ls.make_place(tmp_path_factory.mktemp("learn"))


@pytest.fixture(scope="module")
def loaded(place):
    return ls.loaded_of(place)


def learned(place, loaded, method, *names, files=("first",), folds=0, **options):
    plan = ls.plan_of(place, *(names or NAMES))
    examples = ls.support_of(place, loaded, *files)
    learner = make_learner(method, {**QUICK[method], "folds": folds, **options})
    return learn(plan, loaded, examples, method, learner)


def logits_with(loaded, deltas):
    ids = torch.tensor([[4, 6, 8, 9, 10, 11, 7], [5, 6, 9, 9, 13, 12, 7]])
    with torch.no_grad(), attached(loaded.model, deltas):
        return loaded.model(ids).logits


@pytest.mark.parametrize("method", QUICK)
def test_what_is_written_is_what_was_learned(place, loaded, tmp_path, method):
    made = learned(place, loaded, method)
    plan = make_plan(made.recipe)
    composed = run_plan(plan, tmp_path / "out")
    assert composed.truncation_error < 1e-6
    ids = torch.tensor([[4, 6, 8, 9, 10, 11, 7], [5, 6, 9, 9, 13, 12, 7]])
    values, groups = made.learned.coefficients.values, made.learned.coefficients.groups
    examples = ls.support_of(place, loaded, "first")
    with opened(plan, loaded, examples, "loss") as (problem, active), torch.no_grad():
        assert active == [0, 1, 2]
        problem.mixture.set(values[:, groups.index(problem.mixture.modules)])
        mixed = loaded.model(ids).logits
        assert problem.measure().loss.mean() == pytest.approx(made.learned.mark.loss, abs=1e-5)
    written = logits_with(loaded, open_expert(str(tmp_path / "out")).deltas())
    assert torch.allclose(mixed, written, atol=1e-4)
    assert float((mixed - logits_with(loaded, {})).abs().max()) > 0.1
    assert len(plan.parts) == (0 if method == "lorahub" else len(groups.names))


def test_lorahub_finds_the_mix_that_answered(place, loaded):
    made = learned(place, loaded, "lorahub", evaluations=40, l1=0, files=("first", "second"))
    names = made.recipe.tuning["coefficients"]["experts"]
    found = dict(zip(names, made.learned.coefficients.values[:, 0].tolist(), strict=True))
    assert found["e1"] > 0.3
    assert found["e2"] < 0  # its negative weight is honoured
    marks = made.learned
    assert marks.mark.objective < min(
        marks.base.objective, marks.average.objective, *[m.objective for m in marks.singles]
    )
    assert marks.passes <= 45


def test_finer_coefficients_fit_better(place, loaded):
    coarse = learned(place, loaded, "atlas", granularity="model", steps=15)
    fine = learned(place, loaded, "atlas", steps=15)
    assert fine.learned.mark.objective < coarse.learned.mark.objective
    assert fine.learned.mark.objective < min(fine.learned.curve[0], fine.learned.base.objective)


@pytest.mark.parametrize("method", ["lorahub", "atlas"])
def test_the_order_of_experts_changes_no_byte(place, loaded, tmp_path, method):
    folders = []
    for number, names in enumerate((NAMES, ("e3", "e1", "e2"))):
        made = learned(place, loaded, method, *names)
        by_name = {item.ref.rsplit("/", 1)[-1]: item.weight for item in made.recipe.experts}
        assert list(by_name) == list(names)
        run_plan(make_plan(made.recipe), tmp_path / str(number))
        folders.append(support.folder_bytes(tmp_path / str(number)))
    assert folders[0] == folders[1]


def test_parts_have_the_weights_of_their_own_experts(place, loaded):
    made = learned(place, loaded, "atlas", "e3", "e1", "e2")
    plan = ls.plan_of(place, "e3", "e1", "e2")
    values = made.learned.coefficients.values
    for part in made.recipe.parts:
        place_ = made.learned.coefficients.groups.names.index(part.modules[0])
        for given, weight in enumerate(part.weights):
            assert weight == float(values[plan.given[given], place_])
    means = static_recipe(plan, made.learned.coefficients).experts
    assert means[0].weight == pytest.approx(float(values[plan.given[0]].mean()))


def test_the_record_says_how_it_was_learned_and_repeats_the_bytes(place, loaded, tmp_path):
    made = learned(place, loaded, "lorahub", files=("first", "second"), folds=3)
    run_plan(make_plan(made.recipe), tmp_path / "out")
    tuning = json.loads((tmp_path / "out" / "cgmerge.json").read_text())["tuning"]
    assert tuning["method"] == "lorahub"
    assert tuning["settings"]["evaluations"] == 15
    assert len(tuning["curve"]) <= 15
    assert tuning["learned"]["objective"] == min(tuning["curve"])
    assert {e["name"] for e in tuning["experts"]} == set(NAMES)
    assert set(tuning["coefficients"]["groups"]) == {"all modules"}
    rows = tuning["crossvalidation"]["rows"]
    assert tuning["crossvalidation"]["folds"] == 3
    assert [row["name"] for row in rows] == ["base", "best expert", "average", "lorahub"]
    assert rows[0]["loss"] == pytest.approx(tuning["base"]["loss"])  # it learns nothing
    assert rows[2]["loss"] == pytest.approx(tuning["average"]["loss"])
    from cgmerge.modules.recipe import read_recipe

    again = read_recipe(tmp_path / "out" / "cgmerge.json")
    run_plan(make_plan(again), tmp_path / "again")
    assert support.folder_bytes(tmp_path / "out") == support.folder_bytes(tmp_path / "again")


def test_a_mix_that_does_not_carry_over_is_called_so(place, loaded, monkeypatch):
    from cgmerge.modules.learned import learn as module
    from cgmerge.modules.learned.crossval import Row

    def table(candidates, *_):
        return [Row(c.name, 0.5 - 0.1 * (c.name == "atlas"), 1.0) for c in candidates]

    monkeypatch.setattr(module, "cross_validate", table)
    made = learned(place, loaded, "atlas", folds=2)
    assert "base is better than what atlas learned (right 0.50 against 0.40" in made.notes[-1]
    monkeypatch.setattr(
        module, "cross_validate", lambda cs, *_: [Row(c.name, 0.5, 1.0) for c in cs]
    )
    assert not learned(place, loaded, "atlas", folds=2).notes


def test_an_expert_that_changes_nothing_gets_no_coefficient(place, loaded):
    made = learned(place, loaded, "lorahub", "zero", "e1", "e2")
    assert made.recipe.experts[0].weight == 0.0
    assert "zero: changes nothing" in made.notes[0]
    assert len(made.recipe.tuning["experts"]) == 2
    with pytest.raises(Incompatible, match="every delta is zero"):
        learned(place, loaded, "lorahub", "zero")


def test_one_expert_gets_its_strength(place, loaded):
    made = learned(place, loaded, "lorahub", "e1")
    assert 0.1 < made.recipe.experts[0].weight <= 1.5
    with pytest.raises(UsageError, match="nothing to learn with one expert"):
        learned(place, loaded, "soups", "e1", "zero")


def test_where_only_the_base_is_right_nothing_is_composed(place, loaded):
    plan = ls.plan_of(place, "e1", "e2")
    examples = ls.support_of(place, loaded, "first", limit=2)
    with torch.no_grad():
        rows = []
        for row in examples.rows:
            answer = loaded.model(torch.tensor([row.prompt_ids])).logits[0, -1].argmax()
            rows.append(type(row)(row.prompt_ids, [int(answer)]))
    easy = Support(tuple(rows), examples.skills, examples.answered)
    learner = make_learner("lorahub", {"l1": 50, "folds": 0})
    with pytest.raises(Incompatible, match="none of the experts helps"):
        learn(plan, loaded, easy, "lorahub", learner)
    allowed = ls.plan_of(place, "e1", "e2", allow_noop=True)
    made = learn(allowed, loaded, easy, "lorahub", learner)
    assert [item.weight for item in made.recipe.experts] == [0.0, 0.0]


def test_entropy_needs_no_answers_and_reads_none(place, loaded):
    asked = learned(place, loaded, "adamerging", files=("second",))
    bare = learned(place, loaded, "adamerging", files=("prompts",))
    # The same prompts, with answers and without.
    for one, other in zip(asked.recipe.parts, bare.recipe.parts, strict=True):
        assert one.weights == pytest.approx(other.weights, abs=1e-5)
    assert asked.learned.mark.objective <= asked.learned.curve[0]
    along = learned(place, loaded, "adamerging", files=("second",), reads="answer")
    assert along.recipe.parts != asked.recipe.parts
    checked = learned(place, loaded, "adamerging", files=("second",), folds=2)
    assert [row.name for row in checked.table][-1] == "adamerging"
    assert not learned(place, loaded, "adamerging", files=("prompts",), folds=2).table


def test_progress_counts_to_its_end(place, loaded):
    plan, seen = ls.plan_of(place, "e1"), []
    examples = ls.support_of(place, loaded, "first")
    learner = make_learner("atlas", {"steps": 2, "folds": 2})
    learn(plan, loaded, examples, "atlas", learner, progress=seen.append)
    assert seen == list(range(1, points(examples, learner) + 1)) == list(range(1, 10))


def test_refusals(place):
    with pytest.raises(UsageError, match="weights are what is learned"):
        check_learnable(ls.plan_of(place, "e1=0.5", "e2"))
    with pytest.raises(UsageError, match="runs the base"):
        check_learnable(ls.plan_of(place, "e1", base=None))


def test_another_process_and_hash_seed_write_the_same_bytes(run, place, tmp_path):
    words = ["compose", *[str(place / name) for name in NAMES], "--base", str(place / "base")]
    words += ["-m", "atlas", "--set", "steps=3", "--set", "folds=2"]
    words += ["--examples", str(place / "first.jsonl"), "-q", "-o"]
    code, _, err = run(*words, tmp_path / "here")
    assert code == 0, err
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cgmerge", *words, str(tmp_path / "there")]
    subprocess.run(command, env=environment, check=True)
    assert support.folder_bytes(tmp_path / "here") == support.folder_bytes(tmp_path / "there")
