"""Routed compositions: saved, opened, attached, materialised, exported, refused when damaged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import composition_support
import pytest
import torch
from composition_support import ids, logits, make_experts, tiny
from safetensors.torch import load_file, save_file

from cgmerge.errors import CgmergeError, Damaged, Incompatible, StorageError, UsageError
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.card import BaseId
from cgmerge.modules.expert import open_expert
from cgmerge.modules.export import export
from cgmerge.modules.routing.attach import place_of, routed
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.files import (
    Contents,
    Member,
    find_composition,
    is_routed,
    open_composition,
    safe_names,
    save_composition,
)
from cgmerge.modules.routing.router import RetrievalRouter, TaskRouter
from cgmerge.modules.routing.spectral import spectral_router
from cgmerge.modules.routing.stack import stacks

NAMES = ["sort", "reverse", "count"]
TABLE = {"sort": (1.0, 0.0, 0.0), "reverse": (0.0, 1.0, 0.0), "both": (0.5, -1.5, 0.0)}


def spectral(experts, directions=1, top_k=2):
    found = stacks([dict(expert.deltas()) for expert in experts])
    return spectral_router(found, directions=directions, choice=Choice(top_k))


def retrieval(top_k=1):
    generator = torch.Generator().manual_seed(4)
    width = tiny().model.config.hidden_size
    noise = torch.linalg.qr(torch.randn(width, 2, generator=generator)).Q.T.contiguous()
    centroids = torch.nn.functional.normalize(torch.randn(3, width, generator=generator), dim=1)
    return RetrievalRouter(centroids, torch.zeros(width), noise, Choice(top_k))


def save(folder, experts, router, **changes):
    fingerprint = open_base("tiny").fingerprint
    contents = Contents(
        method="arrow",
        params={"top_k": 2},
        members=[Member(name, expert) for name, expert in zip(NAMES, experts, strict=True)],
        router=router,
        base=BaseId(name="tiny", fingerprint=fingerprint),
        **changes,
    )
    return save_composition(folder, contents)


@pytest.fixture
def experts(tmp_path):
    return make_experts(tmp_path / "experts")


def layered(experts):
    """A table whose rows differ between layers; the rows of `sort` and `both` sum to 1."""
    places = tuple(dict.fromkeys(place_of(path) for expert in experts for path in expert.pairs))
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(2, len(places), 3, generator=generator)
    rows[0, :, 1] = 0.0
    rows /= rows.sum(-1, keepdim=True)
    table = {
        n: tuple(map(tuple, own)) for n, own in zip(("sort", "both"), rows.tolist(), strict=True)
    }
    return TaskRouter(table, places)


@pytest.fixture(
    params=["arrow", "subspace", "spectrum", "dense", "retrieval", "task", "task by layer"]
)
def any_router(request, experts):
    made = {
        "arrow": lambda: spectral(experts),
        "subspace": lambda: spectral(experts, directions=2),
        "spectrum": lambda: spectral(experts, directions=None),
        "dense": lambda: spectral(experts, top_k=None),
        "retrieval": retrieval,
        "task": lambda: TaskRouter(TABLE),
        "task by layer": lambda: layered(experts),
    }
    return made[request.param]()


def answer(composition, tokens):
    with composition.attach(tiny()) as routing:
        routing.route(tokens.tolist(), ["both"] * len(tokens))
        return logits(tokens)


def test_a_saved_composition_gives_the_same_logits_bit_for_bit(tmp_path, experts, any_router):
    saved = save(tmp_path / "c", experts, any_router)
    before = answer(saved, ids(3, 7))
    torch.manual_seed(99)
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "c", moved)
    again = open_composition(moved, open_base("tiny"))
    assert torch.equal(answer(again, ids(3, 7)), before)
    assert (before - logits(ids(3, 7))).abs().max() > 0.01
    assert again.digest == saved.digest
    assert again.names == tuple(NAMES)


def test_a_new_process_gives_the_same_logits(tmp_path, experts):
    saved = save(tmp_path / "c", experts, spectral(experts))
    torch.save(answer(saved, ids(2, 5)), tmp_path / "before.pt")
    script = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1); torch.manual_seed(5)
sys.path.insert(0, sys.argv[2])
from composition_support import ids, logits, tiny
from cgmerge.modules.routing.files import open_composition
with open_composition(Path(sys.argv[1]) / "c").attach(tiny()):
    found = logits(ids(2, 5))
assert torch.equal(found, torch.load(Path(sys.argv[1]) / "before.pt")), "differs"
"""
    tests = Path(composition_support.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(tests)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_base_is_the_same_afterwards(tmp_path, experts, any_router):
    before = {name: tensor.clone() for name, tensor in tiny().model.state_dict().items()}
    saved = save(tmp_path / "c", experts, any_router)
    answer(saved, ids(2, 5))
    after = tiny().model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert type(tiny().model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_the_base_comes_back_when_the_model_fails(tmp_path, experts):
    saved = save(tmp_path / "c", experts, spectral(experts))
    with pytest.raises(RuntimeError, match="on purpose"), saved.attach(tiny()):
        raise RuntimeError("on purpose")
    assert type(tiny().model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_a_table_with_one_expert_is_that_expert_for_each_row(tmp_path, experts):
    saved = save(tmp_path / "c", experts, TaskRouter(TABLE))
    tokens = ids(4, 6)
    with saved.attach(tiny()) as routing:
        routing.route(tokens.tolist(), ["sort", "reverse", "sort", "reverse"])
        found = logits(tokens)
    for row, expert in enumerate([0, 1, 0, 1]):
        with attached(tiny().model, experts[expert].deltas()):
            alone = logits(tokens[row : row + 1])
        assert torch.allclose(found[row], alone[0], atol=1e-5)


def test_a_task_is_materialised_exactly_and_opens_in_peft(tmp_path, experts):
    saved = save(tmp_path / "c", experts, TaskRouter(TABLE))
    routed = answer(saved, ids(2, 6))
    with attached(tiny().model, saved.materialise("both")):
        assert torch.allclose(logits(ids(2, 6)), routed, atol=1e-5)
    done = export(saved, tmp_path / "peft", "peft", task="both")
    assert (done.adapters, done.rank, done.error) == ({"both": "."}, 6, 0.0)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(open_base("tiny").folder, dtype=torch.float32)
    torch.manual_seed(7)
    model = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    with torch.no_grad():
        found = model(input_ids=ids(2, 6)).logits
    assert torch.allclose(found, routed, atol=1e-5)


def test_a_table_by_layer_is_its_dense_sum(tmp_path, experts):
    router = layered(experts)
    saved = save(tmp_path / "c", experts, router)
    deltas = [expert.deltas() for expert in experts]
    for task in ("sort", "both"):
        found = saved.materialise(task)
        for path, delta in found.items():
            row = router.table[task][router.layers.index(place_of(path))]
            wanted = sum(
                w * own[path].dense() for w, own in zip(row, deltas, strict=True) if path in own
            )
            assert torch.allclose(delta.dense(), wanted, atol=1e-5), path
        with saved.attach(tiny()) as routing:
            weights = routing.route(ids(2, 6).tolist(), [task] * 2)
            there = logits(ids(2, 6))
        assert weights.shape == (2, len(router.layers), 3)
        with attached(tiny().model, found):
            assert torch.allclose(logits(ids(2, 6)), there, atol=1e-5)
    assert (router.weights(["sort"]) - router.weights(["both"])).abs().max() > 0.1


def test_a_table_by_layer_says_where_it_differs(tmp_path, experts):
    router = layered(experts)
    saved = save(tmp_path / "c", experts, router)
    found = saved.explain(tiny(), [3, 4, 5], "both").by_layer()
    assert tuple(found) == router.layers
    for layer, row in zip(router.layers, router.table["both"], strict=True):
        assert found[layer] == pytest.approx(list(row), abs=1e-6)
    assert "Its weights differ between layers" in (tmp_path / "c/README.md").read_text()


def test_a_table_by_layer_comes_back_as_it_was(tmp_path, experts):
    router = layered(experts)
    saved = save(tmp_path / "c", experts, router)
    assert saved.router == router
    assert saved.tasks == ("sort", "both")
    assert load_file(tmp_path / "c/router.safetensors")["weights"].shape == (
        2,
        len(router.layers),
        3,
    )
    done = export(saved, tmp_path / "v", "vllm")
    assert sorted(done.adapters) == ["both", "sort"]


def test_sequences_of_a_table_by_layer_must_be_known(experts):
    with routed(tiny(), stacks([dict(e.deltas()) for e in experts]), layered(experts)) as routing:
        with pytest.raises(UsageError, match="has to know the prompts first"):
            logits(ids(2, 4))
        routing.route(ids(2, 4).tolist(), ["sort", "both"])
        logits(ids(4, 4))  # two beams each
        with pytest.raises(UsageError, match="3 sequences, 2 prompts routed"):
            logits(ids(3, 4))


def test_a_table_that_lacks_a_layer_is_refused_before_use(experts):
    whole = layered(experts)
    table = {task: rows[1:] for task, rows in whole.table.items()}
    part = TaskRouter(table, whole.layers[1:])
    found = stacks([dict(e.deltas()) for e in experts])
    with pytest.raises(Incompatible, match=r"model\.layers\.0"), routed(tiny(), found, part):
        pass


LAYER_ATTACKS = {
    "a task less": (lambda r: r["tasks"].pop(), None),
    "a task twice": (lambda r: r["tasks"].__setitem__(0, "both"), None),
    "a task without name": (lambda r: r["tasks"].__setitem__(0, ""), None),
    "tasks are text": (lambda r: r.update(tasks="sort"), None),
    "a layer less": (lambda r: r["layers"].pop(), None),
    "a layer twice": (lambda r: r["layers"].__setitem__(0, r["layers"][1]), None),
    "a strange layer": (lambda r: r["layers"].__setitem__(0, "model.layers.77"), None),
    "layers are numbers": (lambda r: r.update(layers=list(range(len(r["layers"])))), None),
    "no layers": (lambda r: r.update(layers=[]), None),
    "two tables": (lambda r: r.update(table={"sort": [1.0, 0.0, 0.0]}), None),
    "only a plain table": (lambda r: (r.clear(), r.update(table={"a": [1.0, 0.0, 0.0]})), None),
    "not a number": (None, lambda t: t / 0 * 0),
    "too few experts": (None, lambda t: t[..., :2]),
    "too many experts": (None, lambda t: torch.cat([t, t[..., :1]], dim=-1)),
    "too few layers": (None, lambda t: t[:, 1:]),
    "too few tasks": (None, lambda t: t[:1]),
    "flat": (None, lambda t: t.flatten(1)),
    "another axis": (None, lambda t: t[None]),
    "half floats": (None, lambda t: t.half()),
}


@pytest.mark.parametrize("attack", LAYER_ATTACKS)
def test_a_damaged_table_by_layer_is_refused(tmp_path, experts, attack):
    save(tmp_path / "c", experts, layered(experts))
    settings, weights = LAYER_ATTACKS[attack]
    if settings:
        edit(tmp_path / "c", lambda r: settings(r["router"]["settings"]))
    if weights:
        tensor_attack(tmp_path / "c", lambda t: {"weights": weights(t["weights"]).contiguous()})
    with pytest.raises(Damaged):
        open_composition(tmp_path / "c")


def test_another_tensor_in_a_table_by_layer_is_refused(tmp_path, experts):
    save(tmp_path / "c", experts, layered(experts))
    tensor_attack(tmp_path / "c", lambda t: {**t, "more": torch.zeros(1)})
    with pytest.raises(Damaged, match="more"):
        open_composition(tmp_path / "c")


def test_a_task_without_experts_is_the_base_and_no_adapter(tmp_path, experts):
    saved = save(tmp_path / "c", experts, TaskRouter({**TABLE, "none": (0.0, 0.0, 0.0)}))
    assert saved.materialise("none") == {}
    with pytest.raises(Incompatible, match="uses no expert") as refusal:
        export(saved, tmp_path / "v", "vllm")
    assert refusal.value.code == "incompatible.no_effect"
    assert not (tmp_path / "v").exists()


def test_an_adapter_of_one_expert_has_its_rank(tmp_path, experts):
    saved = save(tmp_path / "c", experts, TaskRouter(TABLE))
    assert {d.rank for d in saved.materialise("reverse").values()} == {2}
    assert set(saved.materialise("reverse")) == set(experts[1].pairs)


def test_what_depends_on_the_input_is_not_materialised(tmp_path, experts):
    token = save(tmp_path / "t", experts, spectral(experts))
    with pytest.raises(Incompatible, match="for every token") as refusal:
        token.materialise()
    assert refusal.value.code == "incompatible.not_static"
    prompt = save(tmp_path / "p", experts, retrieval())
    with pytest.raises(Incompatible, match="for every prompt"):
        prompt.materialise()


def test_vllm_gets_adapters_flags_and_a_table(tmp_path, experts):
    saved = save(tmp_path / "c", experts, retrieval())
    done = export(saved, tmp_path / "v", "vllm")
    assert done.adapters == {name: f"adapters/{name}" for name in NAMES}
    assert "--max-lora-rank 8" in (tmp_path / "v/serve.sh").read_text()
    assert "sort=adapters/sort reverse=adapters/reverse" in done.command
    table = json.loads((tmp_path / "v/routing.json").read_text())
    assert table["kind"] == "retrieval"
    assert len(table["centroids"]) == 3
    for name, source in zip(NAMES, experts, strict=True):
        written = open_expert(str(tmp_path / "v/adapters" / name))
        for path, delta in source.deltas().items():
            assert torch.allclose(written.deltas()[path].dense(), delta.dense(), atol=1e-6)
        assert written.config.rank <= 8


def test_servers_get_no_composition_that_they_cannot_serve(tmp_path, experts):
    token = save(tmp_path / "t", experts, spectral(experts))
    mixing = save(tmp_path / "m", experts, retrieval(top_k=2))
    for found in (token, mixing):
        with pytest.raises(Incompatible) as refusal:
            export(found, tmp_path / "out", "vllm")
        assert refusal.value.code == "incompatible.not_servable"
    assert not (tmp_path / "out").exists()


def test_a_rank_cuts_and_says_what_it_cost(tmp_path, experts):
    saved = save(tmp_path / "c", experts, TaskRouter(TABLE))
    done = export(saved, tmp_path / "p", "peft", task="sort", rank=2)
    full, cut = experts[0].deltas(), open_expert(str(tmp_path / "p")).deltas()
    lost = sum(float((full[p].dense() - cut[p].dense()).square().sum()) for p in full)
    total = sum(float(full[p].dense().square().sum()) for p in full)
    assert done.error == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    assert done.rank == 2


def test_beams_and_cache_change_nothing(tmp_path, experts, any_router):
    saved = save(tmp_path / "c", experts, any_router)
    tokens = ids(2, 5)
    tasks = ["both", "sort"]
    plain = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with saved.attach(tiny()) as routing, torch.no_grad():
        cached = routing.generate(tokens, tasks=tasks, **plain)
        assert torch.equal(cached, routing.generate(tokens, tasks=tasks, use_cache=False, **plain))
        beams = routing.generate(tokens, tasks=tasks, num_beams=2, **plain)
        alone = routing.generate(tokens[1:], tasks=tasks[1:], num_beams=2, **plain)
    assert torch.equal(beams[1, : alone.shape[1]], alone[0])


def test_padding_and_neighbours_change_no_row(tmp_path, experts, any_router):
    saved = save(tmp_path / "c", experts, any_router)
    long, short = ids(1, 9), ids(1, 4, seed=1)
    padded = torch.cat([short, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    with saved.attach(tiny()) as routing:
        routing.route([long[0].tolist(), short[0].tolist()], ["both", "sort"])
        together = logits(torch.cat([long, padded]), attention_mask=mask)
        routing.route([short[0].tolist()], ["sort"])
        alone = logits(short)
    assert torch.allclose(together[1, :4], alone[0], atol=1e-5)


def test_sequences_that_nobody_routed_are_refused(tmp_path, experts):
    saved = save(tmp_path / "c", experts, retrieval())
    with saved.attach(tiny()) as routing:
        with pytest.raises(UsageError) as refusal:
            logits(ids(2, 4))
        assert refusal.value.code == "usage.route_first"
        routing.route(ids(2, 4).tolist())
        with pytest.raises(UsageError):
            logits(ids(3, 4))


def test_explanations_add_up(tmp_path, experts, any_router):
    saved = save(tmp_path / "c", experts, any_router)
    found = saved.explain(tiny(), [3, 4, 5, 6], "sort")
    assert set(found.modules) == set(saved.stacks)
    for shares in [found.overall(), *found.by_layer().values(), *found.by_token()]:
        assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    assert next(iter(found.by_layer())) == "model.layers.0"
    if saved.granularity == "token":
        assert len(found.by_token()) == 4


def test_names_are_unique_and_plain(tmp_path, experts):
    class Named:
        def __init__(self, name):
            self.name = name

    found = safe_names([Named("sort"), Named("sort"), Named("a/b ü"), Named("…")])
    assert found == ["sort", "sort-2", "a-b", "expert"]


def test_a_static_composition_is_an_adapter(tmp_path, experts):
    found = open_composition(experts[0].folder)
    assert (found.kind, found.granularity, found.tasks) == ("static", "static", ())
    with found.attach(tiny()) as routing:
        assert routing.route(ids(2, 4).tolist()) is None
        there = logits(ids(2, 4))
    with attached(tiny().model, experts[0].deltas()):
        assert torch.equal(logits(ids(2, 4)), there)
    with pytest.raises(UsageError, match="no router"):
        found.explain(tiny(), [3, 4])


def test_a_wrong_base_is_refused(tmp_path, experts, models):
    saved = save(tmp_path / "c", experts, spectral(experts))
    with pytest.raises(CgmergeError):
        open_composition(tmp_path / "c", open_base(str(models / "B")))
    assert saved.base.name == "tiny"


def edit(folder, change):
    path = folder / "cgmerge.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


RECORD_ATTACKS = {
    "newer schema": lambda r: r.update(schema="cgmerge.routed/2"),
    "unknown field": lambda r: r.update(hook="os.system"),
    "no experts": lambda r: r.update(experts=[]),
    "experts are text": lambda r: r.update(experts="sort"),
    "a name that climbs": lambda r: r["experts"][0].update(name="../sort", path="experts/../sort"),
    "a path elsewhere": lambda r: r["experts"][0].update(path="/etc"),
    "a name twice": lambda r: r["experts"].append(r["experts"][0]),
    "an expert less": lambda r: r["experts"].pop(),
    "another digest": lambda r: r["experts"][0].update(sha256="0" * 64),
    "two experts swapped": lambda r: r["experts"].reverse(),
    "no router": lambda r: r.update(router=None),
    "an unknown router": lambda r: r["router"].update(kind="pickle"),
    "another router's digest": lambda r: r["router"].update(sha256="0" * 64),
    "no router file": lambda r: r["router"].update(sha256=None),
    "no settings": lambda r: r["router"].update(settings=[]),
    "top_k zero": lambda r: r["router"]["settings"].update(top_k=0),
    "top_k text": lambda r: r["router"]["settings"].update(top_k="2"),
    "temperature zero": lambda r: r["router"]["settings"].update(temperature=0.0),
    "an unknown form": lambda r: r["router"]["settings"].update(form="eval"),
    "another form": lambda r: r["router"]["settings"].update(form="energy"),
    "another scope": lambda r: r["router"]["settings"].update(scope="planet"),
    "base without name": lambda r: r.update(base={}),
    "method is long": lambda r: r.update(method="x" * 500),
}


@pytest.mark.parametrize("attack", RECORD_ATTACKS)
def test_a_damaged_record_is_refused(tmp_path, experts, attack):
    save(tmp_path / "c", experts, spectral(experts))
    edit(tmp_path / "c", RECORD_ATTACKS[attack])
    with pytest.raises((Damaged, Incompatible)) as refusal:
        open_composition(tmp_path / "c")
    assert refusal.value.exit_code == 3


def tensor_attack(folder, change):
    """Change tensors and make the digest right again: the checks behind it must hold."""
    from cgmerge.tensorfile import file_sha256

    path = folder / "router.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})
    edit(folder, lambda r: r["router"].update(sha256=file_sha256(path)))


def first(tensors, field):
    return next(name for name in sorted(tensors) if name.endswith(field))


TENSOR_ATTACKS = {
    "not a number": lambda t: {**t, first(t, "rows"): t[first(t, "rows")] * float("nan")},
    "too narrow": lambda t: {**t, first(t, "rows"): t[first(t, "rows")][:, :-1].clone()},
    "too few experts": lambda t: {**t, first(t, "rows"): t[first(t, "rows")][:-1].clone()},
    "half floats": lambda t: {**t, first(t, "rows"): t[first(t, "rows")].half()},
    "a module less": lambda t: {k: v for k, v in t.items() if k.rpartition(".")[0]
                                != first(t, "rows").rpartition(".")[0]},
    "nobody present": lambda t: {**t, first(t, "present"): t[first(t, "present")] & False},
    "present is short": lambda t: {**t, first(t, "present"): t[first(t, "present")][:1].clone()},
    "an extra field": lambda t: {**t, first(t, "rows") + "x": torch.zeros(1)},
    "no rows": lambda t: {k: v for k, v in t.items() if k != first(t, "rows")},
    "one axis": lambda t: {**t, first(t, "rows"): t[first(t, "rows")].flatten()},
    "nothing": lambda t: {"x": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("attack", TENSOR_ATTACKS)
def test_a_router_for_other_experts_is_refused(tmp_path, experts, attack):
    save(tmp_path / "c", experts, spectral(experts))
    tensor_attack(tmp_path / "c", TENSOR_ATTACKS[attack])
    with pytest.raises((Damaged, Incompatible)) as refusal:
        open_composition(tmp_path / "c")
    assert refusal.value.exit_code == 3


def test_files_that_are_gone_or_changed_are_named(tmp_path, experts):
    folder = tmp_path / "c"
    save(folder, experts, spectral(experts))
    weights = folder / "experts/sort/adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Damaged, match="sort"):
        open_composition(folder)
    weights.write_bytes(whole)
    open_composition(folder)
    router = (folder / "router.safetensors").read_bytes()
    (folder / "router.safetensors").unlink()
    with pytest.raises(Damaged, match=r"lacks router\.safetensors"):
        open_composition(folder)
    (folder / "router.safetensors").write_bytes(router[:-3])
    with pytest.raises(Damaged, match="sha256"):
        open_composition(folder)
    (folder / "router.safetensors").write_bytes(router)
    shutil.rmtree(folder / "experts/count")
    with pytest.raises(Damaged, match="count"):
        open_composition(folder)
    (folder / "experts/count").symlink_to(tmp_path / "experts/count")
    with pytest.raises(Damaged, match="count"):
        open_composition(folder)


def test_other_folders_are_no_compositions(tmp_path, experts):
    (tmp_path / "empty").mkdir()
    assert not is_routed(tmp_path / "empty")
    assert not is_routed(experts[0].folder)
    with pytest.raises(CgmergeError, match="neither a composition nor an adapter"):
        find_composition(tmp_path / "empty")


def test_a_composition_is_written_whole_or_not_at_all(tmp_path, experts, monkeypatch):
    from cgmerge import fs

    save(tmp_path / "c", experts, spectral(experts))
    before = {p: p.read_bytes() for p in (tmp_path / "c").rglob("*") if p.is_file()}
    monkeypatch.setattr(fs, "write_tensors", _no_space)
    with pytest.raises(StorageError, match="no space"):
        save(tmp_path / "d", experts, spectral(experts))
    assert not (tmp_path / "d").exists()
    assert {p: p.read_bytes() for p in (tmp_path / "c").rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "experts"]


def _no_space(*args, **kwargs):
    raise OSError("no space")


def test_the_same_experts_give_the_same_bytes(tmp_path, experts):
    for name in ("a", "b"):
        save(tmp_path / name, experts, spectral(experts))
    left, right = ({p.relative_to(tmp_path / n): p.read_bytes()
                    for p in (tmp_path / n).rglob("*") if p.is_file()} for n in "ab")  # fmt: skip
    assert left == right
