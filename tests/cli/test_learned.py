"""`compose --examples` from the command line: what it prints, keeps and refuses."""

import json

import learned_support as ls
import pytest
import support


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return ls.make_place(tmp_path_factory.mktemp("cli"))


def words(place, method, *more, names=("e1", "e2", "e3")):
    experts = [place / name for name in names]
    return ["compose", *experts, "--base", place / "base", "-m", method, *more]


def test_lorahub_from_two_files(run, place, tmp_path):
    out = tmp_path / "o"
    files = [place / "first.jsonl", f"other={place / 'second.jsonl'}"]
    settings = ["--set", "evaluations=12", "--set", "folds=2"]
    code, text, err = run(
        *words(place, "lorahub", "--json", *settings, "-o", out), "--examples", *files
    )
    assert code == 0, err
    result = json.loads(text)
    assert result["method"] == "task-arithmetic"
    tuning = result["tuning"]
    assert tuning["method"] == "lorahub"
    assert [(d["name"], d["n"]) for d in tuning["data"]] == [("first", 12), ("other", 12)]
    assert all(len(d["sha256"]) == 64 for d in tuning["data"])
    weights = {e["name"]: e["weight"] for e in result["experts"]}
    names = tuning["coefficients"]["experts"]
    assert list(weights) == ["e1", "e2", "e3"]
    assert [weights[n] for n in names] == tuning["coefficients"]["groups"]["all modules"]
    code, _, err = run("compose", out / "cgmerge.json", "-o", tmp_path / "again")
    assert code == 0, err
    assert support.folder_bytes(out) == support.folder_bytes(tmp_path / "again")


def test_tables_for_people(run, place, tmp_path):
    settings = ["--set", "steps=2", "--set", "folds=2", "-v"]
    code, text, err = run(
        *words(place, "atlas", *settings, "-o", tmp_path / "o"),
        "--examples", place / "first.jsonl",
    )  # fmt: skip
    assert code == 0, err
    lines = text.splitlines()
    assert lines[0].split() == ["coefficients", "e1", "e2", "e3"]
    assert "model.layers.0.mlp.down_proj" in lines[1]
    table = [line.split() for line in lines if line.startswith(("base", "average", "atlas"))]
    assert [row[0] for row in table] == ["base", "average", "atlas"]
    assert table[-1][-1] == "←"
    assert "plan     atlas on 6 modules" in err
    assert "learn    atlas from 12 examples" in err
    assert "means    steps=2" in err
    assert "2 parts in turn" in err


def test_a_choice(run, place, tmp_path):
    code, text, err = run(
        *words(place, "auto", "--set", "passes=25", "--set", "folds=2", "-o", tmp_path / "o"),
        "--examples", place / "first.jsonl",
    )  # fmt: skip
    assert code == 0, err
    assert "chosen   " in err
    assert "warning: atlas was not tried" in err
    record = json.loads((tmp_path / "o" / "cgmerge.json").read_text())
    assert record["tuning"]["method"] == "auto"
    chosen = next(line for line in text.splitlines() if line.endswith("←"))
    assert chosen.split()[0] == record["tuning"]["chosen"]
    assert record["tuning"]["notes"]


def test_prompts_without_answers(run, place, tmp_path):
    code, text, err = run(
        *words(place, "adamerging", "--set", "steps=2", "--json", "-o", tmp_path / "o"),
        "--examples", place / "prompts.jsonl",
    )  # fmt: skip
    assert code == 0, err
    tuning = json.loads(text)["tuning"]
    assert tuning["crossvalidation"] is None
    assert set(tuning["coefficients"]["groups"]) == {"layer 0", "layer 1"}
    assert all(0 <= v <= 1 for row in tuning["coefficients"]["groups"].values() for v in row)


def test_a_recipe_may_ask_for_it(run, place, tmp_path):
    recipe = place / "learn.json"
    recipe.write_text(
        json.dumps({
            "base": str(place / "base"), "experts": [str(place / "e1"), str(place / "e2")],
            "method": "lorahub", "params": {"evaluations": 8, "folds": 0},
        })
    )  # fmt: skip
    code, text, err = run(
        "compose", recipe, "--json", "-o", tmp_path / "o", "--examples", place / "first.jsonl"
    )
    assert code == 0, err
    assert json.loads(text)["tuning"]["settings"]["evaluations"] == 8


