"""U01: a merged model that behaves exactly like the base."""

import case_support as cases
import support
import torch
from safetensors.torch import load_file


def test_model_and_adapter_have_the_effect_of_the_expert(run, experts, models):
    words = ["compose", experts / "E1", "-m", "task-arithmetic", "--base", models / "B", "--json"]
    found = cases.done(run(*words, "--as", "model", "-o", experts / "model"))
    cases.done(run(*words, "-o", experts / "adapter"))
    expected = cases.effect(models / "B", adapter=experts / "E1")
    cases.same_effect(cases.effect(models / "B", merged=experts / "model"), expected)
    cases.same_effect(cases.effect(models / "B", adapter=experts / "adapter"), expected)
    before = load_file(models / "B" / "model.safetensors")
    after = load_file(experts / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    deltas = support.dense_deltas(experts / "E1")
    assert changed == {f"{path}.weight" for path in deltas}
    # The report has ‖merged − base‖ of every module.
    reports = cases.record(experts / "model")["result"]["modules"]
    for path, delta in deltas.items():
        assert abs(reports[path]["norm"] / float(delta.norm()) - 1) < 1e-5
    total = sum(float(delta.square().sum()) for delta in deltas.values()) ** 0.5
    assert abs(found["norm"] / total - 1) < 1e-5


def test_expert_without_effect_is_refused(run, experts, models):
    support.edit_tensors(
        experts / "E1", lambda t: {n: v * 0 if "lora_B" in n else v for n, v in t.items()}
    )
    before = cases.tree(experts)
    words = ["compose", experts / "E1", "-o", experts / "out", "--json"]
    for more in ([], ["--base", models / "B", "--as", "model"]):
        error = cases.refused(
            run(*words, *more), 3, "incompatible.no_effect", "changes nothing", "--allow-noop"
        )
        assert error["found"] == 0.0
        assert cases.tree(experts) == before
    assert cases.done(run(*words, "--allow-noop"))["norm"] == 0.0
    assert cases.record(experts / "out")["allow_noop"] is True


def test_modules_that_do_not_change_are_named(run, experts):
    def idle(tensors):
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
        return {**tensors, name: tensors[name] * 0}

    support.edit_tensors(experts / "E1", idle)
    found = cases.done(run("compose", experts / "E1", "-o", experts / "out", "--json"))
    assert any("1 of 4 modules do not change" in text for text in found["warnings"])
    code, out, _ = run("inspect", experts / "E1")
    assert code == 0
    assert "1 module with ΔW = 0" in out
