"""Streams as real processes get them: closed, full, or of few letters; and how they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CGMERGE = f"'{sys.executable}' -m cgmerge"
FEW_LETTERS = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(command, cwd=None, **env):
    return subprocess.run(
        ["bash", "-c", f"{CGMERGE} {command}"],
        cwd=cwd, capture_output=True, check=False, env={**os.environ, **env},
    )  # fmt: skip


def test_closed_stdout_is_a_storage_error():
    done = shell("methods --json >&-")
    assert done.returncode == 4
    error = json.loads(done.stderr)
    assert (error["code"], error["exit"]) == ("storage.stdout", 4)
    assert b"> /dev/null" in shell("methods >&-").stderr


def test_few_letters_on_stderr_alone(run, monkeypatch):
    """What is an escape for people is JSON's own escape for scripts."""
    import io

    few = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", few)
    assert run("compose", "ä", "-o", "x", "--json")[0] == 2
    few.flush()
    assert json.loads(few.buffer.getvalue())["message"] == "no such expert: ä"


def test_closed_stderr_and_stdin_change_nothing():
    done = shell("methods ties 2>&- <&-")
    assert done.returncode == 0
    assert done.stdout.startswith(b"ties:")
    assert shell("nope 2>&-").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.fault("F26")
def test_full_disk_under_stdout():
    done = shell("methods --json > /dev/full")
    assert done.returncode == 4
    assert "the disk is full" in json.loads(done.stderr.splitlines()[-1])["message"]


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, FEW_LETTERS], ids=["ascii", "C"])
def test_few_letters(run, tmp_path, env):
    (tmp_path / "ä…").mkdir()
    for command in ("train --help", "methods della"):
        done = shell(command, **env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    facts = json.loads(shell("methods della --json", **env).stdout)
    assert facts == json.loads(run("methods", "della", "--json")[1])
    done = shell("inspect ä… --json", tmp_path, **env)
    assert done.stderr.isascii()
    assert json.loads(done.stderr.splitlines()[-1])["ok"] is False
    assert done.returncode in (2, 3)


def stop(signal_name):
    """A process that is sent a signal in the middle of a command."""
    code = (
        "import os, signal\n"
        "from cgmerge.cli import app, methods\n"
        "import cgmerge.merge.registry\n"
        "from cgmerge.cli.output import Output\n"
        "def table(*_, **__):\n"
        f"    os.kill(os.getpid(), signal.{signal_name})\n"
        "Output.line(Output(), 'plan', 'x')\n"
        "Output.table = table\n"
        "app.main(['methods', '--json'])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("name", "code", "exit_code"), [("SIGINT", "interrupted", 130), ("SIGTERM", "terminated", 143)]
)
@pytest.mark.fault("F29")
def test_signals_end_with_one_object(name, code, exit_code):
    done = stop(name)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == b""
    *before, last = done.stderr.splitlines()
    assert before == [b"plan     x"]
    error = json.loads(last)
    assert (error["schema"], error["code"]) == ("cgmerge.error/1", code)
    assert error["exit"] == exit_code


def test_interrupted_without_json(run, monkeypatch):
    from cgmerge.cli.output import Output

    def table(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Output, "table", table)
    code, out, err = run("methods")
    assert (code, out) == (130, "")
    assert err == "interrupted; nothing half-written is left\n"


def test_a_bug_is_one_object_too(run, monkeypatch):
    from cgmerge.cli.output import Output

    def broken(voice, *_, **__):
        voice.line("plan", "something")
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Output, "table", broken)
    code, out, err = run("methods", "--json")
    assert (code, out) == (70, "")
    assert err.startswith("plan ")
    error = json.loads(err.splitlines()[-1])
    assert (error["schema"], error["code"], error["exit"]) == ("cgmerge.error/1", "bug", 70)
    assert "ZeroDivisionError: oops" in error["message"]
    file = Path(error["traceback"])
    assert "Traceback" in file.read_text()
    file.unlink()
