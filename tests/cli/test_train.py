"""`cgmerge train`: what it prints, its JSON object, its exit codes, several skills."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import support
import train_support

from cgmerge.cli import output
from cgmerge.modules.training.checkpoints import WorkFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    train_support.make_base(folder / "base")
    train_support.write_rows(folder / "reverse.jsonl", train_support.make_rows(20))
    train_support.write_rows(folder / "copy.jsonl", train_support.make_rows(20, skill="copy"))
    train_support.write_rows(folder / "test.jsonl", train_support.make_rows(8, seed=9))
    return folder


@pytest.fixture
def words(place, tmp_path):
    """The words of a short run."""

    def call(*more, out=tmp_path / "expert", data="reverse.jsonl", steps=4):
        base = ["train", "--base", place / "base", "--data", place / data, "--skill", "reverse"]
        return [*base, "-o", out, "--steps", steps, "--rank", 4, "--device", "cpu", *more]

    return call


def test_says_what_it_understood_and_did(run, words, tmp_path):
    code, out, err = run(*words("--eval-data", words()[4].parent / "test.jsonl", "-v"))
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert "data     reverse.jsonl: 20 rows, format prompt/completion" in lines
    assert any(line.startswith("example  reverse : ") and "⟦" in line for line in lines)
    assert any("LoRA rank 4, alpha 8 on 14 layers" in line for line in lines)
    assert any("4 steps of 20 rows (4.0 epochs), learning rate 0.001, cpu" in x for x in lines)
    assert any(line.startswith("train    4/4") for line in lines)
    assert any(line.startswith("eval     exact match 0.000 (base 0.000)") for line in lines)
    assert any(line.startswith(f"wrote    {tmp_path / 'expert'} (") for line in lines)
    assert lines[-1].startswith("hint: measure it with `cgmerge eval")
    assert any(line.startswith("default  lr 0.001: for a base of width 32") for line in lines)


def test_json_is_one_object_with_stable_keys(run, words, tmp_path):
    code, out, _ = run(*words("--eval-data", words()[4].parent / "test.jsonl", "--json"))
    assert code == 0
    found = json.loads(out)
    assert found["schema"] == "cgmerge.train/1"
    assert found["ok"] is True
    assert (found["out"], found["skill"], found["steps"]) == (
        str(tmp_path / "expert"),
        "reverse",
        4,
    )
    assert found["loss"] == found["metrics"]["loss"] > 0
    scores = ["base_exact_match", "base_loss", "exact_match", "loss", "n"]
    assert sorted(found["metrics"]["eval"]) == scores
    assert found["resumed_from"] is None
    assert found["trained"] is True
    (warning,) = found["warnings"]
    assert "1 of 8 evaluation rows stand in the training data" in warning
    assert found["seconds"] > 0
    assert found["size_bytes"] == (tmp_path / "expert/adapter_model.safetensors").stat().st_size


def test_quiet_prints_the_path_only(run, words, tmp_path):
    assert run(*words("-q")) == (0, f"{tmp_path / 'expert'}\n", "")


def test_dry_run_writes_nothing(run, words, tmp_path):
    code, out, err = run(*words("--dry-run", "--json"))
    assert code == 0
    found = json.loads(out)
    assert (found["dry_run"], found["loss"], found["steps"], found["start"]) == (True, None, 4, 0)
    assert found["memory_bytes"] > 0
    assert "nothing written (dry run)" in err
    assert list(tmp_path.iterdir()) == []


def test_stop_and_go_on(run, words, tmp_path, monkeypatch):
    from cgmerge.cli import training

    plain = training.Voice.on_step

    def stop(self, step, total, loss):
        plain(self, step, total, loss)
        if step == 3:
            raise KeyboardInterrupt

    run(*words(out=tmp_path / "straight"))
    monkeypatch.setattr(training.Voice, "on_step", stop)
    code, _, err = run(*words("--checkpoint-steps", 1))
    assert code == 130
    assert "kept     a checkpoint at step 2; repeat the command to go on" in err
    monkeypatch.undo()
    code, out, err = run(*words("--dry-run", "--json"))
    assert json.loads(out)["start"] == 2
    starts = []
    progress = output.Output.progress

    def spy(self, label, total, **options):
        if label == "train":
            starts.append((options, total))
        return progress(self, label, total, **options)

    monkeypatch.setattr(output.Output, "progress", spy)
    code, out, err = run(*words("--checkpoint-steps", 1, "--json"))
    assert (code, json.loads(out)["resumed_from"]) == (0, 2)
    assert starts == [({"start": 3}, 4)]  # two old steps, and the first of this run
    assert "resume   after step 2 of 4, loss there " in err
    assert "resume   loss at step 3: " in err
    straight, stopped = tmp_path / "straight", tmp_path / "expert"
    assert support.folder_bytes(straight) == support.folder_bytes(stopped)


class TestErrors:
    def check(self, found, code, word):
        exit_code, out, err = found
        assert (exit_code, out) == (code, "")
        assert "Traceback" not in err
        last = json.loads(err.strip().splitlines()[-1])
        assert last["ok"] is False
        assert word in last["code"]
        return last

    def test_data_of_a_recipe_that_are_not_there(self, run, tmp_path):
        recipe = tmp_path / "s.yml"
        recipe.write_text("base: tiny\nout: o\neval_data: e.jsonl\n"
                          "skills: {a: a.jsonl, b: {data: [b.jsonl]}}\n")  # fmt: skip
        (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        for more in ([], ["--modular", "skills=2"]):
            error = self.check(run("train", recipe, *more, "--json"), 2, "not_found.data")
            assert error["message"].splitlines()[1:] == [
                f"  skills.a.eval_data: {tmp_path}/e.jsonl",
                f"  skills.b: {tmp_path}/b.jsonl",
                f"  skills.b.eval_data: {tmp_path}/e.jsonl",
            ]
        words = ["train", recipe, "--skill", "a", "--json"]
        error = self.check(run(*words), 2, "not_found.data")
        assert "skills.b" not in error["message"]
        # Files on the command line are not the recipe's, whose folder has nothing to do with them.
        error = self.check(run(*words, "--eval-data", "no.jsonl"), 2, "not_found.data")
        assert "skills.a" not in error["message"]

    def test_missing_options(self, run):
        error = self.check(run("train", "--base", "x", "--json"), 2, "usage.missing_option")
        assert "--data, --skill, --out" in error["message"]

    @pytest.mark.parametrize(
        ("more", "code", "word"),
        [
            (["--rank", 0], 2, "usage.rank"),
            (["--epochs", 1], 2, "usage.steps"),
            (["--target-modules", "q_porj"], 2, "usage.target_modules"),
            (["--device", "cuda:77"], 4, "environment.device"),
            (["--dtype", "int3"], 2, "usage.dtype"),
            (["--max-length", 3], 3, "data.too_long"),
            (["--eval-data", "nowhere.jsonl"], 2, "not_found.data"),
            (["--skill", "a/b"], 2, "usage.skill"),
        ],
    )
    def test_bad_options(self, run, words, more, code, word):
        self.check(run(*words(*more, "--json")), code, word)

    def test_data_errors_name_the_row(self, run, words, tmp_path):
        bad = tmp_path / "bad.jsonl"
        train_support.write_rows(bad, [{"prompt": "a", "completion": ""}])
        error = self.check(run(*words("--json", data=bad)), 3, "data.empty")
        assert "row 1" in error["message"]

    def test_base_errors(self, run, words, place):
        error = self.check(run(*words("--json", "--base", place / "bse")), 2, "not_found.folder")
        assert error["hint"] == "similar: base"

    def test_existing_output_and_other_run(self, run, words, place, tmp_path):
        assert run(*words("-q"))[0] == 0
        error = self.check(run(*words("--json")), 2, "usage.out_exists")
        assert error["message"].endswith("the expert that this very command made")
        for more, name in ((["--lr", "0.002"], "lr"), (["--skill", "other"], "skill")):
            error = self.check(run(*words("--json", *more)), 2, "usage.out_exists")
            assert list(error["expected"]) == list(error["found"]) == [name]
            there, now = error["expected"][name], error["found"][name]
            assert error["message"].splitlines()[1:] == [f"  {name}: {there} there, {now} now"]
            assert str(now) == more[1]
            assert "--overwrite" in error["hint"]
        rows = place / "more.jsonl"
        rows.write_text('{"prompt": "copy : a =", "completion": "a"}\n' * 4)
        error = self.check(run(*words("--json", "--data", rows)), 2, "usage.out_exists")
        assert {"data", "tokens"} <= set(error["found"])
        card = tmp_path / "expert/expert.json"
        card.write_text("{}")
        error = self.check(run(*words("--json")), 2, "usage.out_exists")
        assert error["message"].endswith("exists already")
        assert run(*words("-q", "--overwrite"))[0] == 0
        work = WorkFolder(tmp_path / "second")
        work.open({"rank": 64})
        work.close()
        error = self.check(run(*words("--json", out=tmp_path / "second")), 2, "usage.other_run")
        assert "rank: 64 there, 4 now" in error["message"]


class TestRecipe:
    @pytest.fixture
    def recipe(self, place, tmp_path):
        path = place / "skills.yml"
        path.write_text(
            "base: base\nsteps: 3\nr: 4\nskills:\n  reverse: reverse.jsonl\n  copy: copy.jsonl\n"
        )
        return ["train", path, "-o", tmp_path / "experts", "--device", "cpu"]

    def test_all_skills_and_once_more(self, run, recipe, tmp_path):
        code, out, err = run(*recipe, "--json", "--lr", 0.01)
        assert code == 0
        runs = json.loads(out)["runs"]
        assert [(one["skill"], one["trained"], one["lr"]) for one in runs] == [
            ("reverse", True, 0.01),
            ("copy", True, 0.01),
        ]
        assert "hint: combine them with `cgmerge compose" in err
        assert sorted(path.name for path in (tmp_path / "experts").iterdir()) == ["copy", "reverse"]
        code, out, err = run(*recipe, "--json", "--lr", 0.01)
        assert code == 0
        assert [one["trained"] for one in json.loads(out)["runs"]] == [False, False]
        assert err.count("was finished by an earlier run") == 2

    def test_one_skill_of_it(self, run, recipe, tmp_path):
        assert run(*recipe, "-q", "--skill", "copy") == (0, f"{tmp_path / 'experts/copy'}\n", "")
        code, _, err = run(*recipe, "--skill", "sort")
        assert code == 2
        assert "it has reverse, copy" in err

    def test_everything_is_checked_before_anything_is_trained(self, run, recipe, tmp_path):
        (tmp_path / "experts" / "copy").mkdir(parents=True)
        (tmp_path / "experts" / "copy" / "x").write_text("mine")
        code, _, err = run(*recipe)
        assert code == 2
        assert "copy exists already" in err
        assert not (tmp_path / "experts" / "reverse").exists()

    def test_data_beside_a_recipe(self, run, recipe, place):
        code, _, err = run(*recipe, "--data", place / "copy.jsonl")
        assert code == 2
        assert "both given" in err


def test_help_is_light():
    code = (
        "import sys; from cgmerge.cli import train; "
        "heavy = {'torch', 'transformers', 'peft', 'trl', 'numpy', 'yaml'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_trainer_imports_trl():
    package = Path(__file__).parents[2] / "cgmerge"
    found = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r"^\s*(import|from) trl\b", path.read_text(), re.MULTILINE)
    ]
    assert found == ["trainer.py"]
