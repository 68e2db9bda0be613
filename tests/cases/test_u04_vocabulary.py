"""U04: an expert whose vocabulary is not the base's."""

import case_support as cases
import pytest
import support
import torch

EMBED = "base_model.model.model.embed_tokens.weight"


def add(folder, name, *shape):
    support.edit_tensors(folder, lambda t: {**t, name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        (EMBED, []),
        ("base_model.model.lm_head.weight", []),
        ("base_model.model.model.embed_tokens.modules_to_save.weight", ["embed_tokens"]),
    ],
)
@pytest.mark.parametrize("command", ["compose", "inspect", "eval"])
@pytest.mark.fault("F18")
def test_both_sizes_are_named(run, experts, models, name, listed, command):
    add(experts / "E1", name, 132, 32)
    if listed:
        support.edit_config(experts / "E1", modules_to_save=listed)
    (experts / "t.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    out = ["-o", experts / "out"] if command != "inspect" else []
    data = ["--data", experts / "t.jsonl"] if command == "eval" else []
    error = cases.refused(
        run(command, experts / "E1", "--base", models / "B", *out, *data, "--json"),
        3,
        "incompatible.vocabulary",
        "trained with 132 tokens",
        f"{name}: 132×32",
        f"the base {models / 'B'} has 128",
        "resize the base",
        "remove the saved embeddings",
    )
    assert (error["expected"], error["found"]) == (128, 132)
    assert not (experts / "out").exists()


def test_tied_head_and_gpt2_names(run, tmp_path, models, qv):
    support.make_expert(tmp_path / "t", qv)
    add(tmp_path / "t", "base_model.model.lm_head.weight", 120, 32)
    words = [tmp_path / "t", "--base", models / "Bt", "--json"]
    cases.refused(run("inspect", *words), 3, "incompatible.vocabulary", "120", "128")
    support.make_expert(tmp_path / "g", {"transformer.h.0.attn.c_attn": (96, 32)})
    add(tmp_path / "g", "base_model.model.transformer.wte.weight", 130, 32)
    words = [tmp_path / "g", "--base", models / "G", "--json"]
    cases.refused(run("inspect", *words), 3, "incompatible.vocabulary", "130", "128")


def test_without_a_base_the_tensor_is_named(run, experts):
    add(experts / "E1", EMBED, 132, 32)
    words = ["compose", experts / "E1", "-o", experts / "out", "--json"]
    cases.refused(run(*words), 3, "unsafe.full_weights", f"{EMBED} [132, 32]")


def test_the_same_vocabulary_is_no_excuse(run, experts, models):
    add(experts / "E1", EMBED, 128, 32)
    words = ["inspect", experts / "E1", "--base", models / "B", "--json"]
    cases.refused(run(*words), 3, "unsafe.full_weights", EMBED)


def test_lora_on_a_larger_head(run, tmp_path, models):
    support.make_expert(tmp_path / "h", {"lm_head": (132, 32)})
    words = ["compose", tmp_path / "h", "--base", models / "B", "-o", tmp_path / "out", "--json"]
    cases.refused(run(*words), 3, "incompatible.shape", "lm_head: expert 132×32, base 128×32")
