"""Models in memory: loaded offline in evaluation mode, adapted by hooks, guarded in 4-bit."""

import pytest
import support
import torch

from cgmerge.errors import EnvironmentProblem, Incompatible, MissingExtra, UsageError
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import guard_four_bit, pick_device, pick_dtype


def model_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("base", ["B", "G"])
def test_hooks_equal_added_weights_and_leave_no_trace(models, tmp_path, base):
    if base == "G":
        shapes = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.mlp.c_proj": (32, 128)}
    else:
        shapes = {**support.llama_shapes(), "lm_head": (support.VOCAB, support.HIDDEN)}
    folder = support.make_expert(tmp_path / "e", shapes, std=0.2)
    deltas = open_expert(str(folder)).deltas(open_base(str(models / base)))
    model = model_of(models / base)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = model(ids).logits
        with attached(model, deltas):
            during = model(ids).logits
        after = model(ids).logits
        for path, delta in support.dense_deltas(folder).items():
            weight = model.get_submodule(path).weight
            weight += (delta.T if base == "G" else delta).float()
        added = model(ids).logits
    assert torch.equal(before, after)
    assert (during - before).abs().max() > 0.05
    assert torch.allclose(during, added, atol=1e-4)


def test_hooks_are_removed_after_an_error(models, tmp_path, qv):
    deltas = open_expert(str(support.make_expert(tmp_path / "e", qv))).deltas()
    model = model_of(models / "B")
    with pytest.raises(RuntimeError), attached(model, deltas):
        raise RuntimeError
    assert not any(module._forward_hooks for module in model.modules())


def test_unknown_module_attaches_nothing(models, tmp_path):
    folder = support.make_expert(tmp_path / "e", {"model.layers.9.self_attn.q_proj": (32, 32)})
    model = model_of(models / "B")
    deltas = open_expert(str(folder)).deltas()
    with pytest.raises(Incompatible, match=r"layers\.9"), attached(model, deltas):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_two_experts_attached_are_their_sum(models, experts):
    base = open_base(str(models / "B"))
    one, two = (open_expert(str(experts / name)).deltas(base) for name in ("E1", "E2"))
    model = model_of(models / "B")
    ids = torch.arange(6)[None]
    with torch.no_grad():
        with attached(model, one), attached(model, two):
            both = model(ids).logits
        for name in ("E1", "E2"):
            for path, delta in support.dense_deltas(experts / name).items():
                model.get_submodule(path).weight += delta.float()
        assert torch.allclose(both, model(ids).logits, atol=1e-4)


def test_device_and_dtype_choices():
    cpu = pick_device("cpu")
    assert cpu.type == "cpu"
    assert pick_dtype("auto", cpu) == torch.float32
    assert pick_dtype("bfloat16", cpu) == torch.bfloat16
    with pytest.raises(UsageError, match="float8"):
        pick_dtype("float8", cpu)
    with pytest.raises(UsageError, match="unknown device 'nonsense'"):
        pick_device("nonsense")
    with pytest.raises(EnvironmentProblem, match="cannot be used") as caught:
        pick_device("cuda:99")
    assert caught.value.exit_code == 4


def test_four_bit_guard_reaches_every_layer():
    Linear4bit = type("Linear4bit", (torch.nn.Linear,), {})
    model = torch.nn.Sequential(Linear4bit(4, 4), torch.nn.Linear(4, 4), Linear4bit(4, 4))
    assert guard_four_bit(model) == 2
    assert model[0].support_avx512bf16_for_cpu is False
    assert not hasattr(model[1], "support_avx512bf16_for_cpu")


def test_four_bit_without_bitsandbytes_says_so(models, monkeypatch):
    import sys

    from cgmerge.modules import loading

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra) as caught:
        loading.load_base(open_base(str(models / "B")), load_in_4bit=True)
    assert "pip install bitsandbytes" in caught.value.hint


def test_a_folder_transformers_does_not_know(models, tmp_path):
    import json
    import shutil

    from cgmerge.modules.loading import load_base

    shutil.copytree(models / "B", tmp_path / "B")
    path = tmp_path / "B" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "unheard-of"}))
    with pytest.raises(Incompatible, match="cannot load"):
        load_base(open_base(str(tmp_path / "B")))
