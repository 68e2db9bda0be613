"""U31: GPT-2 layers, whose weights are stored transposed."""

import warnings

import case_support as cases
import pytest
import support

SHAPES = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.attn.c_proj": (32, 32)}


@pytest.mark.parametrize("flag", [True, False])
def test_merged_effect_is_the_adapters(run, tmp_path, models, flag):
    """Non-square and square; PEFT's flag in the expert may be right or left out."""
    # Full paths, as there is a `c_proj` in the MLP too.
    more = {"target_modules": list(SHAPES), **({"fan_in_fan_out": True} if flag else {})}
    support.make_expert(tmp_path / "g", SHAPES, **more)
    given = ["compose", tmp_path / "g", "-m", "task-arithmetic", "--json", "-o"]
    cases.done(run(*given, tmp_path / "model", "--base", models / "G", "--as", "model"))
    cases.done(run(*given, tmp_path / "adapter", "--base", models / "G"))
    found = cases.effect(models / "G", merged=tmp_path / "model")
    cases.same_effect(cases.effect(models / "G", adapter=tmp_path / "adapter"), found)
    if flag:  # without it PEFT itself warns about this expert
        cases.same_effect(cases.effect(models / "G", adapter=tmp_path / "g"), found)
        cases.done(run(*given, tmp_path / "alone"))
        with warnings.catch_warnings():  # without the base nobody knows of the other `c_proj`
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            alone = cases.effect(models / "G", adapter=tmp_path / "alone")
        cases.same_effect(alone, found)
