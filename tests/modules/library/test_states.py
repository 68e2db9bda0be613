"""Any sequence of additions, removals, crashes and clean-ups, against a plain dict."""

import errno
import shutil
import tempfile
from pathlib import Path

import library_support as lib
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cgmerge import fs
from cgmerge.errors import NotFound, StorageError, UsageError
from cgmerge.modules.library import writing
from cgmerge.modules.library.folder import Folder
from cgmerge.modules.library.library import find, listing

NAMES = st.sampled_from(["a", "b", "c"])
ITEMS = st.integers(0, 2)
STEPS = st.integers(1, 25)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return lib.make_items(tmp_path_factory.mktemp("experts"))


class Library(RuleBasedStateMachine):
    """The library and what it must hold."""

    items = ()

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="cgmerge-states-"))
        self.store = Folder(self.root / "lib")
        self.model = {}

    def teardown(self):
        shutil.rmtree(self.root)

    @rule(name=NAMES, number=ITEMS, overwrite=st.booleans())
    def add(self, name, number, overwrite):
        item = lib.named(self.items[number], name)
        taken = self.model.get(name, item.entry.digest) != item.entry.digest
        if taken and not overwrite:
            with pytest.raises(UsageError):
                writing.add(self.store, [item])
            return
        writing.add(self.store, [item], overwrite=overwrite)
        self.model[name] = item.entry.digest

    @rule(name=NAMES)
    def remove(self, name):
        if name not in self.model:
            with pytest.raises(NotFound):
                writing.remove(self.store, [name])
            return
        writing.remove(self.store, [name])
        del self.model[name]

    @rule(name=NAMES, number=ITEMS, at=STEPS, removing=st.booleans())
    def fail(self, name, number, at, removing):
        """At some disk operation; afterwards one name is as before or as it was to become."""
        item = lib.named(self.items[number], name)
        left = at

        def step(operation, path):
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.EIO, "failed", str(path))

        fs._step, plain = step, fs._step
        try:
            if removing:
                writing.remove(self.store, [name])
            else:
                writing.add(self.store, [item], overwrite=True)
        except (StorageError, NotFound):
            pass
        finally:
            fs._step = plain
        wanted = None if removing else item.entry.digest
        try:
            found = find(self.store, name).digest
        except NotFound:
            found = None
        assert found in (self.model.get(name), wanted)
        self.model.pop(name, None)
        if found is not None:
            self.model[name] = found

    @rule()
    def clean(self):
        writing.collect_unreferenced(self.store)
        assert set(self.store.names("objects")) == set(self.model.values())

    @invariant()
    def holds_what_it_must(self):
        found = listing(self.store)
        assert not found.bad
        assert {entry.name: entry.digest for entry in found.entries} == self.model
        assert all(writing.is_intact(self.store, entry) for entry in found.entries)


def test_any_sequence(items, monkeypatch):
    monkeypatch.setattr(writing, "_PATIENCE", 0.0)
    monkeypatch.setattr(Library, "items", items)
    run_state_machine_as_test(
        Library,
        settings=settings(
            max_examples=40,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
