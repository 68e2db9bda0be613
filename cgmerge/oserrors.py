"""What the operating system refuses, in words."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from cgmerge.errors import StorageError

_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would pass the size limit",
    errno.EIO: "the device reported an input/output error",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


def reason_of(error: OSError) -> str:
    """Say in words why the operating system refused."""
    reason = _WORDS.get(error.errno or 0, error.strerror or str(error))
    return reason or type(error).__name__


@contextlib.contextmanager
def plain_os_errors(path: Path) -> Iterator[None]:
    """Turn what safetensors makes of a full disk back into the OSError that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


@contextlib.contextmanager
def storage_errors(path: Path, needed: int) -> Iterator[None]:
    """Raise `StorageError` for what goes wrong in the `with` block; `needed` bytes are named."""
    try:
        yield
    except OSError as error:
        raise as_storage_error(error, path, needed) from error


def as_storage_error(error: OSError, path: Path, needed: int) -> StorageError:
    """Describe an error of the operating system, with the bytes needed and free."""
    reason = reason_of(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free: int | None = None
    with contextlib.suppress(OSError):
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        free = shutil.disk_usage(folder).free
    room = f" ({needed:,} bytes needed, {free:,} free)" if needed and free is not None else ""
    return StorageError(
        f"cannot write {path}: {reason}{room}",
        code="write",
        hint=f"{'free some space or ' if full else ''}choose another --out; nothing was changed",
        path=path,
        needed=needed,
        free=free,
    )
