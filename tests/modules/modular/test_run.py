"""From a recipe to a folder: the same bytes again, the same logits from disk, refusals."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_support
from safetensors.torch import load_file

from cgmerge.errors import Damaged, InputError, UsageError
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.export import export
from cgmerge.modules.loading import load_base
from cgmerge.modules.modular import fit as fitting
from cgmerge.modules.modular import run as running
from cgmerge.modules.modular.inventory import Inventory
from cgmerge.modules.modular.plan import make_modular_plan
from cgmerge.modules.modular.run import curve, train_modular
from cgmerge.modules.modular.settings import ModularParams, read_modular
from cgmerge.modules.routing.files import open_composition
from cgmerge.modules.training.settings import TrainSettings

TASKS = ("copy", "reverse")
IDS = torch.arange(4, 14).reshape(2, 5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modular")
    train_support.make_base(folder / "base")
    for task in TASKS:
        train_support.write_rows(folder / f"{task}.jsonl", train_support.make_rows(12, skill=task))
        rows = train_support.make_rows(6, seed=9, skill=task)
        train_support.write_rows(folder / f"{task}-test.jsonl", rows)
    return folder


def make_plan(place, out, params=None, tasks=TASKS, **changes):
    chosen = {"rank": 2, "steps": 4, "batch_size": 6, "device": "cpu", "lr": 0.02, **changes}
    many = [
        TrainSettings(
            base=str(place / "base"),
            data=(place / f"{task}.jsonl",),
            eval_data=(place / f"{task}-test.jsonl",),
            skill=task,
            out=out / task,
            **chosen,
        )
        for task in tasks
    ]
    return make_modular_plan(many, params or ModularParams(skills=3))


def score(model, rows):
    from cgmerge.cli.training import score_rows

    return score_rows(model, rows)


@pytest.fixture(scope="module")
def result(place, tmp_path_factory):
    plan = make_plan(place, tmp_path_factory.mktemp("made") / "out")
    recorder = train_support.Recorder()
    return plan, train_modular(plan, listener=recorder, scorer=score), recorder


@pytest.fixture(scope="module")
def loaded(place):
    return load_base(open_base(str(place / "base")))


def logits(loaded):
    with torch.no_grad():
        return loaded.model(input_ids=IDS, use_cache=False).logits


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_result_is_a_composition_by_task(result):
    plan, made, recorder = result
    found = made.composition
    assert (found.kind, found.granularity, found.method) == ("task", "sequence", "polytropon")
    assert found.tasks == TASKS
    assert found.names == ("skill-0", "skill-1", "skill-2")
    assert found.base.fingerprint == plan.joint.base.fingerprint
    assert found.router.layers == ("model.layers.0", "model.layers.1")
    assert {rank for expert in found.experts for rank in expert.ranks} == {2}
    assert recorder.losses == dict(enumerate(made.losses, 1))
    assert len(made.losses) == 4


def test_the_table_is_the_recorded_allocation(result):
    _, made, _ = result
    fit = made.composition.record["fit"]
    weights = load_file(made.composition.folder / "router.safetensors")["weights"]
    assert weights.sum(-1).flatten().tolist() == pytest.approx([1.0] * 4, abs=1e-6)
    for layer, name in enumerate(made.composition.router.layers):
        for task, skill in enumerate(TASKS):
            shares = torch.tensor(fit["allocation"][name][skill])
            assert torch.allclose(weights[task, layer], shares / shares.sum(), atol=1e-5)
    flat = torch.tensor([rows[task] for rows in fit["allocation"].values() for task in TASKS])
    assert fit["sparsity"] == pytest.approx(float((flat > 0.5).double().mean()))
    assert 0.9 < fit["discreteness"] <= 1.0  # four steps decide little
    assert 0.9 < fit["usage"] <= 1.0
    assert fit["curve"] == [[i + 1, round(loss, 6)] for i, loss in enumerate(made.losses)]
    assert fit["loss"] == pytest.approx(sum(made.losses) / 4)
    assert fit["tasks"]["copy"]["data"][0]["rows"] == 12


def test_what_was_scored_is_what_lies_on_disk(result, loaded):
    """The evaluation ran inside the trained model; the folder gives the same numbers."""
    plan, made, _ = result
    opened = open_composition(plan.out, open_base(str(plan.joint.base.folder)))
    for task, own in zip(TASKS, plan.tasks, strict=True):
        scores = made.fit["tasks"][task]["eval"]
        with attached(loaded.model, opened.materialise(task)):
            again = score(loaded.model, own.eval_rows)
        assert again["loss"] == pytest.approx(scores["loss"], abs=1e-5)
        assert score(loaded.model, own.eval_rows)["loss"] == pytest.approx(
            scores["base_loss"], abs=1e-6
        )
        assert abs(scores["loss"] - scores["base_loss"]) > 0.01
        assert scores["n"] == 6


def test_a_copy_gives_the_same_logits_and_each_task_is_one_adapter(result, loaded, tmp_path):
    plan, made, _ = result
    with made.composition.attach(loaded) as routing:
        routing.route(IDS.tolist(), TASKS)
        before = logits(loaded)
    shutil.copytree(plan.out, tmp_path / "moved")
    moved = open_composition(tmp_path / "moved")
    with moved.attach(loaded) as routing:
        routing.route(IDS.tolist(), TASKS)
        assert torch.equal(logits(loaded), before)
    for row, task in enumerate(TASKS):
        with attached(loaded.model, moved.materialise(task)):
            assert torch.allclose(logits(loaded)[row], before[row], atol=1e-5)
    done = export(moved, tmp_path / "served", "vllm")
    assert (sorted(done.adapters), done.rank, done.error) == (["copy", "reverse"], 6, 0.0)
    shares = moved.explain(loaded, IDS[0].tolist(), "reverse").by_layer()
    table = made.composition.router.table["reverse"]
    for layer, row in zip(moved.router.layers, table, strict=True):
        assert shares[layer] == pytest.approx(list(row), abs=1e-6)


def test_the_same_run_gives_the_same_bytes_whatever_the_hash_seed(result, place, tmp_path):
    plan, _, _ = result
    script = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1); torch.manual_seed(5)
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_run import make_plan, score
from cgmerge.modules.modular.run import train_modular
train_modular(make_plan(Path(sys.argv[3]), Path(sys.argv[4])), scorer=score)
"""
    here = Path(__file__).parent
    words = [here, Path(train_support.__file__).parent, place, tmp_path / "out"]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "out") == files(plan.out)


