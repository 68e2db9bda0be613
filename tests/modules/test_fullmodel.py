"""Full fine-tunes as experts: exact sums, ties, shards, little memory, refusals by name."""

import errno
import json
import shutil
import subprocess
import sys

import case_support as cases
import pytest
import support
import torch

from cgmerge import fs
from cgmerge.errors import CgmergeError, Damaged, Incompatible, StorageError, UsageError
from cgmerge.merge import merge_state_dicts
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.fullmodel import open_full
from cgmerge.modules.recipe import ExpertRef, Recipe, read_recipe

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def plan_of(*refs, base, method="task-arithmetic", **fields):
    items = tuple(
        ExpertRef(str(r), w) for r, w in (r if isinstance(r, tuple) else (r, None) for r in refs)
    )
    return make_plan(Recipe(experts=items, method=method, base=str(base), form="model", **fields))


def composed(out, *refs, **fields):
    return run_plan(plan_of(*refs, **fields), out)


def differences(folder, base):
    """Task vector of a full model as plain float32 tensors."""
    ours = support.load_tensors(base)
    return {n: t.float() - ours[n].float() for n, t in support.load_tensors(folder).items()}


@pytest.fixture
def fulls(tmp_path, models):
    """Three full fine-tunes of B, of their own seeds."""
    return [support.make_full(tmp_path / f"F{i}", models / "B", seed=i) for i in range(3)]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_sum_of_full_models_and_adapters_is_exact_and_rounded_once(fulls, experts, models, dtype):
    folder = experts / "out"
    pairs = [(fulls[0], 0.7), (fulls[1], -0.4), (experts / "E1", 1.5)]
    composed(folder, *pairs, base=models / "B", dtype=dtype)
    base = support.load_tensors(models / "B")
    expected = {name: tensor.double() for name, tensor in base.items()}
    for full, weight in pairs[:2]:
        for name, tensor in support.load_tensors(full).items():
            expected[name] = expected[name] + weight * (tensor.double() - base[name].double())
    for path, delta in support.dense_deltas(experts / "E1").items():
        expected[f"{path}.weight"] = expected[f"{path}.weight"] + 1.5 * delta
    found = support.load_tensors(folder)
    assert set(found) == set(base)
    for name, tensor in found.items():
        if dtype == "auto":
            assert tensor.dtype == torch.float32
            assert torch.allclose(tensor.double(), expected[name], rtol=0, atol=1e-6), name
        else:  # a second rounding would move more than the few values next to a boundary
            assert tensor.dtype == torch.bfloat16
            assert (tensor != expected[name].to(torch.bfloat16)).float().mean() < 0.01, name
    assert cases.record(folder)["output"]["as"] == "model"


@pytest.mark.parametrize(
    ("method", "params"),
    [("ties", {"density": 0.3}), ("dare", {"drop": 0.5}), ("iso-c", {}), ("slerp", {}),
     ("core+ties", {}), ("tsv", {}), ("karcher", {})],
)  # fmt: skip
def test_any_method_equals_the_same_on_plain_differences(tmp_path, fulls, models, method, params):
    pair = fulls[:2]
    plan = plan_of(*pair, base=models / "B", method=method, params=params)
    run_plan(plan, tmp_path / "out")
    dense = [differences(expert.folder, models / "B") for expert in plan.experts]
    merged = merge_state_dicts(method, dense, params=params, ids=plan.ids)
    base = support.load_tensors(models / "B")
    for name, tensor in support.load_tensors(tmp_path / "out").items():
        assert torch.allclose(tensor, base[name] + merged[name], rtol=0, atol=1e-6), name


def test_one_full_model_comes_back(tmp_path, fulls, models):
    for method in ("task-arithmetic", "linear"):
        composed(tmp_path / method, fulls[0], base=models / "B", method=method)
        found, wanted = (support.load_tensors(f) for f in (tmp_path / method, fulls[0]))
        assert all(torch.allclose(found[n], wanted[n], rtol=0, atol=1e-6) for n in wanted)


def test_one_16_bit_model_comes_back_bit_for_bit(tmp_path):
    """The difference is taken and added back in float32, which 16-bit numbers survive."""
    base = support.make_llama(tmp_path / "base", dtype=torch.bfloat16)
    full = support.make_full(tmp_path / "F", base, std=0.02)
    result = composed(tmp_path / "out", full, base=base)
    found, wanted = support.load_tensors(tmp_path / "out"), support.load_tensors(full)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert result.rounding_error < 1e-4


