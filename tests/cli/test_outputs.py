"""Outputs of commands: no file of the user is lost, and refusals come before any work."""

import json
import os

import case_support as cases
import pytest
import support
import train_support

from cgmerge.modules.training.checkpoints import WorkFolder

ROW = '{"prompt": "a b =", "completion": "b a"}\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A small base, a target of it, data, and a folder of the user's own."""
    monkeypatch.chdir(tmp_path)
    train_support.make_base(tmp_path / "base")
    train_support.write_rows(tmp_path / "d.jsonl", train_support.make_rows(8))
    shapes = {"model.layers.0.self_attn.q_proj": (32, 32)}
    support.make_expert(tmp_path / "e", shapes, rank=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    return tmp_path


TRAIN = ("train", "--base", "base", "--data", "d.jsonl", "--skill", "s", "--steps", "2", "--json")


@pytest.mark.parametrize("out", ["mine", ".", ".."])
@pytest.mark.parametrize(
    "words",
    [
        TRAIN,
        ("compose", "e", "-m", "linear"),
        ("demo",),
        ("export", "e", "--to", "peft"),
        ("decompress", "e.cge"),
        ("extract", "full", "--base", "base", "--rank", "2"),
        ("pull", "e"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.fault("F41")
def test_folders_of_the_user_are_never_replaced(run, place, words, out):
    code, _, err = run("compress", "e", "--lossless", "-o", "e.cge", "-q")
    assert code == 0, err
    if words[0] == "extract":
        support.make_full(place / "full", place / "base")
    (place / "below").mkdir()
    before = cases.tree(place)
    code, _, err = run(*words, "-o", out, "--overwrite")
    assert code == 2, err
    assert "thesis.tex" in err if out == "mine" else "--out" in err
    assert cases.tree(place) == before


def test_a_demo_replaces_a_demo_only(run, place):
    from cgmerge.evals.demo import _is_of_demo

    for name in ("data/reverse.txt", "notes.md", "data/notes.jsonl", "merged-x/notes.md"):
        assert not _is_of_demo(name)
    for name in ("record.items.jsonl", "sweep.json", "merged-ties/expert.json"):
        assert _is_of_demo(name)
    (place / "demo" / "data").mkdir(parents=True)
    (place / "demo" / "data" / "notes.jsonl").write_text("x")
    error = cases.refused(
        run("demo", "-o", "demo", "--overwrite", "--json"), 2, "usage.out_foreign"
    )
    assert error["found"] == ["data/notes.jsonl"]


EVAL = ("eval", "e", "--base", "base", "--data", "d.jsonl", "--device", "cpu", "--overwrite")


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ("e/adapter_model.safetensors", "out_inside"),
        ("e/adapter_config.json", "out_inside"),
        ("e/r.json", "out_inside"),
        ("base/r.json", "out_inside"),
        ("d.jsonl", "out_is_input"),
        ("/dev/null", "out_is_special"),
        ("mine", "out_is_folder"),
        ("pipe", "out_is_special"),
    ],
)
def test_a_record_never_replaces_what_is_scored(run, place, out, code):
    os.mkfifo(place / "pipe")
    before = cases.tree(place / "e")
    cases.refused(run(*EVAL, "-o", out, "--json"), 2, f"usage.{code}")
    assert cases.tree(place / "e") == before


def test_a_record_that_cannot_be_written_is_refused_before_scoring(run, place, monkeypatch):
    from cgmerge.evals import runner

    monkeypatch.setattr(runner, "evaluate_targets", None)  # would be a bug, exit 70
    error = cases.refused(run(*EVAL, "-o", "/proc/x/r.json", "--json"), 4, "storage.write")
    assert "free some space" not in error["hint"]


@pytest.mark.parametrize(
    "words",
    [
        TRAIN,
        ("compress", "e", "-o", "/proc/x.cge"),
        ("stats", "e", "--base", "base", "--data", "d.jsonl"),
        ("compose", "e", "-m", "linear"),
        ("lock", "e", "-o", "/proc/x.json"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.fault("F27")
def test_places_that_take_nothing_are_refused(run, place, words):
    more = () if "-o" in words else ("-o", "/proc/x/y")
    more += () if "--json" in words else ("--json",)
    error = cases.refused(run(*words, *more), 4, "storage.write")
    assert "free some space" not in error["hint"]


@pytest.mark.parametrize(
    "words",
    [("-o", ""), ("--out", ""), ("--out=",), ("-qo", ""), ("--data", "")],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["eval", "train", "compose", "stats", "demo"])
def test_empty_paths_are_refused(run, place, command, words):
    code, _, err = run(command, *words)
    assert code == 2
    assert f"{words[0].rstrip('=')} is empty" in err


def test_a_nul_is_refused_and_empty_texts_are_not(run, place):
    assert run("inspect", "a\0b")[0] == 2
    _, _, err = run("generate", "e", "--prompt", "")
    assert "is empty" not in err


class TestSkills:
    """Several skills in one recipe."""

    def recipe(self, place, **outs):
        skills = {name: {"data": "d.jsonl", "out": out} for name, out in outs.items()}
        content = {"base": "base", "steps": 2, "rank": 2, "out": "outs", "skills": skills}
        (place / "skills.json").write_text(json.dumps(content))
        return "train", "skills.json", "--device", "cpu", "--json"

    @pytest.mark.parametrize(
        ("one", "two"),
        [("o", "o"), ("o", "./z/../o"), ("o", "link"), ("o", "o/in"), ("o/in/deep", "o")],
    )
    def test_no_two_share_a_place(self, run, place, one, two):
        (place / "link").symlink_to("o")
        words = self.recipe(place, first=one, second=two)
        cases.refused(run(*words), 2, "usage.recipe", "'first'", "'second'")
        assert not (place / "o").exists()

    def test_neighbours_are_allowed(self, run, place):
        words = self.recipe(place, first="o/a", second="o/ab")
        assert [one["trained"] for one in cases.done(run(*words))["runs"]] == [True, True]

    @pytest.mark.parametrize("out", [".", "../", "skills.json", "d.jsonl", "d.jsonl/x"])
    def test_none_holds_data_or_the_recipe(self, run, place, out):
        words = self.recipe(place, first=out)
        before = cases.tree(place)
        code, _, err = run(*words, "--overwrite")
        assert code == 2, err
        assert "input" in err
        assert cases.tree(place) == before

    @pytest.mark.parametrize("out", ["o\0o", "", " "])
    def test_paths_that_are_none(self, run, place, out):
        cases.refused(run(*self.recipe(place, first=out)), 2, "usage.recipe", "skills.json")


class TestCheckpoints:
    """What stands where checkpoints go."""

    def stand(self, place, run_json):
        work = WorkFolder(place / "t")
        work.open({"rank": 1})
        work.close()
        with work.new_checkpoint(5) as folder:
            (folder / "x").write_text("x")
        if run_json is None:
            (work.path / "run.json").unlink()
        else:
            (work.path / "run.json").write_text(run_json)
        return work.path

    @pytest.mark.parametrize(("run_json", "why"), [(None, "missing"), ("{", "damaged")])
    def test_checkpoints_of_nobody_are_discarded_with_a_warning(self, run, place, run_json, why):
        path = self.stand(place, run_json)
        words = (*TRAIN, "-o", "t", "--device", "cpu")
        dry = cases.done(run(*words, "--dry-run"))
        assert path.exists()
        found = cases.done(run(*words))
        for warnings in (dry["warnings"], found["warnings"]):
            assert len([w for w in warnings if "step-00000005" in w and why in w]) == 1
        assert found["resumed_from"] is None
        assert not path.exists()

    @pytest.mark.parametrize("kind", ["file", "folder", "more", "link"])
    def test_what_is_the_users_stays(self, run, place, kind):
        path = place / ".t.training"
        if kind == "file":
            path.write_text("mine")
        elif kind == "link":
            path.symlink_to("mine")
        else:
            if kind == "more":
                self.stand(place, None)
            path.mkdir(exist_ok=True)
            (path / "thesis.tex").write_text("years")
        before = cases.tree(place)
        for more in ((), ("--overwrite",), ("--dry-run",)):
            words = (*TRAIN, "-o", "t", "--device", "cpu", *more)
            cases.refused(run(*words), 2, "usage.work_foreign", ".t.training", "move it away")
        assert cases.tree(place) == before
