"""An expert of a library, or at a URL, as files on this machine whose digests were checked.

Experts of other machines are kept in a cache under their digest. A copy is hashed before it is
used, once in each process, and fetched again when it was damaged.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from cgmerge import fs
from cgmerge.errors import Damaged, NotFound
from cgmerge.modules.library.entry import Entry, Part
from cgmerge.modules.library.library import open_library, settled
from cgmerge.modules.library.store import OBJECTS, Store
from cgmerge.tensorfile import file_sha256

_checked: dict[tuple[str, str], tuple[tuple[str, int, int, int], ...]] = {}
"""Folders that were hashed, and what the system said of their files then."""


def cache_folder() -> Path:
    """Return where experts of other machines are kept: `CGMERGE_CACHE`, or the user's cache."""
    given = os.environ.get("CGMERGE_CACHE")
    if given:
        return fs.absolute(Path(given))
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return fs.absolute(Path(home).expanduser() / "cgmerge")


def expert_folder(library: str, name: str) -> Path:
    """Return the folder of an expert of a library, fetched where it is elsewhere.

    Args:
        library: Folder or URL of the library.
        name: Of the expert.

    Raises:
        NotFound: No such library or name.
        Damaged: The object is not what its entry says.
    """
    store = open_library(library)
    return fetched(store, settled(store, name))


def fetched(store: Store, entry: Entry) -> Path:
    """Return the folder with the files of an entry; all have the digests that it says."""
    folder = store.local(f"{OBJECTS}/{entry.digest}")
    if folder is not None:
        check_folder(folder, entry.digest, entry.files)
        return folder
    folder = cache_folder() / OBJECTS / entry.digest
    if folder.is_dir():
        try:
            check_folder(folder, entry.digest, entry.files)
        except (Damaged, NotFound):
            pass
        else:
            return folder
    with fs.new_folder(folder, overwrite=True) as stage:
        write_parts(store, entry, stage)
    return folder


def write_parts(store: Store, entry: Entry, stage: Path) -> None:
    """Write the files of an entry into a staged folder, checked.

    Raises:
        Damaged: A file is not what the entry says; nothing is left then.
    """
    for name, part in entry.files.items():
        path = f"{OBJECTS}/{entry.digest}/{name}"
        found = fs.write_chunks(stage / name, store.chunks(path), part.size)
        if found != part.sha256:
            raise _differs(f"{store.url}/{path}", part, found)


def check_folder(folder: Path, digest: str, files: Mapping[str, Part]) -> None:
    """Hash the files of an expert, unless this process did so and they are as they were.

    Raises:
        Damaged: A file is not what it should be.
        NotFound, Unsafe: A file is missing, or is a link.
    """
    state = tuple(_state(folder / name) for name in sorted(files))
    key = str(folder), digest
    if _checked.get(key) == state:
        return
    for name, part in files.items():
        found = file_sha256(folder / name, follow_links=False)
        if found != part.sha256:
            raise _differs(str(folder / name), part, found)
    _checked[key] = state


def _state(path: Path) -> tuple[str, int, int, int]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}", code="file", path=path) from None
    return path.name, found.st_ino, found.st_size, found.st_mtime_ns


def _differs(where: str, part: Part, found: str) -> Damaged:
    return Damaged(
        f"{where} is not what was added: sha256 {found[:16]}…, expected {part.sha256[:16]}…",
        code="digest",
        hint="the library was changed or damaged: cgmerge verify lists everything; add the expert"
        " again with --overwrite",
        path=where,
        expected=part.sha256,
        found=found,
    )
