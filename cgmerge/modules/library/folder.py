"""A library in a folder of this machine, or of a shared file system."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from cgmerge import fs
from cgmerge.errors import CgmergeError, Damaged, NotFound, Unsafe
from cgmerge.modules.library.store import ENTRIES, OBJECTS, REMOVING, Source
from cgmerge.tensorfile import open_regular, read_small

_PIECE = 1 << 22


class Folder:
    """The files of a library in a folder; see `Writable`. Links are never followed."""

    def __init__(self, root: Path, url: str | None = None) -> None:
        self.root = root
        self.url = url if url is not None else str(root)

    def names(self, folder: str) -> list[str]:
        """Return what is directly inside a folder; temporaries of writers are left out."""
        return sorted(entry.name for entry in self._scan(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name and bytes of the files directly inside a folder; -1 for what is no file."""
        found = {}
        for entry in self._scan(folder):
            regular = entry.is_file(follow_symlinks=False)
            found[entry.name] = entry.stat(follow_symlinks=False).st_size if regular else -1
        return found

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a small file whole."""
        return read_small(self.root / path, limit=limit)

    def read_all(self, folder: str, *, limit: int) -> Iterator[tuple[str, bytes | CgmergeError]]:
        """Read all files of a folder."""
        stem = f"{self.root / folder}/"  # a path object for each of thousands takes its time
        for name in self.names(folder):
            try:
                yield name, read_small(stem + name, limit=limit)
            except NotFound:
                continue  # removed since
            except CgmergeError as error:
                yield name, error

    def chunks(self, path: str) -> Iterator[bytes]:
        """Read a large file piece by piece."""
        return read_chunks(self.root / path)

    def local(self, path: str) -> Path | None:
        """Return the folder itself."""
        return self.root / path

    def write(self, path: str, data: bytes, *, new: bool) -> bool:
        """Put a small file in place as a whole; of two writers of a new one, one is told."""
        if new:
            return fs.create_file(self.root / path, data)
        fs.replace_file(self.root / path, data)
        return True

    def write_folder(self, path: str, files: Mapping[str, Source]) -> None:
        """Put a folder in place in one step, copied and compared with its digests."""
        with fs.new_folder(self.root / path, overwrite=True, own=True) as stage:
            copy_into(stage, files)

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        fs.remove_place(self.root / path)

    def tidy(self) -> None:
        """Remove the temporaries of writers that were killed."""
        for folder in (ENTRIES, OBJECTS, REMOVING):
            fs.collect_leftovers(self.root / folder)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        place = self.root / folder
        try:
            if stat.S_ISLNK(place.lstat().st_mode):
                raise Unsafe(
                    f"{place} is a link; a library holds its own files",
                    code="link",
                    hint="remove the link, or copy there what it leads to",
                    path=place,
                )
            with os.scandir(place) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []


def copy_into(stage: Path, files: Mapping[str, Source]) -> None:
    """Copy files into a staged folder.

    Raises:
        Damaged: A file is not what it must be.
    """
    for name, source in files.items():
        digest = fs.write_chunks(stage / name, read_chunks(source.path), source.size)
        check_copy(source, digest)


def check_copy(source: Source, digest: str) -> None:
    """Refuse a file that is not what it was when it was looked at."""
    if digest != source.sha256:
        raise Damaged(
            f"{source.path} changed while it was copied: sha256 {digest[:16]}…,"
            f" expected {source.sha256[:16]}…",
            code="changed",
            hint="try again when nobody writes to it",
            path=source.path,
            expected=source.sha256,
            found=digest,
        )


def read_chunks(path: Path) -> Iterator[bytes]:
    """Read a regular file piece by piece, never through a link."""
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
