"""Run the steps of a pipeline: what was done is skipped, what fails stops what needs it.

A step is done when its record under `steps/` names its identity and its result is there. Records
are written after results, each in one move, so that a kill at any moment costs at most the steps
that were running; a training goes on from its own checkpoints.
"""

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cgmerge import fs, strictjson
from cgmerge.errors import CgmergeError, Damaged, NotFound
from cgmerge.evals.pipeline.steps import Step
from cgmerge.quoting import quoted
from cgmerge.tensorfile import read_small

_SCHEMA = "cgmerge.step/1"
_RECORD_BYTES = 64 << 20
_INTERRUPTED, _TERMINATED = 130, 143
_SAID = 20  # lines of a failed step that are shown


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command.

    Attributes:
        code: Its exit code.
        stdout: What it printed, with `--json`.
        stderr: What it said, where that was kept.
    """

    code: int
    stdout: str
    stderr: str = ""


class Executor(Protocol):
    """Runs command lines, here or elsewhere."""

    def start(self, words: Sequence[str], launcher: Sequence[str]) -> "Future[Outcome]":
        """Begin a command of this program."""

    def close(self) -> None:
        """Stop what still runs."""


class Inline:
    """One after the other in this process: nothing is loaded twice.

    Args:
        call: Runs a command line and returns its exit code.
    """

    def __init__(self, call: Callable[[list[str]], int]) -> None:
        self.call = call

    def start(self, words: Sequence[str], launcher: Sequence[str]) -> "Future[Outcome]":
        """Run the command and return when it is done."""
        done: Future[Outcome] = Future()
        if launcher:
            done.set_result(run_command(words, launcher, keep=False))
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = self.call(list(words))
            done.set_result(Outcome(code, printed.getvalue()))
        code = done.result().code
        if code == _INTERRUPTED:  # meant for all steps, not for this one
            raise KeyboardInterrupt
        if code == _TERMINATED:
            raise SystemExit(code)
        return done

    def close(self) -> None:
        """Nothing runs."""


class Processes:
    """Several at a time, each in a process of its own on this machine."""

    def __init__(self, workers: int) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.live: set[subprocess.Popen[str]] = set()

    def start(self, words: Sequence[str], launcher: Sequence[str]) -> "Future[Outcome]":
        """Begin the command when a worker is free."""
        return self.pool.submit(run_command, words, launcher, keep=True, live=self.live)

    def close(self) -> None:
        """Terminate what still runs, and wait for it."""
        for process in list(self.live):
            process.terminate()
        self.pool.shutdown(cancel_futures=True)


def run_command(
    words: Sequence[str],
    launcher: Sequence[str],
    *,
    keep: bool,
    folder: str | None = None,
    live: set["subprocess.Popen[str]"] | None = None,
) -> Outcome:
    """Run a command of this program in a process of its own, to its end.

    Args:
        words: The command line, the program's name left out.
        launcher: Words in front of it, in place of this Python.
        keep: Keep what it says instead of passing it on.
        folder: Where it runs; None for here.
        live: Holds the process while it runs.
    """
    program = [*launcher, "-m", "cgmerge"] if launcher else [sys.executable, "-m", "cgmerge"]
    with subprocess.Popen(  # noqa: S603  (our own program; words, no shell)
        [*program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keep else None,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        cwd=folder,
    ) as process:
        if live is not None:
            live.add(process)
        stdout, stderr = process.communicate()
        if live is not None:
            live.discard(process)
    return Outcome(process.returncode, stdout, stderr or "")


@dataclass
class Progress:
    """What became of the steps, by name."""

    cached: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failed: dict[str, Outcome] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


class State:
    """The records of a pipeline's folder.

    Args:
        out: The pipeline's folder.
        identities: Of all its steps.
    """

    def __init__(self, out: Path, identities: Mapping[str, str]) -> None:
        self.folder = out / "steps"
        self.identities = identities

    def result(self, step: Step) -> dict[str, Any] | None:
        """Return what a finished step printed; None where it must be run.

        Raises:
            Damaged: A record that is no record.
        """
        path = self.folder / f"{step.name}.json"
        try:
            record = strictjson.loads_object(
                read_small(path, limit=_RECORD_BYTES), source=str(path), max_bytes=_RECORD_BYTES
            )
        except NotFound:
            return None
        if record.get("schema") != _SCHEMA or not isinstance(record.get("result"), dict):
            raise Damaged(
                f"{path} is no record of a step",
                code="step",
                hint="remove the file; the step is then run again",
                path=path,
            )
        same = record.get("identity") == self.identities[step.name]
        found: dict[str, Any] = record["result"]
        return found if same and step.out.exists() else None

    def begin(self, step: Step) -> bool:
        """Note that a step is begun; return whether another configuration of it was before."""
        path = self.folder / f"{step.name}.begun"
        wanted = self.identities[step.name].encode()
        try:
            before = read_small(path, limit=1 << 10)
        except NotFound:
            before = wanted
        fs.replace_file(path, wanted)
        return before != wanted

    def keep(self, step: Step, seconds: float, result: Mapping[str, Any]) -> None:
        """Write that a step is done."""
        record = {
            "schema": _SCHEMA,
            "step": step.name,
            "identity": self.identities[step.name],
            "command": command_of(step),
            "seconds": round(seconds, 3),
            "result": dict(result),
        }
        text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        fs.replace_file(self.folder / f"{step.name}.json", text.encode())


def command_of(step: Step) -> str:
    """Return the command line of a step, as a shell takes it."""
    program = [*step.launcher, "-m", "cgmerge"] if step.launcher else ["cgmerge"]
    return " ".join(map(quoted, [*program, *step.words]))


def run_steps(
    steps: Sequence[Step],
    state: State,
    executor: Executor,
    *,
    workers: int,
    say: Callable[[str, str], None],
) -> Progress:
    """Run what is not done, each step after those whose results it reads.

    Args:
        steps: In the order of `plan_steps`, or some of them.
        state: What is done already.
        executor: Where commands run.
        workers: How many at a time.
        say: Told what happens: a word and a text.

    Returns:
        What became of each step. After a failure what does not need the failed step still runs.
    """
    progress = Progress()
    waiting: list[Step] = []
    for step in steps:
        if state.result(step) is None:
            waiting.append(step)
        else:
            progress.cached.append(step.name)
            say("done", f"{step.name} (before)")
    running: dict[Future[Outcome], tuple[Step, float]] = {}
    while waiting or running:
        for step in list(_ready(waiting, [s for s, _ in running.values()], progress)):
            if len(running) >= workers:
                break
            waiting.remove(step)
            say("run", command_of(step))
            words = [*step.words, "--json"]
            # A training of the same configuration goes on; everything else begins anew.
            if state.begin(step) or (step.out.exists() and step.kind != "train"):
                words.append("--overwrite")
            started = time.monotonic()
            running[executor.start(words, step.launcher)] = step, started
        if not running:
            break
        ready, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ready:
            step, started = running.pop(future)
            _finish(step, future.result(), time.monotonic() - started, state, progress, say)
    progress.left = [step.name for step in waiting]
    return progress


def _ready(waiting: Sequence[Step], running: Sequence[Step], progress: Progress) -> Iterator[Step]:
    """Give the steps whose forerunners are done, or are none of these steps."""
    blocked = {step.name for step in (*waiting, *running)} | set(progress.failed)
    for step in waiting:
        if not blocked & set(step.after):
            yield step


def _finish(
    step: Step,
    outcome: Outcome,
    seconds: float,
    state: State,
    progress: Progress,
    say: Callable[[str, str], None],
) -> None:
    result: dict[str, Any] | None = None
    if outcome.code == 0:
        with contextlib.suppress(CgmergeError):
            result = strictjson.loads_object(
                outcome.stdout.encode(), source=step.name, max_bytes=_RECORD_BYTES
            )
    if result is None:
        progress.failed[step.name] = outcome
        say("failed", f"{step.name}, exit code {outcome.code}")
        for line in outcome.stderr.splitlines()[-_SAID:]:
            say("", line)
        return
    state.keep(step, seconds, result)
    progress.done.append(step.name)
    say("done", f"{step.name}, {seconds:.0f} s")


def table_of(steps: Sequence[Step], state: State) -> list[dict[str, Any]]:
    """Return one row per target and skill that was measured, with what was chosen for it."""
    rows = []
    for step in steps:
        found = state.result(step) if step.kind == "eval" else None
        for result in (found or {}).get("results", []):
            keys = ("target", "skill", "metric", "score", "n", "low", "high")
            rows.append({key: result.get(key) for key in keys} | {"settings": dict(step.settings)})
    return rows