def test_another_seed_gives_other_modules(result, place, tmp_path):
    plan, _, _ = result
    train_modular(make_plan(place, tmp_path / "out", seed=1))
    name = Path("router.safetensors")
    assert files(tmp_path / "out")[name] != files(plan.out)[name]


def test_one_table_for_the_whole_model(place, tmp_path):
    params = ModularParams(skills=2, granularity="model")
    made = train_modular(make_plan(place, tmp_path / "out", params, steps=2))
    router = made.composition.router
    assert router.layers == ()
    assert not (tmp_path / "out/router.safetensors").exists()
    assert sum(router.table["copy"]) == pytest.approx(1.0)
    assert list(made.fit["allocation"]) == ["all"]
    assert made.fit["tasks"]["copy"]["eval"] is None  # nobody scored


def test_layers_without_a_target_are_filled_and_known(place, tmp_path):
    targets = ("layers.0.mlp.up_proj", "layers.1.self_attn.q_proj")
    made = train_modular(make_plan(place, tmp_path / "out", steps=2, target_modules=targets))
    layers = made.composition.router.layers
    assert layers == ("model.layers.0", "model.layers.1")
    wanted = {f"{layer}.{leaf}" for layer in layers for leaf in ("mlp.up_proj", "self_attn.q_proj")}
    assert set(made.composition.stacks) == wanted
    assert {
        path for path, delta in made.composition.materialise("copy").items() if delta.b.any()
    } == {f"model.{target}" for target in targets}


def test_a_loss_that_is_not_finite_leaves_nothing(place, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "backward", lambda *_: float("nan"))
    with pytest.raises(InputError, match="not finite at step 1"):
        train_modular(make_plan(place, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_modules_that_learned_nothing_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "fit", lambda *_: [1.0])
    with pytest.raises(Damaged, match="every ΔW is zero"):
        train_modular(make_plan(place, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_the_start_is_drawn_once_for_all_granularities(place, tmp_path):
    plans = [
        make_plan(place, tmp_path, ModularParams(skills=2, granularity=name))
        for name in ("layer", "model")
    ]
    one, two = (Inventory(plan.frame, 0, torch.device("cpu")) for plan in plans)
    assert all(torch.equal(one.a[path], two.a[path]) for path in one.a)
    assert (one.size, two.size) == ((2, 2, 2), (2, 1, 2))
    assert plans[0].trainable == sum(t.numel() for t in (one.logits, *one.modules))
    assert plans[1].trainable == sum(t.numel() for t in (two.logits, *two.modules))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ("copy",)}, "nothing to share"),
        ({"load_in_4bit": True}, "load_in_4bit"),
        ({"dropout": 0.1}, "dropout"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"checkpoint_steps": 5}, "checkpoint_steps"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(place, tmp_path, changes, said):
    with pytest.raises(UsageError, match=said):
        make_plan(place, tmp_path / "out", **changes)


def test_several_processes_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 were started"):
        make_plan(place, tmp_path / "out")


def test_an_allocation_that_is_too_large_is_refused(place, tmp_path, monkeypatch):
    from cgmerge.modules.modular import plan as planning

    monkeypatch.setattr(planning, "MAX_ALLOCATION", 11)
    with pytest.raises(UsageError, match="12 numbers") as refusal:
        make_plan(place, tmp_path / "out")
    assert "granularity=model" in refusal.value.hint


def test_the_curve_is_short_and_its_mean_is_kept():
    losses = [float(i) for i in range(1001)]
    found = curve(losses, points=10)
    assert [step for step, _ in found] == [101, 202, 303, 404, 505, 606, 707, 808, 909, 1001]
    assert found[0] == [101, 50.0]
    assert found[-1] == [1001, 954.5]  # 909 … 1000
    assert curve([3.0]) == [[1, 3.0]]


def test_modular_is_read():
    params, rank = read_modular("skills=4, rank=8,granularity=model,ibp=2")
    assert (params.skills, rank, params.granularity, params.ibp) == (4, 8, "model", 2.0)
    assert read_modular("skills=2")[1] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "NAME=VALUE"),
        ("4", "NAME=VALUE"),
        ("skills=4,skills=4", "each once"),
        ("rank=8", "how many modules"),
        ("skills=0", "skills"),
        ("skills=two", "skills"),
        ("skills=4,rank=8.5", "rank"),
        ("skills=4,granularity=module", "granularity"),
        ("skills=4,skils=3", "skils"),
        ("skills=4,temperature=0", "temperature"),
        ("skills=4,allocation_lr=nan", "allocation_lr"),
        ("skills=4,ibp=-1", "ibp"),
    ],
)
def test_modular_that_makes_no_sense_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        read_modular(text)


def test_the_record_is_plain_json(result):
    plan, made, _ = result
    raw = json.loads((plan.out / "cgmerge.json").read_text())
    assert raw["fit"] == made.fit
    assert [entry["source"] for entry in raw["experts"]] == [None] * 3
    assert raw["params"]["skills"] == 3
    assert str(plan.out) not in json.dumps(raw)
