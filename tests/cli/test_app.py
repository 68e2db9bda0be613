"""The command line as scripts see it: exit codes, one JSON object, nothing on stdout on failure."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import support
import typer

from cgmerge.cli import app, output
from cgmerge.cli.output import Output
from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.card import BaseId, ExpertCard


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("cgmerge 0.")


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["compose"], ["compose", "a", "--rnk", "4"], ["eval", "--batch-size", "many"]],
)
def test_wrong_command_lines_exit_2(run, words):
    code, out, err = run(*words)
    assert code == 2
    assert "Traceback" not in err + out


def test_json_failure_is_the_last_line_of_stderr(run, tmp_path):
    for words in (["compose", str(tmp_path / "no"), "-o", "x"], ["compose", "--bogus"]):
        code, out, err = run(*words, "--json")
        assert code == 2
        assert out == ""
        error = json.loads(err.splitlines()[-1])
        assert error["ok"] is False
        assert error["exit"] == 2
        assert error["schema"] == "cgmerge.error/1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compose", "a", "--scale", "abc"], "--scale must be a number, found 'abc'"),
        (["compose", "a", "--scale=1,5"], "--scale must be a number, found '1,5'"),
        (["compose", "a", "--budget", "2.5"], "--budget must be a whole number, found '2.5'"),
        (
            ["compose", "a", "--budget", "0"],
            "--budget must be greater than or equal to 1, found '0'",
        ),
        (
            ["stats", "a", "--base", "b", "--data", "c", "--kind", "k" * 99],
            f"--kind must be one of 'all', 'gram', 'fisher', 'layerwise', found '{'k' * 59}…",
        ),
        (["train", "--lr", "fast"], "--lr must be a number, found 'fast'"),
        (["train", "--learning-rate", "fast"], "--learning-rate must be a number, found 'fast'"),
        (["compose", "a", "--rank", "x"], "at least 1, `exact` or `auto`, found 'x'"),
        (["compose", "a", "--sclae", "3"], "no such option: --sclae"),
        (["compoze"], "no such command 'compoze'. Did you mean 'compose'"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_it_takes(run, words, message):
    code, out, err = run(*words, *(["-o", "x"] if words[0] == "compose" else []))
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    code, out, err = run(*words, *(["-o", "x"] if words[0] == "compose" else []), "--json")
    assert code == 2
    assert out == ""
    if words[0] != "compoze":
        assert message in json.loads(err)["message"]


def test_no_words_at_all_print_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "compose" in out
    assert err == ""


def test_error_for_people_has_message_and_hint(run, experts):
    code, out, err = run("compose", experts / "E1", "-m", "tise", "-o", experts / "x")
    assert code == 2
    assert out == ""
    assert "error: unknown method `tise`" in err
    assert "hint: did you mean `ties`?" in err


def test_a_bug_is_reported_with_a_file(run, experts, monkeypatch):
    from cgmerge.modules import compose

    def broken(*args):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(compose, "make_plan", broken)
    code, out, err = run("compose", experts / "E1", "-o", experts / "x")
    assert code == 70
    assert out == ""
    assert "ZeroDivisionError: oops" in err
    assert "Traceback" not in err
    path = Path(next(word for word in err.split() if ".txt" in word).rstrip(";"))
    assert "Traceback" in path.read_text()
    path.unlink()


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (MemoryError(), 4), (SystemExit(143), 143), (SystemExit(1), 1)],
)
def test_other_endings(run, experts, monkeypatch, error, code):
    from cgmerge.modules import compose

    def stop(*args):
        raise error

    monkeypatch.setattr(compose, "make_plan", stop)
    found, out, err = run("compose", experts / "E1", "-o", experts / "x")
    assert found == code
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "says", "hint", "reason"),
    [
        (PermissionError(13, "no", "/e/w"), "/e/w: permission denied", "permission", "EACCES"),
        (OSError(28, "No space left", "/t/x"), "/t/x: the disk is full", "free some", "ENOSPC"),
        (OSError(5, "I/O", "/e/w"), "/e/w: the device reported an input", "failing", "EIO"),
        (OSError(24, "Too many open files", "a"), "a: Too many open files", "ulimit -n", "EMFILE"),
        (FileNotFoundError(2, "gone", "a", None, "b"), "a and b: gone", "check the", "ENOENT"),
        (OSError(5, "I/O"), "error: the device reported", "failing", "EIO"),
        (OSError("Can't load tokenizer for 'x'"), "Can't load tokenizer", "can be used", "OSError"),
        (TimeoutError(), "error: TimeoutError", "can be used", "TimeoutError"),
    ],
)
def test_what_the_system_refuses_is_no_bug(run, experts, monkeypatch, error, says, hint, reason):
    from cgmerge.modules import compose

    def stop(*args):
        raise error

    monkeypatch.setattr(compose, "make_plan", stop)
    code, out, err = run("compose", experts / "E1", "-o", experts / "x")
    assert (code, out) == (4, "")
    assert says in err
    assert "bug" not in err.replace("DEBUG", "")
    said = err.split("hint: ")[1]
    assert hint in said
    assert "CGMERGE_DEBUG=1" in said
    code, _, err = run("compose", experts / "E1", "-o", experts / "x", "--json")
    found = json.loads(err.splitlines()[-1])
    assert (code, found["exit"], found["code"]) == (4, 4, "storage.system")
    assert found["reason"] == reason
    assert found["path"] == error.filename


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_read_that_fails_in_the_middle(run, experts, monkeypatch, name):
    """The disk fails after the file was opened."""
    from cgmerge import tensorfile

    plain = tensorfile.open_regular

    def failing(path, **options):
        handle = plain(path, **options)
        if Path(path).name == name:
            closed = os.open(path, os.O_WRONLY)  # reading from it fails with EBADF
            os.dup2(closed, handle)
            os.close(closed)
        return handle

    monkeypatch.setattr(tensorfile, "open_regular", failing)
    code, out, err = run("compose", experts / "E1", "-m", "linear", "-o", experts / "x")
    assert (code, out) == (4, ""), err
    assert f"error: {experts / 'E1' / name}: Bad file descriptor" in err
    assert not (experts / "x").exists()


def test_debug_shows_the_traceback(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CGMERGE_DEBUG", "1")
    _, _, err = run("compose", tmp_path / "no", "-o", "x")
    assert "Traceback" in err


@pytest.mark.fault("F29")
def test_terminated_process_leaves_nothing(tmp_path, qv):
    """SIGTERM in the middle of the merge: exit 143, no output folder, no temporary."""
    support.make_expert(tmp_path / "E1", qv)
    code = (
        "import os, signal, sys\n"
        "from cgmerge import fs\n"
        "from cgmerge.cli import app\n"
        "def step(operation, path):\n"
        "    if operation == 'write':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "fs._step = step\n"
        "app.main(['compose', 'E1', '-o', 'out'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 143, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["E1"]


@pytest.mark.fault("F29")
def test_reader_that_goes_away(tmp_path):
    command = f"{sys.executable} -m cgmerge methods ties | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("ties:")
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_methods_lists_and_explains(run):
    code, out, _ = run("methods", "--json")
    names = [entry["name"] for entry in json.loads(out)["methods"]]
    assert code == 0
    assert {"linear", "task-arithmetic", "ties"} <= set(names)
    code, out, _ = run("methods", "ties")
    assert "--set density=0.2, in (0.0, 1.0]:" in out
    assert "arXiv:2306.01708" in out
    code, out, _ = run("methods", "average")
    assert out.startswith("linear:")
    code, out, _ = run("methods", "knots+ties")
    assert out.startswith("knots+ties:")
    assert "ΔW_e stands for Uᵀ·ΔW_e" in out
    assert "streams the dense deltas" not in out  # it works in the small space
    assert run("methods", "nope")[0] == 2


def test_inspect_an_expert(run, experts, models):
    code, out, _ = run("inspect", experts / "E3", "--base", models / "B", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["kind"] == "expert"
    assert facts["ranks"] == [8]
    assert facts["alpha"] == 4
    dense = support.dense_deltas(experts / "E3")
    total = sum(float(delta.square().sum()) for delta in dense.values()) ** 0.5
    assert facts["norm"] == pytest.approx(total, rel=1e-5)
    assert len(facts["modules"]) == 4
    code, out, _ = run("inspect", experts / "E3", "-v")
    assert "rank 8, scaling 0.5" in out
    assert "down_proj" in out


def test_inspect_shows_scores_one_by_one(run, experts):
    """The expert's own first; nothing as Python would print it."""
    tested = {"base_exact_match": 0.0, "exact_match": 0.675, "n": 40}
    metrics = {"first_loss": 4.8, "loss": 0.00408023550407961, "eval": tested, "note": "x"}
    card = ExpertCard(skill="s", base=BaseId(name="some/base"), metrics=metrics)
    text = json.dumps(card.model_dump(mode="json", by_alias=True))
    (experts / "E1/expert.json").write_text(text)
    code, out, err = run("inspect", experts / "E1")
    assert code == 0, err
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [line[1] for line in lines if line[0] == "metric"] == [
        "eval.exact_match = 0.675", "loss = 0.00408024", "eval.base_exact_match = 0",
        "eval.n = 40", "first_loss = 4.8", "note = x",
    ]  # fmt: skip
    assert run("verify", experts / "E1")[2].splitlines()[-1].startswith("checked  1 expert, ")


