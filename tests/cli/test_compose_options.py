"""Options of `compose` that must do what they say, or be refused."""

import json
import math

import pytest
import support
from case_support import done, refused
from safetensors.torch import load_file

TWO = ("compose", "E1", "E2")


@pytest.fixture
def place(experts, models, monkeypatch):
    (experts / "B").symlink_to(models / "B")
    monkeypatch.chdir(experts)
    return experts


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["dare", "dare-ties", "della", "core+dare"])
def test_the_seed_reaches_methods_that_draw(place, run, method):
    for seed in ("1", "2"):
        words = ("-m", method, "--rank", "4", "--seed", seed, "-o", f"s{seed}", "--json")
        assert done(run(*TWO, *words))["params"]["seed"] == int(seed)
    assert weights(place / "s1") != weights(place / "s2")
    done(run(*TWO, "-m", method, "--rank", "4", "--set", "seed=2", "-o", "set", "--json"))
    assert weights(place / "set") == weights(place / "s2")


def test_a_seed_overrides_a_record_and_none_does_not(place, run):
    done(run(*TWO, "-m", "dare", "--rank", "4", "--seed", "5", "-o", "five", "--json"))
    again = ("compose", "five/cgmerge.json")
    done(run(*again, "-o", "same", "--json"))
    assert weights(place / "same") == weights(place / "five")
    assert done(run(*again, "--seed", "0", "-o", "zero", "--json"))["params"]["seed"] == 0
    assert weights(place / "zero") != weights(place / "five")


def test_a_seed_changes_no_method_without_chance(place, run):
    done(run(*TWO, "-o", "a", "--json"))
    done(run(*TWO, "--seed", "7", "-o", "b", "--json"))
    assert support.folder_bytes(place / "a") == support.folder_bytes(place / "b")


def test_two_seeds_are_refused(place, run):
    words = ("-m", "dare", "--seed", "1", "--set", "seed=1", "-o", "out", "--json")
    refused(run(*TWO, *words), 2, "usage.parameter", "both given")


def test_a_rank_in_a_recipe_of_a_model_is_refused(place, run):
    for text, words in (("as: model, rank: 4", ()), ("rank: 4", ("--as", "model"))):
        (place / "r.yml").write_text(
            f"experts: [E1]\nmethod: linear\nbase: B\noutput: {{{text}}}\n"
        )
        found = run("compose", "r.yml", *words, "-o", "out", "--json")
        refused(found, 2, "usage.rank", "rank 4 is for adapters")
    assert not (place / "out").exists()


def test_the_record_of_an_adapter_can_become_a_model(place, run):
    done(run(*TWO, "--base", "B", "--rank", "3", "-o", "adapter", "--json"))
    said = done(run("compose", "adapter/cgmerge.json", "--as", "model", "-o", "model", "--json"))
    assert said["rank"] is None
    assert (place / "model/model.safetensors").exists()


def test_a_record_is_repeated_from_its_own_folder_and_below(place, run, monkeypatch):
    done(run(*TWO, "--base", "B", "--rank", "3", "-o", "deep/er/out", "--json"))
    monkeypatch.chdir(place / "deep/er/out")
    done(run("compose", "cgmerge.json", "-o", "../again", "--json"))
    assert support.folder_bytes(place / "deep/er/again") == support.folder_bytes(
        place / "deep/er/out"
    )
    (place / "E1").rename(place / "moved")
    error = refused(run("compose", "cgmerge.json", "-o", "../no", "--json"), 2, "not_found.expert")
    assert "relative to where it was made" in error["hint"]


def test_an_option_is_no_value(place, run):
    error = refused(run(*TWO, "-o", "--overwrite", "--json"), 2, "usage.option", "--out needs")
    assert error["found"] == "--overwrite"
    refused(run(*TWO, "-o", "out", "-m", "--base", "--json"), 2, "usage.option", "--method needs")
    assert not (place / "--overwrite").exists()


def test_a_budget_without_tuning_is_refused(place, run):
    refused(run(*TWO, "--budget", "3", "-o", "out", "--json"), 2, "usage.budget", "--tune")


def test_a_recipe_with_a_router_says_how_to_use_it(place, run):
    (place / "r.yml").write_text("experts: [E1, E2]\nmethod: arrow\n")
    error = refused(run("compose", "r.yml", "-o", "out", "--json"), 2, "usage.method")
    assert error["hint"] == "cgmerge compose EXPERTS -m arrow"


def test_the_norm_that_is_printed_is_that_of_the_file(place, run):
    code, out, err = run(*TWO, "-m", "task-arithmetic", "--rank", "2", "-o", "out")
    assert code == 0
    norm = math.sqrt(sum(float((d**2).sum()) for d in support.dense_deltas("out").values()))
    assert f"‖ΔW‖ {norm:.4g})" in out + err
    record = json.loads((place / "out/cgmerge.json").read_text())
    assert record["result"]["norm"] > 1.01 * norm


def test_a_model_of_a_delta_whose_squares_overflow(place, run):
    done(run("compose", "E1=1e20", "-m", "linear", "--base", "B", "--as", "model", "--dtype",
             "float32", "-o", "out", "--json"))  # fmt: skip
    values = load_file(place / "out/model.safetensors").values()
    assert max(float(v.abs().max()) for v in values) > 1e18
