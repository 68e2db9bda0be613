"""U21: an adapter that is written without complaint and that the server then refuses."""

import json

import case_support as cases
import pytest
import support
import torch


@pytest.fixture
def summed(run, tmp_path, qv):
    """The exact sum of five experts of rank 4, an adapter of rank 20."""
    for number in range(5):
        support.make_expert(tmp_path / f"e{number}", qv, seed=number)
    words = [tmp_path / f"e{number}" for number in range(5)]
    run("compose", *words, "-m", "task-arithmetic", "--rank", "exact", "-o", tmp_path / "sum", "-q")
    return tmp_path / "sum"


def test_what_a_server_would_refuse_is_said_before_anything_is_written(run, summed):
    before = cases.tree(summed.parent)
    for more in ([], ["-o", summed.parent / "served"]):
        found = cases.done(run("export", summed, "--to", "vllm", "--dry-run", "--json", *more))
        assert (found["rank"], found["out"]) == (20, None)
        assert "rank 20 is more than 16" in found["warnings"][0]
        assert "--rank 16" in found["warnings"][0]
        assert "--max-lora-rank 32" in found["command"]
    assert cases.done(run("export", summed, "--dry-run", "--json"))["warnings"] == []
    assert cases.tree(summed.parent) == before


def test_cut_to_the_limit_with_the_error_measured(run, summed):
    out = summed.parent / "served"
    found = cases.done(run("export", summed, "--to", "vllm", "--rank", 16, "-o", out, "--json"))
    assert (found["rank"], found["warnings"]) == (16, [])
    assert "--max-lora-rank 16" in (out / "serve.sh").read_text()
    (place,) = found["adapters"].values()
    exact, written = support.dense_deltas(summed), support.dense_deltas(out / place)
    assert found["truncation_error"] == pytest.approx(support.relative(written, exact), rel=1e-4)
    # The best there is at this rank, module by module.
    lost = sum(float(torch.linalg.svdvals(d)[16:].square().sum()) for d in exact.values())
    total = sum(float(d.square().sum()) for d in exact.values())
    assert found["truncation_error"] == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    config = json.loads((out / place / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (16, 16, "none")
    assert not config.get("modules_to_save")
    names = support.load_tensors(out / place)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    assert not [name for name in names if "base_layer" in name]


def test_a_rank_that_no_setting_of_the_server_takes(run, tmp_path):
    support.make_expert(tmp_path / "e", {"model.layers.0.self_attn.q_proj": (8, 8)}, rank=600)
    for more in (["--dry-run"], ["-o", tmp_path / "out"]):
        words = ["export", tmp_path / "e", "--to", "vllm", "--json", *more]
        error = cases.refused(run(*words), 2, "usage.rank", "up to 512", "600", "--rank")
        assert (error["expected"], error["found"]) == (512, 600)
    assert not (tmp_path / "out").exists()


def test_what_is_not_lora_never_gets_there(run, summed):
    name = "base_model.model.lm_head.weight"
    support.edit_tensors(summed, lambda t: {**t, name: torch.ones(4, 4)})
    (summed / "expert.json").unlink()
    words = ["export", summed, "--to", "vllm", "--json", "-o", summed.parent / "out"]
    cases.refused(run(*words), 3, "unsafe.full_weights", name)
    assert not (summed.parent / "out").exists()
