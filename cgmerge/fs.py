"""The only module that writes files.

A command builds everything it writes in a private folder beside the target and then puts it in
place with one rename, so that a crash at any moment leaves the old content or the new content,
never a mixture. Data and folders are fsynced first, modes follow the umask (safetensors writes
0600), and leftovers of killed writers are collected by the next one.

Every operation that changes the disk passes through `_step`, which tests replace to make the
k-th operation fail or kill the process.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import strictjson
from cgmerge.errors import StorageError, UsageError
from cgmerge.oserrors import as_storage_error, plain_os_errors, storage_errors
from cgmerge.outputs import refuse_foreign, refuse_here, refuse_special

if TYPE_CHECKING:
    import torch

_MARK = ".cgmerge-tmp-"
_NAME_BYTES = 80
"""Kept of a name in temporary ones, so that those fit whatever name fits (255 bytes)."""

_DAY = 86_400.0
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


def _step(operation: str, path: Path) -> None:
    """Announce a disk operation; the seam through which tests inject faults."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file inside a staged folder and fsync it.

    Raises:
        StorageError: The operating system refused; says how many bytes were needed and free.
    """
    with storage_errors(path, len(data)):
        _step("write", path)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            _step("fsync", path)
            os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write canonical JSON (sorted keys, final newline) inside a staged folder."""
    write_bytes(path, strictjson.dumps(value))


def write_lines(path: Path, lines: Iterator[bytes] | list[bytes]) -> None:
    """Write many lines without holding them all, inside a staged folder."""
    with storage_errors(path, 0):
        _step("write", path)
        with path.open("wb") as file:
            for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def write_chunks(path: Path, chunks: "Iterable[bytes | memoryview]", size: int) -> str:
    """Write a file inside a staged folder piece by piece, so that it is never in memory whole.

    Args:
        path: Target, in a folder from `new_folder`.
        chunks: What to write; errors of whoever makes them pass through unchanged.
        size: Bytes of all of them, for the message when the disk is full.

    Returns:
        The sha256 of what was to be written, in hexadecimal, to compare with what can be read.

    Raises:
        StorageError: The operating system refused; says how many bytes were needed and free.
    """
    digest = hashlib.sha256()
    with storage_errors(path, size):
        _step("write", path)
        file = path.open("wb", buffering=1 << 20)
    try:
        for chunk in chunks:
            digest.update(chunk)
            with storage_errors(path, size):
                file.write(chunk)
        with storage_errors(path, size):
            file.flush()
            _step("fsync", path)
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):  # what close would write again was reported above
            file.close()
    return digest.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, "torch.Tensor"], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file inside a staged folder.

    Args:
        path: Target, in a folder from `new_folder`.
        tensors: Contiguous CPU tensors that do not share memory.
        metadata: Extra header strings; `format: pt` is always there.
    """
    from safetensors.torch import save_file

    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with storage_errors(path, size), plain_os_errors(path):
        _step("write", path)
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})


def make_folder(path: Path) -> None:
    """Make a folder inside a staged one."""
    with storage_errors(path, 0):
        _step("mkdir", path)
        path.mkdir()


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file into a staged folder."""
    with storage_errors(target, source.stat().st_size):
        _step("copy", target)
        shutil.copyfile(source, target)


@contextlib.contextmanager
def new_folder(out: Path, *, overwrite: bool = False, own: bool = False) -> Iterator[Path]:
    """Stage a result folder and commit it on success.

    Args:
        out: The folder.
        overwrite: Replace a result that is there.
        own: The place is this package's alone, as in a cache: whatever is there is replaced.

    Yields:
        A private folder beside `out` (same file system), to be filled with the functions here
        or by any library that saves to a path.

    Raises:
        UsageError: `out` exists and `overwrite` is false, it is a file, or not a result.
        StorageError: The folder cannot be written.
    """
    out = absolute(out)
    _check_folder(out, overwrite=overwrite, own=own)
    with storage_errors(out.parent, 0):
        out.parent.mkdir(parents=True, exist_ok=True)
    collect_leftovers(out.parent)
    stage = _temporary_beside(out)
    with storage_errors(stage, 0):
        _step("mkdir", stage)
        stage.mkdir()
    try:
        with plain_os_errors(out):
            yield stage
        _seal(stage)
        _put_in_place(stage, out, overwrite=overwrite)
    except OSError as error:
        raise as_storage_error(error, out, 0) from error
    finally:
        if stage.exists():
            shutil.rmtree(stage, ignore_errors=True)


