"""`cgmerge train SKILLS.yml --modular …` as a user calls it, and what is done with its result."""

import json

import pytest
import train_support
from case_support import done, refused, tree


@pytest.fixture
def place(tmp_path, monkeypatch):
    train_support.make_base(tmp_path / "base")
    for task in ("copy", "reverse"):
        train_support.write_rows(tmp_path / f"{task}.jsonl", train_support.make_rows(8, skill=task))
    (tmp_path / "skills.yml").write_text(
        "base: base\nrank: 4\nsteps: 3\nbatch_size: 4\ndevice: cpu\nskills:\n"
        "  copy: copy.jsonl\n  reverse: {data: reverse.jsonl, eval_data: copy.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train_explain_evaluate_serve_adapt(place, run):
    found = done(run("train", "skills.yml", "--modular", "skills=2,rank=3", "-o", "out", "--json"))
    assert (found["out"], found["tasks"], found["skills"]) == ("out", ["copy", "reverse"], 2)
    assert (found["rank"], found["steps"], found["granularity"]) == (3, 3, "layer")
    assert found["fit"]["tasks"]["reverse"]["eval"]["n"] == 8
    assert found["fit"]["tasks"]["copy"]["eval"] is None
    words = ("route", "out", "--base", "base", "--explain", "copy : a =", "--json")
    shares = done(run(*words, "--task", "copy"))["explained"][0]["layers"]
    row = found["fit"]["allocation"]["model.layers.1"]["copy"]
    assert shares["model.layers.1"]["skill-1"] == pytest.approx(row[1] / sum(row), abs=1e-5)
    refused(run(*words), 2, "usage.task", "copy")
    again = run("compose", "out/cgmerge.json", "-o", "again", "--json")
    refused(again, 2, "usage.trained", "--modular")
    served = done(run("export", "out", "--to", "vllm", "-o", "served", "--json"))
    assert served["adapters"] == {"copy": "adapters/copy", "reverse": "adapters/reverse"}
    train_support.write_rows(place / "new.jsonl", train_support.make_rows(5, seed=4))
    adapted = done(
        run(
            "compose", "out/experts/skill-0", "out/experts/skill-1", "-m", "atlas", "--set",
            "granularity=layer", "--set", "steps=3", "--set", "folds=0", "--base", "base",
            "--examples", "new.jsonl", "-o", "new", "--json",
        )
    )  # fmt: skip
    assert adapted["as"] == "adapter"
    assert (place / "new/adapter_model.safetensors").exists()


def test_people_see_the_table(place, run):
    code, out, err = run("train", "skills.yml", "--modular", "skills=2", "-o", "out")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["task", "skill-0", "skill-1"]
    assert [line.split()[0] for line in lines[1:]] == ["copy", "reverse"]
    assert "task     copy: copy.jsonl (8 rows)" in err
    assert "2 modules of rank 4, alpha 8 on 14 layers" in err
    assert "an allocation of 2 tasks for 2 layers" in err
    assert "eval     reverse: exact match" in err
    assert "hint: a new task: cgmerge compose out/experts/* -m atlas" in err


def test_a_dry_run_writes_nothing(place, run):
    before = tree(place)
    found = done(run("train", "skills.yml", "--modular", "skills=2", "-o", "out", "--dry-run",
                     "--json"))  # fmt: skip
    assert (found["dry_run"], found["loss"]) == (True, None)
    assert tree(place) == before


def test_a_result_is_replaced_only_when_asked_and_nothing_else_ever(place, run):
    words = ("train", "skills.yml", "--modular", "skills=2", "--json")
    done(run(*words, "-o", "out"))
    refused(run(*words, "-o", "out"), 2, "usage.out_exists")
    assert done(run(*words, "-o", "out", "--overwrite", "--steps", "2"))["steps"] == 2
    (place / "mine").mkdir()
    (place / "mine/notes.txt").write_text("keep")
    refused(run(*words, "-o", "mine", "--overwrite"), 2, "usage.out_exists")
    refused(run(*words, "-o", "base", "--overwrite"), 2, "usage.out_is_input")
    refused(run(*words, "-o", ".", "--overwrite"), 2, "usage.out_holds_input")
    refused(run(*words, "-o", "out/experts/skill-0", "--overwrite"), 2, "usage.out_exists")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--resume",), "usage.option", "--resume"),
        (("--load-in-4bit",), "usage.option", "--load-in-4bit"),
        (("--checkpoint-steps", "2"), "usage.option", "--checkpoint-steps"),
        (("--skill", "copy"), "usage.option", "--skill"),
        (("--data", "copy.jsonl"), "usage.option", "--data"),
        (("--rank", "5"), "usage.rank", "contradict"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(place, run, words, code, said):
    before = tree(place)
    command = ("train", "skills.yml", "--modular", "skills=2,rank=3", "-o", "out", "--json")
    refused(run(*command, *words), 2, code, said)
    assert tree(place) == before


def test_a_recipe_is_needed(place, run):
    words = ("train", "--base", "base", "--modular", "skills=2", "-o", "out", "--json")
    refused(run(*words), 2, "usage.recipe", "SKILLS.yml")


@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        ("{data: reverse.jsonl, steps: 9}", "usage.steps", "reverse"),
        ("{data: reverse.jsonl, rank: 2}", "usage.rank", "copy"),
        ("{data: reverse.jsonl, out: elsewhere}", "usage.out", "elsewhere"),
    ],
)
def test_tasks_share_their_settings(place, run, entry, code, said):
    recipe = (place / "skills.yml").read_text().splitlines()
    lines = ["out: together", *recipe[:-1], f"  reverse: {entry}"]
    (place / "own.yml").write_text("\n".join(lines) + "\n")
    found = run("train", "own.yml", "--modular", "skills=2", "--json")
    refused(found, 2, code, said)


def test_a_start_without_old_steps_may_be_said(place, run):
    found = run("train", "skills.yml", "--modular", "skills=2", "-o", "out", "--no-resume", "-q")
    assert found == (0, "out\n", "")
    assert json.loads((place / "out/cgmerge.json").read_text())["method"] == "polytropon"
