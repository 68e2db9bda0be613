"""Every command that writes, failed or killed at every disk operation, or at any moment.

A trial copies a small place (base, experts, data, library, records), lets a forked child run one
command there under a fault, and judges what is left: inputs untouched, every output old or new as a
whole, no foreign file; then the same command must do its work without help and leave exactly what
an undisturbed run leaves. Used by the tests (a few trials) and by `scripts/trust.py` (all of them).
"""

import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tiny_model

from cgmerge import fs
from cgmerge.cli import app

TEMPORARY = ".cgmerge-tmp-"


@dataclass(frozen=True)
class Command:
    """A command line and what stands there before.

    Attributes:
        words: Relative to the place.
        before: Commands run first: what the one under test replaces.
        pieces: It leaves several results one after the other, each whole (a pipeline, a library):
            between old and new everything goes that a repetition completes.
        again: Words of the repetition, where they differ.
    """

    words: str
    before: tuple[str, ...] = ()
    pieces: bool = False
    again: str | None = None


COMMANDS = {
    "train": Command(
        "train --base base --data copy.jsonl --skill copy -o out --steps 2 --rank 2 --batch-size 4"
        " --checkpoint-steps 1",
        pieces=True,
    ),
    "compose an adapter": Command(
        "compose a b -m ties -o out --overwrite", before=("compose a b -m linear -o out",)
    ),
    "compose a model": Command("compose a b --base base --as model --dtype float32 -o out"),
    "compose a router": Command("compose a b --base base -m arrow -o out"),
    "compress": Command("compress a -o out.cge --overwrite", before=("compress b -o out.cge",)),
    "decompress": Command("decompress a.cge -o out"),
    "stats": Command("stats a --base base --data copy.jsonl --limit 4"),
    "extract": Command("extract full --base base --rank 2 -o out"),
    "export": Command("export a --to vllm -o out"),
    "add": Command("add lib b --overwrite", pieces=True),
    "rm": Command("rm lib a", pieces=True, again="rm lib --unreferenced"),
    "push": Command("push lib other", pieces=True),
    "pull": Command("pull lib/a -o out"),
    "lock": Command("lock lib/a -o lock.json --overwrite", before=("lock lib/a=2 -o lock.json",)),
    "eval": Command("eval a --base base --data copy.jsonl -o out.json", pieces=True,
                    again="eval a --base base --data copy.jsonl -o out.json --overwrite"),
    "report": Command("report record.json -o out.html --md out.md", pieces=True,
                      again="report record.json -o out.html --md out.md --overwrite"),
    "run": Command("run p.yml", pieces=True),
    "init": Command("init out.yml"),
    "tasks": Command("tasks make chains --n 40 -o out"),
    "split": Command("split copy.jsonl --by iid -o out"),
}  # fmt: skip

PIPELINE = """\
base: base
out: study
experts: {a: a}
train: {steps: 2, rank: 2, batch_size: 4, skills: {copy: copy.jsonl}}
compose: [{method: linear}]
eval: {data: {copy: copy.jsonl}}
"""


@dataclass
class Fault:
    """Fails or kills at the k-th disk operation; counts them otherwise."""

    at: int
    kill: bool = True
    number: int = errno.ENOSPC
    seen: int = 0

    def __call__(self, _operation: str, path: Path) -> None:
        self.seen += 1
        if self.seen == self.at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.number, os.strerror(self.number), str(path))


@dataclass
class Counting:
    """Counts the operations of a child where its parent can read them."""

    path: Path

    def __call__(self, _operation: str, _path: Path) -> None:
        with self.path.open("ab") as file:
            file.write(b".")

    def read(self) -> int:
        """Return how many there were, and begin anew."""
        count = self.path.stat().st_size if self.path.exists() else 0
        self.path.unlink(missing_ok=True)
        return count


