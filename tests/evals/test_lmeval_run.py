"""From what lm-evaluation-harness returns to a record: scores, ids, texts, refusals."""

import hashlib
import math
from dataclasses import replace

import pytest
import tiny_model as tiny
import torch
from lmeval_support import StandIn

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.evals.checked import load_checked
from cgmerge.evals.comparing import compare_sides, open_side
from cgmerge.evals.lmeval.run import count_requests, evaluate_tasks
from cgmerge.evals.lmeval.translate import Measure, choose_measure, items_of
from cgmerge.evals.record import write_record
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.stats import wilson
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.targets import open_targets
from cgmerge.modules.base import open_base
from cgmerge.modules.data import Example
from cgmerge.modules.loading import load_base

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    rows = tiny.make_rows("copy", 300, seed=1, lengths=(1, 2, 3))
    model = tiny.train(tiny.make_model(3), tiny.make_tokenizer(), rows, steps=60)
    tiny.save(root / "mine", model, tiny.make_tokenizer())
    tiny.make_adapter(root / "one", model, seed=1, size=0.3)
    tiny.make_adapter(root / "idle", model, seed=3, size=0.0)
    tiny.save(root / "whole", tiny.merged(model, root / "one"), tiny.make_tokenizer())
    return root


@pytest.fixture(scope="module")
def loaded(shelf):
    return load_base(open_base(str(shelf / "mine")), device="cpu", dtype="float32")


ROWS = tiny.make_rows("copy", 20, seed=9, lengths=(1, 2, 3))
WRITTEN = [{"context": row["prompt"], "until": ["<eos>"], "most": 8, "target": row["completion"]}
           for row in ROWS]  # fmt: skip


def other(row):
    return f"{row['completion']} h"


CHOICES = [{"context": row["prompt"], "target": 0,
            "answers": [f" {text} <eos>" for text in (row["completion"], other(row))]}
           for row in ROWS]  # fmt: skip


def evaluate(loaded, harness, *targets, measure=None, **settings):
    opened = open_targets([str(one) for one in targets], loaded.base)
    return evaluate_tasks(loaded, opened, harness, Settings(**settings), measure=measure)


def scores(evaluation, skill):
    return {one.target: one.score for one in evaluation.record.results if one.skill == skill}


@pytest.fixture(scope="module")
def found(shelf, loaded):
    harness = StandIn(written=WRITTEN, choices=CHOICES)
    return evaluate(loaded, harness, shelf / "one", shelf / "whole")


def test_scores_are_those_of_our_own_runner(shelf, loaded, found):
    """The same rows, the same exact match and the same choices, target by target."""
    skill = SkillSet("own", tuple(Example(r["prompt"], r["completion"]) for r in ROWS))
    targets = open_targets([str(shelf / "one"), str(shelf / "whole")], loaded.base)
    own = evaluate_targets(loaded, targets, [skill])
    assert scores(found, "written") == scores(own, "own")
    assert 0 < scores(own, "own")["base"] < 1  # neither all nor nothing, so that it says something
    right = [item.correct for item in own.items]
    assert [item.correct for item in found.items if item.skill == "written"] == right
    offered = [
        Example(r["prompt"], r["completion"], extra={"choices": [r["completion"], other(r)]})
        for r in ROWS
    ]
    settings = Settings(metric="choice")
    own = evaluate_targets(loaded, targets, [SkillSet("own", tuple(offered))], settings)
    assert scores(found, "choices") == scores(own, "own")
    logliks = [item.choices[0].loglik for item in own.items]
    theirs = [item.measures["loglik"] for item in found.items if item.skill == "choices"]
    assert theirs == pytest.approx(logliks, abs=1e-4)


def test_the_record_says_what_was_asked(loaded, found):
    record = found.record
    assert record.settings.metric == "lm_eval_right"
    assert [(one.name, one.n, one.source, one.measure) for one in record.skills] == [
        ("written", 20, "written.yaml", "exact_match,none"),
        ("choices", 20, "choices.yaml", "acc,none"),
    ]
    assert record.versions["lm_eval"] == "stand-in"
    assert [one.kind for one in record.targets] == ["base", "expert", "model"]
    assert all(one.loglik is None for one in record.results)
    (first, *_) = record.results
    interval = wilson(first.correct, first.n)
    assert (first.low, first.high) == (interval.low, interval.high)
    assert {one.against for one in record.comparisons} == {"base"}


