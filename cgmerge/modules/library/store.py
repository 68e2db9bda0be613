"""Where a library lies: what its parts need from a folder, a URL or a repository."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from cgmerge import fs
from cgmerge.errors import CgmergeError, UsageError
from cgmerge.refs import expanded

MARK = "cgmerge-library.json"
MARK_SCHEMA = "cgmerge.library/1"
ENTRIES, OBJECTS, REMOVING = "entries", "objects", "removing"
HUB = "hf://"
# As in `modules.expert`, which is heavier to import than listing a library may be.
CONFIG, COMPRESSED, STORED = "adapter_config.json", ".cge", "expert.cge"


@dataclass(frozen=True, slots=True)
class Source:
    """A file to be stored: where it lies now, and what it must be."""

    path: Path
    sha256: str
    size: int


class Store(Protocol):
    """Reads files by their path within the library, `/` between the parts.

    Attributes:
        url: What users call the library.
    """

    url: str

    def names(self, folder: str) -> list[str]:
        """Return what is directly inside a folder, sorted; nothing where there is no folder."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name and bytes of the files directly inside a folder.

        Raises:
            Unsafe: The folder is a link.
        """

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a small file whole.

        Raises:
            NotFound: No such file.
            Unsafe: A link, a pipe or a device.
            LimitExceeded: Longer than `limit` bytes.
        """

    def read_all(self, folder: str, *, limit: int) -> Iterator[tuple[str, bytes | CgmergeError]]:
        """Read all files of a folder: name and content, or why it cannot be read."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """Read a large file piece by piece; errors as those of `read`."""

    def local(self, path: str) -> Path | None:
        """Return the folder on this machine that a folder of the library is, if it is one."""


class Writable(Store, Protocol):
    """Also writes, one file or one whole folder at a time."""

    def write(self, path: str, data: bytes, *, new: bool) -> bool:
        """Put a small file in place as a whole.

        Args:
            path: Where.
            data: What.
            new: Leave what is there alone.

        Returns:
            False where something was there and `new` was asked for.
        """

    def write_folder(self, path: str, files: Mapping[str, Source]) -> None:
        """Put a folder in place, in place of what is there.

        Raises:
            Damaged: A file is not what it must be.
        """

    def remove(self, path: str) -> None:
        """Remove a file or a folder; nothing happens where there is nothing."""

    def tidy(self) -> None:
        """Remove what writers left that were killed, where a storage has such a thing."""


def is_url(ref: str) -> bool:
    """Whether a reference is a URL rather than a path."""
    return "://" in ref


def local_path(ref: str) -> Path | None:
    """Return the folder that a path or a `file://` URL means; None for other URLs."""
    if not is_url(ref):
        return fs.absolute(expanded(ref))
    parts = urlsplit(ref)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{ref} names another host; write file:///path", code="ref")
    return fs.absolute(Path(unquote(parts.path)))


def open_store(ref: str) -> Store:
    """Open the place of a library, whether or not there is one yet.

    Args:
        ref: A folder, a URL, or `hf://user/repo[@revision]`.

    Raises:
        UsageError: Malformed, or a kind of URL that nobody knows.
        MissingExtra: A kind of URL whose package is not installed.
    """
    if not ref.strip() or "\0" in ref:
        raise UsageError("the library's name is empty", code="ref")
    path = local_path(ref)
    if path is not None:
        from cgmerge.modules.library.folder import Folder

        return Folder(path, ref)
    if ref.startswith(HUB):
        from cgmerge.modules.library.hub import Repository

        return Repository(ref)
    from cgmerge.modules.library.remote import Remote

    return Remote(ref)


def is_local_library(path: Path) -> bool:
    """Whether a folder on this machine is a library."""
    return os.path.isfile(path / MARK)  # noqa: PTH113  (Path.is_file raises on odd names)