def test_a_dry_run_learns_nothing(run, place):
    code, _, err = run(*words(place, "atlas", "--dry-run"), "--examples", place / "first.jsonl")
    assert code == 0, err
    assert "plan     atlas" in err
    assert "weight" not in err
    assert "learn " not in err


@pytest.mark.parametrize("method", ["lorahub", "atlas", "adamerging", "soups", "auto"])
def test_without_examples_the_format_is_named(run, place, tmp_path, method):
    code, out, err = run(*words(place, method, "-o", tmp_path / "o"))
    assert code == 2
    assert out == ""
    assert f"method `{method}` learns from examples" in err
    assert '--examples FILE.jsonl with rows like {"prompt": "…", "completion": "…"}' in err


@pytest.mark.parametrize(
    ("method", "more", "says"),
    [
        ("ties", [], "method `ties` does not learn from --examples"),
        ("lorahub", ["--scale", "0.5"], "no parameter `scale`"),
        ("lorahub", ["--set", "steps=3"], "makes no use of `steps`"),
        ("atlas", ["--set", "lr=-1"], "must be in"),
        ("lorahub", ["--set", "evaluations=3"], "at least 5 are needed"),
        ("auto", ["--set", "lr=1"], "no parameter `lr`"),
    ],
)
def test_usage(run, place, tmp_path, method, more, says):
    code, _, err = run(
        *words(place, method, *more, "-o", tmp_path / "o"), "--examples", place / "first.jsonl"
    )
    assert code == 2
    assert says in err
    assert not (tmp_path / "o").exists()


def test_examples_that_cannot_be_used(run, place, tmp_path):
    empty, wrong = tmp_path / "empty.jsonl", tmp_path / "wrong.jsonl"
    empty.write_text("")
    wrong.write_text('{"question": "a"}\n')
    for file, expected in ((empty, 3), (wrong, 3), (tmp_path / "no.jsonl", 2)):
        code, _, err = run(*words(place, "lorahub", "-o", tmp_path / "o"), "--examples", file)
        assert code == expected, err
        assert file.name in err
        assert "a bug" not in err


def test_what_does_not_go_together(run, place, tmp_path):
    file = place / "first.jsonl"
    call = [*words(place, "lorahub", "-o", tmp_path / "o"), "--examples", file]
    code, _, err = run(*call, "--tune", file)
    assert code == 2
    assert "--tune from other data" in err
    code, _, err = run(
        "compose", place / "e1", "-m", "atlas", "--examples", file, "-o", tmp_path / "o"
    )
    assert code == 2
    assert "add --base hf://some/base" in err
    weighted = [*words(place, "atlas", names=("e1=0.5", "e2")), "-o", tmp_path / "o"]
    code, _, err = run(*weighted, "--examples", file)
    assert code == 2
    assert "weights are what is learned" in err
    code, _, err = run(
        *words(place, "atlas", names=("zero",)), "-o", tmp_path / "o", "--examples", file
    )
    assert code == 3
    assert "every delta is zero" in err


def test_experts_of_another_base(run, place, tmp_path, qv):
    support.make_expert(tmp_path / "other", support.pick(support.llama_shapes(), "k_proj"))
    code, _, err = run(
        *words(place, "lorahub", names=("e1",)), tmp_path / "other", "-o", tmp_path / "o",
        "--examples", place / "first.jsonl",
    )  # fmt: skip
    assert code == 3
    assert "have other shapes" in err


def test_methods_explains_what_is_learned(run):
    code, out, _ = run("methods", "lorahub")
    assert code == 0
    assert "--set evaluations=40" in out
    assert "--set steps" not in out
    assert "arXiv:2307.13269" in out
    code, out, _ = run("methods", "--json")
    learned = {e["name"]: e for e in json.loads(out)["methods"] if e["kind"] == "learned"}
    assert list(learned) == ["lorahub", "atlas", "adamerging", "soups", "auto"]
    params = {p["name"]: p for p in learned["atlas"]["params"]}
    assert params["lr"]["default"] == 0.02
    assert params["granularity"]["choices"] == ["model", "layer", "module"]
    code, out, _ = run("methods")
    assert "lorahub" in out
