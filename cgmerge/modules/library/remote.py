"""A library at any URL that fsspec knows: `s3://`, `gs://`, `memory://` and others.

What is put there becomes visible as a whole, as object stores have it; the order of writing does
the rest.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cgmerge.errors import (
    CgmergeError,
    EnvironmentProblem,
    LimitExceeded,
    MissingExtra,
    NotFound,
    UsageError,
)
from cgmerge.modules.library.folder import check_copy, read_chunks
from cgmerge.modules.library.store import Source

_PIECE = 1 << 22
_BATCH = 500


class Remote:
    """The files of a library at a URL; see `Writable`."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self._files, self._root = url_to_fs(self.url)
        except ImportError as error:
            raise MissingExtra(
                f"{url}: {error}", code="filesystem", hint="install the package that it names"
            ) from error
        except ValueError as error:
            raise UsageError(
                f"{url} is no reference: {error}",
                code="ref",
                hint="write a path, hf://user/repo, or a URL that fsspec knows",
            ) from error

    def names(self, folder: str) -> list[str]:
        """Return what is directly inside a folder, sorted."""
        return sorted(name for name, _ in self._list(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name and bytes of the files directly inside a folder; -1 for folders."""
        return {
            name: int(info["size"]) if info["type"] == "file" else -1
            for name, info in self._list(folder)
        }

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a small file whole."""
        with self._errors(path):
            size = int(self._files.info(self._at(path))["size"])
            if size > limit:
                raise _too_long(f"{self.url}/{path}", limit)
            data: bytes = self._files.cat_file(self._at(path))
        return data

    def read_all(self, folder: str, *, limit: int) -> Iterator[tuple[str, bytes | CgmergeError]]:
        """Read all files of a folder, many at a time."""
        sizes = self.sizes(folder)
        short = sorted(name for name, size in sizes.items() if 0 <= size <= limit)
        for name in sorted(set(sizes) - set(short)):
            yield name, _too_long(f"{self.url}/{folder}/{name}", limit)
        for first in range(0, len(short), _BATCH):
            batch = {self._at(f"{folder}/{name}"): name for name in short[first : first + _BATCH]}
            with self._errors(folder):
                found = self._files.cat(list(batch), on_error="return")
            for path, name in batch.items():
                data = found[path] if path in found else found["/" + path.lstrip("/")]
                if isinstance(data, bytes):
                    yield name, data
                elif not isinstance(data, FileNotFoundError):  # else removed since
                    yield name, _problem(f"{self.url}/{folder}/{name}", data)

    def chunks(self, path: str) -> Iterator[bytes]:
        """Read a large file piece by piece."""
        with self._errors(path), self._files.open(self._at(path), "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def local(self, path: str) -> Path | None:
        """Return None: nothing there is on this machine."""

    def write(self, path: str, data: bytes, *, new: bool) -> bool:
        """Put a small file in place; where storage can, one of two writers of a new one is told."""
        place = self._at(path)
        with self._errors(path):
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
            if not new:
                self._files.pipe_file(place, data)
                return True
            self._files.invalidate_cache()
            if self._files.exists(place):
                return False
            try:
                self._files.pipe_file(place, data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, ValueError):  # storage that cannot tell
                self._files.pipe_file(place, data)
        return True

    def write_folder(self, path: str, files: Mapping[str, Source]) -> None:
        """Put files in place; the folder is not referred to before all are there."""
        with self._errors(path):
            self._files.makedirs(self._at(path), exist_ok=True)
        for name, source in files.items():
            place = self._at(f"{path}/{name}")
            digest = hashlib.sha256()
            with self._errors(path), self._files.open(place, "wb") as file:
                for piece in read_chunks(source.path):
                    digest.update(piece)
                    file.write(piece)
            try:
                check_copy(source, digest.hexdigest())
            except CgmergeError:
                self.remove(path)
                raise

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        self._files.invalidate_cache()
        with self._errors(path), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._at(path), recursive=True)

    def tidy(self) -> None:
        """Do nothing: there are no temporaries, a file appears under its name when it is whole."""

    def _list(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        place = self._at(folder)
        self._files.invalidate_cache()
        try:
            with self._errors(folder):
                found = self._files.ls(place, detail=True)
        except NotFound:
            return []
        named = [(str(info["name"]).rstrip("/").rpartition("/")[2], info) for info in found]
        own = place.rstrip("/").rpartition("/")[2]
        # Some object stores list the folder itself, as an empty file.
        kept = [pair for pair in named if pair[0] and not pair[0].startswith(".")]
        return [pair for pair in kept if pair[0] != own or pair[1]["name"].strip("/") !=
                place.strip("/")]  # fmt: skip

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except CgmergeError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"no such file: {self.url}/{path}", code="file") from error
        except Exception as error:  # each storage has exceptions of its own
            raise _problem(f"{self.url}/{path}", error) from error


def _problem(where: str, error: object) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{where} cannot be used: {type(error).__name__}: {error}",
        code="remote",
        hint="check the name, the connection and your permissions",
    )


def _too_long(where: str, limit: int) -> LimitExceeded:
    return LimitExceeded(f"{where} is longer than the limit of {limit:,} bytes", code="file_size")
