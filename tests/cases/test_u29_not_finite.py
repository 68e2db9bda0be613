"""U29: an expert with NaN or Inf; a failed merge that leaves things half changed."""

import case_support as cases
import pytest
import support
import torch

NAME = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", ["adapter", "model"])
@pytest.mark.parametrize("method", ["task-arithmetic", "ties"])
@pytest.mark.fault("F08")
def test_tensor_is_named_and_nothing_changes(run, experts, models, bad, form, method):
    def poison(tensors):
        tensors[NAME][3, 1] = bad
        return tensors

    support.edit_tensors(experts / "E2", poison)
    before, base = cases.tree(experts), support.folder_bytes(models / "B")
    words = ["compose", experts / "E1", experts / "E2", "-m", method, "--base", models / "B"]
    error = cases.refused(
        run(*words, "--as", form, "-o", experts / "out", "--json"),
        3,
        "damaged.not_finite",
        NAME,
        "1 value that is NaN or infinite",
        "train it again",
    )
    assert (error["tensor"], error["found"]) == (NAME, 1)
    assert cases.tree(experts) == before
    assert support.folder_bytes(models / "B") == base


def test_an_old_result_survives(run, experts):
    words = ["compose", experts / "E1", experts / "E2", "-o", experts / "out", "--json"]
    cases.done(run(*words))
    before = support.folder_bytes(experts / "out")
    support.edit_tensors(experts / "E2", lambda t: {n: v / 0 for n, v in t.items()})
    cases.refused(run(*words, "--overwrite"), 3, "damaged.not_finite", "E2")
    assert support.folder_bytes(experts / "out") == before


def test_sound_values_that_overflow_together(run, experts, models):
    cases.done(run("compose", experts / "E1", "-o", experts / "ok", "--json"))
    before = cases.tree(experts)
    given = ["compose", experts / "E1", experts / "E2", "-o", experts / "out", "--json"]
    for method in ("task-arithmetic", "linear", "ties"):
        for more in ([], ["--base", models / "B", "--as", "model"]):
            cases.refused(
                run(*given, "-m", method, "--scale", "1e300", *more),
                3,
                "incompatible.overflow",
                "model.layers.0.self_attn.q_proj",
                "smaller",
            )
    cases.refused(
        run(*given, "-m", "linear", "--scale", "1e6", "--dtype", "float16"),
        3,
        "incompatible.overflow",
        "float16",
    )
    assert cases.tree(experts) == before


@pytest.mark.fault("F08")
def test_a_base_with_nan(run, experts, models):
    from safetensors.torch import load_file, save_file

    support.make_llama(experts / "Bn")
    path = experts / "Bn" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    words = ["compose", experts / "E1", "--base", experts / "Bn", "--as", "model"]
    cases.refused(run(*words, "-o", experts / "out", "--json"), 3, "damaged.not_finite", "Bn", name)
