"""`compose -m auto` with routers among the candidates: what is tried, said, written, repeated."""

import json

import learned_support as ls
import pytest
import support
from case_support import done, refused

from cgmerge.evals import routedauto
from cgmerge.modules.learned import auto
from cgmerge.modules.learned.crossval import Row

NAMES = ("e1", "e2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = ls.make_place(tmp_path_factory.mktemp("auto"))
    (folder / "e1.jsonl").write_bytes((folder / "first.jsonl").read_bytes())
    (folder / "e2.jsonl").write_bytes((folder / "second.jsonl").read_bytes())
    return folder


@pytest.fixture
def compose(run, place, tmp_path, monkeypatch):
    """Call compose on two experts with examples that are named after them."""
    monkeypatch.chdir(place)
    small = ("--set", "folds=2", "--set", "passes=60")

    def call(method, out, *more, examples=("e1.jsonl", "e2.jsonl"), settings=small):
        words = settings if method == "auto" else ()
        return run("compose", *NAMES, "--base", "base", "-m", method, *words, *more,
                   "-o", tmp_path / out, "--json", "--examples", *examples)  # fmt: skip

    return call


def prefer(monkeypatch, name):
    """Let a candidate win without fitting any."""
    monkeypatch.setattr(auto, "cross_validate", lambda kept, *_: [
        Row(one.name, float(one.name == name), 1.0) for one in kept
    ])  # fmt: skip


def tree(folder, *, without=()):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def test_routers_are_in_the_table(compose):
    tuning = done(compose("auto", "o"))["tuning"]
    rows = [row["name"] for row in tuning["crossvalidation"]["rows"]]
    assert sorted(rows[1:3]) == ["e1", "e2"]
    assert [rows[0], *rows[3:]] == ["base", "linear", "task-arithmetic", "ties", "retrieval"]
    assert tuning["left_out"] == ["lorahub", "atlas", "gate"]
    assert any(note.startswith("gate was not tried: it takes about") for note in tuning["notes"])
    assert tuning["settings"] == {"folds": 2, "passes": 60, "routed": True}


@pytest.mark.parametrize(("method", "seed"), [("retrieval", None), ("gate", 3)])
def test_a_chosen_router_is_what_its_own_method_writes(
    compose, run, tmp_path, monkeypatch, method, seed
):
    prefer(monkeypatch, method)
    drawn = () if seed is None else ("--seed", seed)
    chosen = done(compose("auto", "chosen", *drawn, settings=("--set", "folds=2")))
    plain = done(compose(method, "plain", *drawn))
    a, b = tmp_path / "chosen", tmp_path / "plain"
    assert tree(a, without=["cgmerge.json"]) == tree(b, without=["cgmerge.json"])
    ours, theirs = (json.loads((folder / "cgmerge.json").read_text()) for folder in (a, b))
    tuning = ours["fit"].pop("tuning")
    assert ours == theirs
    assert (tuning["method"], tuning["chosen"]) == ("auto", method)
    assert method in [row["name"] for row in tuning["crossvalidation"]["rows"]]
    assert [(d["name"], d["file"], d["n"]) for d in tuning["data"]] == [
        ("e1", "e1.jsonl", 12), ("e2", "e2.jsonl", 12)
    ]  # fmt: skip
    assert (chosen["method"], chosen["as"]) == (method, "composition")
    assert chosen["tuning"] == tuning
    assert plain["tuning"] is None
    done(run("compose", a / "cgmerge.json", "-o", tmp_path / "again", "--json"))
    assert tree(a) == tree(tmp_path / "again")


def test_a_record_that_is_changed_says_no_more_how_it_was_chosen(compose, run, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        prefer(patch, "retrieval")
        done(compose("auto", "a"))
    record = tmp_path / "a/cgmerge.json"
    same = done(run("compose", record, "--base", "base", "-o", tmp_path / "b", "--json"))
    assert same["tuning"]["chosen"] == "retrieval"
    other = done(run("compose", record, "--top-k", "2", "-o", tmp_path / "c", "--json"))
    assert other["tuning"] is None
    assert "tuning" not in other["fit"]
    raw = json.loads(record.read_text())
    raw["fit"]["tuning"] = "me"
    record.write_text(json.dumps(raw))
    refused(run("compose", record, "-o", tmp_path / "d", "--json"), 3, "damaged.composition")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--rank", "auto"), "--rank asks for one result for every input"),
        (("--as", "model"), "--as asks for one result for every input"),
        (("--dtype", "bfloat16"), "--dtype asks for one result for every input"),
        (("--set", "routed=false"), "--set routed=false"),
    ],
)
def test_who_wants_one_adapter_gets_one_and_is_told(compose, tmp_path, monkeypatch, more, why):
    prefer(monkeypatch, "linear")
    code, out, err = compose("auto", "o", *more)
    assert code == 0, err
    assert f"left out retrieval: {why}" in err
    assert f"left out gate: {why}" in err
    tuning = json.loads(out)["tuning"]
    assert tuning["left_out"] == ["lorahub", "atlas", "retrieval", "gate"]
    assert not (tmp_path / "o/router.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "routes"), [((), True), (("--rank", "4"), False), (("--set", "routed=false"), False)]
)
def test_a_dry_run_says_what_may_come_out(compose, tmp_path, more, routes):
    code, out, err = compose("auto", "o", *more, "--dry-run")
    assert code == 0, err
    assert json.loads(out)["method"] == "auto"
    assert ("or a routed composition if that does better" in err) == routes
    assert not (tmp_path / "o").exists()


