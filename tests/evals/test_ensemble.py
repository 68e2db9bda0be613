"""Experts asked together: probabilities averaged as by hand, weights that validation data wants."""

import json
import math

import case_support as cases
import pytest
import tiny_model
import torch

from cgmerge.errors import UsageError
from cgmerge.evals.ensemble import ensemble_of, pool_weights
from cgmerge.evals.targets import Target


def test_weights_of_a_pool_by_hand():
    # The first expert is right on the one token, the other on three: w maximises
    # ln(0.9w + 0.1(1-w)) + 3 ln(0.1w + 0.9(1-w)), whose derivative is 0 at w = 3/16.
    likely = torch.tensor([[0.9, 0.1, 0.1, 0.1], [0.1, 0.9, 0.9, 0.9]]).double().log()
    found = pool_weights(likely, torch.full((4,), 0.25).double())
    assert found == pytest.approx([3 / 16, 13 / 16], abs=1e-3)
    # Tokens that count for nothing decide nothing.
    alone = pool_weights(likely, torch.tensor([1.0, 0.0, 0.0, 0.0]).double())
    assert alone == pytest.approx([1.0, 0.0], abs=1e-6)


def test_tokens_that_all_find_impossible_are_no_obstacle():
    likely = torch.tensor([[-2000.0, -1.0], [-2001.0, -3.0]]).double()
    found = pool_weights(likely, torch.full((2,), 0.5).double())
    assert found == pytest.approx([1.0, 0.0], abs=1e-6)
    assert all(math.isfinite(one) for one in found)


def test_one_expert_is_no_ensemble():
    with pytest.raises(UsageError, match="at least two experts, found 1"):
        ensemble_of([Target("a", "expert", "d", {})])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensemble")
    model, tokenizer = tiny_model.make_model(5), tiny_model.make_tokenizer()
    tiny_model.save(folder / "base", model, tokenizer)
    for seed, name in enumerate(("one", "two", "three"), start=1):
        tiny_model.make_adapter(folder / name, model, seed=seed)
    tiny_model.write_jsonl(folder / "copy.jsonl", tiny_model.make_rows("copy", 9))
    tiny_model.write_jsonl(folder / "val.jsonl", tiny_model.make_rows("copy", 7, seed=4))
    return folder


@pytest.fixture
def evaluate(run, place, monkeypatch):
    monkeypatch.chdir(place)

    def call(*more, experts=("one", "two", "three")):
        return run("eval", *experts, "--base", "base", "--data", "copy.jsonl", *more, "--json")

    return call


def by_hand(place, names, weights):
    """Mean log-probability of each row's target, with plain transformers and peft, batch 1."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    rows = [json.loads(line) for line in (place / "copy.jsonl").read_text().splitlines()]
    said = []
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float64)
        torch.manual_seed(99)
        model = PeftModel.from_pretrained(model, place / name).double().eval()
        parts = []
        for row in rows:
            prompt = tokenizer(row["prompt"]).input_ids
            full = tokenizer(f"{row['prompt']} {row['completion']}").input_ids
            full = [*full, tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(torch.tensor([full])).logits[0].log_softmax(-1)
            parts.append(logits[len(prompt) - 1 : -1].exp())
        said.append(parts)
    found = []
    for place_, row in enumerate(rows):
        pooled = sum(w * parts[place_] for w, parts in zip(weights, said, strict=True)).log()
        target = [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        right = pooled[torch.arange(len(target)), torch.tensor(target)]
        found.append((float(right.mean()), pooled.argmax(-1).tolist() == target))
    return found


def items_of(place, target):
    lines = (place / "r.items.jsonl").read_text().splitlines()
    return [item for item in map(json.loads, lines) if item["target"] == target]


def test_equal_weights_are_the_mean_of_probabilities(evaluate, place):
    found = cases.done(evaluate("--ensemble", "-o", "r.json", "--overwrite"))
    assert [r["target"] for r in found["results"]][-1] == "ensemble"
    expected = by_hand(place, ("one", "two", "three"), [1 / 3] * 3)
    items = items_of(place, "ensemble")
    assert [i["loglik"] for i in items] == pytest.approx([e for e, _ in expected], abs=1e-5)
    assert [i["correct"] for i in items] == [right for _, right in expected]
    record = json.loads((place / "r.json").read_text())
    made = next(one for one in record["targets"] if one["name"] == "ensemble")
    assert made["kind"] == "baseline"
    assert made["note"] == ("mean of next-token probabilities: one 0.333, two 0.333, three 0.333")


def test_stacked_weights_are_those_that_validation_data_wants(evaluate, place):
    cases.done(evaluate("--ensemble", "--validation", "val.jsonl", "-o", "r.json", "--overwrite"))
    record = json.loads((place / "r.json").read_text())
    note = next(one["note"] for one in record["targets"] if one["name"] == "stacked")
    assert "weights from val.jsonl (sha256 " in note
    weights = [
        float(part.split()[-1]) for part in note.partition(": ")[2].split(" (")[0].split(",")
    ]
    assert sum(weights) == pytest.approx(1, abs=0.01)
    items = items_of(place, "stacked")
    expected = by_hand(place, ("one", "two", "three"), weights)  # three digits of the weights
    assert [i["loglik"] for i in items] == pytest.approx([e for e, _ in expected], abs=0.02)


def test_stacking_gains_on_the_data_it_saw(run, place, monkeypatch):
    from cgmerge.evals.ensemble import stack
    from cgmerge.evals.runner import Settings, evaluate_targets
    from cgmerge.evals.suite import read_skills
    from cgmerge.evals.targets import open_targets
    from cgmerge.modules.base import open_base
    from cgmerge.modules.loading import load_base

    monkeypatch.chdir(place)
    base = open_base("base")
    loaded, skills = load_base(base), read_skills(["val.jsonl"])
    experts = open_targets(["one", "two", "three"], base)
    stacked = stack(loaded, experts, skills, batch_size=4)
    found = evaluate_targets(
        loaded, [*experts, ensemble_of(experts), stacked], skills, Settings(metric="loglik")
    )
    means = {one.target: one.score for one in found.record.means}
    others = [score for name, score in means.items() if name != "stacked"]
    assert means["stacked"] >= max(others) - 1e-6
    assert means["stacked"] > means["ensemble"] + 1e-4
    again = stack(loaded, experts, skills, batch_size=1)
    assert [w for _, w in again.members] == pytest.approx([w for _, w in stacked.members], abs=1e-4)


def test_the_base_is_as_it_was(evaluate, place):
    before = cases.done(evaluate())["results"][0]
    after = cases.done(evaluate("--ensemble"))["results"]
    assert after[0] == before
    assert [one["target"] for one in after] == ["base", "one", "two", "three", "ensemble"]


@pytest.mark.parametrize(
    ("more", "experts", "code", "said"),
    [
        (("--ensemble",), ("one",), "usage.experts", "at least two"),
        (("--ensemble", "--generate"), ("one", "two"), "usage.ensemble", "does not write texts"),
        (("--ensemble",), ("ensemble=one", "two"), "usage.name", "ensemble"),
        (
            ("--ensemble", "--validation", "copy.jsonl"),
            ("one", "two"),
            "usage.validation",
            "scored",
        ),
    ],
)
def test_what_is_no_ensemble_is_refused_before_any_work(evaluate, more, experts, code, said):
    cases.refused(evaluate(*more, experts=experts), 2, code, said)
