"""From expert folders to result folders: exact sums, honest errors, readable by plain peft."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support
import torch
from safetensors.torch import load_file

from cgmerge.errors import CgmergeError, Damaged, Incompatible, NotFound, UsageError
from cgmerge.modules.compose import describe, make_plan, run_plan
from cgmerge.modules.recipe import ExpertRef, Recipe, read_recipe


def composed(out, *refs, method="task-arithmetic", base=None, overwrite=False, **fields):
    items = tuple(
        ExpertRef(str(r[0]), r[1]) if isinstance(r, tuple) else ExpertRef(str(r)) for r in refs
    )
    recipe = Recipe(
        experts=items, method=method, base=None if base is None else str(base), **fields
    )
    return run_plan(make_plan(recipe), out, overwrite=overwrite)


def weighted_sum(*pairs):
    total = {}
    for folder, weight in pairs:
        for path, delta in support.dense_deltas(folder).items():
            total[path] = total.get(path, 0) + weight * delta
    return total


def reference_ties(folders, density):
    """TIES on zero-filled dense float64 vectors, written down from the paper."""
    dense = [support.dense_deltas(folder) for folder in folders]
    names = sorted(set().union(*dense))
    shapes = {n: next(d[n] for d in dense if n in d).shape for n in names}
    flat = torch.stack(
        [
            torch.cat(
                [d.get(n, torch.zeros(shapes[n], dtype=torch.float64)).flatten() for n in names]
            )
            for d in dense
        ]
    )
    kept = int(density * flat.shape[1])
    limits = flat.abs().sort(dim=1, descending=True).values[:, kept - 1 : kept]
    flat = torch.where(flat.abs() >= limits, flat, 0.0)
    sign = flat.sum(0).sign()
    agree = (flat.sign() == sign) & (sign != 0)
    mean = (flat * agree).sum(0) / agree.sum(0).clamp(min=1)
    parts = mean.split([math.prod(shapes[n]) for n in names])
    return {n: part.reshape(shapes[n]) for n, part in zip(names, parts, strict=True)}


CONFIGS = [
    {"rank": 4, "alpha": 8},
    {"rank": 4, "alpha": 4},
    {"rank": 16, "alpha": 16, "use_rslora": True},
    {"rank": 5, "alpha": 3},
    {"rank": 4, "alpha": 8, "ranks": {"v_proj": 2}},
    {"rank": 4, "alpha": 8, "alpha_pattern": {"layers.1.self_attn.v_proj": 32}},
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("method", "params"),
    [("linear", {}), ("task-arithmetic", {}), ("ties", {"density": 1.0})],
)
def test_one_expert_is_itself(tmp_path, qv, config, method, params):
    folder = support.make_expert(tmp_path / "e", qv, **config)
    composed(tmp_path / "out", folder, method=method, params=params)
    expected = support.dense_deltas(folder)
    assert support.relative(support.dense_deltas(tmp_path / "out"), expected) < 1e-6
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["lora_alpha"] == written["r"]
    assert type(written["lora_alpha"]) is int
    assert "rank_pattern" not in written
    assert written["use_rslora"] is False


@pytest.mark.parametrize(
    "weights", [(1.0, 1.0, 1.0), (0.5, -2.0, 0.25), (1.0, 0.0, -1.0), (1e-3, 1e3, 1.0)]
)
@pytest.mark.fault("F19")
def test_weighted_sums_are_exact_over_ranks_and_targets(experts, weights):
    folders = [experts / name for name in ("E1", "E2", "E3")]
    pairs = list(zip(folders, weights, strict=True))
    result = composed(experts / "out", *pairs, rank="exact")
    assert support.relative(support.dense_deltas(experts / "out"), weighted_sum(*pairs)) < 1e-6
    assert result.truncation_error == 0.0
    # q_proj has all three: 4 + 4 + 8.
    assert result.plan.rank == 16


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_truncated_sum_is_optimal_and_its_error_true(experts, rank):
    pairs = [(experts / "E1", 1.0), (experts / "E3", 0.5)]
    result = composed(experts / "out", *pairs, rank=rank)
    wanted = weighted_sum(*pairs)
    found = support.dense_deltas(experts / "out")
    best = sum(float(torch.linalg.svdvals(m)[rank:].square().sum()) for m in wanted.values())
    size = sum(float(m.square().sum()) for m in wanted.values())
    assert result.truncation_error == pytest.approx(support.relative(found, wanted), rel=1e-3)
    assert result.truncation_error == pytest.approx((best / size) ** 0.5, rel=1e-3)


def test_ties_equals_the_dense_reference(experts):
    folders = [experts / name for name in ("E1", "E2", "E3")]
    # Rank 32 holds every matrix here, so nothing is truncated.
    result = composed(experts / "out", *folders, method="ties", params={"density": 0.5}, rank=32)
    expected = reference_ties(folders, 0.5)
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-5
    assert result.truncation_error < 1e-4


def test_ties_to_low_rank_reports_its_error(experts):
    folders = [experts / name for name in ("E1", "E2", "E3")]
    result = composed(experts / "out", *folders, method="ties", params={"density": 0.5}, rank=6)
    gap = support.relative(support.dense_deltas(experts / "out"), reference_ties(folders, 0.5))
    assert result.truncation_error == pytest.approx(gap, rel=1e-3)
    assert 0.01 < gap < 0.9


def test_opposite_experts_have_no_effect(experts):
    with pytest.raises(Incompatible) as caught:
        composed(experts / "out", (experts / "E1", 1.0), (experts / "E1", -1.0))
    assert caught.value.code == "incompatible.no_effect"
    assert not (experts / "out").exists()
    composed(experts / "out", (experts / "E1", 1.0), (experts / "E1", -1.0), allow_noop=True)
    assert (experts / "out" / "adapter_model.safetensors").exists()


def test_untrained_expert_has_no_effect(experts):
    support.edit_tensors(
        experts / "E1", lambda t: {n: v * 0 if "lora_B" in n else v for n, v in t.items()}
    )
    with pytest.raises(Incompatible, match="changes nothing"):
        composed(experts / "out", experts / "E1")


def test_idle_modules_are_named(experts):
    def idle(tensors):
        for name in tensors:
            if "layers.1.self_attn.v_proj.lora_B" in name:
                tensors[name].zero_()
        return tensors

    support.edit_tensors(experts / "E1", idle)
    result = composed(experts / "out", experts / "E1")
    assert any("layers.1.self_attn.v_proj" in warning for warning in result.warnings)


@pytest.mark.fault("F38")
def test_order_of_experts_gives_the_same_bytes(experts):
    names = ("E1", "E2", "E3")
    for number, order in enumerate(itertools.permutations(names)):
        composed(experts / f"o{number}", *[experts / n for n in order], method="ties", rank=8)
    first = support.folder_bytes(experts / "o0")
    for number in range(1, 6):
        assert support.folder_bytes(experts / f"o{number}") == first


@pytest.mark.fault("F38")
def test_hash_seed_and_threads_give_the_same_bytes(experts):
    words = [sys.executable, "-m", "cgmerge", "compose", "E1", "E2=0.5", "E3", "--rank", "8"]
    results = []
    for seed, threads, method in [(0, 1, "ties"), (1, 2, "ties"), (2, 2, "ties")]:
        out = f"s{seed}"
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [*words, "-m", method, "-o", out, "-q"],
            cwd=experts,
            env=env,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().strip() == out
        results.append(support.folder_bytes(experts / out))
    assert results[0] == results[1] == results[2]


def test_the_record_reproduces_the_bytes(experts, monkeypatch):
    monkeypatch.chdir(experts)
    recipe = Recipe(
        experts=(ExpertRef("E1", 0.7), ExpertRef("E2", -0.2)),
        method="ties",
        params={"density": 0.3, "scale": 1.5},
        rank=6,
    )
    run_plan(make_plan(recipe), experts / "once")
    again = read_recipe(experts / "once" / "cgmerge.json")
    run_plan(make_plan(again), experts / "deep" / "twice")
    assert support.folder_bytes(experts / "once") == support.folder_bytes(
        experts / "deep" / "twice"
    )


@pytest.mark.fault("F15")
def test_the_record_notices_a_changed_expert(experts, monkeypatch):
    monkeypatch.chdir(experts)
    composed(experts / "out", "E1", "E2")
    support.make_expert(experts / "E1", support.pick(support.llama_shapes(), "q_proj"), seed=77)
    with pytest.raises(Damaged, match="not the expert that the recipe names"):
        make_plan(read_recipe(experts / "out" / "cgmerge.json"))


def test_yaml_recipe(experts, monkeypatch):
    monkeypatch.chdir(experts)
    (experts / "r.yml").write_text(
        "experts:\n  - E1=0.5\n  - {ref: E2, weight: -1}\nmethod: task-arithmetic\n"
        "params: {scale: 2}\noutput: {rank: exact}\n"
    )
    run_plan(make_plan(read_recipe(experts / "r.yml")), experts / "out")
    expected = weighted_sum((experts / "E1", 1.0), (experts / "E2", -2.0))
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6


def test_paths_in_a_recipe_are_relative_to_it(experts, models, monkeypatch, tmp_path):
    """From everywhere the same experts, although other ones of that name lie in between."""
    place = tmp_path / "place"
    place.mkdir()
    shutil.copytree(models / "B", place / "base")
    shutil.copytree(experts / "E1", place / "one=2")  # a name that ends like a weight
    shutil.copytree(experts / "E2", place / "two")
    shutil.copytree(experts / "E2", tmp_path / "one=2")
    shutil.copytree(experts / "E1", tmp_path / "two")
    (place / "r.yml").write_text(
        "base: base\nexperts:\n  - one=2\n  - {ref: ./two, weight: 3}\nmethod: linear\n"
        "params: {normalize: false}\noutput: {rank: exact}\n"
    )
    expected = weighted_sum((experts / "E1", 1.0), (experts / "E2", 3.0))
    for folder, ref in ((tmp_path, "place/r.yml"), (place, "r.yml"), (experts, place / "r.yml")):
        monkeypatch.chdir(folder)
        recipe = read_recipe(Path(ref))
        assert recipe.base == str(Path(ref).parent / "base")
        plan = make_plan(recipe)
        run_plan(plan, tmp_path / "out", overwrite=True)
        found = support.dense_deltas(tmp_path / "out")
        assert support.relative(found, expected) < 1e-6
        beside = Path(ref).parent
        assert sorted(plan.refs) == [str(beside / "one=2"), str(beside / "two")]
        # The record says where the experts are from here, and can be composed again.
        again = make_plan(read_recipe(tmp_path / "out" / "cgmerge.json"))
        assert (again.refs, again.base.ref) == (plan.refs, plan.base.ref)


def test_what_only_the_current_folder_has_is_not_taken(experts, monkeypatch):
    monkeypatch.chdir(experts)
    (experts / "deep").mkdir()
    (experts / "deep" / "r.yml").write_text("experts: [E1]\n")
    with pytest.raises(NotFound) as caught:
        make_plan(read_recipe(Path("deep/r.yml")))
    assert caught.value.message == "no such expert: deep/E1"
    # And no guess at a repository `deep/E1` on the hub.
    assert caught.value.hint == "references are relative to the folder of deep/r.yml: write ../E1"


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "hf://user/repo", "hf://user/repo@main"])
def test_names_that_are_no_paths_stay(tmp_path, name):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "r.yml").write_text(
        f"base: {name}\nexperts: [hf://user/e=0.5, {{ref: hf://user/f}}, tiny]\n"
    )
    recipe = read_recipe(tmp_path / "r.yml")
    assert recipe.base == name
    assert [(e.ref, e.weight) for e in recipe.experts] == [
        ("hf://user/e", 0.5), ("hf://user/f", None), (str(tmp_path / "tiny"), None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experts: []\nmethod: ties", "at least one"),
        ("expert: [E1]", "unknown key `expert`"),
        ("experts: [E1]\noutput: {rnk: 4}", "unknown key `rnk`"),
        ("experts: [{ref: E1, weight: heavy}]", "weight must be a finite number"),
        ("- a\n- b", "must hold a mapping"),
        ("experts: [E1", "not valid YAML"),
        ("experts: [E1]\noutput: {as: zip}", "adapter or model"),
    ],
)
def test_bad_recipes_are_usage_errors(tmp_path, text, words):
    (tmp_path / "r.yml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_recipe(tmp_path / "r.yml")


def test_gaps_between_layers_are_filled_with_zeros(tmp_path):
    shapes = {
        "model.layers.0.self_attn.q_proj": (32, 32),
        "model.layers.1.self_attn.v_proj": (16, 32),
    }
    folder = support.make_expert(tmp_path / "e", shapes)
    composed(tmp_path / "out", folder)
    found = support.dense_deltas(tmp_path / "out")
    assert len(found) == 4
    assert found["model.layers.1.self_attn.q_proj"].abs().max() == 0
    assert support.relative(found, support.dense_deltas(folder)) < 1e-6


def test_half_precision_output_says_what_rounding_costs(experts):
    result = composed(experts / "out", experts / "E1", dtype="bfloat16")
    gap = support.relative(
        support.dense_deltas(experts / "out"), support.dense_deltas(experts / "E1")
    )
    assert result.rounding_error == pytest.approx(gap, rel=1e-2)
    assert 1e-4 < gap < 1e-2


def test_experts_of_different_bases_are_refused(experts, models):
    from cgmerge.modules.card import BaseId, ExpertCard, write_card

    for name, base in (("E1", "fp1:a"), ("E2", "fp1:b")):
        write_card(experts / name, ExpertCard(skill=name, base=BaseId(name="x", fingerprint=base)))
    with pytest.raises(Incompatible, match="do not share a base") as caught:
        composed(experts / "out", experts / "E1", experts / "E2")
    assert caught.value.details["found"] == ["fp1:a", "fp1:b"]


def test_experts_of_different_widths_are_refused(experts):
    support.make_expert(experts / "W", {"model.layers.0.self_attn.q_proj": (64, 64)})
    with pytest.raises(Incompatible, match="64×64"):
        composed(experts / "out", experts / "E1", experts / "W")


def test_existing_output_is_kept_unless_told(experts):
    composed(experts / "out", experts / "E1")
    before = support.folder_bytes(experts / "out")
    with pytest.raises(UsageError) as caught:
        composed(experts / "out", experts / "E2")
    assert "--overwrite" in caught.value.hint
    assert support.folder_bytes(experts / "out") == before
    composed(experts / "out", experts / "E2", overwrite=True)
    assert support.folder_bytes(experts / "out") != before


def test_output_never_replaces_an_input(experts):
    before = support.folder_bytes(experts / "E1")
    (experts / "link").symlink_to("E1")
    for out in (experts / "E1", experts / "link"):
        with pytest.raises(UsageError, match="inputs are never replaced") as caught:
            composed(out, experts / "E1", experts / "E2", overwrite=True)
        assert caught.value.code == "usage.out_is_input"
    with pytest.raises(UsageError, match="inputs are never replaced"):
        composed(experts / "E1", experts / "link", experts / "E2", overwrite=True)
    assert support.folder_bytes(experts / "E1") == before


def test_output_inside_an_input_is_refused(experts):
    with pytest.raises(UsageError, match="inside"):
        composed(experts / "E1" / "sub", experts / "E1")


def test_files_are_readable_by_others(experts):
    before = os.umask(0o022)
    try:
        composed(experts / "out", experts / "E1")
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in (experts / "out").iterdir()} == {"0o644"}
    assert oct((experts / "out").stat().st_mode & 0o777) == "0o755"


def test_removing_an_expert_is_recomposing(experts):
    composed(experts / "both", experts / "E1", experts / "E2")
    composed(experts / "one", experts / "E1")
    composed(experts / "both", experts / "E1", overwrite=True)
    assert support.folder_bytes(experts / "both") == support.folder_bytes(experts / "one")


def test_describe_keeps_the_order_of_the_user(experts):
    result = composed(experts / "out", (experts / "E2", 2.0), (experts / "E1", 3.0))
    shown = describe(result)
    assert [entry["weight"] for entry in shown["experts"]] == [2.0, 3.0]
    assert shown["experts"][0]["ref"].endswith("E2")


@pytest.mark.slow
@pytest.mark.parametrize("base", ["B", "G"])
def test_plain_peft_gives_base_plus_delta(experts, models, base):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if base == "G":
        shapes = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.attn.c_proj": (32, 32)}
        folders = [
            support.make_expert(experts / f"G{i}", shapes, seed=i, fan_in_fan_out=True)
            for i in range(2)
        ]
    else:
        folders = [experts / name for name in ("E1", "E2", "E3")]
    composed(experts / "out", *folders, base=models / base, rank="exact")
    torch.manual_seed(123)  # a failed load must not look right by coincidence
    ids = torch.arange(8)[None]
    plain = AutoModelForCausalLM.from_pretrained(models / base)
    before = plain(ids).logits
    expected = weighted_sum(*[(folder, 1.0) for folder in folders])
    with torch.no_grad():
        for path, delta in expected.items():
            weight = plain.get_submodule(path).weight
            weight += (delta.T if base == "G" else delta).float()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(models / base), experts / "out"
    )
    effect, wanted = loaded(ids).logits - before, plain(ids).logits - before
    assert wanted.abs().max() > 0.05
    assert torch.allclose(effect, wanted, atol=1e-5)


@pytest.mark.parametrize(("base", "tied"), [("B", False), ("Bt", True)])
def test_model_output_loads_by_itself(experts, models, base, tied):
    from transformers import AutoModelForCausalLM

    shapes = {**support.pick(support.llama_shapes(), "q_proj"), "lm_head": (128, 32)}
    folder = support.make_expert(experts / "head", shapes, seed=5)
    composed(experts / "out", folder, experts / "E3", base=models / base, form="model")
    ids = torch.arange(8)[None]
    plain = AutoModelForCausalLM.from_pretrained(models / base)
    before = plain(ids).logits
    expected = weighted_sum((folder, 1.0), (experts / "E3", 1.0))
    if tied:
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.detach().clone())
    with torch.no_grad():
        for path, delta in expected.items():
            plain.get_submodule(path).weight += delta.float()
    loaded = AutoModelForCausalLM.from_pretrained(experts / "out")
    assert (plain(ids).logits - before).abs().max() > 0.05
    assert torch.allclose(loaded(ids).logits, plain(ids).logits, atol=1e-5)
    assert (experts / "out" / "generation_config.json").exists()


def test_model_of_gpt2_adds_transposed(experts, models):
    shapes = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.attn.c_proj": (32, 32)}
    folder = support.make_expert(experts / "g", shapes, fan_in_fan_out=True)
    composed(experts / "out", folder, base=models / "G", form="model")
    before = load_file(models / "G" / "model.safetensors")
    after = load_file(experts / "out" / "model.safetensors")
    for path, delta in support.dense_deltas(folder).items():
        gap = after[f"{path}.weight"].double() - before[f"{path}.weight"].double()
        assert torch.allclose(gap, delta.T, atol=1e-6)
    untouched = [n for n in before if not any(n.startswith(p) for p in shapes)]
    assert all(torch.equal(before[n], after[n]) for n in untouched)


def test_sharded_base_gives_the_same_model(experts, models):
    from transformers import AutoModelForCausalLM

    sharded = experts / "sharded"
    AutoModelForCausalLM.from_pretrained(models / "B").save_pretrained(
        sharded, max_shard_size="20KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 2
    composed(experts / "a", experts / "E1", base=models / "B", form="model")
    composed(experts / "b", experts / "E1", base=sharded, form="model")
    whole = load_file(experts / "a" / "model.safetensors")
    parts = {}
    for path in (experts / "b").glob("*.safetensors"):
        parts |= load_file(path)
    assert set(whole) == set(parts)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    ids = torch.arange(6)[None]
    one = AutoModelForCausalLM.from_pretrained(experts / "a")(ids).logits
    two = AutoModelForCausalLM.from_pretrained(experts / "b")(ids).logits
    assert torch.equal(one, two)


def test_rounding_away_the_delta_is_reported_then_refused(experts, tmp_path):
    support.make_llama(experts / "Bf", dtype=torch.bfloat16)
    weak = {"params": {"scale": 0.02}}
    result = composed(experts / "a", experts / "E1", base=experts / "Bf", form="model", **weak)
    assert 0.01 < result.rounding_error < 0.5
    assert any("rounding to bfloat16 loses" in warning for warning in result.warnings)
    lost = {"params": {"scale": 1e-5}}
    with pytest.raises(Incompatible) as caught:
        composed(experts / "b", experts / "E1", base=experts / "Bf", form="model", **lost)
    assert caught.value.code == "incompatible.rounding"
    assert "rounding to bfloat16 loses" in caught.value.message
    assert not (experts / "b").exists()
    kept = composed(
        experts / "c", experts / "E1", base=experts / "Bf", form="model", dtype="float32", **lost
    )
    assert kept.rounding_error < 0.01


def test_quantized_base_is_refused(experts, models):
    import shutil

    shutil.copytree(models / "B", experts / "Q")
    path = experts / "Q" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"load_in_4bit": True}})
    )
    with pytest.raises(Incompatible) as caught:
        composed(experts / "out", experts / "E1", base=experts / "Q", form="model")
    assert caught.value.code == "incompatible.quantized_base"


def test_model_without_a_base_is_a_usage_error():
    with pytest.raises(UsageError, match="needs the base"):
        Recipe(experts=(ExpertRef("x"),), method="linear", form="model")


def test_inputs_and_base_are_not_touched(experts, models):
    before = {name: support.folder_bytes(experts / name) for name in ("E1", "E2")}
    base = support.folder_bytes(models / "B")
    composed(experts / "out", experts / "E1", experts / "E2", base=models / "B", form="model")
    assert {name: support.folder_bytes(experts / name) for name in ("E1", "E2")} == before
    assert support.folder_bytes(models / "B") == base


def test_errors_leave_nothing_behind(experts):
    support.edit_tensors(experts / "E2", lambda t: {n: v * float("nan") for n, v in t.items()})
    with pytest.raises(CgmergeError):
        composed(experts / "out", experts / "E1", experts / "E2")
    assert sorted(path.name for path in experts.iterdir()) == ["E1", "E2", "E3"]


def test_the_same_expert_twice_is_said(run, experts, tmp_path):
    first = experts / "E1"
    code, text, err = run("compose", first, first, "-o", tmp_path / "o", "--json")
    assert code == 0, err
    assert any("more than once" in warning for warning in json.loads(text)["warnings"])


def test_the_page_of_fisher_promises_no_exact_rank(run):
    code, text, _ = run("methods", "fisher")
    assert code == 0
    assert "whole matrices" in text
    assert "exact at --rank exact" not in text
    assert "exact at --rank exact" in run("methods", "tsv")[1]


def test_slerp_keeps_the_order_of_the_experts_and_its_record_repeats_it(experts):
    """t is the way from the first expert to the second, whatever their contents hash to."""
    e1, e2 = experts / "E1", experts / "E2"
    for name, pair, t in (("a", (e1, e2), 0.2), ("b", (e2, e1), 0.8), ("c", (e2, e1), 0.2)):
        composed(experts / name, *pair, method="slerp", params={"t": t})
    a, b, c = (support.dense_deltas(experts / name) for name in "abc")
    assert support.relative(a, support.dense_deltas(e1)) < support.relative(
        a, support.dense_deltas(e2)
    )
    assert support.relative(a, b) < 1e-6
    assert support.relative(c, a) > 0.1
    for name in "ac":
        run_plan(make_plan(read_recipe(experts / name / "cgmerge.json")), experts / f"{name}2")
        assert support.folder_bytes(experts / name) == support.folder_bytes(experts / f"{name}2")


def test_cutting_equal_singular_values_is_said_to_be_arbitrary(experts):
    pair = experts / "E1", experts / "E3"
    words = "keeps arbitrary"
    cut = composed(experts / "cut", *pair, method="iso-c", rank=4)
    assert any(words in text and "flatten=1.0" in text for text in cut.warnings)
    whole = composed(experts / "whole", *pair, method="iso-c", rank="exact")
    slanted = composed(experts / "s", *pair, method="iso-c", rank=4, params={"flatten": 0.99})
    assert not any(words in text for text in [*whole.warnings, *slanted.warnings])


def test_a_large_loss_is_warned_of(experts):
    refs = experts / "E1", experts / "E2"
    rank = composed(experts / "exact", *refs, rank="exact").plan.rank
    low = composed(experts / "low", *refs, rank=1)
    assert low.truncation_error > 0.1
    (warning,) = [text for text in low.warnings if "loses" in text]
    assert f"rank 1 loses {low.truncation_error:.0%} of ‖ΔW‖" in warning
    assert "--rank exact" in warning
    assert "larger --rank" in warning
    recorded = json.loads((experts / "low" / "cgmerge.json").read_text())["warnings"]
    assert warning in recorded
    high = composed(experts / "high", *refs, rank=rank)
    assert not [text for text in high.warnings if "loses" in text]
    (warning,) = [
        t for t in composed(experts / "t", *refs, method="ties", rank=1).warnings if "loses" in t
    ]
    assert "--rank exact" not in warning
    assert "--as model" in warning


def scaled(folder, factor):
    support.edit_tensors(folder, lambda tensors: {n: t * factor for n, t in tensors.items()})
    return folder


def test_a_product_that_float32_cannot_hold_is_refused(experts, tmp_path):
    """Finite factors: only their product overflows, and plain peft would answer NaN."""
    with pytest.raises(Incompatible, match="overflows float32") as caught:
        composed(tmp_path / "out", scaled(experts / "E1", 1e25))
    assert caught.value.code == "incompatible.overflow"
    assert not (tmp_path / "out").exists()


def test_a_product_below_every_float32_changes_nothing(experts, tmp_path):
    with pytest.raises(Incompatible, match="changes nothing.*float32 holds none") as caught:
        composed(tmp_path / "out", scaled(experts / "E1", 1e-25))
    assert caught.value.code == "incompatible.no_effect"


def test_experts_that_name_other_bases_are_warned_of(experts, tmp_path):
    support.edit_config(experts / "E1", base_model_name_or_path="org/one")
    support.edit_config(experts / "E2", base_model_name_or_path="org/two")
    for name in ("E1", "E2"):
        (experts / name / "expert.json").unlink(missing_ok=True)
    made = composed(tmp_path / "out", experts / "E1", experts / "E2", method="linear")
    said = [text for text in made.warnings if "name their bases differently" in text]
    assert said == ["the experts name their bases differently (E1: org/one; E2: org/two)"]


def test_a_dry_run_refuses_what_the_run_would(run, experts, tmp_path):
    """An output that exists is known before anything is computed."""
    out = tmp_path / "out"
    words = ["compose", str(experts / "E1"), "-o", str(out)]
    assert run(*words)[0] == 0
    code, _, said = run(*words, "--dry-run")
    assert (code, "exists already" in said) == (2, True)
