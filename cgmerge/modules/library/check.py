"""`verify`: everything read and hashed again, all damage listed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cgmerge import fs
from cgmerge.errors import Damaged, InputError, NotFound
from cgmerge.modules.compress.container import CgeFile
from cgmerge.modules.expert import COMPRESSED, compressed_file, is_adapter, open_expert
from cgmerge.modules.library.admit import check_values
from cgmerge.modules.library.entry import Entry, is_digest
from cgmerge.modules.library.library import has_mark, listing, open_library
from cgmerge.modules.library.store import OBJECTS, Store, local_path
from cgmerge.refs import local_place


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not what it was: where, and what is wrong."""

    place: str
    error: InputError

    def facts(self) -> dict[str, str]:
        """Return what `--json` prints."""
        return {"place": self.place, "code": self.error.code, "message": self.error.message}


@dataclass(slots=True)
class Checked:
    """What `verify` found.

    Attributes:
        experts: How many were read.
        size: Their bytes.
        damages: All of them.
        unreferenced: Objects of libraries that no entry refers to, which harm nobody.
        unsealed: Experts that come without digests, whose changes nobody could tell.
    """

    experts: int = 0
    size: int = 0
    damages: list[Damage] = field(default_factory=list)
    unreferenced: list[str] = field(default_factory=list)
    unsealed: list[str] = field(default_factory=list)


def verify(target: str, checked: Checked) -> None:
    """Check a library, an expert, or a folder of experts.

    Args:
        target: A folder, a file, a URL.
        checked: Takes what is found.

    Raises:
        NotFound: Nothing there that could be checked.
    """
    path = local_path(target)
    if path is None:
        if target.endswith(COMPRESSED):
            _check_expert(target, local_place(target, what="expert", suffix=COMPRESSED), checked)
        else:
            _check_library(open_library(target), checked)
        return
    from cgmerge.modules.library.folder import Folder

    store = Folder(path, target)
    if path.is_dir() and _is_library(store, checked):
        _check_library(store, checked)
        return
    place = local_place(str(path), what="expert or library", suffix=COMPRESSED)
    inside = [] if is_adapter(place) else _experts_in(place)
    for expert in inside or [place]:
        _check_expert(target if expert == place else str(expert), expert, checked)


def _is_library(store: Store, checked: Checked) -> bool:
    try:
        return has_mark(store)
    except InputError as error:
        checked.damages.append(Damage(store.url, error))
        return True


def _experts_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    below = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [
        path
        for path in below
        if (path.is_file() and path.suffix == COMPRESSED) or (path.is_dir() and is_adapter(path))
    ]


def _check_expert(ref: str, place: Path, checked: Checked) -> None:
    checked.experts += 1
    small = compressed_file(place)
    try:
        if small is not None:
            with CgeFile.open(small) as file:
                checked.size += file.size
                checked.damages += [
                    Damage(f"{ref}: {damage.name}" if damage.name else ref, damage.error)
                    for damage in file.damages()
                ]
            return
        expert = open_expert(str(fs.absolute(place)))
        try:
            checked.size += expert.file.size
            check_values(expert)
        finally:
            expert.file.close()
        if expert.card is None or not expert.card.files:
            checked.unsealed.append(ref)
    except NotFound as error:
        if not is_adapter(place):
            raise
        checked.damages.append(Damage(ref, Damaged(error.message, code="file_missing")))
    except InputError as error:
        checked.damages.append(Damage(ref, error))


def _check_library(store: Store, checked: Checked) -> None:
    found = listing(store)
    checked.damages += [Damage(f"{store.url}/{bad.file}", bad.error) for bad in found.bad]
    done: dict[str, list[InputError]] = {}
    for entry in found.entries:
        checked.experts += 1
        if entry.digest not in done:
            done[entry.digest] = list(_object_damages(store, entry, checked))
        checked.damages += [Damage(f"{store.url}/{entry.name}", e) for e in done[entry.digest]]
    for name in store.names(OBJECTS):
        if not is_digest(name):
            error = Damaged(f"{store.url}/{OBJECTS}/{name} is no object", code="stray")
            checked.damages.append(Damage(store.url, error))
        elif name not in done:
            checked.unreferenced.append(name)


def _object_damages(store: Store, entry: Entry, checked: Checked) -> Iterator[InputError]:
    folder = f"{OBJECTS}/{entry.digest}"
    try:
        sizes = store.sizes(folder)
    except InputError as error:
        yield error
        return
    for name in sorted(set(sizes) - set(entry.files)):
        # Statistics of an expert may lie with it; they are checked by what uses them.
        if not name.startswith("cgmerge-stats"):
            yield Damaged(f"{folder}/{name} is no file of the expert", code="stray")
    for name, part in entry.files.items():
        where = f"{store.url}/{folder}/{name}"
        if name not in sizes:
            yield Damaged(f"{where} is missing", code="file_missing")
            continue
        digest = hashlib.sha256()
        try:
            for piece in store.chunks(f"{folder}/{name}"):
                digest.update(piece)
                checked.size += len(piece)
        except InputError as error:
            yield error
            continue
        except NotFound as error:
            yield Damaged(error.message, code="file_missing")
            continue
        if digest.hexdigest() != part.sha256:
            yield Damaged(
                f"{where} is not what was added: {sizes[name]:,} bytes with sha256"
                f" {digest.hexdigest()[:16]}…, expected {part.size:,} with {part.sha256[:16]}…",
                code="digest",
                hint="add the expert again with --overwrite",
                expected=part.sha256,
                found=digest.hexdigest(),
            )
