"""U18: a saved adapter that is empty."""

import case_support as cases
import pytest
import support


@pytest.mark.parametrize("command", ["inspect", "compose"])
def test_header_only(run, experts, models, command):
    support.edit_tensors(experts / "E1", lambda tensors: {})
    path = experts / "E1" / "adapter_model.safetensors"
    for base in ([], ["--base", models / "B"]):
        out = ["-o", experts / "out"] if command == "compose" else []
        words = [command, experts / "E1", *base, *out, "--json"]
        cases.refused(run(*words), 3, "damaged.empty", f"{path} contains no tensors")
    assert not (experts / "out").exists()


def test_one_empty_expert_among_others(run, experts):
    support.edit_tensors(experts / "E2", lambda tensors: {})
    words = ["compose", experts / "E1", experts / "E2", "-o", experts / "out", "--json"]
    cases.refused(run(*words), 3, "damaged.empty", "E2")


def test_one_factor_of_a_pair(run, experts):
    support.edit_tensors(
        experts / "E1", lambda t: {n: v for n, v in t.items() if "lora_B" not in n}
    )
    words = ["inspect", experts / "E1", "--json"]
    cases.refused(run(*words), 3, "damaged.pair", "has lora_A only", "incomplete")
