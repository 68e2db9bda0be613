"""Adding to a library and removing from it, with any number of others who do the same.

An adder writes objects first and the entry last. A remover deletes the entry first; before it
deletes the object it leaves a mark, and looks once more whether an entry came to refer to it. An
adder looks for marks after it wrote its entry. So either the remover sees the entry and keeps the
object, or the adder sees the mark, waits until it is gone, and stores the object again. Nobody
needs a lock, and a process that dies leaves at most an object that no entry refers to.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cgmerge import fs
from cgmerge.errors import InputError, NotFound, UsageError
from cgmerge.modules.library.admit import Item
from cgmerge.modules.library.entry import Entry, file_name, is_digest
from cgmerge.modules.library.library import (
    check_is_library_or_free,
    find,
    listing,
    missing_files,
    new_mark,
)
from cgmerge.modules.library.store import ENTRIES, MARK, OBJECTS, REMOVING, Store, Writable

_PATIENCE, _PAUSE = 30.0, 0.02


@dataclass(slots=True)
class Added:
    """What `add` did: names that are new, that were there with the same content, or replaced."""

    new: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Removed:
    """What `remove` did: names, and objects with their bytes."""

    names: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    freed: int = 0


def add(store: Writable, items: Sequence[Item], *, overwrite: bool = False) -> Added:
    """Store experts, the library with them where there is none.

    Args:
        store: Where.
        items: What, checked.
        overwrite: Replace entries of the same name with other content.

    Raises:
        UsageError: A name is taken; the experts before it are stored.
        StorageError: The storage refused.
    """
    if not check_is_library_or_free(store):
        store.write(MARK, new_mark(), new=True)
    done = Added()
    for item in items:
        _add(store, item, done, overwrite=overwrite)
    return done


def remove(store: Writable, names: Sequence[str], *, dry_run: bool = False) -> Removed:
    """Remove entries, also broken ones, and the objects that no other entry refers to.

    Raises:
        NotFound: No such name; nothing was removed.
    """
    done = Removed()
    digests: dict[str, None] = {}
    for name in names:
        try:
            entry = find(store, name)
        except InputError:  # a broken entry; what it referred to, nobody can say
            done.names.append(name)
        else:
            done.names.append(entry.name)
            digests[entry.digest] = None
    files = {file_name(name) for name in done.names}
    others = [entry for entry in listing(store).entries if entry.file_name not in files]
    used = {entry.digest for entry in others}
    for file in sorted(files) if not dry_run else ():
        store.remove(f"{ENTRIES}/{file}")
    loose = [digest for digest in digests if digest not in used]
    return _collect(store, loose, done, dry_run=dry_run)


def collect_unreferenced(store: Writable, *, dry_run: bool = False) -> Removed:
    """Remove every object that no entry refers to.

    Raises:
        InputError: An entry cannot be read, so that nobody knows what it refers to.
    """
    found = listing(store)
    if found.bad:
        raise found.bad[0].error
    used = {entry.digest for entry in found.entries}
    loose = [name for name in store.names(OBJECTS) if is_digest(name) and name not in used]
    return _collect(store, loose, Removed(), dry_run=dry_run)


def refuse_twice(items: Sequence[Item]) -> None:
    """Refuse two experts under one name.

    Raises:
        UsageError: Names both digests.
    """
    seen: dict[str, Entry] = {}
    for item in items:
        other = seen.setdefault(item.entry.file_name, item.entry)
        if other.digest != item.entry.digest:
            raise UsageError(
                f"two experts would have one name: {other.name} ({other.digest[:16]}…) and"
                f" {item.entry.name} ({item.entry.digest[:16]}…)",
                code="name_twice",
                hint="add them one by one with --name",
            )


def same_name(store: Store, entry: Entry, *, overwrite: bool) -> Entry | None:
    """Return what has this name already.

    Raises:
        UsageError: It is something else, and may not be replaced.
    """
    try:
        old = find(store, entry.name)
    except NotFound:
        return None
    except InputError:
        if overwrite:
            return None
        raise
    if old.digest != entry.digest and not overwrite:
        raise UsageError(
            f"{store.url} has an expert {old.name} already: {old.digest[:16]}…, this one is"
            f" {entry.digest[:16]}…",
            code="name_taken",
            hint="choose another --name, or --overwrite",
            expected=entry.digest,
            found=old.digest,
        )
    return old


def _add(store: Writable, item: Item, done: Added, *, overwrite: bool) -> None:
    entry = item.entry
    _put_object(store, item)
    old = same_name(store, entry, overwrite=overwrite)
    if old == entry:
        done.same.append(entry.name)
    elif store.write(f"{ENTRIES}/{entry.file_name}", entry.to_bytes(), new=not overwrite):
        (done.replaced if old is not None else done.new).append(entry.name)
    else:  # somebody was faster
        old = same_name(store, entry, overwrite=False)
        done.same.append(entry.name)
    _wait_for_removers(store, entry.digest)
    _put_object(store, item)


def _put_object(store: Writable, item: Item) -> None:
    if not is_intact(store, item.entry):
        store.write_folder(f"{OBJECTS}/{item.entry.digest}", item.sources)


def is_intact(store: Writable, entry: Entry) -> bool:
    """Whether an object is there and is what it was, to the last byte."""
    folder = f"{OBJECTS}/{entry.digest}"
    if missing_files(store, entry):
        return False
    for name, part in entry.files.items():
        digest = hashlib.sha256()
        try:
            for piece in store.chunks(f"{folder}/{name}"):
                digest.update(piece)
        except (NotFound, InputError):
            return False
        if digest.hexdigest() != part.sha256:
            return False
    return True


def _wait_for_removers(store: Writable, digest: str) -> None:
    """Wait until nobody is about to delete an object; marks of the dead are removed."""
    end = time.monotonic() + _PATIENCE
    while marks := [name for name in store.names(REMOVING) if name.startswith(digest)]:
        _remove_marks(store, marks if time.monotonic() > end else _dead(marks))
        time.sleep(_PAUSE)


def _collect(store: Writable, digests: Sequence[str], done: Removed, *, dry_run: bool) -> Removed:
    """Remove objects that nothing refers to, as the top of this file says."""
    marks = {digest: f"{digest}.{fs.writer_id()}-{secrets.token_hex(4)}" for digest in digests}
    try:
        for mark in marks.values() if not dry_run else ():
            store.write(f"{REMOVING}/{mark}", b"\n", new=False)
        found = listing(store)
        used = {entry.digest for entry in found.entries} if not dry_run else set()
        for digest in digests if not found.bad else ():  # a bad entry may refer to anything
            if digest not in used:
                folder = f"{OBJECTS}/{digest}"
                done.freed += sum(max(0, size) for size in store.sizes(folder).values())
                done.objects.append(digest)
                if not dry_run:
                    store.remove(folder)
    finally:
        if not dry_run:
            _remove_marks(store, [*marks.values(), *_dead(store.names(REMOVING))])
            store.tidy()
    return done


def _dead(marks: Sequence[str]) -> list[str]:
    return [mark for mark in marks if fs.writer_is_dead(mark.partition(".")[2])]


def _remove_marks(store: Writable, marks: Sequence[str]) -> None:
    for mark in marks:
        store.remove(f"{REMOVING}/{mark}")
