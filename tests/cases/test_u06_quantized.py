"""U06: merging into a quantized base."""

import json
import shutil

import case_support as cases
import pytest
import support
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def quantized(experts, models):
    """B as 4-bit loaders mark it in config.json."""
    shutil.copytree(models / "B", experts / "Q")
    path = experts / "Q" / "config.json"
    marked = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": marked}))
    return experts / "Q"


def test_refused_with_the_two_ways_out(run, experts, quantized, models):
    given = ["compose", experts / "E1=0.01", "-m", "task-arithmetic", "--json"]
    before = cases.tree(experts)
    cases.refused(
        run(*given, "--base", quantized, "--as", "model", "-o", experts / "out"),
        3,
        "incompatible.quantized_base",
        f"{quantized} is quantized",
        "the 16-bit base",
        "--as adapter",
    )
    assert cases.tree(experts) == before
    cases.done(run(*given, "--base", quantized, "-o", experts / "adapter"))
    expected = {p: 0.01 * d for p, d in support.dense_deltas(experts / "E1").items()}
    assert support.relative(support.dense_deltas(experts / "adapter"), expected) < 1e-6
    cases.done(run(*given, "--base", models / "B", "--as", "model", "-o", experts / "model"))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (models / "B", experts / "model")
    )
    found = {p: after[f"{p}.weight"].double() - before[f"{p}.weight"].double() for p in expected}
    assert support.relative(found, expected) < 0.01


def test_integer_weights_without_the_mark(run, experts, models):
    shutil.copytree(models / "B", experts / "I")
    path = experts / "I" / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path, metadata={"format": "pt"})
    given = ["compose", experts / "E1", "--base", experts / "I", "--as", "model"]
    cases.refused(
        run(*given, "-o", experts / "out", "--json"),
        3,
        "incompatible.quantized_base",
        name,
        "int8",
        "--as adapter",
    )
    assert not (experts / "out").exists()
