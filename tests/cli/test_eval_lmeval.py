"""`cgmerge eval --lm-eval` where the harness is not there, and what it refuses before it is."""

import builtins
import importlib
import json

import pytest
import tiny_model as tiny
from lmeval_support import StandIn

from cgmerge.cli.app import main

TASK = """\
task: copy
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{completion}}"
"""
ROWS = tiny.make_rows("copy", 6, seed=9, lengths=(1, 2, 3))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    model = tiny.make_model(3)
    tiny.save(root / "mine", model, tiny.make_tokenizer())
    tiny.make_adapter(root / "one", model, seed=1, size=0.3)
    (root / "tasks").mkdir()
    (root / "tasks" / "copy.yaml").write_text(TASK)
    tiny.write_jsonl(root / "tasks" / "rows.jsonl", ROWS)
    return root


@pytest.fixture
def run(shelf, capsys, monkeypatch):
    monkeypatch.chdir(shelf)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["eval", *words])
        done = capsys.readouterr()
        return stop.value.code, done.out, done.err

    return call


@pytest.fixture
def absent(monkeypatch):
    """Have no harness, whatever is installed."""
    find = importlib.import_module

    def without(name, *rest):
        if name.split(".")[0] == "lm_eval":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return find(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)


@pytest.fixture
def stand_in(monkeypatch):
    from cgmerge.evals.lmeval import harness

    def opened(files):
        (task,) = files
        rows = [{"context": row["prompt"], "until": ["<eos>"], "most": 8,
                 "target": row["completion"]} for row in task.splits["test"]]  # fmt: skip
        return StandIn(**{task.name: rows})

    monkeypatch.setattr(harness, "check_installed", lambda: None)
    monkeypatch.setattr(harness, "open_folder", opened)


def test_without_the_package_the_extra_is_named(run, absent):
    code, _, stderr = run("one", "--base", "mine", "--lm-eval", "tasks", "--json")
    assert code == 4
    error = json.loads(stderr.strip().splitlines()[-1])
    assert error["code"] == "missing.lm_eval"
    assert 'pip install "cgmerge[lm-eval]"' in error["hint"]


def test_a_folder_of_tasks_makes_a_record(run, stand_in, tmp_path):
    out = tmp_path / "r.json"
    code, stdout, stderr = run("one", "--base", "mine", "--lm-eval", "tasks", "-o", str(out),
                               "--json", "--limit", "4")  # fmt: skip
    assert code == 0, stderr
    found = json.loads(stdout)
    assert [(one["target"], one["skill"], one["n"]) for one in found["results"]] == [
        ("base", "copy", 4), ("one", "copy", 4)
    ]  # fmt: skip
    assert found["skills"][0]["measure"] == "exact_match,none"
    assert out.exists()
    code, _, stderr = run("one", "--base", "mine", "--lm-eval", "tasks", "-o", str(out))
    assert code == 2
    assert "exists already" in stderr
    code, _, _ = run("one", "--base", "mine", "--lm-eval", "tasks", "--min", "1.0")
    assert code == 1


def test_the_table_says_whose_score_it_is(run, stand_in):
    code, stdout, _ = run("one", "--base", "mine", "--lm-eval", "tasks")
    assert code == 0
    assert "lm-evaluation-harness counts as right" in stdout
    assert "copy: exact_match,none" in stdout


def test_a_dry_run_asks_nothing(run, stand_in):
    code, stdout, stderr = run("one", "--base", "mine", "--lm-eval", "tasks", "--dry-run", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["skills"] == [{"name": "copy", "n": None}]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--lm-eval", "tasks", "--data", "tasks/rows.jsonl"), 2, "--data does not go"),
        (("--lm-eval", "tasks", "--metric", "loglik"), 2, "--metric does not go"),
        (("--lm-eval", "tasks", "--generate"), 2, "--generate does not go"),
        (("--lm-eval", "tasks", "--by", "tokens"), 2, "--by does not go"),
        (("--lm-eval", "gone/tasks"), 2, "no such folder of tasks"),
        (("--lm-eval", "copy.yaml"), 2, "no such folder of tasks"),
        (("--lm-eval", ","), 2, "no such folder of tasks"),
        (("--lm-eval", "tasks", "--min", "2"), 2, "from 0 to 1"),
        (("--data", "tasks/rows.jsonl", "--lm-eval-metric", "acc"), 2, "needs --lm-eval"),
        ((), 2, "--data"),
        (("--lm-eval", "tasks", "-o", "tasks/r.json"), 2, "tasks"),
        (("--lm-eval", "tasks", "--oracle"), 2, "at least two"),
    ],
)
def test_mistakes_say_what_to_do(run, stand_in, words, code, says):
    found, _, stderr = run("one", "--base", "mine", *words)
    assert found == code, stderr
    assert says in stderr


def test_a_folder_that_brings_code_is_refused_unseen(run, tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "t.yaml").write_text(TASK + "process_docs: !function utils.steal\n")
    (folder / "utils.py").write_text("raise SystemExit('ran')\n")
    real = builtins.__import__

    def watch(name, *rest):
        assert name.split(".")[0] not in ("lm_eval", "utils")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", watch)
    code, _, stderr = run("one", "--base", "mine", "--lm-eval", str(folder))
    assert code == 3
    assert "!function" in stderr
