"""U23: adapters of mixture-of-experts models whose weights are one fused parameter in memory."""

import case_support as cases
import pytest
import support
import torch

from cgmerge.errors import Incompatible
from cgmerge.modules.attach import attached
from cgmerge.modules.expert import open_expert

INNER, HIDDEN = 24, 16
STEM = "model.layers.0.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("u23")
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, num_local_experts=2, num_experts_per_tok=2,
        initializer_range=0.3,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder / "base")
    return folder / "base"


@pytest.fixture
def adapter(tmp_path):
    """Names of one expert each, and a plain projection beside them, as older programs wrote."""
    shapes = {
        f"{STEM}.0.w1": (INNER, HIDDEN), f"{STEM}.1.w1": (INNER, HIDDEN),
        f"{STEM}.1.w2": (HIDDEN, INNER), "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
    }  # fmt: skip
    return support.make_expert(tmp_path / "moe", shapes, std=0.3)


def fused(mixtral, deltas):
    """Logits of the model in memory with the deltas added to its fused parameters by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()
    block = model.model.layers[0]
    with torch.no_grad():
        block.mlp.experts.gate_up_proj[0, :INNER] += deltas[f"{STEM}.0.w1"].float()
        block.mlp.experts.gate_up_proj[1, :INNER] += deltas[f"{STEM}.1.w1"].float()
        block.mlp.experts.down_proj[1] += deltas[f"{STEM}.1.w2"].float()
        block.self_attn.q_proj.weight += deltas["model.layers.0.self_attn.q_proj"].float()
        return model(cases.IDS).logits


def test_merged_whole_into_the_files(run, mixtral, adapter, tmp_path):
    words = ["compose", adapter, "--base", mixtral, "-m", "linear", "--as", "model", "--json"]
    cases.done(run(*words, "-o", tmp_path / "out"))
    expected = fused(mixtral, support.dense_deltas(adapter)) - cases.logits(mixtral)
    cases.same_effect(cases.effect(mixtral, merged=tmp_path / "out"), expected)


def test_never_a_part_of_it_on_the_model_in_memory(mixtral, adapter):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()
    before = cases.logits(mixtral)
    deltas = open_expert(str(adapter)).deltas()
    refusal = pytest.raises(Incompatible, match=r"experts\.0\.w1")
    with refusal as caught, attached(model, deltas):
        pass
    assert "compose --as model" in caught.value.hint
    with torch.no_grad():
        assert torch.equal(model(cases.IDS).logits, before)


@pytest.mark.parametrize("listed", [True, False])
def test_adapters_on_the_fused_parameter_are_refused_with_the_reason(
    run, mixtral, tmp_path, listed
):
    shapes = {"model.layers.0.mlp.experts": (HIDDEN, INNER)}
    support.make_expert(tmp_path / "new", shapes)
    if listed:
        support.edit_config(tmp_path / "new", target_parameters=["mlp.experts.down_proj"])
    words = ["compose", tmp_path / "new", "--base", mixtral, "--json", "-o", tmp_path / "out"]
    if listed:
        code, said = "incompatible.config_target_parameters", "fused MoE experts"
    else:
        code, said = "incompatible.modules", "model.layers.0.mlp.experts"
    cases.refused(run(*words), 3, code, said)
    assert not (tmp_path / "out").exists()
