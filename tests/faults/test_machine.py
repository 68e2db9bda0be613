"""What the machine does to a whole command: full disks, power loss, clocks, little memory."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import case_support as cases
import pytest
import support

from cgmerge import fs
from cgmerge.errors import CgmergeError
from cgmerge.modules.expert import open_expert
from cgmerge.modules.library import writing
from cgmerge.modules.library.folder import Folder


@pytest.fixture
def place(experts, monkeypatch):
    monkeypatch.chdir(experts)
    return experts


COMMANDS = {
    "compose": ["compose", "E1", "E2", "-o", "out", "--overwrite"],
    "compress": ["compress", "E1", "--lossless", "-o", "out.cge", "--overwrite"],
    "export": ["export", "E1", "-o", "out", "--overwrite"],
}


@pytest.mark.fault("F26")
@pytest.mark.parametrize(
    ("command", "number"),
    [("compose", errno.ENOSPC), ("compress", errno.EIO), ("export", errno.EDQUOT)],
)
def test_every_write_of_a_command_may_fail(run, place, monkeypatch, command, number):
    """The k-th disk operation for k = 1, 2, … until none fails: what stood there still stands."""
    words = [*COMMANDS[command], "--json"]
    cases.done(run(*words))
    kept = [path for path in (place / "out", place / "out.cge") if path.exists()]
    before = {path: support_bytes(path) for path in kept}
    for at in range(1, 100):
        count = 0

        def step(operation, path, at=at):
            nonlocal count
            count += 1
            if count == at:
                raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(fs, "_step", step)
        code, out, err = run(*words)
        monkeypatch.undo()
        monkeypatch.chdir(place)
        if code == 0:
            break
        assert code == 4, err
        error = json.loads(err.splitlines()[-1])
        assert error["code"].startswith("storage."), error
        assert out == ""
        assert {path: support_bytes(path) for path in kept} == before
        assert not [p for p in place.rglob("*") if ".cgmerge-tmp-" in p.name]
    assert 4 <= at < 99


def support_bytes(path):
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file): file.read_bytes() for file in files}


class Journal:
    """What reached the disk: data and folders when they are synced, names when they are renamed."""

    def __init__(self, monkeypatch):
        self.synced, self.log = set(), []
        monkeypatch.setattr(os, "fsync", self.around_fsync(os.fsync))
        monkeypatch.setattr(os, "rename", self.around_rename(os.rename))
        monkeypatch.setattr(os, "replace", self.around_rename(os.replace))
        monkeypatch.setattr(fs, "_exchange", self.around_exchange(fs._exchange))

    def around_fsync(self, plain):
        def fsync(handle):
            plain(handle)
            path = Path(f"/proc/self/fd/{handle}").readlink()
            self.synced.add((os.fstat(handle).st_ino, path.stat().st_mtime_ns))
            self.log.append(("sync", path))

        return fsync

    def around_rename(self, plain):
        def rename(path, target):
            self.durable(Path(path))
            self.log.append(("rename", Path(target)))
            return plain(path, target)

        return rename

    def around_exchange(self, plain):
        def exchange(stage, out):
            self.durable(stage)
            self.log.append(("rename", out))
            plain(stage, out)

        return exchange

    def durable(self, path):
        """Everything that a rename will show has been synced, as it is now."""
        for part in [path, *path.rglob("*")]:
            found = part.stat()
            assert (found.st_ino, found.st_mtime_ns) in self.synced, f"{part} was never synced"

    def check(self, *outs):
        """After the last rename of each result its folder was synced before the command ended."""
        for out in outs:
            last = max(i for i, entry in enumerate(self.log) if entry == ("rename", out))
            assert ("sync", out.parent) in self.log[last:], f"the name {out} was never synced"


@pytest.mark.fault("F30")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("command", ["compose", "compress", "export"])
@pytest.mark.parametrize("again", [False, True])
def test_data_are_on_the_disk_before_their_names(run, place, monkeypatch, command, again):
    """What was not synced is lost with the power: so data first, then the name, then its folder.

    With that order every moment shows the old result or the new one, whole.
    """
    words = [*COMMANDS[command], "--json"]
    if again:
        cases.done(run(*words))
    journal = Journal(monkeypatch)
    cases.done(run(*words))
    monkeypatch.undo()
    journal.check(place / ("out.cge" if command == "compress" else "out"))


@pytest.mark.fault("F30")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_the_journal_sees_what_is_missing(tmp_path, monkeypatch):
    journal = Journal(monkeypatch)
    (tmp_path / "a").write_text("x")
    with pytest.raises(AssertionError, match="never synced"):
        (tmp_path / "a").replace(tmp_path / "b")
    fs.replace_file(tmp_path / "c", b"1")
    journal.check(tmp_path / "c")
    journal.log = [entry for entry in journal.log if entry != ("sync", tmp_path)]
    with pytest.raises(AssertionError, match="the name"):
        journal.check(tmp_path / "c")


@pytest.mark.fault("F30")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_library_too(run, place, monkeypatch):
    journal = Journal(monkeypatch)
    cases.done(run("add", "lib", "E1", "--json"))
    monkeypatch.undo()
    assert any(kind == "rename" for kind, _ in journal.log)


@pytest.mark.fault("F36")
def test_times_of_files_decide_nothing(run, place):
    """All files of one second, of the future, or of 1970: the same bytes, and a change is seen."""
    cases.done(run("compose", "E1", "E2", "-o", "plain", "--json"))
    for moment in (0, 1_700_000_000, 4_000_000_000):
        for path in (*place.rglob("*"), place):
            os.utime(path, (moment, moment))
        cases.done(run("compose", "E1", "E2", "-o", "out", "--overwrite", "--json"))
        assert support.folder_bytes(place / "out") == support.folder_bytes(place / "plain")
    path = place / "E1" / "adapter_model.safetensors"
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 64
    path.write_bytes(bytes(data))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # of the same size, too
    error = cases.refused(
        run("compose", "plain/cgmerge.json", "-o", "again", "--json"), 3, "damaged.digest"
    )
    assert "E1" in error["message"]


@pytest.mark.fault("F36")
def test_a_library_does_not_believe_times(run, place):
    cases.done(run("add", "lib", "E1", "--json"))
    assert run("verify", "lib", "--json")[0] == 0
    (path,) = (place / "lib").rglob("adapter_model.safetensors")
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 64
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert run("verify", "lib", "--json")[0] == 3
    assert run("compose", "lib/E1", "-m", "linear", "-o", "out", "--json")[0] == 3


_SWEEP = """
import os, resource, sys, torch
torch.set_num_threads(1)
from cgmerge import memory
from cgmerge.cli import app
words = ["compose", "E1", "E2", "-m", "ties", "--json", "-o"]
assert app.run([*words, "warm"]) == 0
memory.left = lambda: None  # as where nothing tells: the allocations themselves fail
used = int(open("/proc/self/statm").read().split()[0]) * 4096
for room in map(int, sys.argv[1:]):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        os._exit(app.run([*words, f"out-{room}"]))
    print(room, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.fault("F33")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_memory_that_ends_anywhere_ends_cleanly(place):
    """Where an allocation fails half-way: exit code 4 and nothing left, or the whole result."""
    wide = {f"model.layers.{i}.q_proj": (1024, 512) for i in range(2)}
    for seed in (1, 2):
        shutil.rmtree(place / f"E{seed}")
        support.make_expert(place / f"E{seed}", wide, seed=seed)
    rooms = [0, 1 << 18, 1 << 20, 3 << 20, 6 << 20, 10 << 20, 40 << 20]
    done = subprocess.run(
        [sys.executable, "-c", _SWEEP, *map(str, rooms)], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    codes = {int(room): int(code) for room, code in (line.split() for line in lines)}
    assert set(codes.values()) == {0, 4}, (codes, done.stderr)
    assert codes[40 << 20] == 0
    for room, code in codes.items():
        assert (place / f"out-{room}").exists() == (code == 0)
    errors = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"schema')]
    assert {error["code"] for error in errors} == {"limit.memory"}
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    "name", ["\u00e9", "e\u0301", "-o", "a b\tc", "\u200frtl", "🦙" * 63, "con", "%s%n"]
)
def test_outputs_of_any_name(run, place, name):
    """Composed and decomposed letters, words that look like options: the name that was written."""
    cases.done(run("compose", "E1", "-m", "linear", f"--out=./{name}", "--json"))
    assert name in [path.name for path in place.iterdir()]
    assert cases.done(run("inspect", f"./{name}", "--json"))["norm"] > 0


@pytest.mark.fault("F42")
def test_an_expert_that_is_cut_while_it_is_merged(run, place, monkeypatch):
    """From another thread, at a random moment: refused or whole, never half of it."""
    rng = random.Random(0)
    path = place / "E2" / "adapter_model.safetensors"
    whole = path.read_bytes()
    cases.done(run("compose", "E1", "E2", "-o", "plain", "--json"))
    refused = 0
    for _ in range(6):
        path.write_bytes(whole)
        timer = threading.Timer(rng.random() * 0.1, os.truncate, (path, 600))
        timer.start()
        code, _, err = run("compose", "E1", "E2", "-o", "out", "--overwrite", "--json")
        timer.join()
        assert code in (0, 3), err
        refused += code == 3
        if code == 0:
            weights = "adapter_model.safetensors"
            assert (place / "out" / weights).read_bytes() == (
                place / "plain" / weights
            ).read_bytes()
    path.write_bytes(whole[:600])
    with pytest.raises(CgmergeError):
        open_expert("E2")


@pytest.mark.fault("F42")
def test_reads_that_give_less_than_asked(place, monkeypatch):
    """The system may return fewer bytes at a time; all of them arrive all the same."""
    expected = {p: d.dense() for p, d in open_expert("E1").deltas().items()}
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda handle, count, at: pread(handle, min(count, 7), at))
    monkeypatch.setattr(os, "preadv", lambda handle, views, at: preadv(handle, [views[0][:13]], at))
    for path, delta in open_expert("E1").deltas().items():
        assert delta.dense().equal(expected[path])


@pytest.mark.fault("F31")
def test_writers_without_working_locks(place, monkeypatch):
    """`flock` that does nothing, as on some network disks: everything that was added is there."""
    import fcntl

    from cgmerge.modules.library.admit import admit
    from cgmerge.modules.library.library import listing

    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    items = [admit(name) for name in ("E1", "E2", "E3")]
    store = Folder(place / "lib")
    writing.add(store, items[:1])
    threads = [threading.Thread(target=writing.add, args=(store, [item])) for item in items[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.name for entry in listing(store).entries) == ["E1", "E2", "E3"]
