"""Libraries at URLs, on the storage in memory that fsspec brings."""

import json
import uuid

import case_support as cases
import library_support as lib
import pytest
import support
from fsspec.implementations.memory import MemoryFileSystem

from cgmerge.errors import Damaged, EnvironmentProblem, NotFound, Unsafe, UsageError
from cgmerge.modules.library import writing
from cgmerge.modules.library.fetch import cache_folder, fetched, place_of
from cgmerge.modules.library.library import find, listing, open_library, settled
from cgmerge.modules.library.remote import Remote
from cgmerge.modules.library.store import open_store

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return lib.make_items(tmp_path_factory.mktemp("experts"))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CGMERGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def url():
    """A place of its own for each test; the storage is one for the whole process."""
    return f"memory://{uuid.uuid4().hex}/lib"


def memory():
    return MemoryFileSystem()


def place(url, path):
    return f"/{url.removeprefix('memory://')}/{path}"


def test_a_library_in_memory(url, items):
    store = open_store(url)
    assert isinstance(store, Remote)
    assert writing.add(store, items).new == ["e0", "e1", "e2"]
    assert writing.add(store, items).same == ["e0", "e1", "e2"]
    assert [e.name for e in listing(open_library(url)).entries] == ["e0", "e1", "e2"]
    assert lib.check_sound(store).experts == 3
    for item in items:
        folder = fetched(store, settled(store, item.entry.name))
        assert folder.parent == cache_folder() / "objects"
        for name, source in item.sources.items():
            assert (folder / name).read_bytes() == source.path.read_bytes()
    with pytest.raises(UsageError, match="e0 already"):
        writing.add(store, [lib.named(items[1], "E0")])
    assert writing.add(store, [lib.named(items[1], "e0")], overwrite=True).replaced == ["e0"]
    assert writing.collect_unreferenced(store).objects == [items[0].entry.digest]
    assert writing.remove(store, ["e0"]).objects == []
    assert writing.remove(store, ["e1"]).objects == [items[1].entry.digest]
    assert store.names("removing") == []
    assert [e.name for e in listing(store).entries] == ["e2"]


def test_the_layout_is_that_of_a_folder(url, items, tmp_path):
    writing.add(open_store(url), items)
    writing.add(open_store(str(tmp_path / "lib")), items)
    files = lib.tree(tmp_path / "lib")
    root = place(url, "")
    found = {path.removeprefix(root): memory().cat_file(path) for path in memory().find(root)}
    assert found == files


def test_nothing_there(url):
    with pytest.raises(NotFound, match="is no library"):
        open_library(url)
    with pytest.raises(NotFound, match="no such expert"):
        place_of(f"{url}/x", "expert")
    memory().pipe_file(place(url, "photo.jpg"), b"x")
    with pytest.raises(UsageError, match="is no library"):
        writing.add(open_store(url), [])