def test_inspect_a_base(run, models):
    code, out, _ = run("inspect", models / "B", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["kind"] == "base"
    assert facts["fingerprint"].startswith("fp1:")
    assert facts["parameters"] > 20_000


def test_inspect_refuses_what_does_not_fit(run, experts, models, tmp_path):
    support.make_expert(tmp_path / "odd", {"model.layers.7.self_attn.q_proj": (32, 32)})
    code, _, err = run("inspect", tmp_path / "odd", "--base", models / "B")
    assert code == 3
    assert "layers.7" in err


def test_doctor_reports_versions(run):
    code, out, _ = run("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"]
    assert facts["problems"] == []
    assert facts["devices"][0].startswith("cpu")


def test_output_keeps_stdout_for_data(capsys):
    voice = Output()
    voice.line("plan", "something")
    voice.warn("careful")
    voice.table(["a", "b"], [["x", "1"], ["long", "22"]])
    captured = capsys.readouterr()
    assert captured.out == "a      b\nx      1\nlong  22\n"
    voice.table(["a", "b"], [["x", "one"], ["long", "y"]], words=True)
    assert capsys.readouterr().out == "a     b\nx     one\nlong  y\n"
    assert "plan     something" in captured.err
    assert "warning: careful" in captured.err
    assert voice.warnings == ["careful"]


def test_quiet_output_is_the_result_only(capsys):
    voice = Output(quiet=True)
    voice.line("plan", "something")
    voice.table(["a"], [["x"]])
    voice.hint("next")
    voice.result("s/1", {"out": "x"}, short="x")
    captured = capsys.readouterr()
    assert captured.out == "x\n"
    assert captured.err == ""


def test_json_output_is_one_object_without_nan(capsys):
    voice = Output(as_json=True)
    voice.text("not this")
    voice.result("s/1", {"loss": float("nan"), "deep": [{"x": float("inf")}], "n": 2})
    content = json.loads(capsys.readouterr().out)
    assert content == {
        "schema": "s/1", "ok": True, "loss": None, "deep": [{"x": None}], "n": 2, "warnings": [],
    }  # fmt: skip


def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch):
    voice = Output()
    with voice.progress("merge", 3) as advance:
        for done in (1, 2, 3):
            advance(done, note="loss 1")
    assert capsys.readouterr().err.splitlines() == ["merge    3/3, 0 s, loss 1"]
    clock = iter(range(0, 1000, 11))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with voice.progress("merge", 3) as advance:
        advance(1)
        assert capsys.readouterr().err == "merge    1/3\n"
        advance(2)
        assert capsys.readouterr().err == "merge    2/3, 11 s left\n"
    with Output(quiet=True).progress("merge", 1) as advance:
        advance(1)
    assert capsys.readouterr().err == ""