def test_shards_and_order_make_no_difference(tmp_path, fulls, models):
    """Sharded experts, a sharded base, another order: the same bytes of every tensor."""
    parts = [tmp_path / "P0", tmp_path / "P1", tmp_path / "PB"]
    for source, target in zip((*fulls[:2], models / "B"), parts, strict=True):
        shutil.copytree(source, target)
        (target / "model.safetensors").unlink()
        support.write_tensors(target, support.load_tensors(source), shard=20_000)
    # DARE draws by the expert's digest, which must not depend on the shards either.
    whole = {"base": models / "B", "method": "dare", "params": {"drop": 0.6}}
    composed(tmp_path / "a", *fulls[:2], **whole)
    composed(tmp_path / "b", fulls[1], parts[0], **whole)
    composed(tmp_path / "c", *parts[:2], **{**whole, "base": parts[2]})
    one, two, three = (support.load_tensors(tmp_path / name) for name in "abc")
    assert (
        support.folder_bytes(tmp_path / "a")["model.safetensors"]
        == (support.folder_bytes(tmp_path / "b")["model.safetensors"])
    )
    assert set(one) == set(two) == set(three)
    assert all(torch.equal(one[name], three[name]) for name in one)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    given = json.loads((parts[2] / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == given["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in one.values())


def test_the_record_repeats_the_bytes(tmp_path, fulls, models, experts):
    composed(tmp_path / "a", fulls[0], (experts / "E1", 0.5), base=models / "B", method="ties")
    run_plan(make_plan(read_recipe(tmp_path / "a" / "cgmerge.json")), tmp_path / "b")
    assert support.folder_bytes(tmp_path / "a") == support.folder_bytes(tmp_path / "b")
    support.make_full(tmp_path / "other", models / "B", seed=9)
    shutil.rmtree(fulls[0])
    shutil.move(tmp_path / "other", fulls[0])
    with pytest.raises(Damaged, match="not the expert that the recipe names"):
        make_plan(read_recipe(tmp_path / "a" / "cgmerge.json"))


def test_the_result_loads_in_transformers(tmp_path, fulls, models):
    (models / "B" / "chat_template.jinja").write_text("{{ messages }}")
    composed(tmp_path / "out", fulls[0], base=models / "B")
    ids = cases.IDS
    from transformers import AutoModelForCausalLM

    one, two = (
        AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (fulls[0], tmp_path / "out")
    )
    assert torch.allclose(one, two, atol=1e-4)
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    (models / "B" / "chat_template.jinja").unlink()


def test_gpt2_keeps_its_orientation(tmp_path, models):
    """Rules that tell rows from columns see [out, in]; sums come back as stored."""
    full = support.make_full(tmp_path / "G1", models / "G", seed=3)
    shapes = {"transformer.h.0.attn.c_attn": (96, 32)}
    adapter = support.make_expert(tmp_path / "a", shapes, fan_in_fan_out=True)
    composed(tmp_path / "out", full, (adapter, 2.0), base=models / "G")
    base, theirs, found = (support.load_tensors(f) for f in (models / "G", full, tmp_path / "out"))
    delta = support.dense_deltas(adapter)["transformer.h.0.attn.c_attn"]
    name = "transformer.h.0.attn.c_attn.weight"
    for key in base:
        wanted = theirs[key].double() + (2.0 * delta.T if key == name else 0.0)
        assert torch.allclose(found[key].double(), wanted, rtol=0, atol=2e-6), key
    composed(tmp_path / "wudi", full, adapter, base=models / "G", method="wudi")
    plan = plan_of(full, adapter, base=models / "G", method="wudi")
    views = [{name: deltas[name].dense()} for deltas in plan.deltas]
    assert views[0][name].shape == (96, 32)
    merged = merge_state_dicts("wudi", views)[name]
    found = support.load_tensors(tmp_path / "wudi")[name]
    assert torch.allclose(found, base[name] + merged.T, rtol=0, atol=1e-6)


def test_official_names_and_tables(tmp_path, models):
    """GPT-2 as published: no prefix, and causal masks among the weights."""
    tensors = support.load_tensors(models / "G")
    plain = {n.removeprefix("transformer."): t for n, t in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    shutil.copytree(models / "G", tmp_path / "published")
    support.write_tensors(tmp_path / "published", plain)
    full = support.make_full(tmp_path / "G1", models / "G", seed=3)
    composed(tmp_path / "out", full, base=tmp_path / "published")
    found, wanted = support.load_tensors(tmp_path / "out"), support.load_tensors(full)
    assert set(found) == set(plain)
    assert torch.equal(found["h.0.attn.bias"], plain["h.0.attn.bias"])
    for name, tensor in wanted.items():
        assert torch.allclose(found[name.removeprefix("transformer.")], tensor, atol=1e-6)


# Tied heads


def store_head(tensors, delta=0.0):
    return {**tensors, HEAD: tensors[EMBED] + delta}


def test_tied_stays_tied(tmp_path, models):
    """Whether a fine-tune or the base writes the tied head out makes no difference."""
    a = support.make_full(tmp_path / "A", models / "Bt", seed=1)
    b = support.make_full(tmp_path / "B", models / "Bt", seed=2)
    stored = support.make_full(tmp_path / "S", models / "Bt", seed=2, change=store_head)
    base = support.make_full(tmp_path / "base", models / "Bt", std=0.0, change=store_head)
    for name, experts, model in (
        ("x", (a, b), models / "Bt"), ("y", (a, stored), models / "Bt"), ("z", (a, b), base)
    ):  # fmt: skip
        composed(tmp_path / name, *experts, base=model, method="dare", params={"drop": 0.5})
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["tie_word_embeddings"] is True
    x, y, z = (support.load_tensors(tmp_path / name) for name in "xyz")
    assert HEAD not in x
    assert set(x) == set(y)
    assert all(torch.equal(x[name], y[name]) for name in x)
    assert torch.equal(z[HEAD], z[EMBED])
    assert all(torch.equal(x[name], z[name]) for name in x)
    gap = support.relative({EMBED: x[EMBED]}, {EMBED: support.load_tensors(models / "Bt")[EMBED]})
    assert gap > 0.01


def test_a_head_that_moved_away_unties(tmp_path, models):
    """Tied fine-tunes then move both embedding and head; the base's embedding is the start."""
    a = support.make_full(tmp_path / "A", models / "Bt", seed=1)
    b = support.make_full(
        tmp_path / "B", models / "Bt", seed=2, change=lambda t: store_head(t, torch.ones(32))
    )
    result = composed(tmp_path / "out", a, (b, 0.5), base=models / "Bt")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    base, one, two, found = (
        support.load_tensors(f)[EMBED] for f in (models / "Bt", a, b, tmp_path / "out")
    )
    expected = base + (one - base) + 0.5 * (two - base)
    assert torch.allclose(found, expected, atol=1e-6)
    head = support.load_tensors(tmp_path / "out")[HEAD]
    assert torch.allclose(head, expected + 0.5, atol=1e-6)
    assert HEAD in result.modules
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.equal(loaded.model.embed_tokens.weight, found)


def test_an_adapter_on_the_head_unties(tmp_path, models):
    full = support.make_full(tmp_path / "A", models / "Bt", seed=1)
    adapter = support.make_expert(tmp_path / "h", {"lm_head": (128, 32)}, seed=5)
    composed(tmp_path / "out", full, adapter, base=models / "Bt")
    found, wanted = support.load_tensors(tmp_path / "out"), support.load_tensors(full)
    delta = support.dense_deltas(adapter)["lm_head"].float()
    assert torch.allclose(found[EMBED], wanted[EMBED], atol=1e-6)
    assert torch.allclose(found[HEAD], wanted[EMBED] + delta, atol=1e-6)


def test_a_tied_fine_tune_of_an_untied_base(tmp_path, models):
    def tie(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != HEAD}

    full = support.make_full(tmp_path / "A", models / "B", seed=1, change=tie)
    composed(tmp_path / "out", full, base=models / "B")
    found = support.load_tensors(tmp_path / "out")
    wanted = support.load_tensors(full)[EMBED]
    assert torch.allclose(found[HEAD], wanted, atol=1e-6)
    assert torch.allclose(found[EMBED], wanted, atol=1e-6)


# Memory

_MEASURE = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.recipe import ExpertRef, Recipe
import cgmerge.merge.methods.ties
base, method, out, *experts = sys.argv[1:]
recipe = Recipe(experts=tuple(ExpertRef(e) for e in experts), method=method, base=base,
                form="model", params={"density": 0.3} if method == "ties" else {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_plan(make_plan(recipe), Path(out))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def big_models(folder, layers):
    """A base in one file and two fine-tunes, 4 MB per layer; only config and files are needed."""
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": layers,
              "num_attention_heads": 8, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        place = folder / f"{layers}-{number}"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        tensors = {
            f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(
                1024, 1024, generator=generator
            )
            for i in range(layers)
        }
        tensors[EMBED] = torch.randn(64, 1024, generator=generator)
        support.write_tensors(place, tensors)
    return [folder / f"{layers}-{number}" for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ties", "task-arithmetic"])
@pytest.mark.fault("F33")
def test_memory_does_not_grow_with_the_model(tmp_path, method):
    """16 and 32 layers of 4 MB in one file; three models of 128 MB in the larger case."""
    peaks = {}
    for layers in (16, 32):
        base, *experts = big_models(tmp_path, layers)
        words = [str(w) for w in (base, method, tmp_path / f"out{layers}", *experts)]
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, *words], capture_output=True, text=True, check=True
        )
        peaks[layers] = int(done.stdout)
    assert peaks[32] < peaks[16] + 8e6, peaks
    assert peaks[32] < 60e6, peaks


def test_no_tensor_of_the_expert_is_read_whole(tmp_path, models, monkeypatch):
    """Entry-wise rules ask for rows, never for more than a block of all experts."""
    from cgmerge.merge import deltas
    from cgmerge.modules import model_out, weights

    full = [support.make_full(tmp_path / f"F{i}", models / "B", seed=i) for i in range(2)]
    monkeypatch.setattr(deltas, "BLOCK_ENTRIES", 256)
    for module in (weights, model_out):
        monkeypatch.setattr(module, "CHUNK_ENTRIES", 128)
    largest = 0
    plain = weights.WeightReader.entries

    def entries(self, name, first, last):
        nonlocal largest
        largest = max(largest, last - first)
        return plain(self, name, first, last)

    monkeypatch.setattr(weights.WeightReader, "entries", entries)
    composed(tmp_path / "small", *full, base=models / "B", method="ties")
    assert largest == 128
    monkeypatch.undo()
    composed(tmp_path / "big", *full, base=models / "B", method="ties")
    one, two = (support.load_tensors(tmp_path / name) for name in ("small", "big"))
    assert all(torch.allclose(one[n], two[n], atol=1e-6) for n in one)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.fault("F26")
def test_a_failing_disk_leaves_the_old_or_nothing(tmp_path, models, monkeypatch, overwrite):
    """Shards, index and config appear together, or not at all."""
    base = support.make_full(tmp_path / "base", models / "B", std=0.0, shard=90_000)
    full = support.make_full(tmp_path / "F", models / "B")
    out = tmp_path / "out"
    if overwrite:
        composed(out, base, full, base=base)
    before = support.folder_bytes(out) if overwrite else None
    plan = plan_of(full, base=base)
    for at in range(1, 200):
        steps = 0

        def fail(operation, path, at=at):
            nonlocal steps
            steps += 1
            if steps == at:
                raise OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(fs, "_step", fail)
        try:
            run_plan(plan, out, overwrite=overwrite)
        except StorageError as error:
            assert "the disk is full" in error.message
            assert sorted(p.name for p in tmp_path.iterdir()) == (
                ["F", "base", "out"] if overwrite else ["F", "base"]
            )
            assert not overwrite or support.folder_bytes(out) == before
        else:
            break
    names = {path.name for path in out.iterdir()}
    assert {path.name for path in base.iterdir()} <= names
    assert at > 3 * len(list(base.glob("*.safetensors")))  # written, synced, sealed
    assert support.folder_bytes(out) != before


# Refusals


def refusal(tmp_path, models, change, base="B", **config):
    full = support.make_full(tmp_path / "F", models / base, change=change)
    if config:
        path = full / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(CgmergeError) as caught:
        composed(tmp_path / "out", full, base=models / base)
    assert not (tmp_path / "out").exists()
    return caught.value


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path, models):
    def grow(tensors):
        rows = torch.zeros(2, 32)
        return {n: torch.cat([t, rows]) if n in (EMBED, HEAD) else t for n, t in tensors.items()}

    error = refusal(tmp_path, models, grow, vocab_size=130)
    assert error.code == "incompatible.vocabulary"
    assert "130 tokens" in error.message
    assert "has 128" in error.message
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("change", "config", "code", "words"),
    [
        (lambda t: {n: v for n, v in t.items() if n != Q0}, {}, "weights",
         [Q0, "only in the base"]),
        (lambda t: {**t, "model.more.weight": torch.ones(2)}, {}, "weights",
         ["model.more.weight", "only in the fine-tune"]),
        (lambda t: {**t, Q0: t[Q0][:16].clone()}, {}, "shape", [Q0, "[16, 32]", "[32, 32]"]),
        (lambda t: {**t, Q0: t[Q0].to(torch.int8)}, {}, "quantized", [Q0, "I8"]),
        (None, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized",
         ["quantized weights"]),
        (None, {"model_type": "mistral"}, "architecture", ["mistral", "llama"]),
        (None, {"num_attention_heads": 8}, "architecture", ["heads is 8, the base has 4"]),
    ],
)  # fmt: skip
def test_what_is_no_fine_tune_is_refused(tmp_path, models, change, config, code, words):
    error = refusal(tmp_path, models, change, **config)
    assert error.code == f"incompatible.{code}"
    for word in words:
        assert word in error.message


def test_two_names_of_one_weight_are_refused(tmp_path, models):
    plain = Q0.removeprefix("model.")
    error = refusal(tmp_path, models, lambda t: {**t, plain: t[Q0].clone()})
    assert error.code == "damaged.names"
    assert plain in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, models, value):
    def spoil(tensors):
        tensors[Q0][3, 4] = value
        return tensors

    error = refusal(tmp_path, models, spoil)
    assert error.code == "damaged.not_finite"
    assert Q0 in error.message
    assert str(tmp_path / "F") in error.message


@pytest.mark.fault("F24")
def test_overflow_is_refused(tmp_path, fulls, models):
    with pytest.raises(Incompatible) as caught:
        composed(tmp_path / "out", (fulls[0], 1e6), base=models / "B", dtype="float16")
    assert caught.value.code == "incompatible.overflow"


def test_settings_that_are_not_merged_are_named(tmp_path, models, fulls):
    path = fulls[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    (fulls[0] / "chat_template.jinja").write_text("x")
    plan = plan_of(fulls[0], base=models / "B")
    assert any("rms_norm_eps" in text for text in plan.warnings)
    assert any("chat template" in text for text in plan.warnings)
    assert plan_of(fulls[1], base=models / "B").warnings == []


def test_an_adapter_cannot_be_made_of_full_models(run, tmp_path, fulls, models):
    for words in ([], ["--base", models / "B"]):
        result = run("compose", fulls[0], *words, "-o", tmp_path / "out", "--json")
        cases.refused(result, 2, "usage.full_model", "--as model", "cgmerge extract")
    words = ["--base", models / "B", "--as", "model"]
    result = run("compose", *fulls[:2], *words, "-m", "regmean", "-o", tmp_path / "out", "--json")
    cases.refused(result, 2, "usage.method", "statistics")


def test_command_line(run, tmp_path, fulls, models, experts):
    words = ["compose", f"{fulls[0]}=0.5", experts / "E1", "--base", models / "B", "--as", "model"]
    code, out, err = run(*words, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["modules"] == len(support.load_tensors(models / "B"))
    code, _, err = run(*words, "-o", tmp_path / "out")
    assert code == 0
    assert "F0  weight 0.5  full model" in err
    names = {entry["name"] for entry in cases.record(tmp_path / "out")["experts"]}
    assert names == {"F0", "E1"}


def test_the_result_never_replaces_an_input(fulls, models):
    with pytest.raises(UsageError, match="inputs are never replaced"):
        run_plan(plan_of(*fulls[:2], base=models / "B"), fulls[0], overwrite=True)


@pytest.mark.fault("F42")
def test_a_model_that_changes_while_it_is_read(tmp_path, models, fulls):
    plan = plan_of(fulls[0], base=models / "B")
    expert = open_full(str(fulls[0]), open_base(str(models / "B")))
    support.write_tensors(fulls[0], {"x": torch.zeros(3)})
    with pytest.raises(Damaged, match="changed"):
        expert.reader.entries(Q0, 0, 1)
    # The plan has read everything for the digest, and keeps the file it read.
    run_plan(plan, tmp_path / "out")


def test_a_folder_with_the_name_of_a_built_in_base(tmp_path, models, fulls, monkeypatch):
    fulls[0].rename(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    (expert,) = plan_of("tiny", base=models / "B").experts
    assert (expert.folder, expert.ref) == (tmp_path / "tiny", "tiny")


def test_pickles_are_refused(tmp_path, models, fulls):
    (fulls[0] / "model.safetensors").rename(fulls[0] / "pytorch_model.bin")
    with pytest.raises(CgmergeError) as caught:
        plan_of(fulls[0], base=models / "B")
    assert caught.value.code == "unsafe.pickle"


def test_the_usage_error_without_a_base(fulls):
    with pytest.raises(UsageError):
        make_plan(Recipe(experts=(ExpertRef(str(fulls[0])),), method="ties"))
