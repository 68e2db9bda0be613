"""Every writing command is killed or finds the disk full once; `make trust` tries every place."""

import errno
import zlib

import crash_support as crashes
import pytest


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return crashes.Bench(tmp_path_factory.mktemp("crashes"))


def place(bench, name, fault):
    """Where to stop a command: another operation for each, the same in each run."""
    return 1 + zlib.crc32(f"{name} {fault}".encode()) % bench.operations(name)


@pytest.mark.fault("F28")
@pytest.mark.parametrize("name", sorted(crashes.COMMANDS)[::2])
def test_a_killed_command_is_repeated_to_the_same_bytes(bench, name):
    bench.trial(name, place(bench, name, "kill"), kill=True)


@pytest.mark.fault("F26")
@pytest.mark.parametrize("name", sorted(crashes.COMMANDS)[1::2])
def test_a_full_disk_leaves_what_was_there(bench, name):
    bench.trial(name, place(bench, name, "full"), kill=False, number=errno.ENOSPC)


def test_every_command_that_writes_is_among_them():
    """`demo`, `generate`, `chat` and the readers aside; `demo` is made of these."""
    listed = {words.words.split()[0] for words in crashes.COMMANDS.values()}
    assert listed == {
        "train", "compose", "compress", "decompress", "stats", "extract", "export", "add", "rm",
        "push", "pull", "lock", "eval", "report", "run", "init", "tasks", "split",
    }  # fmt: skip