def test_what_is_not_what_it_should_be(url, items):
    store = open_store(url)
    writing.add(store, items)
    weights = place(url, f"objects/{items[0].entry.digest}/{WEIGHTS}")
    good = memory().cat_file(weights)
    memory().pipe_file(weights, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(Damaged, match="is not what was added"):
        fetched(store, settled(store, "e0"))
    assert not (cache_folder() / "objects" / items[0].entry.digest).exists()
    memory().pipe_file(weights, good[:-1])
    with pytest.raises(Damaged, match="incomplete"):
        settled(store, "e0")
    writing.add(store, items[:1])
    lib.check_sound(store)
    memory().pipe_file(place(url, "entries/e1.json"), b" " * 70_000)
    assert [bad.file for bad in listing(store).bad] == ["e1.json"]
    with pytest.raises(Unsafe, match="longer than the limit"):
        find(store, "e1")


def test_the_cache_is_checked_before_it_is_believed(url, items):
    store = open_store(url)
    writing.add(store, items)
    folder = fetched(store, find(store, "e0"))
    path = folder / WEIGHTS
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert fetched(store, find(store, "e0")) == folder
    assert path.read_bytes() == good
    reads = []
    plain = Remote.chunks
    try:
        Remote.chunks = lambda self, path: reads.append(path) or plain(self, path)
        fetched(store, find(store, "e0"))
    finally:
        Remote.chunks = plain
    assert reads == []


def test_failure_at_every_write(url, items, monkeypatch):
    """Whatever write fails: what was there is whole, and the same command then does it."""
    store = open_store(url)
    writing.add(store, items[:1])
    failures = 0
    plain = MemoryFileSystem._open
    for at in range(1, 50):
        count = 0

        def failing(self, path, mode="rb", at=at, **given):
            nonlocal count
            count += mode != "rb"
            if mode != "rb" and count == at:
                raise OSError("no more room")
            return plain(self, path, mode, **given)

        monkeypatch.setattr(MemoryFileSystem, "_open", failing)
        try:
            writing.add(store, items)
        except EnvironmentProblem as error:
            assert error.exit_code == 4
            assert "no more room" in error.message
            failures += 1
            monkeypatch.setattr(MemoryFileSystem, "_open", plain)
            lib.check_sound(store)
            assert "e0" in [entry.name for entry in listing(store).entries]
            writing.remove(store, [e.name for e in listing(store).entries if e.name != "e0"])
            writing.collect_unreferenced(store)
        else:
            break
    assert failures >= 6
    assert lib.check_sound(store).experts == 3


@pytest.mark.parametrize("ref", ["nosuch://x/y", "s3x://b"])
def test_unknown_kinds_of_urls(ref):
    with pytest.raises(UsageError) as caught:
        open_store(ref)
    assert ref in caught.value.message


def test_commands_on_urls(run, experts, url, small_cge):
    """add, ls, compose, inspect, pull, push, verify, rm, all by URL; `file://` is a path."""
    done = run("add", url, experts / "E1", experts / "E2", small_cge, "--license", "mit", "--json")
    assert cases.done(done)["new"] == ["E1", "E2", "small"]
    listed = cases.done(run("ls", url, "--json"))["experts"]
    assert [entry["name"] for entry in listed] == ["E1", "E2", "small"]
    words = ["-m", "task-arithmetic", "--json"]
    cases.done(run("compose", experts / "E1", experts / "E2", *words, "-o", experts / "a"))
    cases.done(run("compose", f"{url}/E1", f"{url}/e2", *words, "-o", experts / "b"))
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
    found = cases.done(run("inspect", f"{url}/small", "--json"))
    assert found == cases.done(run("inspect", small_cge, "--json"))
    pulled = cases.done(run("pull", f"{url}/E1", "-o", experts / "copy", "--json"))
    assert pulled["digest"] == listed[0]["digest"]
    assert support.folder_bytes(experts / "copy") == support.folder_bytes(experts / "E1")
    cases.refused(run("pull", f"{url}/E9", "-o", experts / "x", "--json"), 2, "not_found.entry")
    assert not (experts / "x").exists()
    sent = cases.done(run("push", url, experts / "mirror", "--json"))
    assert sent["new"] == ["E1", "E2", "small"]
    assert cases.done(run("push", url, experts / "mirror", "--json"))["same"] == sent["new"]
    there = cases.done(run("ls", f"file://{experts}/mirror", "--json"))["experts"]
    assert there == listed
    sent = cases.done(run("push", experts / "E3", f"{url}/other", "--json"))
    assert sent["new"] == ["other"]
    assert cases.done(run("verify", url, "--json"))["experts"] == 4
    memory().rm_file(place(url, f"objects/{listed[0]['digest']}/{WEIGHTS}"))
    code, out, _ = run("verify", url, "--json")
    assert code == 3
    assert [damage["place"] for damage in json.loads(out)["damaged"]] == [f"{url}/E1"]
    assert cases.done(run("rm", url, "E1", "E2", "--json"))["names"] == ["E1", "E2"]
    cases.refused(run("inspect", url, "--json"), 2, "not_found.library", "/NAME")
    base = run("inspect", f"{url}/small", "--base", url, "--json")
    cases.refused(base, 2, "usage.ref", "base model")


def test_experts_outside_of_libraries(run, experts, url, small_cge):
    """A folder or a `.cge` file at a URL is an expert like any other."""
    for path in (experts / "E1").iterdir():
        memory().pipe_file(place(url, f"plain/{path.name}"), path.read_bytes())
    memory().pipe_file(place(url, "s.cge"), small_cge.read_bytes())
    for ref, local in ((f"{url}/plain", experts / "E1"), (f"{url}/s.cge", small_cge)):
        found = cases.done(run("inspect", ref, "--json"))
        expected = cases.done(run("inspect", local, "--json"))
        assert found["sha256"] == expected["sha256"]
        assert found["name"] == ("plain" if local == experts / "E1" else expected["name"])


@pytest.fixture
def small_cge(experts, run):
    assert run("compress", experts / "E1", "-o", experts / "small.cge", "-q")[0] == 0
    return experts / "small.cge"
