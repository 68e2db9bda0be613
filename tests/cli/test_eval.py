"""`cgmerge eval` as a user calls it: exit codes, the JSON object, the table, the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model as tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.cli.app import main
from cgmerge.cli.scoretable import how_to_read, score_table
from cgmerge.cli.spread import spread
from cgmerge.evals.record import load_record
from cgmerge.evals.stats import wilson
from cgmerge.evals.summary import summarise

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    training = tiny.make_rows("copy", 300, seed=1, lengths=(2, 3)) + tiny.make_rows(
        "reverse", 300, seed=2, lengths=(2, 3)
    )
    model = tiny.train(tiny.make_model(3), tiny.make_tokenizer(), training, steps=60)
    tiny.save(root / "mine", model, tiny.make_tokenizer())
    for name, size in (("soft", 0.02), ("hard", 0.5), ("idle", 0.0)):
        tiny.make_adapter(root / "experts" / name, model, seed=5, size=size)
    tiny.save(root / "whole", tiny.merged(model, root / "experts" / "soft"), tiny.make_tokenizer())
    for skill, count in (("copy", 20), ("reverse", 24)):
        rows = tiny.make_rows(skill, count, seed=9, lengths=(1, 2, 3))
        tiny.write_jsonl(root / f"{skill}.jsonl", rows)
    return root


@pytest.fixture
def run(shelf, capsys, monkeypatch):
    """Run the command in the folder of the data; give exit code, stdout and stderr."""
    monkeypatch.chdir(shelf)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["eval", *words])
        done = capsys.readouterr()
        return stop.value.code, done.out, done.err

    return call


BOTH = ("--base", "mine", "--data", "copy.jsonl", "--data", "reverse.jsonl")


def test_json_is_one_object_with_the_promised_keys(run, shelf, tmp_path):
    out = tmp_path / "record.json"
    code, stdout, stderr = run("experts/soft", "whole", *BOTH, "-o", str(out), "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found["schema"] == "cgmerge.eval/1"
    assert found["ok"] is True
    assert found["items"] == str(tmp_path / "record.items.jsonl")
    assert [(r["target"], r["skill"]) for r in found["results"]] == [
        (target, skill) for target in ("base", "soft", "whole") for skill in ("copy", "reverse")
    ]
    for result in found["results"]:
        assert set(result) >= {"target", "skill", "metric", "score", "n", "low", "high"}
        assert result["metric"] == "exact_match"
        assert result["n"] == {"copy": 20, "reverse": 24}[result["skill"]]
        interval = wilson(result["correct"], result["n"])
        assert (result["low"], result["high"]) == (interval.low, interval.high)
    assert found["base"]["name"] == "mine"
    assert found["comparisons"][0]["against"] == "base"
    assert found["warnings"] == []
    # `soft` as hooks and as a model of its own: the same answers.
    scores = {(r["target"], r["skill"]): r["correct"] for r in found["results"]}
    assert scores["soft", "copy"] == scores["whole", "copy"]
    assert len(Path(found["items"]).read_text().splitlines()) == 3 * 44


def test_record_is_deterministic_and_recomputable(run, shelf, tmp_path):
    for name in ("a", "b"):
        code, _, _ = run("experts/soft", *BOTH, "-o", str(tmp_path / name / "r.json"), "-q")
        assert code == 0
    first, second = tmp_path / "a", tmp_path / "b"
    assert (first / "r.json").read_bytes() == (second / "r.json").read_bytes()
    assert (first / "r.items.jsonl").read_bytes() == (second / "r.items.jsonl").read_bytes()
    text = (first / "r.json").read_text()
    assert str(shelf) not in text
    loaded = load_record(first / "r.json")
    numbers = summarise(loaded.items, compare_to="base")
    assert numbers.results == loaded.record.results
    assert numbers.comparisons == loaded.record.comparisons


def test_table_on_stdout_everything_else_on_stderr(run):
    code, stdout, stderr = run("one=experts/soft", "experts/hard", *BOTH)
    assert code == 0
    lines = stdout.splitlines()
    assert lines[0].split() == ["target", "copy", "reverse", "mean", "vs", "base"]
    assert [line.split()[0] for line in lines[1:4]] == ["base", "one", "hard"]
    assert "*" in lines[1] + lines[2]
    assert "n = 20 to 24 items" in stdout
    assert "fp1:" in stderr
    assert "one  expert  sha256" in stderr


def test_generation_is_compared(run):
    code, stdout, _ = run(*BOTH, "--generate", "--batch-size", "5", "--json")
    assert code == 0
    for result in json.loads(stdout)["results"]:
        assert result["agree"] == result["n"]
        assert result["generated_correct"] == result["correct"]
    assert "agree on 44 of 44 items" in run(*BOTH, "--generate")[1]


def test_loglik_as_the_score(run):
    code, stdout, _ = run(*BOTH, "--metric", "loglik", "--json")
    assert code == 0
    for result in json.loads(stdout)["results"]:
        assert result["metric"] == "loglik"
        assert result["low"] < result["score"] == result["loglik"] < result["high"] < 0


def test_limit_takes_the_first_items(run):
    code, stdout, _ = run(*BOTH, "--limit", "7", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert [r["n"] for r in found["results"]] == [7, 7]
    assert found["settings"]["limit"] == 7


def test_min_answers_with_the_exit_code(run):
    code, stdout, stderr = run("experts/hard", *BOTH, "--min", "0.99", "--json")
    assert code == 1
    assert json.loads(stdout)["passed"] is False
    assert "hard on copy" in stderr
    assert "base on" not in stderr  # the base is not on trial beside a target
    assert run("experts/hard", *BOTH, "--min", "0", "--json")[0] == 0
    assert run(*BOTH, "--min", "1")[0] == 1


def test_picked_experts_are_columns(run, shelf, tmp_path):
    held = tiny.write_jsonl(tmp_path / "held.jsonl", tiny.make_rows("copy", 12, seed=4))
    words = ("a=experts/soft", "b=experts/hard", *BOTH, "--oracle", "--validation", str(held))
    code, stdout, stderr = run(*words, "-o", str(tmp_path / "r.json"), "--min", "0", "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    kinds = [(t["name"], t["kind"]) for t in found["targets"]]
    assert kinds[3:] == [("best-single", "baseline"), ("oracle", "baseline")]
    scores = {(r["target"], r["skill"]): r["score"] for r in found["results"]}
    for skill in ("copy", "reverse"):
        assert scores["oracle", skill] == max(scores["a", skill], scores["b", skill])
    note = found["targets"][3]["note"]
    assert "best mean on held.jsonl (sha256 " in note
    for skill in ("copy", "reverse"):
        assert scores["best-single", skill] == scores[note[0], skill]
    alone = json.loads(run("a=experts/soft", "b=experts/hard", "--base", "mine", "--data",
                           str(held), "--no-base", "--json")[1])  # fmt: skip
    best = max(alone["means"], key=lambda one: one["score"])
    assert note.startswith(best["target"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("experts/soft", "--oracle"), "at least two are needed, found 1"),
        (("a=experts/soft", "experts/hard", "--validation", "copy.jsonl"), "--oracle"),
        (("oracle=experts/soft", "experts/hard", "--oracle"), "two targets are called 'oracle'"),
        (("experts/soft", "experts/hard", "--validation", "none.jsonl"), "no such data file"),
    ],
)
def test_picks_that_cannot_be(run, words, says):
    for more in ((), ("--dry-run",)):
        code, stdout, stderr = run(*words, *BOTH, *more)
        assert (code, stdout) == (2, "")
        assert says in stderr


def test_compare_to_another_target(run):
    words = ("a=experts/soft", "b=experts/hard", *BOTH, "--compare-to", "b", "--json")
    found = json.loads(run(*words)[1])
    assert {c["against"] for c in found["comparisons"]} == {"b"}
    assert {c["target"] for c in found["comparisons"]} == {"base", "a"}
    code, _, stderr = run("a=experts/soft", *BOTH, "--compare-to", "c")
    assert code == 2
    assert "base, a" in stderr


def test_without_base(run):
    code, stdout, _ = run("experts/soft", *BOTH, "--no-base", "--json")
    assert code == 0
    assert [t["name"] for t in json.loads(stdout)["targets"]] == ["soft"]
    assert run(*BOTH, "--no-base")[0] == 2


def test_dry_run_checks_and_writes_nothing(run, tmp_path):
    out = tmp_path / "r.json"
    code, stdout, _ = run("experts/soft", *BOTH, "-o", str(out), "--dry-run", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert found["dry_run"] is True
    assert found["results"] == []
    assert [s["n"] for s in found["skills"]] == [20, 24]
    assert not out.exists()
    assert run("experts/sofd", *BOTH, "--dry-run")[0] == 2


def test_outputs_are_never_replaced_unasked(run, shelf, tmp_path):
    out = tmp_path / "r.json"
    assert run(*BOTH, "-o", str(out), "-q")[0] == 0
    before = out.read_bytes()
    code, _, stderr = run(*BOTH, "-o", str(out))
    assert code == 2
    assert "--overwrite" in stderr
    assert out.read_bytes() == before
    assert run(*BOTH, "-o", str(out), "--overwrite", "--limit", "3", "-q")[0] == 0
    assert load_record(out).record.results[0].n == 3
    data = (shelf / "copy.jsonl").read_bytes()
    code, _, stderr = run(*BOTH, "-o", "copy.jsonl", "--overwrite")
    assert code == 2
    assert (shelf / "copy.jsonl").read_bytes() == data


def test_quiet_prints_the_result_only(run, tmp_path):
    code, stdout, stderr = run(*BOTH, "-q")
    assert code == 0
    assert stderr == ""
    assert stdout.startswith("base 0.")
    out = tmp_path / "r.json"
    assert run(*BOTH, "-q", "-o", str(out))[1] == f"{out}\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("experts/sofd", *BOTH), 2, "similar: soft"),
        (("experts", *BOTH), 2, "it holds"),
        (("a=experts/soft", "a=experts/hard", *BOTH), 2, "NAME=PATH"),
        (("--base", "mine", "--data", "coppy.jsonl"), 2, "similar: copy.jsonl"),
        (("--base", "min", "--data", "copy.jsonl"), 2, "similar: mine"),
        ((*BOTH, "--data", "copy.jsonl"), 2, "copy.jsonl and copy.jsonl are the same data"),
        ((*BOTH, "--data", "other=copy.jsonl"), 2, "copy.jsonl and other=copy.jsonl are the same"),
        (("--base", "mine", "--data", "a=copy.jsonl", "a=copy.jsonl"), 2, "are the same data"),
        (("--base", "mine", "--data", "a=copy.jsonl", "a=reverse.jsonl"), 2, "NAME=FILE"),
        ((*BOTH, "--no-such-option"), 2, ""),
        ((*BOTH, "--metric", "bleu"), 2, ""),
        ((*BOTH, "--limit", "0"), 2, ""),
        (("--base", "mine"), 2, ""),
        (("experts/idle", *BOTH), 3, "--expect-same"),
        ((*BOTH, "--device", "cuda:9"), 4, "--device cpu"),
    ],
)
def test_errors_say_what_to_do(run, words, code, says):
    found, stdout, stderr = run(*words)
    assert found == code, stderr
    assert says in stderr
    assert stdout == ""
    assert "Traceback" not in stderr


@pytest.mark.parametrize("path", ["experts/sofd", "user/repo", "nothing"])
def test_a_wrong_path_opens_no_socket(run, monkeypatch, path):
    import socket

    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert run(path, *BOTH)[0] == 2
    assert run("experts/soft", "--base", path, "--data", "copy.jsonl")[0] == 2


def test_errors_as_json(run):
    code, stdout, stderr = run("experts/idle", *BOTH, "--json")
    assert (code, stdout) == (3, "")
    error = json.loads(stderr.strip().splitlines()[-1])
    assert error["code"] == "incompatible.same_as_base"
    assert error["target"] == "idle"
    assert len(error["digest"]) == 64
    assert run("experts/idle", *BOTH, "--expect-same", "-q")[0] == 0


def test_all_targets_that_are_the_base_are_named_and_nothing_is_written(run, tmp_path):
    out = tmp_path / "r.json"
    words = ("experts/soft", "experts/idle", "lazy=experts/idle", *BOTH)
    code, stdout, stderr = run(*words, "-o", str(out))
    assert (code, stdout) == (3, "")
    assert "error: targets idle, lazy score exactly as the base on all 44 items" in stderr
    assert "--expect-same" in stderr
    assert list(tmp_path.iterdir()) == []
    code, _, stderr = run(*words, "--json")
    assert code == 3
    assert json.loads(stderr.strip().splitlines()[-1])["targets"] == ["idle", "lazy"]
    assert run(*words, "-o", str(out), "--expect-same", "-q")[0] == 0
    assert [one.name for one in load_record(out).record.targets] == [
        "base", "soft", "idle", "lazy"
    ]  # fmt: skip


def test_data_takes_several_words(run):
    code, stdout, _ = run(
        "experts/soft", "--base", "mine", "--data", "copy.jsonl", "r=reverse.jsonl", "--json"
    )
    assert code == 0
    assert [s["name"] for s in json.loads(stdout)["skills"]] == ["copy", "r"]


def test_help_is_light():
    script = (
        "import sys\nfrom cgmerge.cli.app import main\n"
        "try:\n main(['eval', '--help'])\nexcept SystemExit as stop:\n"
        " heavy = {'torch', 'transformers', 'scipy', 'numpy', 'peft'} & set(sys.modules)\n"
        " sys.exit(repr(heavy) if heavy else stop.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--compare-to" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("eval t --data a b --json", "eval t --data a --data b --json"),
        ("eval --data a --data b c -o x y", "eval --data a --data b --data c -o x y"),
        ("eval --data=a b", "eval --data=a b"),
        ("eval --data a b -- t u", "eval --data a --data b -- t u"),
        ("eval --data - b", "eval --data - --data b"),
        ("eval --data", "eval --data"),
        ("eval --data --json a", "eval --data --json a"),
        ("eval a b", "eval a b"),
        ("", ""),
    ],
)
def test_spread(words, expected):
    assert spread(words.split(), {"--data"}) == expected.split()


@given(st.lists(st.sampled_from(["--data", "--base", "-o", "a", "b", "-", "--", "--data=x"])))
def test_spread_loses_nothing_and_repeats_nothing(words):
    once = spread(words, {"--data"})
    assert spread(once, {"--data"}) == once
    assert [w for w in once if w != "--data"] == [w for w in words if w != "--data"]


def test_many_skills_become_rows(run, shelf, tmp_path):
    rows = tiny.make_rows("copy", 16, seed=9, lengths=(1, 2))
    rows = [{**row, "skill": f"s{i % 8}"} for i, row in enumerate(rows)]
    data = tiny.write_jsonl(tmp_path / "many.jsonl", rows)
    out = tmp_path / "r.json"
    code, stdout, _ = run("experts/hard", "--base", "mine", "--data", str(data), "-o", str(out))
    assert code == 0
    lines = stdout.splitlines()
    assert lines[0].split() == ["skill", "base", "hard"]
    assert [line.split()[0] for line in lines[1:9]] == [f"s{i}" for i in range(8)]
    titles, cells = score_table(load_record(out).record)
    assert len(titles) == 3
    assert [row[0] for row in cells[-2:]] == ["mean", "vs base"]
    assert "n = 2 items" in how_to_read(load_record(out).record)