def test_progress_that_goes_on_counts_only_its_own_speed(capsys, monkeypatch):
    """The second step took 22 s after 96 old ones: two more take 44 s, not half a second.

    The first took 300 s to warm up, which says nothing about the others.
    """
    clock = iter([0.0, 300.0, 322.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Output().progress("train", 100, start=96) as advance:
        advance(97)
        advance(98)
    assert capsys.readouterr().err == "train    97/100\ntrain    98/100, 44 s left\n"


@pytest.mark.parametrize("start", [0, 96])
def test_bar_begins_where_the_work_does(monkeypatch, start):
    import rich.progress

    bars = []
    plain = rich.progress.Progress.add_task

    def spy(self, *args, **options):
        bars.append(self)
        return plain(self, *args, **options)

    monkeypatch.setattr(rich.progress.Progress, "add_task", spy)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Output().progress("train", 100, **({"start": start} if start else {})) as advance:
        (task,) = bars[0].tasks
        assert (task.completed, task.total) == (start, 100)
        advance(98, note="x")
        assert (task.completed, task.fields["note"]) == (98, "x")


def test_errors_print_their_details(capsys):
    output.print_error(Damaged("bad", code="file", path="x", found=3, list=[1]), as_json=True)
    shown = json.loads(capsys.readouterr().err)
    assert shown["code"] == "damaged.file"
    assert (shown["path"], shown["found"], shown["list"]) == ("x", 3, [1])
    output.print_error(UsageError("wrong", hint="do this"), as_json=False)
    assert capsys.readouterr().err == "error: wrong\n\nhint: do this\n"


def test_main_exits_with_the_code(monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            app.main(["methods", "nope"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert caught.value.code == 2


def test_methods_explains_a_rule_in_a_space(run):
    code, out, _ = run("methods", "core+ties", "--json")
    assert code == 0
    assert json.loads(out)["methods"][0]["name"] == "ties"
    assert run("methods", "cube+ties")[0] == 2


def test_help_shows_every_word_of_its_texts():
    """The help is markup: an unescaped bracket, as around a default, would vanish."""
    from rich.text import Text

    from cgmerge.cli.app import app

    group = typer.main.get_command(app)
    seen = 0
    for name, command in group.commands.items():
        for param in command.params:
            written = getattr(param, "help", None) or ""
            shown = Text.from_markup(written).plain
            assert shown == written.replace("\\[", "["), (name, param.name)
            seen += "[default: " in shown
    assert seen >= 15


def test_defaults_stand_in_the_help(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command, default in (("compress", "ternary"), ("compress", "1"), ("compose", "16")):
        assert f"[default: {default}]" in run(command, "--help")[1]
    assert "ties if not given, one expert as it is" in run("compose", "--help")[1]
