"""U15: another base of the same shapes."""

import json

import case_support as cases
import pytest
import support

from cgmerge.modules.base import open_base
from cgmerge.modules.card import BaseId, ExpertCard, write_card


@pytest.fixture
def prints(models):
    return {name: open_base(str(models / name)).fingerprint for name in ("B", "B2")}


@pytest.fixture
def trained(experts, prints):
    """E1 and E2 with the card of an expert trained on B."""
    for name in ("E1", "E2"):
        base = BaseId(name="org/B", fingerprint=prints["B"])
        write_card(experts / name, ExpertCard(skill=name, base=base))
    return experts


@pytest.mark.parametrize("form", ["adapter", "model"])
@pytest.mark.fault("F16")
def test_both_fingerprints_are_named(run, trained, models, prints, form):
    before = cases.tree(trained)
    words = ["compose", trained / "E1", "--base", models / "B2", "--as", form]
    error = cases.refused(
        run(*words, "-o", trained / "out", "--json"),
        3,
        "incompatible.base",
        "trained on another base: org/B",
        prints["B"],
        prints["B2"],
        "--force-base",
    )
    assert (error["expected"], error["found"]) == (prints["B"], prints["B2"])
    assert cases.tree(trained) == before
    cases.done(
        run(*words[:2], "--base", models / "B", "--as", form, "-o", trained / "out", "--json")
    )


def test_inspect_says_so_too(run, trained, models, prints):
    words = ["inspect", trained / "E1", "--json", "--base"]
    cases.refused(run(*words, models / "B2"), 3, "incompatible.base", prints["B"], prints["B2"])
    assert cases.done(run(*words, models / "B"))["base_fingerprint"] == prints["B"]


@pytest.mark.fault("F16")
def test_force_is_recorded(run, trained, models, prints):
    words = ["compose", trained / "E1", "--base", models / "B2", "--force-base"]
    found = cases.done(run(*words, "-o", trained / "out", "--json"))
    warning = "--force-base: base fingerprints were not enforced"
    assert warning in found["warnings"]
    record = cases.record(trained / "out")
    assert record["force_base"] is True
    assert record["base"]["fingerprint"] == prints["B2"]
    assert warning in record["warnings"]
    card = json.loads((trained / "out" / "expert.json").read_text())
    assert card["base"]["fingerprint"] == prints["B2"]


@pytest.mark.fault("F16")
def test_experts_of_two_bases(run, trained, prints, qv):
    support.make_expert(trained / "E9", qv, seed=9)
    other = BaseId(name="org/B2", fingerprint=prints["B2"])
    write_card(trained / "E9", ExpertCard(skill="nine", base=other))
    words = ["compose", trained / "E1", trained / "E9", "-o", trained / "out", "--json"]
    cases.refused(run(*words), 3, "incompatible.base", "org/B ", "org/B2 ", *prints.values())
    assert not (trained / "out").exists()


def test_a_record_pins_its_base(run, trained, models, prints, monkeypatch):
    monkeypatch.chdir(trained)
    words = ["compose", "E1", "E2", "--base", models / "B", "--as", "model"]
    cases.done(run(*words, "-o", "once", "--json"))
    record = trained / "once" / "cgmerge.json"
    cases.done(run("compose", record, "-o", "twice", "--json"))
    assert support.folder_bytes(trained / "once") == support.folder_bytes(trained / "twice")
    raw = json.loads(record.read_text())
    raw["base"]["ref"] = str(models / "B2")
    for entry in raw["experts"]:
        entry.pop("sha256")
    (trained / "r.json").write_text(json.dumps(raw))
    for name in ("E1", "E2"):
        (trained / name / "expert.json").unlink()
    words = ["compose", "r.json", "-o", "third", "--json"]
    cases.refused(run(*words), 3, "incompatible.base", prints["B"], prints["B2"], "--force-base")
    assert not (trained / "third").exists()
    cases.done(run(*words, "--force-base"))
    # Another base named on the command line is a new request.
    raw["base"]["ref"] = "nowhere"
    (trained / "r.json").write_text(json.dumps(raw))
    cases.done(run("compose", "r.json", "--base", models / "B2", "-o", "fourth", "--json"))
