"""An expert of a library, or at a URL, as files on this machine whose digests were checked.

Experts of other machines are kept in a cache under their digest. A copy is hashed before it is
used, once in each process, and fetched again when it was damaged.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cgmerge import fs
from cgmerge.errors import Damaged, NotFound
from cgmerge.modules.library.entry import Entry, Part, digest_of
from cgmerge.modules.library.hub import Repository, parse_ref
from cgmerge.modules.library.library import has_mark, open_library, settled
from cgmerge.modules.library.store import (
    COMPRESSED,
    CONFIG,
    HUB,
    MARK,
    OBJECTS,
    STORED,
    Store,
    open_store,
)
from cgmerge.quoting import quoted
from cgmerge.shown import some_of
from cgmerge.tensorfile import file_sha256

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*"]
_ENDINGS = (".json", ".safetensors", ".cge", ".md", ".model", ".jinja", ".txt")
_MAX_FILES = 64

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


def place_of(ref: str, what: str, *, offline: bool = False) -> Path:
    """Return the folder of an expert at a URL or on the hub, fetched.

    Args:
        ref: `URL/LIB/NAME`, `URL/FOLDER`, `URL/FILE.cge`, `hf://user/repo[/name][@revision]`.
        what: What to call it in messages.
        offline: Ask nobody.

    Returns:
        A folder with the expert's files, or the hub's own folder of a full model.

    Raises:
        NotFound: Nothing there, or a library without a name of an expert in it.
        EnvironmentProblem: It cannot be reached, or is not in the cache while offline.
    """
    if ref.startswith(HUB):
        named = parse_ref(ref)
        if named.name is not None:
            return expert_folder(named.library, named.name)
    else:
        parent, _, name = ref.rstrip("/").rpartition("/")
        if name and not parent.endswith("/") and has_mark(open_store(parent)):
            return expert_folder(parent, name)
        if name.endswith(COMPRESSED):
            return _plain(open_store(parent), {STORED: name})
    store = Repository(ref, offline=offline) if ref.startswith(HUB) else open_store(ref)
    sizes = store.sizes("")
    if MARK in sizes:
        raise NotFound(
            f"{ref} is a library; the {what} is one of its experts",
            code="library",
            hint=f"cgmerge ls {quoted(ref)} lists them: {quoted(f'{ref}/NAME')}",
        )
    if not {CONFIG, STORED} & set(sizes):
        if isinstance(store, Repository) and "config.json" in sizes:
            return hub_model(ref, what)
        shown = f"it holds {some_of(sorted(sizes), 8)}" if sizes else "nothing is there"
        raise NotFound(f"no such {what}: {ref}", code="folder", hint=shown)
    files = {name: name for name, size in sizes.items() if size >= 0 and _wanted(name)}
    return _plain(store, files)


def _plain(store: Store, files: Mapping[str, str]) -> Path:
    """Fetch files that nobody promised a digest of, and keep them under the one that they have."""
    cache = cache_folder() / OBJECTS
    with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
        stage = Path(folder)
        parts = {}
        for name, path in sorted(files.items())[:_MAX_FILES]:
            digest = fs.write_chunks(stage / name, store.chunks(path), 0)
            parts[name] = Part(digest, (stage / name).stat().st_size)
        digest = digest_of(parts)
        place = cache / digest
        try:
            check_folder(place, digest, parts)
        except (Damaged, NotFound):
            with fs.new_folder(place, overwrite=True, own=True) as kept:
                for name in parts:
                    fs.copy_file(stage / name, kept / name)
    return place


def hub_model(
    ref: str, what: str, *, files: Sequence[str] = _MODEL_FILES, offline: bool = False
) -> Path:
    """Fetch a full model from the hub into the hub's own cache, whose folder is returned.

    Args:
        ref: `hf://user/repo[@revision]`.
        what: What to call it in messages.
        files: Patterns of what is fetched.
        offline: Ask nobody.
    """
    from huggingface_hub import snapshot_download

    repository = Repository(ref, offline=offline)
    with repository.errors(what):
        return Path(
            snapshot_download(
                repository.ref.repo,
                revision=repository.revision,
                allow_patterns=list(files),
                local_files_only=repository.offline,
            )
        )


def cached(ref: str, what: str) -> Path | None:
    """Return the expert `user/repo` that was fetched from the hub before; nobody is asked."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    if not (hub / f"models--{ref.replace('/', '--')}" / "snapshots").is_dir():
        return None
    return place_of(f"{HUB}{ref}", what, offline=True)


def _wanted(name: str) -> bool:
    return name.endswith(_ENDINGS) and not name.startswith(".")


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
    with fs.new_folder(folder, overwrite=True, own=True) as stage:
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
