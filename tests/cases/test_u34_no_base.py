"""U34: composing experts with no base at hand."""

import case_support as cases
import support

from cgmerge.modules.base import open_base
from cgmerge.modules.card import BaseId, ExpertCard, write_card


def test_base_is_neither_needed_nor_looked_for(run, experts, models):
    for name in ("E1", "E2"):
        support.edit_config(experts / name, base_model_name_or_path="/nowhere/base")
    words = ["compose", experts / "E1", experts / "E2", "-m", "task-arithmetic"]
    found = cases.done(run(*words, "-o", experts / "out", "--json"))
    assert found["base"] is None
    assert found["warnings"] == [
        "E1, E2: no base fingerprint in the expert (not checked: no --base)"
    ]
    cases.done(run(*words, "--base", models / "B", "--as", "model", "-o", experts / "m", "--json"))
    cases.same_effect(
        cases.effect(models / "B", adapter=experts / "out"),
        cases.effect(models / "B", merged=experts / "m"),
    )


def test_fingerprint_travels_and_is_checked_later(run, experts, models):
    fingerprint = open_base(str(models / "B")).fingerprint
    for name in ("E1", "E2"):
        base = BaseId(name="org/B", fingerprint=fingerprint)
        write_card(experts / name, ExpertCard(skill=name, base=base))
    words = [
        "compose",
        experts / "E1",
        experts / "E2",
        "-m",
        "linear",
        "-o",
        experts / "out",
        "--json",
    ]
    assert cases.done(run(*words))["warnings"] == []
    words = ["inspect", experts / "out", "--json", "--base"]
    assert cases.done(run(*words, models / "B"))["base_fingerprint"] == fingerprint
    cases.refused(run(*words, models / "B2"), 3, "incompatible.base", fingerprint)


def test_a_full_model_needs_it(run, experts):
    words = ["compose", experts / "E1", "--as", "model", "-o", experts / "out", "--json"]
    cases.refused(run(*words), 2, "usage.base", "needs the base's weights", "--base BASE")
