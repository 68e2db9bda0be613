"""Writing to any library, whatever it lies on."""

from collections.abc import Sequence
from typing import cast

from cgmerge.modules.library import writing
from cgmerge.modules.library.admit import Item
from cgmerge.modules.library.library import check_is_library_or_free
from cgmerge.modules.library.store import Store, Writable
from cgmerge.modules.library.writing import Added, Removed


def check_free(store: Store, items: Sequence[Item], *, overwrite: bool) -> None:
    """Refuse what could not be stored, before anything is written.

    Raises:
        UsageError: The place is something else, or a name is taken.
    """
    writing.refuse_twice(items)
    if check_is_library_or_free(store):
        for item in items:
            writing.same_name(store, item.entry, overwrite=overwrite)


def add_to(store: Store, items: Sequence[Item], *, overwrite: bool) -> Added:
    """Store experts; see `writing.add`."""
    return writing.add(cast("Writable", store), items, overwrite=overwrite)


def remove_from(store: Store, names: Sequence[str], *, dry_run: bool) -> Removed:
    """Remove experts, or, without names, what no entry refers to; see `writing`."""
    files = cast("Writable", store)
    if names:
        return writing.remove(files, names, dry_run=dry_run)
    return writing.collect_unreferenced(files, dry_run=dry_run)
