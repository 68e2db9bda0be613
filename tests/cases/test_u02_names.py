"""U02: an adapter whose names do not match, so that nothing would be applied."""

import case_support as cases
import pytest
import support


def rename(folder, old, new):
    support.edit_tensors(folder, lambda t: {n.replace(old, new): v for n, v in t.items()})


def test_missing_peft_prefix_is_suggested(run, experts, models):
    rename(experts / "E1", "base_model.model.", "model.")
    before = cases.tree(experts)
    for words in (["inspect"], ["compose", "-o", experts / "out"]):
        error = cases.refused(
            run(*words, experts / "E1", "--base", models / "B", "--json"),
            3,
            "incompatible.names",
            "8 tensor names are not of the form base_model.model.<module>.lora_A.weight",
            "replace the leading `model.` by `base_model.model.`",
        )
        assert len(error["found"]) == 5
    assert cases.tree(experts) == before


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("model.model.", "model.", "lack `model.`"),
        (
            "model.model.layers",
            "model.language_model.model.layers",
            "have `language_model.` too much",
        ),
    ],
)
def test_modules_that_the_base_lacks(run, experts, models, old, new, hint):
    rename(experts / "E1", old, new)
    error = cases.refused(
        run("compose", experts / "E1", "--base", models / "B", "-o", experts / "o", "--json"),
        3,
        "incompatible.modules",
        "4 of 4 modules are not in",
        "only in the expert: ",
        "only in the base:   model.layers.0.self_attn.q_proj",
        hint,
    )
    assert len(error["found"]) == len(error["expected"]) == 4


def test_adapter_name_left_in_the_names(run, experts):
    rename(experts / "E1", ".weight", ".default.weight")
    cases.refused(
        run("inspect", experts / "E1", "--json"), 3, "incompatible.names", "remove the adapter name"
    )


def test_module_called_weighted_and_expert_called_lora(run, tmp_path):
    support.make_expert(tmp_path / "lora", {"weighted.lin": (5, 3)})
    words = ["compose", tmp_path / "lora=2", "-m", "task-arithmetic", "-o", tmp_path / "out"]
    assert cases.done(run(*words, "--json"))["rank"] == 3
    expected = {p: 2 * d for p, d in support.dense_deltas(tmp_path / "lora").items()}
    assert support.relative(support.dense_deltas(tmp_path / "out"), expected) < 1e-6
