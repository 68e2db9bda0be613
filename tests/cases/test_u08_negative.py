"""U08: negative weights."""

import case_support as cases
import pytest
import support


def test_minus_one_is_minus_the_delta(run, experts, models):
    given = ["compose", f"{experts / 'E1'}=-1", "-m", "task-arithmetic", "--json"]
    cases.done(run(*given, "-o", experts / "out"))
    expected = {p: -d for p, d in support.dense_deltas(experts / "E1").items()}
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6
    # Forgetting, and taking it back: the base again.
    cases.done(run(*given, "--base", models / "B", "--as", "model", "-o", experts / "less"))
    again = ["compose", experts / "E1", "-m", "task-arithmetic", "--base", experts / "less"]
    cases.done(run(*again, "--as", "model", "-o", experts / "back", "--json"))
    gap = cases.logits(experts / "back") - cases.logits(models / "B")
    assert gap.abs().max() < 1e-5
    assert cases.effect(models / "B", merged=experts / "less").abs().max() > 0.02


@pytest.mark.fault("F21", "F22")
def test_an_expert_against_itself_is_a_noop(run, experts):
    refs = [experts / "E1", f"{experts / 'E1'}=-1"]
    for method in ("task-arithmetic", "linear", "ties"):
        words = ["compose", *refs, "-m", method, "-o", experts / "out", "--json"]
        cases.refused(run(*words), 3, "incompatible.no_effect", "changes nothing")
        assert not (experts / "out").exists()


def test_a_negative_scale_is_the_same(run, experts):
    given = ["compose", "-m", "task-arithmetic", "--json", "-o"]
    cases.done(run(*given, experts / "a", f"{experts / 'E1'}=-0.5"))
    cases.done(run(*given, experts / "b", experts / "E1", "--scale", "-0.5"))
    assert (
        support.relative(support.dense_deltas(experts / "a"), support.dense_deltas(experts / "b"))
        < 1e-7
    )
