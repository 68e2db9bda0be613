"""The demo end to end with few steps, and the sweep it is made of."""

import json

import pytest
import support
import torch

from cgmerge.evals import demo
from cgmerge.evals.record import load_record
from cgmerge.evals.summary import group_scores
from cgmerge.evals.sweep import Candidate, best, merge_in_memory, sweep
from cgmerge.evals.tasks import chains
from cgmerge.merge import merge_state_dicts, pad_rank


@pytest.mark.slow
def test_demo_leaves_what_it_promises(run, tmp_path):
    out = tmp_path / "d"
    code, text, err = run("demo", "--out", out, "--steps", 3, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert set(result["checks"]) == {
        "new_skill_gain", "unseen_pair_gain", "own_skill_min", "base_kept",
    }  # fmt: skip
    assert result["out"] == str(out)
    # Three steps teach little, but the base must be intact.
    assert result["checks"]["base_kept"] >= 0.9
    evaluation = load_record(out / "record.json")
    names = [target.name for target in evaluation.record.targets]
    assert names == ["base", *demo.SKILLS, "task-arithmetic", "ties"]
    assert sorted(path.name for path in (out / "experts").iterdir()) == sorted(demo.SKILLS)
    assert (out / "merged-ties" / "cgmerge.json").exists()
    page = (out / "report.html").read_text()
    for words in (
        "Four skills, merged",
        "chosen on caesar.validation.jsonl",
        "unseen pairs against",
    ):
        assert words in page
    assert page.count("<polyline") == 2  # a curve of scales for each merge
    code, _, err = run("demo", "--out", out, "--steps", 3)
    assert code == 2
    assert "--overwrite" in err


def test_training_data_holds_no_test_prompt_and_no_pair_of_skills(tmp_path):
    folder = demo.write_data(tmp_path, 0)
    held_out = set()
    for path in folder.glob("*.test.jsonl"):
        held_out |= {json.loads(line)["prompt"] for line in path.read_text().splitlines()}
    validation = set()
    for path in folder.glob("*.validation.jsonl"):
        validation |= {json.loads(line)["prompt"] for line in path.read_text().splitlines()}
    assert not held_out & validation
    for skill in demo.SKILLS:
        rows = (folder / f"{skill}.train.jsonl").read_text().splitlines()
        prompts = {json.loads(row)["prompt"] for row in rows}
        assert not prompts & (held_out | validation)
        others = set(demo.SKILLS) - {skill}
        assert not any(set(prompt.split(" : ")[0].split()) & others for prompt in prompts)


@pytest.fixture(scope="module")
def tiny():
    from cgmerge.modules.base import open_base
    from cgmerge.modules.loading import load_base

    return load_base(open_base("tiny"), device="cpu", dtype="float32")


def factors(tiny, tmp_path, count=2):
    from cgmerge.modules.expert import open_expert

    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in tiny.base.modules.items()
        if path.endswith(("q_proj", "down_proj"))
    }
    found = []
    for seed in range(count):
        folder = support.make_expert(tmp_path / f"s{seed}", shapes, seed=seed, std=0.05)
        deltas = open_expert(str(folder)).deltas(tiny.base)
        found.append({path: deltas[path] for path in deltas})
    return found


def test_merge_in_memory_is_the_merge(tiny, tmp_path):
    experts = factors(tiny, tmp_path)
    merged = merge_in_memory(experts, "task-arithmetic", {}, ids=["a", "b"])
    dense = [{path: delta.dense() for path, delta in one.items()} for one in experts]
    expected = merge_state_dicts("task-arithmetic", dense)
    for path, delta in merged.items():
        assert torch.allclose(delta.dense(), expected[path], atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("method", "params"),
    [("dare", {"drop": 0.7}), ("della", {}), ("dare-ties", {"seed": 3}), ("slerp", {"t": 0.2})],
)
def test_what_is_swept_or_tuned_is_what_compose_writes(tiny, tmp_path, method, params, turned):
    """Random rules draw by digest, sums are made in one order: the bits are the same."""
    from dataclasses import asdict

    from cgmerge.evals.tune import Search
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.expert import open_expert
    from cgmerge.modules.recipe import ExpertRef, Recipe

    experts = factors(tiny, tmp_path)
    folders = [tmp_path / "s0", tmp_path / "s1"]
    if turned:
        experts, folders = experts[::-1], folders[::-1]
    ids = [open_expert(str(folder)).digest for folder in folders]
    swept = merge_in_memory(experts, method, params, ids=ids)
    refs = tuple(ExpertRef(str(folder)) for folder in folders)
    plan = make_plan(Recipe(experts=refs, method=method, params=params, base="tiny"))
    run_plan(plan, tmp_path / "out")
    written = open_expert(str(tmp_path / "out")).deltas()
    tuned = Search(plan, tiny, [], 1, None).merge(asdict(plan.rule.params))
    assert set(swept) == set(tuned) == set(written)
    for path, delta in written.items():
        for found in (swept[path], tuned[path]):
            assert torch.equal(pad_rank(found, plan.rank).a, delta.a)
            assert torch.equal(pad_rank(found, plan.rank).b, delta.b)


def test_sweep_scores_every_candidate_and_scale_zero_is_the_base(tiny, tmp_path):
    import random

    from cgmerge.evals.runner import Settings, evaluate_targets
    from cgmerge.evals.suite import SkillSet
    from cgmerge.modules.formats import Example

    rows = chains.group_rows("base1", random.Random(0), 20)
    examples = tuple(Example(row["prompt"], row["completion"]) for row in rows)
    skills = [SkillSet("base", examples)]
    candidates = [Candidate("task-arithmetic", (), scale) for scale in (0.0, 0.1, 30.0)]
    found = sweep(tiny, factors(tiny, tmp_path), candidates, skills, ids=["a", "b"])
    groups = {"all": ("base",)}
    scores = [group_scores(found, c.name, groups)["all"] for c in candidates]
    plain = evaluate_targets(tiny, [], skills, Settings())
    assert scores[0].correct == plain.record.results[0].correct >= 18
    assert scores[2].correct < scores[0].correct
    assert scores[0].n == 20
    assert best(found, candidates, groups) == candidates[0]


def test_candidate_names_say_everything():
    assert Candidate("ties", (("density", 0.2),), 0.8).name == "ties density=0.2 x0.8"
