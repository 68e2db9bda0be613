"""Writing to any library, whatever it lies on; sending experts there and getting them back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from cgmerge import fs
from cgmerge.errors import NotFound, UsageError
from cgmerge.inputs import real_path, refuse_inputs
from cgmerge.modules.library import writing
from cgmerge.modules.library.admit import Item, admit
from cgmerge.modules.library.entry import Entry
from cgmerge.modules.library.fetch import fetched
from cgmerge.modules.library.folder import copy_into
from cgmerge.modules.library.library import (
    check_is_library_or_free,
    has_mark,
    listing,
    open_library,
)
from cgmerge.modules.library.store import HUB, Source, Store, Writable, local_path, open_store
from cgmerge.modules.library.writing import Added, Removed
from cgmerge.refs import is_in_library


def check_free(store: Store, items: Sequence[Item], *, overwrite: bool) -> None:
    """Refuse what could not be stored, before anything is written.

    Raises:
        UsageError: The place is something else, or a name is taken.
    """
    writing.refuse_twice(items)
    if check_is_library_or_free(store):
        for item in items:
            writing.same_name(store, item.entry, overwrite=overwrite)


def add_to(store: Store, items: Sequence[Item], *, overwrite: bool, private: bool = False) -> Added:
    """Store experts; see `writing.add`. On the hub this is one commit."""
    if store.url.startswith(HUB):
        from cgmerge.modules.library import hubwriting

        return hubwriting.add(store.url, items, overwrite=overwrite, private=private)
    return writing.add(cast("Writable", store), items, overwrite=overwrite)


def remove_from(store: Store, names: Sequence[str], *, dry_run: bool) -> Removed:
    """Remove experts, or, without names, what no entry refers to; see `writing`."""
    if store.url.startswith(HUB):
        from cgmerge.modules.library import hubwriting

        return hubwriting.remove(store.url, names, dry_run=dry_run)
    files = cast("Writable", store)
    if names:
        return writing.remove(files, names, dry_run=dry_run)
    return writing.collect_unreferenced(files, dry_run=dry_run)


def pull(ref: str, out: Path, *, overwrite: bool = False) -> Item:
    """Copy an expert from wherever it is into a folder, checked to its last number.

    Returns:
        What was copied.

    Raises:
        As `admit`; nothing is left behind then.
    """
    refuse_inputs(out, _places(ref))
    fs.check_target(out, overwrite=overwrite)
    item = admit(ref, name="pulled")
    with fs.new_folder(out, overwrite=overwrite) as stage:
        copy_into(stage, item.sources)
    return item


def refuse_nested(library: str, refs: Sequence[str]) -> None:
    """Refuse a library that is, or lies inside, an expert that goes into it.

    Raises:
        UsageError: Naming both.
    """
    place = local_path(library)
    if place is None:
        return
    for ref in refs:
        own = [part for part in _places(ref) if real_path(place) not in real_path(part).parents]
        refuse_inputs(place, [part for part in own if part != place], option="library")


def _places(ref: str) -> list[Path]:
    """Return what on this machine a reference reads: an expert, or the library that it is in."""
    place = local_path(ref)
    if place is None:
        return []
    return [place.parent] if is_in_library(place) else [place]


def push(
    source: str,
    destination: str,
    *,
    name: str | None = None,
    licence: str | None = None,
    tags: Sequence[str] = (),
    overwrite: bool = False,
    private: bool = False,
) -> Added:
    """Send an expert or a whole library to another place.

    Args:
        source: A library, or an expert.
        destination: A library or `LIB/NAME`; `hf://user/repo` for one expert by itself.
        name: In the destination, of an expert.
        licence: Where the expert does not say.
        tags: More words to find it by.
        overwrite: Replace what has the name.
        private: Whether a repository that is made on the hub is private.

    Raises:
        UsageError: The destination is something else, or a name is taken.
    """
    if is_library(source):
        if name is not None:
            raise UsageError("--name takes one expert, not a library", code="name")
        items = library_items(open_library(source))
        tagged = [_described(item, licence, tags) for item in items]
        store = open_store(destination)
        check_free(store, tagged, overwrite=overwrite)
        return add_to(store, tagged, overwrite=overwrite, private=private)
    library, own = _destination(destination)
    item = admit(source, name=name or own, licence=licence, tags=tags)
    if library.startswith(HUB) and own is None and not is_library(library):
        from cgmerge.modules.library import hubwriting

        hubwriting.publish(library, item, overwrite=overwrite, private=private)
        return Added(new=[item.entry.name])
    store = open_store(library)
    refuse_nested(library, [source])
    check_free(store, [item], overwrite=overwrite)
    return add_to(store, [item], overwrite=overwrite, private=private)


def is_library(ref: str) -> bool:
    """Whether there is a library."""
    try:
        return has_mark(open_store(ref))
    except NotFound:  # no such repository
        return False


def library_items(store: Store) -> list[Item]:
    """Return all experts of a library with their files here, fetched and checked.

    Raises:
        InputError: An entry or an object is damaged; nothing is sent then.
    """
    found = listing(store)
    if found.bad:
        raise found.bad[0].error
    return [_item(store, entry) for entry in found.entries]


def _item(store: Store, entry: Entry) -> Item:
    folder = fetched(store, entry)
    sources = {
        name: Source(folder / name, part.sha256, part.size) for name, part in entry.files.items()
    }
    return Item(entry, sources)


def _described(item: Item, licence: str | None, tags: Sequence[str]) -> Item:
    entry = item.entry
    words = (*tags, *(tag for tag in entry.tags if tag not in tags))
    return Item(replace(entry, license=entry.license or licence, tags=words), item.sources)


def _destination(ref: str) -> tuple[str, str | None]:
    """Split `LIB/NAME` where LIB is a library, or is the hub's."""
    if ref.startswith(HUB):
        from cgmerge.modules.library.hub import parse_ref

        named = parse_ref(ref)
        return named.library, named.name
    parent, _, name = ref.rstrip("/").rpartition("/")
    if name and parent and not parent.endswith(":/") and not is_library(ref) and is_library(parent):
        return parent, name
    return ref, None
