"""Full fine-tune to LoRA: the best of its rank, the error true, readable by plain peft."""

import json

import case_support as cases
import pytest
import support
import torch

from cgmerge.errors import CgmergeError
from cgmerge.merge import best_dense, lowrank
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.extract import plan_extraction, run_extraction
from cgmerge.modules.fullmodel import open_full
from cgmerge.modules.recipe import ExpertRef, Recipe

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


def extracted(full, base, out, rank, **options):
    opened = open_base(str(base))
    return run_extraction(
        plan_extraction(open_full(str(full), opened), opened, rank, **options), out
    )


def model_of(out, base, *experts):
    """Base plus experts as a full model."""
    refs = tuple(ExpertRef(str(expert)) for expert in experts)
    recipe = Recipe(experts=refs, method="task-arithmetic", base=str(base), form="model")
    run_plan(make_plan(recipe), out)
    return out


def differences(full, base):
    """Delta of every 2-D linear weight in float64, by module path."""
    ours = support.load_tensors(base)
    return {
        name.removesuffix(".weight"): tensor.double() - ours[name].double()
        for name, tensor in support.load_tensors(full).items()
        if tensor.ndim == 2 and "embed" not in name
    }


def test_what_was_a_lora_comes_back_at_its_rank(run, experts, models):
    full = model_of(experts / "full", models / "B", experts / "E1")
    words = ["extract", full, "--base", models / "B", "--rank", 4, "-o", experts / "out"]
    found = cases.done(run(*words, "--json"))
    wanted = support.dense_deltas(experts / "E1")
    assert found["error"] < 1e-5
    assert found["dropped"] == {}
    assert support.relative(support.dense_deltas(experts / "out"), wanted) < 1e-5
    assert sorted(found["modules"]) == sorted(wanted)
    config = json.loads((experts / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    cases.same_effect(
        cases.effect(models / "B", adapter=experts / "out"), cases.effect(models / "B", merged=full)
    )
    # It is an expert like any other, of this base.
    composed = ["compose", experts / "out", experts / "E2", "--base", models / "B", "-m", "linear"]
    assert cases.done(run(*composed, "-o", experts / "both", "--json"))["warnings"] == [
        "E2: no base fingerprint in the expert (shapes fit)"
    ]


@pytest.mark.parametrize("rank", [1, 4, 20])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_best_of_its_rank_and_the_error_is_true(tmp_path, models, rank, dtype):
    full = support.make_full(tmp_path / "F", models / "B", only="_proj")
    result = extracted(full, models / "B", tmp_path / "out", rank, dtype=dtype)
    wanted = differences(full, models / "B")
    found = support.dense_deltas(tmp_path / "out")
    gap = support.relative(found, wanted)
    assert result.error == pytest.approx(gap, rel=1e-3)
    best = sum(float(torch.linalg.svdvals(m)[rank:].square().sum()) for m in wanted.values())
    size = sum(float(m.square().sum()) for m in wanted.values())
    tolerance = 1e-3 if dtype == "auto" else 0.05
    assert gap == pytest.approx((best / size) ** 0.5, rel=tolerance)
    path = "model.layers.0.self_attn.q_proj"
    own = support.relative({path: found[path]}, {path: wanted[path]})
    assert result.modules[path].error == pytest.approx(own, rel=1e-3)
    record = json.loads((tmp_path / "out" / "extract.json").read_text())
    assert record["error"] == result.error
    assert record["modules"][path]["error"] == result.modules[path].error


def test_what_lora_cannot_hold_is_named_and_counted(tmp_path, models):
    full = support.make_full(tmp_path / "F", models / "B")
    result = extracted(full, models / "B", tmp_path / "out", 32)
    base, theirs = support.load_tensors(models / "B"), support.load_tensors(full)
    lost = {n: t.double() - base[n].double() for n, t in theirs.items() if t.ndim < 2 or n == EMBED}
    assert set(result.dropped) == set(lost)
    for name, delta in lost.items():
        assert result.dropped[name] == pytest.approx(float(delta.norm()), rel=1e-5)
    total = sum(float((theirs[n].double() - base[n].double()).square().sum()) for n in theirs)
    # Rank 32 holds every matrix here, so the error is what was dropped.
    share = sum(float(delta.square().sum()) for delta in lost.values()) / total
    assert result.error == pytest.approx(share**0.5, rel=1e-3)
    (warning,) = result.warnings
    assert f"{len(lost)} weights changed" in warning
    assert EMBED in warning  # the largest come first
    assert "lm_head" in result.modules


def test_a_tied_embedding_is_dropped_once(tmp_path, models):
    full = support.make_full(tmp_path / "F", models / "Bt")
    result = extracted(full, models / "Bt", tmp_path / "out", 4)
    assert EMBED in result.dropped
    assert "lm_head" not in result.modules


def test_gpt2_in_plain_peft(tmp_path, models):
    """Transposed on disk, and published files lack the prefix that the model has."""
    full = support.make_full(tmp_path / "F", models / "G", only="attn.c_attn.weight", std=0.2)
    published = tmp_path / "published"
    support.make_full(
        published, models / "G", std=0.0,
        change=lambda t: {n.removeprefix("transformer."): v for n, v in t.items()},
    )  # fmt: skip
    for number, base in enumerate((models / "G", published)):
        out = tmp_path / f"out{number}"
        assert extracted(full, base, out, 32).error < 1e-5
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["fan_in_fan_out"] is True
        cases.same_effect(
            cases.effect(models / "G", adapter=out), cases.effect(models / "G", merged=full)
        )


def test_sharded_gives_the_same_factors(tmp_path, models):
    one = support.make_full(tmp_path / "F", models / "B", only="_proj")
    two = support.make_full(tmp_path / "S", models / "B", only="_proj", shard=20_000)
    extracted(one, models / "B", tmp_path / "a", 4)
    extracted(two, models / "B", tmp_path / "b", 4)
    weights = [support.folder_bytes(tmp_path / n)["adapter_model.safetensors"] for n in "ab"]
    assert weights[0] == weights[1]


def test_nothing_to_extract(run, tmp_path, models):
    same = support.make_full(tmp_path / "F", models / "B", std=0.0)
    words = ["extract", same, "--base", models / "B", "--rank", 4, "-o", tmp_path / "out", "--json"]
    cases.refused(run(*words), 3, "incompatible.no_effect", "nothing to extract")
    assert not (tmp_path / "out").exists()


def test_refusals(run, tmp_path, models, experts):
    full = support.make_full(tmp_path / "F", models / "B")
    words = ["--base", models / "B", "-o", tmp_path / "out", "--json"]
    cases.refused(run("extract", full, *words, "--rank", 5000), 2, "usage.rank", "1,024", "5,000")
    cases.refused(run("extract", full, *words, "--rank", 4, "--dtype", "int8"), 2, "usage.dtype")
    cases.refused(
        run("extract", experts / "E1", *words, "--rank", 4), 3, "incompatible.base_is_adapter"
    )
    inside = ["--base", models / "B", "-o", full / "x", "--json"]
    cases.refused(run("extract", full, *inside, "--rank", 4), 2, "usage.out_inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "extract.json").write_text("{}")
    cases.refused(run("extract", full, *words, "--rank", 4), 2, "usage.out_exists", "--overwrite")
    assert (tmp_path / "out" / "extract.json").read_text() == "{}"
    found = cases.done(run("extract", full, *words, "--rank", 4, "--overwrite", "--dry-run"))
    assert found["out"] is None
    code, _, err = run("extract", full, *words[:-1], "--rank", 4, "--overwrite", "-v")
    assert code == 0
    assert "is not in the adapter" in err
    assert "model.layers.0.self_attn.q_proj: norm" in err


def test_a_rank_that_no_matrix_has_is_not_written(run, tmp_path, models):
    """The smallest side of the largest matrices is 32; beyond it there are only zeros."""
    full = support.make_full(tmp_path / "F", models / "B", only="_proj")
    words = ["extract", full, "--base", models / "B", "--json", "-o"]
    wide = cases.done(run(*words, tmp_path / "wide", "--rank", 500))
    assert wide["rank"] == 32
    assert "no matrix has a rank above 32: written at rank 32, not 500" in wide["warnings"]
    assert cases.done(run(*words, tmp_path / "dry", "--rank", 500, "--dry-run"))["rank"] == 32
    own = cases.done(run(*words, tmp_path / "own", "--rank", 32))
    assert own["warnings"] == []
    a, b = (support.folder_bytes(tmp_path / name) for name in ("wide", "own"))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert a[name] == b[name]


def test_a_model_that_says_what_it_was_made_from(run, tmp_path, models, experts):
    """A model that `compose` wrote has a record, wherever its delta is taken again."""
    full = model_of(tmp_path / "made", models / "B", experts / "E1")
    ours, theirs = (open_base(str(models / name)).fingerprint for name in ("B2", "B"))
    commands = {
        "extract": ["extract", full, "--rank", 4],
        "compress": ["compress", full],
        "compose": ["compose", full, experts / "E2", "-m", "linear", "--as", "model"],
    }
    for name, words in commands.items():
        for base, code in ((models / "B", 0), (models / "B2", 3)):
            out = tmp_path / f"{name}-{base.name}.cge"
            all_words = [*words, "--base", base, "-o", out, "--json"]
            if code == 0:
                cases.done(run(*all_words))
                continue
            error = cases.refused(
                run(*all_words), 3, "incompatible.base", theirs, ours, "--force-base"
            )
            assert (error["expected"], error["found"]) == (theirs, ours)
            assert not out.exists()
            forced = cases.done(run(*all_words, "--force-base"))
            assert f"made was made from {theirs}" in " ".join(forced["warnings"])


@pytest.mark.parametrize("record", [{"schema": "other/1", "base": {"fingerprint": "x"}}, {}])
def test_a_record_of_something_else_says_nothing(run, tmp_path, models, record):
    full = support.make_full(tmp_path / "F", models / "B")
    (full / "cgmerge.json").write_text(json.dumps(record))
    words = ["extract", full, "--base", models / "B", "--rank", 4, "-o", tmp_path / "out"]
    assert run(*words)[0] == 0


def test_overflow_is_refused(tmp_path, models):
    full = support.make_full(tmp_path / "F", models / "B", std=1e12, only="q_proj")
    with pytest.raises(CgmergeError) as caught:
        extracted(full, models / "B", tmp_path / "out", 4, dtype="float16")
    assert caught.value.code == "incompatible.overflow"


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (64, 64), (1, 5), (5, 1)])
@pytest.mark.parametrize("side", [0, 4096])
def test_best_dense_is_the_optimum(monkeypatch, shape, side):
    """Exactly, and by iteration where a matrix is too large for that."""
    monkeypatch.setattr(lowrank, "EXACT_SIDE", side)
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for rank in (1, 3, 200):
        found = best_dense(matrix, rank)
        gap = float((matrix - found.delta.dense()).square().sum())
        values = torch.linalg.svdvals(matrix.double()).square()
        assert gap == pytest.approx(float(values[rank:].sum()), rel=2e-2, abs=1e-6)
        assert found.error_sq == pytest.approx(gap, rel=1e-3, abs=1e-6)
        assert found.norm_sq == pytest.approx(float(values.sum()), rel=1e-5)
    zero = best_dense(torch.zeros(*shape), 2)
    assert zero.error_sq == 0.0
    assert float(zero.delta.dense().abs().max()) == 0.0