def test_items_keep_every_number_of_the_harness(found):
    item = next(one for one in found.items if one.skill == "choices")
    assert set(item.measures) == {"acc,none", "acc_norm,none", "loglik"}  # f1 is no number
    assert item.value == item.measures["acc,none"] == float(item.correct)
    assert item.measures["loglik"] < 0
    assert item.expected == f"{ROWS[0]['completion']} <eos>"
    key = "\0".join(["choices", ROWS[0]["prompt"], item.expected])
    assert item.id == hashlib.sha256(key.encode()).hexdigest()[:16]
    written = next(one for one in found.items if one.skill == "written")
    assert (written.expected, written.loglik) == (ROWS[0]["completion"], None)
    assert (written.prediction == written.expected) is written.correct


def test_records_are_compared_and_checked_like_all_others(tmp_path, found):
    write_record(tmp_path / "r.json", found)
    checked = load_checked(tmp_path / "r.json")
    assert checked.record.results == found.record.results
    assert checked.items == found.items
    compared = compare_sides(*(open_side(f"{tmp_path}/r.json:{name}") for name in ("base", "one")))
    assert compared.overall.n == 40
    flips = sum(a.correct != b.correct for a, b in zip(
        *([i for i in found.items if i.target == name] for name in ("base", "one")), strict=True
    ))  # fmt: skip
    assert len(compared.flips) == flips > 0


def test_progress_counts_requests(shelf, loaded):
    harness = StandIn(written=WRITTEN[:3], choices=CHOICES[:4])
    targets, settings = open_targets([str(shelf / "one")], loaded.base), Settings()
    seen = []
    evaluate_tasks(loaded, targets, harness, settings,
                   progress=lambda done, note="": seen.append((done, note)))  # fmt: skip
    assert seen[-1] == (count_requests(targets, harness, settings), "one") == (22, "one")


def test_a_limit_and_no_base(shelf, loaded):
    found = evaluate(loaded, StandIn(choices=CHOICES), shelf / "one", limit=5, keeps_base=False)
    assert [(one.target, one.n) for one in found.record.results] == [("one", 5)]
    assert found.record.settings.limit == 5
    assert found.record.comparisons == ()


def test_targets_that_are_the_base_are_refused_before_the_work(shelf, loaded):
    harness = StandIn(choices=CHOICES)
    with pytest.raises(Incompatible) as error:
        evaluate(loaded, harness, shelf / "one", shelf / "idle")
    assert error.value.code == "incompatible.same_as_base"
    assert error.value.details["targets"] == ["idle"]
    assert harness.asked == 0
    same = evaluate(loaded, harness, shelf / "idle", expects_same=True)
    assert len(set(scores(same, "choices").values())) == 1


def test_a_model_that_gives_nan_is_named(shelf, loaded, tmp_path):
    broken = tiny.make_model(3)
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    tiny.save(tmp_path / "broken", broken, tiny.make_tokenizer())
    with pytest.raises(Damaged, match="target broken"):
        evaluate(loaded, StandIn(choices=CHOICES), tmp_path / "broken")


def test_another_metric_of_the_tasks(loaded):
    found = evaluate(loaded, StandIn(choices=CHOICES), measure="acc_norm")
    assert found.record.skills[0].measure == "acc_norm,none"
    values = [item.measures["acc_norm,none"] for item in found.items]
    assert [item.value for item in found.items] == values
    with pytest.raises(UsageError) as error:
        evaluate(loaded, StandIn(choices=CHOICES), measure="f1")
    assert error.value.code == "usage.measure"
    assert "acc,none, acc_norm,none" in error.value.hint


def sample(place, **fields):
    metrics = {k: v for k, v in fields.items() if k not in ("target", "answers", "filter")}
    return {
        "doc_id": place, "target": fields.get("target", "x"), "arguments": [("p", {})],
        "filtered_resps": fields.get("answers", ["x"]), "filter": fields.get("filter", "none"),
        "metrics": list(metrics), **metrics,
    }  # fmt: skip


