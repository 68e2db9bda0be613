"""Reading a library: its entries, and the files of an expert, without any lock.

A reader may meet a writer at any moment. Entries are replaced as a whole and objects never
change, so the one thing that can happen is that an object is gone because its entry was; the
entry is then read again.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cgmerge import strictjson
from cgmerge.errors import (
    CgmergeError,
    Damaged,
    Incompatible,
    InputError,
    LimitExceeded,
    NotFound,
    Unsafe,
    UsageError,
)
from cgmerge.modules.library.entry import ENDING, MAX_BYTES, Entry, file_name, is_name, parse_entry
from cgmerge.modules.library.store import (
    ENTRIES,
    MARK,
    MARK_SCHEMA,
    OBJECTS,
    Store,
    open_store,
)
from cgmerge.nearest import nearest
from cgmerge.quoting import quoted
from cgmerge.shown import some_of

_TRIES, _PAUSE = 5, 0.02


@dataclass(frozen=True, slots=True)
class Bad:
    """An entry that cannot be used, and why."""

    file: str
    error: InputError


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries, sorted by name, and what is no entry."""

    entries: tuple[Entry, ...]
    bad: tuple[Bad, ...]


def open_library(ref: str) -> Store:
    """Open a library that exists.

    Raises:
        NotFound: There is nothing, or something else.
        Incompatible: Written by a newer version.
    """
    store = open_store(ref)
    if not has_mark(store):
        there = "nothing there" if not store.names("") else "what is there is something else"
        raise NotFound(
            f"{ref} is no library: {there}",
            code="library",
            hint=f"make one: cgmerge add {quoted(ref)} EXPERT",
            path=ref,
        )
    return store


def has_mark(store: Store) -> bool:
    """Whether a place is a library.

    Raises:
        Incompatible: A library of a newer version.
        Damaged: Its mark is not readable.
    """
    try:
        data = store.read(MARK, limit=MAX_BYTES)
    except NotFound:
        return False
    schema = strictjson.loads_object(data, source=f"{store.url}/{MARK}").get("schema")
    if schema != MARK_SCHEMA:
        raise Incompatible(
            f"{store.url} is a library of kind {str(schema)[:60]!r}; this version reads"
            f" {MARK_SCHEMA!r}",
            code="library",
            hint="update cgmerge",
            expected=MARK_SCHEMA,
            found=str(schema)[:60],
        )
    return True


def new_mark() -> bytes:
    """Return the content of the file that makes a folder a library."""
    return strictjson.dumps({"schema": MARK_SCHEMA})


def listing(store: Store) -> Listing:
    """Read every entry; what cannot be used is returned with its reason."""
    entries, bad = [], []
    with _no_search_for_cycles():
        for name, found in _contents(store):
            try:
                entries.append(_parsed(store, name, found))
            except InputError as error:
                bad.append(Bad(name, error))
    return Listing(tuple(sorted(entries, key=lambda entry: entry.name)), tuple(bad))


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Let thousands of objects be made that form no cycles; to search them takes a third more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def find(store: Store, name: str) -> Entry:
    """Read one entry.

    Raises:
        NotFound: No such name; says what is near it.
        Damaged, Incompatible, Unsafe: An entry that cannot be used.
    """
    path = f"{ENTRIES}/{file_name(name)}"
    if is_name(name):
        try:
            data = store.read(path, limit=MAX_BYTES)
        except NotFound:
            pass
        except LimitExceeded as error:
            return _parsed(store, file_name(name), error)
        else:
            return _parsed(store, file_name(name), data)
    known = [file.removesuffix(ENDING) for file in store.names(ENTRIES)]
    near = nearest(name, known, count=3)
    shown = (
        f"similar: {', '.join(near)}"
        if near
        else f"cgmerge ls {quoted(store.url)} lists all {len(known):,}"
    )
    raise NotFound(
        f"no expert {name[:120]!r} in the library {store.url}", code="entry", hint=shown, path=path
    )


def settled(store: Store, name: str) -> Entry:
    """Read an entry whose object is there: again, where a writer was at work in between.

    Raises:
        NotFound: No such name.
        Damaged: Files of its object are missing or have other sizes, and stay so.
    """
    for attempt in range(_TRIES):
        entry = find(store, name)
        missing = missing_files(store, entry)
        if not missing:
            return entry
        time.sleep(_PAUSE * 2**attempt)
    raise Damaged(
        f"the expert {name} of {store.url} is incomplete: {', '.join(missing)}",
        code="object",
        hint=f"cgmerge verify {quoted(store.url)} lists all damage; add the expert again with"
        " --overwrite",
        path=f"{OBJECTS}/{entry.digest}",
        found=missing,
    )


def missing_files(store: Store, entry: Entry) -> list[str]:
    """Return which files of an entry are not there, or not in their size."""
    sizes = store.sizes(f"{OBJECTS}/{entry.digest}")
    return [name for name, part in entry.files.items() if sizes.get(name) != part.size]


def check_is_library_or_free(store: Store) -> bool:
    """Return whether there is a library already.

    Raises:
        UsageError: There is something else, which is left alone.
    """
    if has_mark(store):
        return True
    there = store.names("")
    if there:
        raise UsageError(
            f"{store.url} holds {some_of(there)} and is no library",
            code="library",
            hint="name an empty or a new folder",
            found=there[:5],
        )
    return False


def _contents(store: Store) -> Iterator[tuple[str, bytes | CgmergeError]]:
    return (item for item in store.read_all(ENTRIES, limit=MAX_BYTES) if item[0].endswith(ENDING))


def _parsed(store: Store, name: str, found: bytes | CgmergeError) -> Entry:
    source = f"{store.url}/{ENTRIES}/{name}"
    if isinstance(found, bytes):
        return parse_entry(found, file=name, source=source)
    if isinstance(found, InputError):
        raise found
    if isinstance(found, LimitExceeded):
        raise Unsafe(found.message, code="entry_size") from found
    raise Damaged(found.message, code="entry") from found
