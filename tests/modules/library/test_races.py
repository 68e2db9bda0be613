"""Many writers and readers of one library at once: nothing lost, nothing torn."""

import json
import os
import random
import time
import traceback

import library_support as lib
import pytest

from cgmerge.errors import NotFound
from cgmerge.modules.library import writing
from cgmerge.modules.library.fetch import fetched
from cgmerge.modules.library.folder import Folder
from cgmerge.modules.library.library import listing, settled
from cgmerge.tensorfile import file_sha256

SECONDS, WRITERS, READERS = 4.0, 4, 4


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return lib.make_items(tmp_path_factory.mktemp("experts"), 5)


def write(root, items, me, end, log):
    """Add names of its own that stay, one that all fight for, and some that go again."""
    store, random_ = Folder(root), random.Random(me)
    count = 0
    while time.monotonic() < end:
        item = random_.choice(items)
        name = f"w{me}-{count}"
        writing.add(store, [lib.named(item, name)])
        log(name)
        writing.add(store, [lib.named(random_.choice(items), "shared")], overwrite=True)
        writing.add(store, [lib.named(items[4], f"gone{me}")])
        writing.remove(store, [f"gone{me}"])
        count += 1


def read(root, items, me, end, log):
    """What is listed or named is whole, whenever it is looked at."""
    store, random_ = Folder(root), random.Random(100 + me)
    while time.monotonic() < end:
        found = listing(store)
        assert not found.bad, found.bad
        for name in ("shared", random_.choice(found.entries).name):
            try:
                entry = settled(store, name)
                folder = fetched(store, entry)
                for file, part in entry.files.items():
                    assert file_sha256(folder / file) == part.sha256
            except NotFound:
                assert name.startswith("gone"), name
                continue
            log(name)


def child(work, *arguments):
    """Run a loop in a process of its own; its log is a file."""
    *given, path = arguments
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with path.open("w") as file:
            work(*given, lambda name: file.write(json.dumps(name) + "\n"))
        code = 0
    except BaseException:  # noqa: BLE001  (the parent shows it)
        path.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.fault("F31")
def test_writers_and_readers(tmp_path, items):
    root = tmp_path / "lib"
    writing.add(Folder(root), [lib.named(items[0], "shared")])
    end = time.monotonic() + SECONDS
    logs = {}
    for work, count in ((write, WRITERS), (read, READERS)):
        for me in range(count):
            path = tmp_path / f"{work.__name__}{me}"
            logs[child(work, root, items, me, end, path)] = path
    for pid, path in logs.items():
        _, status = os.waitpid(pid, 0)
        error = path.with_suffix(".error")
        assert status == 0, error.read_text() if error.exists() else status
    logs = [(tmp_path / f"write{n}").read_text().splitlines() for n in range(WRITERS)]
    added = [json.loads(line) for log in logs for line in log]
    reads = sum(len((tmp_path / f"read{n}").read_text().splitlines()) for n in range(READERS))
    assert len(added) >= 3 * WRITERS
    assert reads >= 20
    there = {entry.name for entry in listing(Folder(root)).entries}
    assert set(added) - there == set()
    lib.check_sound(Folder(root))
    assert not list(root.rglob(".*"))
