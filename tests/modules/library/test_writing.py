"""Adding to and removing from a library on disk, whatever fails and whenever the process dies."""

import errno
import os
import signal
import threading
from dataclasses import replace

import library_support as lib
import pytest
import support

from cgmerge import fs
from cgmerge.errors import Damaged, InputError, NotFound, StorageError, Unsafe, UsageError
from cgmerge.modules.library import writing
from cgmerge.modules.library.admit import admit
from cgmerge.modules.library.fetch import fetched
from cgmerge.modules.library.folder import Folder
from cgmerge.modules.library.library import find, listing, open_library, settled


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return lib.make_items(tmp_path_factory.mktemp("experts"), 4)


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "lib")


def names(store):
    return [entry.name for entry in listing(store).entries]


def objects(store):
    return set(store.names("objects"))


def test_what_was_added_is_there(store, items):
    done = writing.add(store, items)
    assert (done.new, done.same, done.replaced) == (["e0", "e1", "e2", "e3"], [], [])
    assert list(listing(store).entries) == [item.entry for item in items]
    assert objects(store) == {item.entry.digest for item in items}
    for item in items:
        folder = fetched(store, settled(store, item.entry.name))
        for name, source in item.sources.items():
            assert (folder / name).read_bytes() == source.path.read_bytes()
    assert lib.check_sound(store).experts == 4


def test_adding_again_changes_nothing(store, items):
    writing.add(store, items)
    before = lib.tree(store.root)
    done = writing.add(store, items)
    assert (done.new, done.same) == ([], ["e0", "e1", "e2", "e3"])
    assert lib.tree(store.root) == before


@pytest.mark.fault("F21")
def test_one_object_for_equal_content(store, items):
    writing.add(store, [items[0], lib.named(items[0], "twin")])
    assert names(store) == ["e0", "twin"]
    assert len(objects(store)) == 1
    assert writing.remove(store, ["e0"]).objects == []
    lib.check_sound(store)
    assert writing.remove(store, ["twin"]).objects == [items[0].entry.digest]
    assert objects(store) == set()


@pytest.mark.fault("F21")
def test_a_taken_name_is_refused_with_both_digests(store, items):
    writing.add(store, items[:1])
    other = lib.named(items[1], "e0")
    before = lib.tree(store.root / "entries")
    with pytest.raises(UsageError) as caught:
        writing.add(store, [other])
    for item in (items[0], other):
        assert item.entry.digest[:16] in caught.value.message
    assert lib.tree(store.root / "entries") == before
    with pytest.raises(UsageError):
        writing.add(store, [lib.named(items[1], "E0")])
    assert writing.add(store, [other], overwrite=True).replaced == ["e0"]
    assert find(store, "e0").digest == other.entry.digest
    # Who reads the old one may go on; what is left over goes when it is asked for.
    assert objects(store) == {items[0].entry.digest, items[1].entry.digest}
    assert lib.check_sound(store).unreferenced == [items[0].entry.digest]
    assert writing.collect_unreferenced(store, dry_run=True).objects == [items[0].entry.digest]
    assert len(objects(store)) == 2
    assert writing.collect_unreferenced(store).objects == [items[0].entry.digest]
    assert objects(store) == {items[1].entry.digest}


@pytest.mark.fault("F21")
def test_names_that_differ_in_capitals_are_one(store, items):
    with pytest.raises(UsageError, match="would have one name"):
        writing.refuse_twice([lib.named(items[0], "Sort"), lib.named(items[1], "sort")])
    writing.add(store, [lib.named(items[0], "Sort")])
    assert find(store, "sORT").name == "Sort"


def test_removing_what_is_not_there(store, items):
    writing.add(store, items)
    before = lib.tree(store.root)
    with pytest.raises(NotFound, match="no expert 'e9'") as caught:
        writing.remove(store, ["e0", "e9"])
    assert "lists all 4" in caught.value.hint
    assert lib.tree(store.root) == before


