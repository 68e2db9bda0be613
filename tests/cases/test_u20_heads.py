"""U20: heads and other fully trained modules."""

import case_support as cases
import pytest
import support
import torch

SCORE = "base_model.model.score.weight"


@pytest.fixture
def headed(experts):
    """E1 and E2 with different score heads, as PEFT saves sequence classifiers."""
    for number, name in enumerate(("E1", "E2"), 2):
        head = torch.full((number, 32), float(number))
        support.edit_tensors(experts / name, lambda t, head=head: {**t, SCORE: head})
    return experts


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.fault("F20")
def test_refused_with_the_list(run, headed, models, listed):
    if listed:
        for name in ("E1", "E2"):
            support.edit_config(headed / name, modules_to_save=["classifier", "score"])
    words = ["compose", headed / "E1", headed / "E2", "-o", headed / "out", "--json"]
    for base in ([], ["--base", models / "B"]):
        if listed:
            cases.refused(
                run(*words, *base),
                3,
                "incompatible.config_modules_to_save",
                "modules_to_save is set to ['classifier', 'score']",
                "train the expert without modules_to_save",
            )
        else:
            cases.refused(
                run(*words, *base), 3, "unsafe.full_weights", f"{SCORE} [2, 32]", "remove them"
            )
        assert not (headed / "out").exists()


@pytest.mark.fault("F20")
def test_one_head_is_refused_as_well(run, headed, experts):
    support.make_expert(experts / "plain", {"model.layers.0.self_attn.q_proj": (32, 32)}, seed=8)
    words = ["compose", experts / "plain", headed / "E2", "-o", experts / "out", "--json"]
    cases.refused(run(*words), 3, "unsafe.full_weights", "E2", f"{SCORE} [3, 32]")
