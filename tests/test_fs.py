"""Writing: complete or not at all, whatever fails and whenever the process dies."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from cgmerge import fs
from cgmerge.errors import StorageError, UsageError


def fill(stage):
    fs.write_json(stage / "a.json", {"x": 1})
    fs.write_tensors(stage / "w.safetensors", {"t": torch.ones(3)})
    fs.write_bytes(stage / "b.txt", b"b")


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_complete(tmp_path):
    with fs.new_folder(tmp_path / "out") as stage:
        fill(stage)
        assert not (tmp_path / "out").exists()
    assert listing(tmp_path / "out") == ["a.json", "b.txt", "w.safetensors"]
    assert listing(tmp_path) == ["out"]


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), fs.new_folder(tmp_path / "out") as stage:
        fill(stage)
        raise RuntimeError
    assert listing(tmp_path) == []


def test_overwrite_replaces_the_whole_folder(tmp_path):
    with fs.new_folder(tmp_path / "out") as stage:
        fs.write_bytes(stage / "old", b"1")
    with pytest.raises(UsageError), fs.new_folder(tmp_path / "out"):
        pass
    with fs.new_folder(tmp_path / "out", overwrite=True, own=True) as stage:
        fs.write_bytes(stage / "new", b"2")
    assert listing(tmp_path / "out") == ["new"]
    assert listing(tmp_path) == ["out"]


@pytest.mark.fault("F31")
def test_two_writers_of_one_name_do_not_mix(tmp_path):
    first, second = fs.new_folder(tmp_path / "out"), fs.new_folder(tmp_path / "out")
    one, two = first.__enter__(), second.__enter__()
    fs.write_bytes(one / "one", b"1")
    fs.write_bytes(two / "two", b"2")
    first.__exit__(None, None, None)
    with pytest.raises(UsageError):
        second.__exit__(None, None, None)
    assert listing(tmp_path / "out") == ["one"]
    assert listing(tmp_path) == ["out"]


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with fs.new_folder(tmp_path / "out") as stage:
            fill(stage)
        fs.replace_file(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes == {"0o640"}
    assert oct((tmp_path / "out").stat().st_mode & 0o777) == "0o750"
    assert oct((tmp_path / "f").stat().st_mode & 0o777) == "0o640"


class Fault:
    """Fails (or kills the process) at the k-th disk operation."""

    def __init__(self, at, number=errno.ENOSPC, *, kill=False):
        self.at, self.number, self.kill, self.count = at, number, kill, 0

    def __call__(self, operation, path):
        self.count += 1
        if self.count == self.at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.fault("F26")
def test_failure_at_every_operation_keeps_the_old_content(tmp_path, monkeypatch, overwrite, number):
    out = tmp_path / "out"
    if overwrite:
        with fs.new_folder(out) as stage:
            fs.write_bytes(stage / "old", b"1")
    failures = 0
    for at in range(1, 100):
        fault = Fault(at, number)
        monkeypatch.setattr(fs, "_step", fault)
        try:
            with fs.new_folder(out, overwrite=overwrite, own=True) as stage:
                fill(stage)
        except StorageError as error:
            failures += 1
            assert error.exit_code == 4
            assert listing(tmp_path) == (["out"] if overwrite else [])
            if overwrite:
                assert listing(out) == ["old"]
        else:
            break
    assert failures >= 9
    assert listing(out) == ["a.json", "b.txt", "w.safetensors"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.fault("F28")
def test_kill_at_every_operation_leaves_old_or_new(tmp_path, overwrite):
    out = tmp_path / "out"
    states = set()
    for at in range(1, 60):
        if overwrite and not out.exists():
            with fs.new_folder(out) as stage:
                fs.write_bytes(stage / "old", b"1")
        pid = os.fork()
        if pid == 0:
            fs._step = Fault(at, kill=True)
            with fs.new_folder(out, overwrite=overwrite, own=True) as stage:
                fs.write_json(stage / "a.json", {"x": 1})
                fs.write_bytes(stage / "b.txt", b"b")
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        if out.exists():
            assert listing(out) in (["old"], ["a.json", "b.txt"])
        states.add(tuple(listing(out)) if out.exists() else ())
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 7
            break
    assert ("a.json", "b.txt") in states
    assert ("old",) in states if overwrite else () in states
    # The next writer removes what the killed ones left.
    fs.replace_file(tmp_path / "next", b"x")
    assert listing(tmp_path) == ["next", "out"]


def test_a_living_writers_folder_is_not_collected(tmp_path):
    with fs.new_folder(tmp_path / "slow") as stage:
        fs.write_bytes(stage / "x", b"1")
        fs.replace_file(tmp_path / "quick", b"2")
        assert stage.exists()
    assert listing(tmp_path / "slow") == ["x"]


def test_replace_file_is_atomic_and_checked(tmp_path):
    path = tmp_path / "f"
    fs.replace_file(path, b"1")
    with pytest.raises(UsageError):
        fs.replace_file(path, b"2", overwrite=False)
    fs.replace_file(path, b"3")
    assert path.read_bytes() == b"3"
    (tmp_path / "d").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        fs.replace_file(tmp_path / "d", b"")


@pytest.mark.parametrize("at", range(1, 4))
def test_replace_file_failing_keeps_the_old(tmp_path, monkeypatch, at):
    path = tmp_path / "f"
    fs.replace_file(path, b"old")
    monkeypatch.setattr(fs, "_step", Fault(at))
    with pytest.raises(StorageError):
        fs.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert listing(tmp_path) == ["f"]


@pytest.mark.fault("F27")
def test_unusable_targets_are_found_before_work(tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((UsageError, StorageError)):
            fs.check_target(out, overwrite=True)
    with pytest.raises(StorageError, match="too long"):
        fs.check_target(tmp_path / ("n" * 300), overwrite=False)


@pytest.mark.parametrize(
    "name",
    ["with space", "emoji-🦙", "new\nline", "-dash", "‏rtl", "🦙" * 60, "🦙" * 63, "é" * 127,
     "x" * 255, os.fsdecode(b"\xff" * 255)],
)  # fmt: skip
@pytest.mark.fault("F27")
def test_odd_names_work(tmp_path, name):
    """A name takes up to 255 bytes: 63 emoji of 4 bytes are 252."""
    for overwrite in (False, True):
        with fs.new_folder(tmp_path / name, overwrite=overwrite, own=True) as stage:
            fill(stage)
    assert listing(tmp_path) == [name]
    shutil.rmtree(tmp_path / name)
    for content in (b"1", b"2"):
        fs.replace_file(tmp_path / name, content)
    assert listing(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"2"


def test_names_are_cut_by_bytes_at_whole_characters():
    assert fs.cut_name("🦙" * 60, 80) == "🦙" * 20
    assert fs.cut_name("a" + "🦙" * 60, 80) == "a" + "🦙" * 19  # 77 bytes; one more would be 81
    assert fs.cut_name("x" * 81, 80) == "x" * 80
    assert fs.cut_name("short", 80) == "short"


def test_leftovers_of_long_names_are_collected(tmp_path):
    out = tmp_path / ("🦙" * 60)
    pid = os.fork()
    if pid == 0:
        with fs.new_folder(out):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = listing(tmp_path)
    assert left.startswith("." + "🦙" * 20 + ".cgmerge-tmp-")
    fs.replace_file(out, b"x")
    assert listing(tmp_path) == [out.name]


@pytest.mark.parametrize(
    "statement",
    [
        "fs.write_bytes(stage / 'big', b'x' * 5000)",
        "fs.write_tensors(stage / 'big', {'t': torch.ones(1250)})",
        "fs.write_chunks(stage / 'big', [b'x' * 500] * 10, 5000)",
        # As peft and transformers save, with safetensors' own exception.
        "save_file({'t': torch.ones(1250)}, stage / 'big')",
    ],
)
@pytest.mark.fault("F26")
def test_file_size_limit_is_a_storage_error(tmp_path, statement):
    code = (
        "import resource, signal, sys, pathlib, torch\n"
        "from safetensors.torch import save_file\n"
        "from cgmerge import fs\n"
        "from cgmerge.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    with fs.new_folder(out) as stage:\n"
        f"        {statement}\n"
        "except StorageError as error:\n"
        "    print(error.message)\n"
        "    sys.exit(4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    assert "the file would pass the size limit" in done.stdout
    assert ("5,000 bytes needed" in done.stdout) == ("fs." in statement)
    assert listing(tmp_path) == []


def test_other_errors_of_safetensors_stay(tmp_path):
    with pytest.raises(SafetensorError), fs.new_folder(tmp_path / "out"):
        raise SafetensorError("invalid header")
    assert listing(tmp_path) == []


def test_chunks_are_written_as_they_come(tmp_path):
    """Never collected; the digest is that of the file; errors of the maker are its own."""

    def chunks(count):
        for number in range(count):
            assert (tmp_path / "x").exists()
            yield bytes([number]) * 3

    digest = fs.write_chunks(tmp_path / "x", chunks(4), 12)
    content = (tmp_path / "x").read_bytes()
    assert content == b"\0\0\0\1\1\1\2\2\2\3\3\3"
    assert digest == hashlib.sha256(content).hexdigest()
    assert fs.write_chunks(tmp_path / "y", [], 0) == hashlib.sha256(b"").hexdigest()

    def broken():
        yield b"1"
        raise OSError(5, "reading failed", "input")

    with pytest.raises(OSError, match="reading failed") as caught:
        fs.write_chunks(tmp_path / "z", broken(), 2)
    assert not isinstance(caught.value, StorageError)


@pytest.mark.parametrize("at", range(1, 3))
def test_chunks_failing_leave_nothing(tmp_path, monkeypatch, at):
    monkeypatch.setattr(fs, "_step", Fault(at + 1))  # the first is the folder
    with pytest.raises(StorageError), fs.new_folder(tmp_path / "out") as stage:
        fs.write_chunks(stage / "x", [b"1"], 1)
    assert listing(tmp_path) == []


def test_replacing_by_chunks_is_atomic_and_checked(tmp_path):
    path = tmp_path / "f"
    fs.replace_chunks(path, [b"ab", memoryview(b"cd")], 4)
    assert path.read_bytes() == b"abcd"
    with pytest.raises(UsageError, match="exists already"):
        fs.replace_chunks(path, [b"x"], 1, overwrite=False)

    def broken():
        yield b"new"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fs.replace_chunks(path, broken(), 6)
    assert path.read_bytes() == b"abcd"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("at", ["write", "fsync", "rename"])
def test_replacing_by_chunks_failing_keeps_the_old(tmp_path, monkeypatch, at):
    path = tmp_path / "f"
    fs.replace_file(path, b"old")

    def fail(operation, target):
        if operation == at:
            raise OSError(errno.ENOSPC, "full", str(target))

    monkeypatch.setattr(fs, "_step", fail)
    with pytest.raises(StorageError, match="disk is full"):
        fs.replace_chunks(path, [b"new"], 3)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