def test_a_dry_run_says_and_does_nothing(store, items):
    writing.add(store, items)
    before = lib.tree(store.root)
    done = writing.remove(store, ["e1"], dry_run=True)
    assert (done.names, done.objects) == (["e1"], [items[1].entry.digest])
    assert done.freed == items[1].entry.size
    assert lib.tree(store.root) == before
    real = writing.remove(store, ["e1"])
    assert (real.names, real.objects, real.freed) == (done.names, done.objects, done.freed)


def test_a_broken_entry_can_be_removed_and_keeps_others_objects(store, items):
    writing.add(store, items[:2])
    (store.root / "entries" / "e1.json").write_bytes(b"{")
    with pytest.raises(Damaged):
        writing.collect_unreferenced(store)
    assert writing.remove(store, ["e0"]).objects == []  # the broken one may refer to it
    assert writing.remove(store, ["e1"]).names == ["e1"]
    assert names(store) == []
    assert len(writing.collect_unreferenced(store).objects) == 2


def test_a_damaged_object_is_healed_by_adding_again(store, items):
    writing.add(store, items)
    for how in ("flip", "cut", "gone"):
        path = store.root / "objects" / items[0].entry.digest / "adapter_model.safetensors"
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if how == "flip" else b""))
        with pytest.raises((Damaged, NotFound)):
            fetched(store, settled(store, "e0"))
        writing.add(store, items[:1])
        lib.check_sound(store)


def test_something_else_is_left_alone(tmp_path, items):
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match="is no library"):
        writing.add(Folder(tmp_path), items)
    assert lib.tree(tmp_path) == {"photo.jpg": b"x"}
    with pytest.raises(NotFound, match="is no library"):
        open_library(str(tmp_path))


@pytest.mark.fault("F42")
def test_an_expert_that_changes_while_it_is_copied(store, tmp_path):
    shapes = support.pick(support.llama_shapes(), "q_proj")
    item = admit(str(support.make_expert(tmp_path / "x", shapes)))
    support.edit_config(tmp_path / "x", lora_alpha=9)
    with pytest.raises(Damaged, match="changed while it was copied"):
        writing.add(store, [item])
    assert names(store) == []
    assert objects(store) == set()


def test_modes_follow_the_umask(store, items):
    before = os.umask(0o027)
    try:
        writing.add(store, items)
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in store.root.rglob("*") if p.is_file()}
    assert modes == {0o640}
    assert {p.stat().st_mode & 0o777 for p in store.root.rglob("objects/*")} == {0o750}


class Fault:
    """Fails, or kills the process, at the k-th disk operation."""

    def __init__(self, at, *, kill):
        self.at, self.kill, self.count = at, kill, 0

    def __call__(self, operation, path):
        self.count += 1
        if self.count == self.at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