@dataclass
class Ended:
    """How a command ended: its exit code, or minus the signal, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


@dataclass
class Bench:
    """The place all trials start from, and what undisturbed commands make of it."""

    root: Path
    place: Path = field(init=False)
    old: dict[str, dict[str, bytes]] = field(default_factory=dict)
    new: dict[str, dict[str, bytes]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = self.root / "place"
        build(self.place)

    def start(self, name: str) -> Path:
        """A fresh copy, with what the command replaces."""
        work = self.root / "work"
        shutil.rmtree(work, ignore_errors=True)
        prepared = self.root / "prepared" / name.replace(" ", "-")
        if not prepared.exists():
            shutil.copytree(self.place, prepared)
            for words in COMMANDS[name].before:
                done = execute(prepared, words)
                assert done.code == 0, done.err
        shutil.copytree(prepared, work)
        return work

    def learn(self, name: str) -> None:
        """Run it undisturbed: these bytes are what is expected of every trial."""
        if name in self.new:
            return
        work = self.start(name)
        self.old[name] = tree(work)
        steps = Counting(self.root / "steps")
        begun = time.monotonic()
        done = execute(work, COMMANDS[name].words, steps)
        self.seconds[name] = time.monotonic() - begun
        assert done.code == 0, done.err
        self.steps[name] = steps.read()
        self.new[name] = tree(work)
        assert self.old[name] != self.new[name]

    def operations(self, name: str) -> int:
        """How many disk operations the command announces."""
        self.learn(name)
        return self.steps[name]

    def trial(self, name: str, at: int, *, kill: bool, number: int = errno.ENOSPC) -> None:
        """Fail or be killed at one operation, and see what is left."""
        self.learn(name)
        work = self.start(name)
        ended = execute(work, COMMANDS[name].words, Fault(at, kill=kill, number=number))
        self.judge(name, work, ended, kill=kill, label=f"{name}, operation {at}")

    def random_kill(self, name: str, after: float) -> bool:
        """Kill at a moment; returns whether the command was still at work."""
        self.learn(name)
        work = self.start(name)
        ended = execute(work, COMMANDS[name].words, kill_after=after)
        if ended.code == 0:
            assert_equal(tree(work), self.new[name], f"{name}, killed too late")
            return False
        self.judge(name, work, ended, kill=True, label=f"{name}, killed after {after:.4f} s")
        return True

    def judge(self, name: str, work: Path, ended: Ended, *, kill: bool, label: str) -> None:
        command, old, new = COMMANDS[name], self.old[name], self.new[name]
        if kill:
            assert ended.killed, f"{label}: {ended}"
        else:
            refused(ended, label)
        left = tree(work)
        whole = {path: data for path, data in left.items() if TEMPORARY not in path}
        if not kill:
            assert whole == left, f"{label}: left over: {sorted(set(left) - set(whole))}"
        lost = [path for path in old if path not in whole and path in new]
        assert not lost, f"{label}: lost {lost}"
        if command.pieces:
            for path in old:
                if path in new and old[path] == new[path]:
                    assert whole[path] == old[path], f"{label}: {path} is neither old nor new"
        else:
            assert whole in (old, new), f"{label}: neither old nor new: {differing(whole, old)}"
        self._repeat(command, work, whole, new, label)

    def _repeat(self, command: Command, work: Path, whole: dict[str, bytes],
                new: dict[str, bytes], label: str) -> None:  # fmt: skip
        """The same command, or nothing where all is done, must bring what was to be."""
        done = execute(work, command.words)
        if done.code in (2, 3) and command.again:  # half of it was done: it says how to go on
            done = execute(work, command.again)
        if done.code == 2:
            assert whole == new, f"{label}: then refused: {differing(whole, new)} {done.err}"
            assert '"usage.out_exists"' in done.err, f"{label}: {done.err}"
            # Any write to the folder collects what killed writers left.
            assert execute(work, "init next.yml").code == 0
            (work / "next.yml").unlink()
        else:
            assert done.code == 0, f"{label}: then {done.code}: {done.err}"
        assert_equal(tree(work), new, f"{label}, then repeated")


def refused(ended: Ended, label: str) -> None:
    """A full disk or a broken one is exit 4, one JSON object, nothing on stdout."""
    assert ended.code == 4, f"{label}: {ended}"
    assert ended.out == "", f"{label}: {ended.out}"
    assert "Traceback" not in ended.err, f"{label}: {ended.err}"
    error = json.loads(ended.err.splitlines()[-1])
    assert error["code"].startswith("storage."), f"{label}: {error}"


def assert_equal(found: dict[str, bytes], expected: dict[str, bytes], label: str) -> None:
    assert found == expected, f"{label}: {differing(found, expected)}"


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Name what is too much, missing, or has other bytes."""
    paths = sorted(set(found) | set(expected))
    return [
        f"{'+' if path not in expected else '-' if path not in found else '≠'} {path}"
        for path in paths
        if found.get(path) != expected.get(path)
    ]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, every empty folder with none.

    What a pipeline notes about its steps holds the seconds they took: these are left out.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.parent.name == "steps":
                content = re.sub(rb'"seconds": ?[0-9.e-]+', b"", content)
            found[str(path.relative_to(folder))] = content
        elif path.is_dir() and not any(path.iterdir()):
            found[f"{path.relative_to(folder)}/"] = b""
    return found


def execute(
    place: Path,
    words: str,
    step: Callable[[str, Path], None] | None = None,
    *,
    kill_after: float | None = None,
) -> Ended:
    """Run a command in a forked child, which never returns here."""
    streams = [place.parent / "out.txt", place.parent / "err.txt"]
    child = os.fork()
    if child == 0:
        _become(place, words, step, streams)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    out, err = (path.read_text() if path.exists() else "" for path in streams)
    return Ended(os.waitstatus_to_exitcode(status), out, err)


def _become(
    place: Path, words: str, step: Callable[[str, Path], None] | None, streams: list[Path]
) -> None:
    code = 99
    try:
        for number, path in zip((1, 2), streams, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.chdir(place)
        if step is not None:
            fs._step = step
        with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
            sys.stdout, sys.stderr = out, err
            code = app.run([*words.split(), "--json"])
    finally:
        os._exit(code)


def build(place: Path) -> None:
    """Make a base, two experts, a full fine-tune, data, a library, a record and a pipeline."""
    import cgmerge.modules.training.trainer  # once, and not in every child  # noqa: F401

    place.mkdir(parents=True)
    model, tokenizer = tiny_model.make_model(5), tiny_model.make_tokenizer()
    tiny_model.save(place / "base", model, tokenizer)
    for seed, name in enumerate("ab"):
        tiny_model.make_adapter(place / name, model, seed=seed + 1)
    tiny_model.write_jsonl(place / "copy.jsonl", tiny_model.make_rows("copy", 12))
    (place / "p.yml").write_text(PIPELINE)
    for words in (
        "compose a b --base base --as model --dtype float32 -o full",
        "compress a -o a.cge",
        "add lib a",
        "eval a --base base --data copy.jsonl -o record.json",
    ):
        done = execute(place, words)
        assert done.code == 0, done.err
