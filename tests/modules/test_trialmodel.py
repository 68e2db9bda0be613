"""Trials with full models: in memory as they would be written, and the base as before."""

import json
import random

import pytest
import support
import torch
from transformers import AutoModelForCausalLM

from cgmerge.errors import Incompatible
from cgmerge.evals.tasks import chains
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.trialmodel import TrialModel


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return LoadedBase(open_base(str(folder)), model.eval(), None)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plan_of(base, *refs, method="ties", **fields):
    items = tuple(ExpertRef(str(ref)) for ref in refs)
    return make_plan(Recipe(experts=items, method=method, base=str(base), form="model", **fields))


@pytest.mark.parametrize("name", ["B", "Bt", "G"])
@pytest.mark.parametrize(
    ("method", "params"), [("ties", {"density": 0.4}), ("dare", {}), ("linear", {}), ("tsv", {})]
)
def test_the_model_in_memory_is_the_one_that_is_written(models, tmp_path, name, method, params):
    base = models / name
    folders = [support.make_full(tmp_path / f"ft{i}", base, seed=i) for i in (1, 2)]
    loaded = load(base)
    before = state(loaded.model)
    for scale in (1.0, 0.5):
        plan = plan_of(base, *folders, method=method, params={**params, "scale": scale})
        run_plan(plan, tmp_path / f"out{scale}")
        written = state(load(tmp_path / f"out{scale}").model)
        unit = plan_of(base, *folders, method=method, params=params)
        with TrialModel(unit, loaded).merged(unit.merger(), scale):
            found = state(loaded.model)
        assert set(found) == set(written)
        changed = 0
        for key, value in written.items():
            if scale == 1.0:
                assert torch.equal(found[key], value), key
            assert torch.allclose(found[key], value, atol=1e-6), key
            changed += int(not torch.equal(value, before[key]))
        assert changed > 5
        after = state(loaded.model)
        assert all(torch.equal(after[key], value) for key, value in before.items())


def test_rounding_is_that_of_the_result(models, tmp_path):
    base = models / "B"
    folder = support.make_full(tmp_path / "ft", base)
    loaded = load(base)
    plan = plan_of(base, folder, method="linear", dtype="bfloat16")
    run_plan(plan, tmp_path / "out")
    written = support.load_tensors(tmp_path / "out")
    with TrialModel(plan, loaded).merged(plan.merger(), 1.0):
        found = state(loaded.model)
    assert len(written) == len(found)
    for name, value in written.items():  # those without a delta too
        assert value.dtype == torch.bfloat16
        assert torch.equal(found[name], value.float()), name


def test_a_head_that_moves_apart_is_tied_again_afterwards(models, tmp_path):
    """One expert has its own head: base and trial differ in whether head and embedding are one."""

    def untie(tensors):
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 1.5}

    base = models / "Bt"
    folder = support.make_full(tmp_path / "ft", base, only="embed", change=untie)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    loaded = load(base)
    plan = plan_of(base, folder, method="linear")
    run_plan(plan, tmp_path / "out")
    written = state(load(tmp_path / "out").model)
    with TrialModel(plan, loaded).merged(plan.merger(), 1.0):
        found = state(loaded.model)
        assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert all(torch.equal(found[key], value) for key, value in written.items())
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_an_error_on_the_way_leaves_the_base_as_it_was(models, tmp_path):
    base = models / "B"
    folder = support.make_full(tmp_path / "ft", base)
    loaded = load(base)
    before = state(loaded.model)
    plan = plan_of(base, folder, method="linear")

    def fail():
        with TrialModel(plan, loaded).merged(plan.merger(), 1.0):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(torch.equal(value, before[key]) for key, value in state(loaded.model).items())


def test_tuning_with_full_models_on_the_command_line(run, tmp_path):
    """A full model that only does harm, and an adapter: the search walks down."""
    tiny = open_base("tiny")
    full = support.make_full(tmp_path / "ft", tiny.folder, std=0.05, only="mlp")
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in tiny.modules.items()
        if path.endswith("q_proj")
    }
    adapter = support.make_expert(tmp_path / "e", shapes, std=0.05)
    rows = chains.group_rows("base1", random.Random(1), 12)
    text = "\n".join(json.dumps({k: row[k] for k in ("prompt", "completion")}) for row in rows)
    (tmp_path / "v.jsonl").write_text(text)
    words = ["compose", full, adapter, "--base", "tiny", "--as", "model", "-m", "ties"]
    code, text, err = run(
        *words, "--tune", tmp_path / "v.jsonl", "--budget", 9, "-o", tmp_path / "out", "--json"
    )
    assert code == 0, err
    result = json.loads(text)
    trials = result["tuning"]["trials"]
    assert len(trials) == 9
    assert result["tuning"]["tuned"] == ["scale", "density"]
    by_scale = {t["params"]["scale"]: t["loglik"] for t in trials if t["params"]["density"] == 0.2}
    assert by_scale[0.25] > by_scale[1.7]
    # What was scored in memory is what was written.
    code, text, err = run(
        "eval", tmp_path / "out", "--base", "tiny", "--data", tmp_path / "v.jsonl",
        "-o", tmp_path / "r.json", "--json",
    )  # fmt: skip
    assert code == 0, err
    (found,) = [r for r in json.loads(text)["results"] if r["target"] == "out"]
    best = next(t for t in trials if t["params"] == result["tuning"]["chosen"])
    assert found["score"] == best["score"]
    assert found["loglik"] == pytest.approx(best["loglik"], rel=1e-4)


def test_statistics_of_full_models_are_refused_with_the_way_out(run, models, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    code, _, err = run("stats", models / "B", "--base", "tiny", "--data", tmp_path / "d.jsonl")
    assert code == 2
    assert "is a full model" in err
    assert "cgmerge extract" in err


def test_a_quantized_base_is_refused_before_anything_is_tried(models, tmp_path):
    base = tmp_path / "Q"
    base.mkdir()
    for path in (models / "B").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (base / "config.json").write_text(json.dumps(config))
    shapes = {"model.layers.0.self_attn.q_proj": open_base(str(base)).modules}
    path = next(iter(shapes))
    shape = shapes[path].get(path) or shapes[path][path.removeprefix("model.")]
    expert = support.make_expert(tmp_path / "e", {path: (shape.out_features, shape.in_features)})
    with pytest.raises(Incompatible, match="is quantized"):
        TrialModel(plan_of(base, expert, method="linear"), load(models / "B"))
