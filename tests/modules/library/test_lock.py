"""`lock` without a network: digests of local experts, and a recipe that composes."""

import json

import case_support as cases
import pytest
import support

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def recipe(experts):
    path = experts / "recipes" / "r.yml"
    path.parent.mkdir()
    path.write_text(
        "method: ties\nparams: {density: 0.5}\n"
        "experts:\n  - ../E1\n  - {ref: ../lib/E2, weight: 2}\n"
    )
    return path


def test_a_locked_recipe_is_the_recipe(run, experts, recipe):
    cases.done(run("add", experts / "lib", experts / "E2", "--json"))
    lock = experts / "deep" / "er" / "lock.json"
    told = cases.done(run("lock", recipe, "-o", lock, "--json"))
    content = json.loads(lock.read_text())
    assert content["experts"] == told["experts"]
    assert [item["ref"] for item in content["experts"]] == ["../../E1", "../../lib/E2"]
    assert (content["method"], content["params"]) == ("ties", {"density": 0.5})
    for item, name in zip(content["experts"], ("E1", "E2"), strict=True):
        found = cases.done(run("inspect", experts / name, "--json"))
        assert item["sha256"] == found["sha256"]
    cases.done(run("compose", recipe, "-o", experts / "a", "--json"))
    cases.done(run("compose", lock, "-o", experts / "b", "--json"))
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
    cases.refused(run("lock", recipe, "-o", lock, "--json"), 2, "usage.out_exists")
    # Locking a lock changes nothing.
    again = experts / "deep" / "er" / "again.json"
    cases.done(run("lock", lock, "-o", again, "--json"))
    assert json.loads(again.read_text()) == content
    support.edit_config(experts / "E1", lora_alpha=16)
    cases.refused(run("compose", lock, "-o", experts / "c", "--json"), 3, "damaged.digest", "E1")
    cases.refused(run("lock", lock, "-o", experts / "x.json", "--json"), 3, "damaged.digest")


def test_references_instead_of_a_recipe(run, experts, models):
    words = [experts / "E1", f"{experts / 'E2'}=0.5", "-o", experts / "lock.json", "--json"]
    cases.done(run("lock", *words))
    content = json.loads((experts / "lock.json").read_text())
    assert [(item["ref"], item.get("weight")) for item in content["experts"]] == [
        ("E1", None), ("E2", 0.5)]  # fmt: skip
    recipe = experts / "with-base.json"
    recipe.write_text(json.dumps({**content, "base": str(models / "B")}))
    cases.done(run("lock", recipe, "-o", experts / "based.json", "--json"))
    base = json.loads((experts / "based.json").read_text())["base"]
    facts = cases.done(run("inspect", models / "B", "--json"))
    assert base["fingerprint"] == facts["fingerprint"]


def test_what_cannot_be_locked(run, experts, recipe):
    out = experts / "lock.json"
    cases.refused(run("lock", recipe, "-o", experts / "lock.yml", "--json"), 2, "usage.out")
    cases.refused(run("lock", recipe, "-o", out, "--json"), 2, "not_found.folder", "E2")
    cases.done(run("compose", experts / "E1", experts / "E2", "-o", experts / "m", "--json"))
    record = experts / "m" / "cgmerge.json"
    cases.refused(run("lock", record, "-o", out, "--json"), 2, "usage.recipe", "pins its experts")
    merge = experts / "merge.yml"
    merge.write_text("merge_method: linear\nmodels: [{model: E1}]\n")
    cases.refused(run("lock", merge, "-o", out, "--json"), 2, "usage.recipe", "mergekit")
    assert not out.exists()