ACTIONS = {
    "add": lambda store, items: writing.add(store, items[1:3]),
    "replace": lambda store, items: writing.add(store, [lib.named(items[2], "e0")], overwrite=True),
    "remove": lambda store, items: writing.remove(store, ["e0"]),
    "create": lambda store, items: writing.add(Folder(store.root / "new"), items[:1]),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.fault("F26")
def test_failure_at_every_operation(store, items, monkeypatch, action):
    """The old library or the new one; the same command then does it."""
    monkeypatch.setattr(writing, "_PATIENCE", 0.1)
    failures = 0
    for at in range(1, 200):
        writing.add(store, items[:1], overwrite=True)
        monkeypatch.setattr(fs, "_step", Fault(at, kill=False))
        try:
            ACTIONS[action](store, items)
        except StorageError:
            failures += 1
            monkeypatch.setattr(fs, "_step", lambda operation, path: None)
            lib.check_sound(store)
            if action != "remove":
                assert "e0" in names(store)
        else:
            break
    monkeypatch.undo()
    assert failures >= 4
    check_done(store, items, action)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.fault("F28")
def test_kill_at_every_operation(tmp_path, items, action):
    """After SIGKILL nothing is torn, and the next command does its work and cleans up."""
    kills = 0
    for at in range(1, 200):
        store = Folder(tmp_path / f"lib{at}")
        writing.add(store, items[:1])
        pid = os.fork()
        if pid == 0:
            fs._step = Fault(at, kill=True)
            ACTIONS[action](store, items)
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        lib.check_sound(store)
        if action == "add":
            assert "e0" in names(store)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 7
            break
        kills += 1
        try:
            ACTIONS[action](store, items)
        except NotFound:
            assert action == "remove"  # the entry was gone already
        check_done(store, items, action)
    assert kills >= 4


def check_done(store, items, action):
    """What each action leaves, leftovers of killed ones collected."""
    store = Folder(store.root / "new") if action == "create" else store
    expected = {"add": ["e0", "e1", "e2"], "remove": []}.get(action, ["e0"])
    assert names(store) == expected
    writing.add(store, items[:1], overwrite=True)
    writing.add(store, items[3:])
    writing.remove(store, ["e3"])
    writing.collect_unreferenced(store)
    lib.check_sound(store)
    used = {entry.digest for entry in listing(store).entries}
    assert objects(store) == used
    assert store.names("removing") == []
    assert not list(store.root.rglob(".*"))


@pytest.mark.fault("F31")
def test_an_adder_meets_a_remover(store, items, monkeypatch):
    """The entry comes between the remover's last look and its deletion: stored once more."""
    writing.add(store, items[:1])
    looked, added = threading.Event(), threading.Event()
    plain = Folder.remove

    def slow(self, path):
        if path.startswith("objects/"):
            looked.set()
            added.wait(5)
        plain(self, path)

    monkeypatch.setattr(Folder, "remove", slow)
    remover = threading.Thread(target=writing.remove, args=(store, ["e0"]))
    remover.start()
    assert looked.wait(5)
    waiting = threading.Timer(0.2, added.set)  # by then the adder waits for the mark to go
    waiting.start()
    writing.add(store, [lib.named(items[0], "again")])
    remover.join()
    assert names(store) == ["again"]
    lib.check_sound(store)


def test_a_remover_keeps_what_was_added_meanwhile(store, items, monkeypatch):
    writing.add(store, items[:1])
    plain = Folder.write

    def after(self, path, data, *, new):
        if path.startswith("removing/"):  # between the entry's end and the second look
            monkeypatch.setattr(Folder, "write", plain)
            plain(self, "entries/again.json", replace(items[0].entry, name="again").to_bytes(),
                  new=True)  # fmt: skip
        return plain(self, path, data, new=new)

    monkeypatch.setattr(Folder, "write", after)
    assert writing.remove(store, ["e0"]).objects == []
    assert names(store) == ["again"]
    lib.check_sound(store)


def test_a_dead_removers_mark_holds_nobody_up(store, items):
    writing.add(store, items[:1])
    pid = os.fork()
    if pid == 0:
        mark = f"removing/{items[1].entry.digest}.{fs.writer_id()}-00"
        store.write(mark, b"", new=False)
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(store.names("removing")) == 1
    writing.add(store, items[1:2])
    assert store.names("removing") == []


@pytest.mark.fault("F12")
def test_links_lead_nowhere(store, items, tmp_path):
    writing.add(store, items[:1])
    digest = items[0].entry.digest
    place = store.root / "objects" / digest
    outside = tmp_path / "outside"
    place.rename(outside)
    place.symlink_to(outside)
    with pytest.raises(Unsafe, match="is a link"):
        settled(store, "e0")
    place.unlink()
    outside.rename(place)
    weights = place / "adapter_model.safetensors"
    weights.rename(outside)
    weights.symlink_to(outside)
    with pytest.raises(InputError):
        fetched(store, settled(store, "e0"))
    entry = store.root / "entries" / "e0.json"
    entry.rename(tmp_path / "entry")
    entry.symlink_to(tmp_path / "entry")
    with pytest.raises(Unsafe):
        find(store, "e0")
    assert len(listing(store).bad) == 1
    entry.unlink()
    os.mkfifo(entry)
    with pytest.raises(Unsafe):
        find(store, "e0")
