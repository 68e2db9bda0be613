"""Pipelines on a real cluster of Ray; `make ray` runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # as Ray itself has it; without it a token is put into the home
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
}
LONG = 300.0
"""Seconds until something is given up; a busy machine needs a minute for a step."""

PIPELINE = """\
base: tiny
out: study
train: {steps: 3, rank: 2, skills: {up: up.jsonl, back: {data: back.jsonl, rank: 3}}}
compose:
  - {method: ties, set: {density: [0.2, 0.5]}}
eval: {data: {up: up.jsonl, back: back.jsonl}}
report: true
"""


@pytest.fixture
def study(tmp_path):
    """A folder with a pipeline, and what it gives in one process."""
    for name, rows in (
        ("up", [("caesar : a b c =", "b c d"), ("caesar : d e f =", "e f g")]),
        ("back", [("rotr : a b c =", "c a b"), ("rotr : d e f =", "f d e")]),
    ):
        lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "p.yml").write_text(PIPELINE)
    run(tmp_path)
    expected = contents(tmp_path)
    assert "report.html" in expected
    (tmp_path / "study").rename(tmp_path / "inline")
    return tmp_path, expected


def command(*words):
    return [sys.executable, "-m", "cgmerge", "run", "p.yml", "--json", *words]


def run(folder, *words):
    done = subprocess.run(
        command(*words), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(folder):
    """Bytes of everything that was made; the records of steps hold the time they took."""
    root = folder / "study"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "steps"
    }


def left_over(folder):
    """Steps that still run in a folder: commands of this program that were started there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            if b"cgmerge" in words and (place / "cwd").resolve() == folder.resolve():
                found.append(b" ".join(words))
        except OSError:
            continue
    return found


def wait_for(what):
    until = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def head(tmp_path_factory):
    """A cluster of two CPUs that is there before and after; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Sockets of Ray have names of at most 107 bytes.
    place = tmp_path_factory.mktemp("r")
    words = ["ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2",
             "--include-dashboard=false", f"--temp-dir={place}",
             "--disable-usage-stats"]  # fmt: skip
    log = (place / "head.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", *words], env=ENVIRONMENT, stdout=log,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def answers():
        assert process.poll() is None, (place / "head.log").read_text()
        return b"Ray runtime started" in (place / "head.log").read_bytes()

    try:
        wait_for(answers)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def test_a_cluster_of_ones_own_gives_the_same_bytes(study):
    folder, expected = study
    found = run(folder, "--executor", "ray", "--workers", "2")
    assert found["cached"] == []
    assert contents(folder) == expected
    assert run(folder, "--executor", "ray")["done"] == []
    assert left_over(folder) == []


def test_killed_twice_on_a_cluster_the_bytes_are_the_same(study, head):
    folder, expected = study
    words = ["--executor", "ray", "--address", head, "--workers", "2"]
    for wanted in ("train-up.json", "compose-ties-density0.2.json"):
        process = subprocess.Popen(
            command(*words), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )
        wait_for(
            lambda record=wanted, process=process: (
                (folder / "study/steps" / record).exists() or process.poll() is not None
            )
        )
        assert process.poll() is None, "it was over before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not left_over(folder))  # a cluster ends the steps of who is gone
    found = run(folder, *words)
    assert "train-up" in found["cached"]
    assert found["done"]
    assert contents(folder) == expected


def test_no_cluster_and_a_step_that_fails(study, head):
    folder, _ = study
    words = ["--executor", "ray", "--address"]
    done = subprocess.run(command(*words, "127.0.0.1:1"), cwd=folder, capture_output=True,
                          env=ENVIRONMENT, text=True, check=False)  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "there is no Ray cluster at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
    (folder / "back.jsonl").write_text('{"prompt": "rotr : a b =", "completion": ""}\n')
    done = subprocess.run(command(*words, head), cwd=folder, capture_output=True, env=ENVIRONMENT,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["failed"]["train-back"]["code"] == 3
    assert {"compose-ties-density0.2", "report"} <= set(found["left"])
    assert "train-up" in found["done"]