def test_a_recipe_may_want_one_adapter(run, place, tmp_path, monkeypatch):
    prefer(monkeypatch, "linear")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({
        "base": str(place / "base"), "experts": [str(place / name) for name in NAMES],
        "method": "auto", "output": {"rank": 4}, "params": {"folds": 2, "passes": 60},
    }))  # fmt: skip
    code, _, err = run("compose", recipe, "-o", tmp_path / "o", "--examples", place / "e1.jsonl")
    assert code == 0, err
    assert "left out gate: `rank` of the recipe asks" in err


def test_retrieval_needs_examples_that_name_the_experts(compose, monkeypatch):
    monkeypatch.setattr(routedauto, "TRIED", ("retrieval",))
    for examples in (("e1.jsonl",), ("e1=e1.jsonl", "e2.jsonl", "new=first.jsonl")):
        code, out, err = compose("auto", "o", "--overwrite", examples=examples)
        assert code == 0, err
        assert "left out retrieval: the examples do not name the experts" in err
        tuning = json.loads(out)["tuning"]
        assert tuning["left_out"] == ["lorahub", "atlas", "retrieval"]
    words = ("e1=e1.jsonl", "e1=prompts.jsonl", "e2=e2.jsonl")  # several files of one expert
    tuning = done(compose("auto", "o", "--overwrite", examples=words))["tuning"]
    assert [(d["name"], d["file"]) for d in tuning["data"]] == [
        ("e1", "e1.jsonl"), ("e1", "prompts.jsonl"), ("e2", "e2.jsonl")
    ]  # fmt: skip
    assert "retrieval" in [row["name"] for row in tuning["crossvalidation"]["rows"]]


def test_experts_that_no_router_tells_apart(run, place, tmp_path, monkeypatch):
    prefer(monkeypatch, "linear")
    monkeypatch.chdir(place)
    code, _, err = run("compose", "e1", "e1", "--base", "base", "-m", "auto", "-o", tmp_path / "o",
                       "--set", "passes=20", "--examples", "e1.jsonl")  # fmt: skip
    assert code == 0, err
    assert "left out gate: e1 is the same expert as e1" in err


def test_a_chosen_router_replaces_only_when_asked(compose, tmp_path, monkeypatch):
    prefer(monkeypatch, "retrieval")
    done(compose("auto", "o"))
    first = tree(tmp_path / "o")
    refused(compose("auto", "o"), 2, "usage.out_exists")
    done(compose("auto", "o", "--overwrite"))
    assert tree(tmp_path / "o") == first
    prefer(monkeypatch, "linear")
    done(compose("auto", "o", "--overwrite"))
    assert (tmp_path / "o/adapter_model.safetensors").exists()
    assert support.folder_bytes(tmp_path / "o")  # one folder, nothing of the router is left