def replace_file(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Put one file in place atomically: unique temporary, fsync, rename, fsync of the folder.

    Raises:
        UsageError: `path` exists and `overwrite` is false.
        StorageError: The operating system refused.
    """
    with _replacing(path, len(data), overwrite=overwrite) as temporary:
        write_bytes(temporary, data)


def replace_chunks(
    path: Path, chunks: "Iterable[bytes | memoryview]", size: int, *, overwrite: bool = True
) -> None:
    """Put one file in place atomically, written piece by piece; see `write_chunks`.

    Raises:
        UsageError: `path` exists and `overwrite` is false.
        StorageError: The operating system refused.
    """
    with _replacing(path, size, overwrite=overwrite) as temporary:
        write_chunks(temporary, chunks, size)


def replace_tensors(
    path: Path,
    tensors: Mapping[str, "torch.Tensor"],
    metadata: Mapping[str, str],
    *,
    overwrite: bool = True,
) -> None:
    """Put one safetensors file in place atomically; see `write_tensors`.

    Raises:
        UsageError: `path` exists and `overwrite` is false.
        StorageError: The operating system refused.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with _replacing(path, size, overwrite=overwrite) as temporary:
        write_tensors(temporary, tensors, metadata)
        with storage_errors(path, size), temporary.open("rb") as file:
            _step("fsync", temporary)
            os.fsync(file.fileno())


@contextlib.contextmanager
def _replacing(
    path: Path, size: int, *, overwrite: bool, put: Callable[[Path, Path], object] = Path.replace
) -> Iterator[Path]:
    """Yield a temporary beside `path` that takes its place when it was filled."""
    path = absolute(path)
    check_free(path, overwrite=overwrite)
    with storage_errors(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
    collect_leftovers(path.parent)
    temporary = _temporary_beside(path)
    try:
        yield temporary
        with storage_errors(path, size):
            temporary.chmod(0o666 & ~_umask())
            _step("rename", path)
            put(temporary, path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def create_file(path: Path, data: bytes) -> bool:
    """Put a new file in place atomically; of several writers exactly one succeeds.

    Returns:
        False where there was one already; it is left alone.
    """
    try:
        with _replacing(path, len(data), overwrite=False, put=_link) as temporary:
            write_bytes(temporary, data)
    except UsageError:
        return False
    return True


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, which nothing has yet."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        source.replace(target)  # a file system without links: the best that it can do


def remove_place(path: Path) -> None:
    """Remove a file or a folder in one step; nothing happens where there is nothing."""
    path = absolute(path)
    gone = _temporary_beside(path)
    with storage_errors(path, 0), contextlib.suppress(FileNotFoundError):
        _step("rename", path)
        path.rename(gone)
        try:
            _sync_folder(path.parent)
            _step("remove", gone)
        finally:
            remove(gone)


def move_file(source: Path, target: Path) -> None:
    """Give a finished file its final name, in place of what has it; both in one folder.

    Raises:
        StorageError: The operating system refused.
    """
    with storage_errors(target, 0):
        _step("rename", target)
        source.replace(target)
        _sync_folder(target.parent)


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse an unusable output folder before any work is done.

    Raises:
        UsageError: It exists and may not be replaced, or is not a folder.
        StorageError: Nothing can be made where it shall be.
    """
    out = absolute(out)
    _check_folder(out, overwrite=overwrite, own=False)
    _check_writable(out)


def check_file(path: Path, *, overwrite: bool) -> None:
    """Refuse an unusable output file before any work is done.

    Raises:
        UsageError: It exists and may not be replaced, or is no regular file.
        StorageError: Nothing can be made where it shall be.
    """
    path = absolute(path)
    check_free(path, overwrite=overwrite)
    _check_writable(path)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that is there and may not be replaced, or that is none."""
    with storage_errors(path, 0):
        refuse_special(path)
        if path.exists() and not overwrite:
            raise _exists(path)


def _check_folder(out: Path, *, overwrite: bool, own: bool) -> None:
    with storage_errors(out, 0):
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise UsageError(f"{out} exists and is not a folder", code="out_is_file")
        if not out.is_dir():
            return
        held = any(out.iterdir())
        if held and not overwrite:
            raise _exists(out)
        if not own:
            refuse_here(out)
            refuse_foreign(out)


def _check_writable(path: Path) -> None:
    """Make something where a result shall be, and remove it: permissions do not tell of /proc."""
    with storage_errors(path, 0):
        parent = next(folder for folder in path.parents if folder.exists())
        if not parent.is_dir():
            raise UsageError(f"{parent} is a file, not a folder", code="out_parent")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise StorageError(
                f"{parent} cannot be written",
                code="permission",
                hint="choose another --out",
                path=parent,
            )
        probe = _temporary_beside(parent / path.name)
        _step("probe", probe)
        probe.mkdir()
        probe.rmdir()


def cut_name(name: str, limit: int) -> str:
    """Cut a file name to so many bytes, which is what file systems count, at a whole character."""
    return os.fsencode(name)[:limit].decode("utf-8", errors="ignore")


def absolute(path: Path) -> Path:
    """Make a path absolute without following symbolic links."""
    return Path(os.path.abspath(path))  # noqa: PTH100  (Path.resolve would follow links)


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists already", code="out_exists", hint="choose another --out, or --overwrite"
    )


def _seal(stage: Path) -> None:
    """Fsync every file and folder and give them the modes that the umask asks for."""
    mask = _umask()
    for folder, _, names in os.walk(stage, topdown=False):
        for name in names:
            path = Path(folder) / name
            path.chmod(0o666 & ~mask)
            _step("fsync", path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        Path(folder).chmod(0o777 & ~mask)
        _sync_folder(Path(folder))


def _put_in_place(stage: Path, out: Path, *, overwrite: bool) -> None:
    if out.is_dir() and not any(out.iterdir()):
        _step("rename", out)
        stage.rename(out)  # POSIX: a folder may replace an empty one
    elif out.exists():
        if not overwrite:  # somebody else finished while we worked
            raise _exists(out)
        _step("exchange", out)
        _exchange(stage, out)
    else:
        _step("rename", out)
        stage.rename(out)
    _sync_folder(out.parent)


def _exchange(stage: Path, out: Path) -> None:
    """Swap two folders in one step; `stage` then holds the old content and is removed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        rename = getattr(libc, "renameat2", None)
        if rename is not None:
            at_cwd, exchange = -100, 2
            arguments = (at_cwd, os.fsencode(stage), at_cwd, os.fsencode(out), exchange)
            if rename(*arguments) == 0:
                return
            if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(out))
    # No atomic exchange on this system: between the two renames `out` is missing, and the old
    # content stands beside it under the temporary name.
    old = stage.with_name(stage.name + "-old")
    out.rename(old)
    stage.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    # The umask can only be read by setting it; /proc tells it without the race.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _temporary_beside(path: Path) -> Path:
    """Name a private file or folder that `collect_leftovers` knows as ours."""
    name = f".{cut_name(path.name, _NAME_BYTES)}{_MARK}{writer_id()}-{secrets.token_hex(4)}"
    return path.with_name(name)


def writer_id() -> str:
    """Name this process so that others can tell whether it still lives; see `writer_is_dead`."""
    host = zlib.crc32(socket.gethostname().encode())
    return f"{host:08x}-{os.getpid()}"


def writer_is_dead(writer: str) -> bool:
    """Whether the process with this `writer_id` ran on this machine and is gone."""
    host, number = (*writer.split("-"), "")[:2]
    return host == writer_id().split("-")[0] and number.isdigit() and not _alive(int(number))


def collect_leftovers(folder: Path) -> None:
    """Remove temporaries of writers that were killed: on this host when the process is gone."""
    here = writer_id().partition("-")[0]
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            _, mark, tail = entry.name.partition(_MARK)
            if not mark or not entry.name.startswith("."):
                continue
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if writer_is_dead(tail) or (not tail.startswith(here) and age > _DAY):
                remove(Path(entry.path))


def remove(path: Path) -> None:
    """Remove a file, a link, or a whole folder; nothing happens where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