def returned(samples, results, **better):
    return {"samples": {"t": samples}, "results": {"t": results}, "higher_is_better": {"t": better}}


def test_the_first_share_of_which_more_is_better_is_the_score():
    pair = ("a", "b")
    rows = [
        sample(0, bleu=pair, ter=0.5, chars=30.0, f=0.5),
        sample(1, bleu=pair, ter=0.0, chars=1.0, f=1.0),
    ]
    theirs = {"bleu,none": 3.0, "ter,none": 0.25, "chars,none": 15.5, "f,none": 0.75}
    answer = returned(rows, theirs, ter=False)
    assert choose_measure("t", answer, None) == Measure("f", "none")
    assert [one.value for one in items_of("m", "t", rows, Measure("f", "none"))] == [0.5, 1.0]
    for wanted in ("bleu", "ter", "chars"):
        with pytest.raises(UsageError, match=f"no score '{wanted}'"):
            choose_measure("t", answer, wanted)


def test_a_score_that_is_no_mean_of_its_items_is_refused():
    rows = [sample(0, acc=1.0), sample(1, acc=0.0)]
    assert choose_measure("t", returned(rows, {"acc,none": 0.5}), None) == Measure("acc", "none")
    with pytest.raises(UsageError) as error:
        choose_measure("t", returned(rows, {"acc,none": 0.6}), None)
    assert error.value.code == "usage.measure"


def test_filters_are_kept_apart():
    rows = [sample(0, exact_match=0.0, filter="strict"), sample(0, exact_match=1.0, filter="loose")]
    theirs = {"exact_match,strict": 0.0, "exact_match,loose": 1.0}
    answer = returned(rows, theirs)
    assert str(choose_measure("t", answer, None)) == "exact_match,strict"
    chosen = choose_measure("t", answer, "exact_match,loose")
    (item,) = items_of("m", "t", rows, chosen)
    assert (item.value, item.measures) == (1.0, theirs)


def test_repeated_items_have_ids_of_their_own():
    rows = [sample(1, acc=1.0), sample(0, acc=0.0)]
    items = items_of("m", "t", rows, Measure("acc", "none"))
    assert [item.value for item in items] == [0.0, 1.0]  # in the order of the data
    assert len({item.id for item in items}) == 2
    del rows[0]["acc"], rows[0]["metrics"][0]
    with pytest.raises(Incompatible, match="item 1 has no acc"):
        items_of("m", "t", rows, Measure("acc", "none"))


def test_answers_without_context_are_no_choices():
    """Mutual information asks every choice twice, the second time of nothing."""
    one = sample(0, acc=1.0, acc_mutual_info=1.0, target=1)
    one |= {
        "arguments": [("p", " a"), ("p", " b"), ("", " a"), ("", " b")],
        "filtered_resps": [(-3.0, False), (-2.0, True), (-0.1, True), (-9.0, False)],
    }
    (item,) = items_of("m", "t", [one], Measure("acc", "none"))
    assert (item.prediction, item.expected, item.measures["loglik"]) == ("b", "b", -2.0)


def test_graded_scores_get_a_bootstrap(loaded):
    class Graded(StandIn):
        def ask(self, model, limit):
            found = super().ask(model, limit)
            for place, one in enumerate(found["samples"]["choices"]):
                one["rouge"] = place / 20
                one["metrics"].append("rouge")
            found["results"]["choices"]["rouge,none"] = 9.5 / 20
            return found

    found = evaluate(loaded, Graded(choices=CHOICES), measure="rouge")
    assert found.record.settings.metric == "lm_eval"
    (result,) = found.record.results
    assert result.score == pytest.approx(0.475)
    assert (result.low, result.high) != (wilson(10, 20).low, wilson(10, 20).high)
    assert result.correct == 0  # an item of which only a part was given is not right


def test_tables_of_tasks_know_every_task(shelf, loaded):
    from types import SimpleNamespace

    (target,) = open_targets([str(shelf / "one")], loaded.base)
    routed = replace(target, deltas=None, composition=SimpleNamespace(tasks=["other"]))
    with pytest.raises(UsageError, match="routes by task"):
        evaluate_tasks(loaded, [routed], StandIn(choices=CHOICES), Settings())
