"""U19: tied embeddings, and a head that is lost after a reload."""

import json

import case_support as cases
import pytest
import support
import torch


@pytest.mark.parametrize("base", [[], ["--base"]])
def test_retrained_embedding_and_head_are_refused(run, experts, models, base):
    names = ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(4)
    full = {name: torch.randn(128, 32, generator=generator) for name in names}
    support.edit_tensors(experts / "E1", lambda tensors: {**tensors, **full})
    given = [*base, models / "Bt"] if base else []
    before = cases.tree(experts)
    words = ["compose", experts / "E1", *given, "-o", experts / "out", "--json"]
    error = cases.refused(
        run(*words), 3, "unsafe.full_weights", "2 tensors that are not LoRA factors", *names
    )
    assert sorted(error["found"]) == names
    support.edit_config(experts / "E1", modules_to_save=["embed_tokens", "lm_head"])
    cases.refused(
        run(*words), 3, "incompatible.config_modules_to_save", "['embed_tokens', 'lm_head']"
    )
    support.edit_config(experts / "E1", modules_to_save=None, ensure_weight_tying=True)
    cases.refused(run(*words), 3, "unsafe.full_weights")
    assert cases.tree(experts)[0] == before[0]
    assert not (experts / "out").exists()


def test_adapted_head_unties_and_survives_a_reload(run, experts, models):
    """The head moves, the embedding it shared its weight with does not."""
    from transformers import AutoModelForCausalLM

    folder = support.make_expert(experts / "head", {"lm_head": (128, 32)}, seed=5)
    words = ["compose", folder, "-m", "task-arithmetic", "--base", models / "Bt"]
    cases.done(run(*words, "--as", "model", "-o", experts / "out", "--json"))
    config = json.loads((experts / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    model = AutoModelForCausalLM.from_pretrained(models / "Bt")
    delta = support.dense_deltas(folder)["lm_head"].float()
    with torch.no_grad():
        hidden = model.model(cases.IDS).last_hidden_state
        expected = hidden @ delta.T
    cases.same_effect(cases.effect(models / "Bt", merged=experts / "out"), expected)
    loaded = AutoModelForCausalLM.from_pretrained(experts / "out")
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_untouched_head_stays_tied(run, experts, models):
    words = ["compose", experts / "E1", "--base", models / "Bt", "--as", "model"]
    cases.done(run(*words, "-m", "task-arithmetic", "-o", experts / "out", "--json"))
    config = json.loads((experts / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    cases.same_effect(
        cases.effect(models / "Bt", merged=experts / "out"),
        cases.effect(models / "Bt", adapter=experts / "E1"),
    )
