"""U05: merged weights that give other answers than base and adapter."""

import case_support as cases
import pytest
import support
import torch
from safetensors.torch import load_file


@pytest.fixture
def half(experts):
    """B in bfloat16."""
    return support.make_llama(experts / "Bf", dtype=torch.bfloat16)


def measured_loss(base, merged, expert, scale):
    """‖(merged − base) − scale·ΔW‖ / ‖scale·ΔW‖ from the files, in float64."""
    before = load_file(base / "model.safetensors")
    after = load_file(merged / "model.safetensors")
    wanted = {p: scale * d for p, d in support.dense_deltas(expert).items()}
    found = {p: after[f"{p}.weight"].double() - before[f"{p}.weight"].double() for p in wanted}
    return support.relative(found, wanted)


def words(experts, half, scale, out):
    given = ["compose", experts / "E1", "-m", "task-arithmetic", "--scale", scale]
    return [*given, "--base", half, "--as", "model", "-o", experts / out, "--json"]


@pytest.mark.fault("F24")
def test_loss_is_measured_and_warned_about(run, experts, half):
    found = cases.done(run(*words(experts, half, 0.02, "out")))
    loss = measured_loss(half, experts / "out", experts / "E1", 0.02)
    assert 0.01 < loss < 0.5
    assert abs(found["rounding_error"] / loss - 1) < 1e-3
    warned = f"loses {found['rounding_error']:.1%} of the delta; --dtype float32 keeps it"
    assert any(warned in text for text in found["warnings"])


@pytest.mark.fault("F24")
def test_most_of_it_lost_is_refused(run, experts, half):
    before = cases.tree(experts)
    error = cases.refused(
        run(*words(experts, half, 0.0004, "out")),
        3,
        "incompatible.rounding",
        "of the delta",
        "--dtype float32",
        "--allow-rounding",
    )
    assert cases.tree(experts) == before
    found = cases.done(run(*words(experts, half, 0.0004, "out"), "--allow-rounding"))
    loss = measured_loss(half, experts / "out", experts / "E1", 0.0004)
    assert loss > 0.5
    assert abs(found["rounding_error"] / loss - 1) < 1e-3
    assert abs(error["found"] / loss - 1) < 1e-3
    assert cases.record(experts / "out")["output"]["allow_rounding"] is True


def test_float32_keeps_everything(run, experts, half):
    found = cases.done(run(*words(experts, half, 1.0, "out"), "--dtype", "float32"))
    assert found["rounding_error"] < 1e-6
    expected = cases.effect(half, adapter=experts / "E1")
    cases.same_effect(cases.effect(half, merged=experts / "out"), expected)
    weak = cases.done(run(*words(experts, half, 0.0004, "weak"), "--dtype", "float32"))
    assert measured_loss(half, experts / "weak", experts / "E1", 0.0004) < 0.01
    assert weak["rounding_error"] < 0.01
    kinds = {t.dtype for t in load_file(experts / "out" / "model.safetensors").values()}
    assert kinds == {torch.float32}


def test_adapters_too(run, experts):
    given = ["compose", experts / "E1=1e-9", "-m", "task-arithmetic", "-o", experts / "out"]
    cases.refused(run(*given, "--dtype", "float16", "--json"), 3, "incompatible.rounding", "100%")
    assert cases.done(run(*given, "--json"))["rounding_error"] == 0.0
