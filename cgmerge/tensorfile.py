"""Read safetensors files from strangers: header first, bounded, one tensor at a time.

The header is checked here (not by the library) because the checks must come before any
allocation, must name the field, and because listing an expert must not import torch. Data are
read with `pread` into fresh memory, never mapped, so that a file that changes while it is read
cannot crash the process or differ from what was hashed. safetensors has no checksum; digests are
kept in cards and verified with `sha256`.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cgmerge import strictjson
from cgmerge.errors import (
    Damaged,
    EnvironmentProblem,
    Incompatible,
    LimitExceeded,
    NotFound,
    Unsafe,
)

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 8
_CHUNK = 1 << 22
# What a failed open says about the machine, not about the file.
_ENVIRONMENT = {errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: dtype name as in the format, shape, byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open safetensors file whose header has been checked.

    Use as a context manager, or call `close`.

    Args:
        path: A regular file; symbolic links are refused unless `follow_links`.
        max_header: Refuse longer headers before reading them (bytes).
        max_tensors: Refuse files with more tensors.
        follow_links: Allow a link as the last part (hub caches are made of links).

    Raises:
        NotFound: No such file.
        Unsafe: A link, pipe or device.
        Damaged: Truncated, over-long, overlapping, or not safetensors at all.
        LimitExceeded: Header longer, or more tensors, than allowed.
        EnvironmentProblem: No permission, or too many open files.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_header: int = MAX_HEADER_BYTES,
        max_tensors: int | None = None,
        follow_links: bool = False,
    ) -> None:
        self.path = path
        self._handle = open_regular(path, follow_links=follow_links)
        try:
            self.size = os.fstat(self._handle).st_size
            self.infos, self.metadata = self._read_header(max_header, max_tensors)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; reading afterwards fails."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        # As the interpreter ends, modules may be gone before this file is: the system closes it.
        if os is not None and getattr(self, "_handle", -1) >= 0:
            self.close()

    def read(self, name: str) -> "torch.Tensor":
        """Read one tensor in the dtype it is stored in.

        Raises:
            Damaged: The file became shorter since it was opened.
        """
        import torch

        info = self.infos[name]
        dtype = torch_dtype(info.dtype)
        if info.end == info.start:
            return torch.empty(info.shape, dtype=dtype)
        tensor = torch.empty(info.shape, dtype=dtype)
        self._fill(tensor.reshape(-1), info.start)
        return tensor

    def read_rows(self, name: str, first: int, last: int) -> bytes:
        """Read raw bytes `first:last` of one tensor's data (offsets in bytes, within it)."""
        info = self.infos[name]
        return self._pread(info.start + first, last - first)

    def read_entries(self, name: str, first: int, last: int) -> "torch.Tensor":
        """Read entries `first:last` of one tensor, flattened row by row, in the stored dtype."""
        import torch

        dtype = torch_dtype(self.infos[name].dtype)
        if last <= first:
            return torch.empty(0, dtype=dtype)
        width = DTYPE_BYTES[self.infos[name].dtype]
        tensor = torch.empty(last - first, dtype=dtype)
        self._fill(tensor, self.infos[name].start + first * width)
        return tensor

    def read_span(self, first: int, last: int) -> bytes:
        """Read raw bytes `first:last` of the file itself, header included."""
        return self._pread(first, last - first)

    def sha256(self) -> str:
        """Hash the whole file as it is now, in hexadecimal."""
        digest = hashlib.sha256()
        for start in range(0, self.size, _CHUNK):
            digest.update(self._pread(start, min(_CHUNK, self.size - start)))
        return digest.hexdigest()

    def _fill(self, flat: "torch.Tensor", start: int) -> None:
        """Read into a tensor's own memory: no copy, and nothing is cleared first."""
        import torch

        view, done = flat.view(torch.uint8).numpy().data, 0
        while done < len(view):
            with _naming(self.path):
                got = os.preadv(self._handle, [view[done : done + (1 << 30)]], start + done)
            if not got:
                raise Damaged(
                    f"{self.path} became shorter while it was read", code="changed", path=self.path
                )
            done += got

    def _pread(self, start: int, count: int) -> bytes:
        parts = []
        while count:
            with _naming(self.path):
                part = os.pread(self._handle, min(count, 1 << 30), start)
            if not part:
                raise Damaged(
                    f"{self.path} became shorter while it was read", code="changed", path=self.path
                )
            parts.append(part)
            start += len(part)
            count -= len(part)
        return b"".join(parts)

    def _read_header(
        self, max_header: int, max_tensors: int | None
    ) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        if self.size < 8:
            raise self._damaged(f"has {self.size} bytes; a safetensors file has at least 8")
        length = int.from_bytes(self._pread(0, 8), "little")
        if length > self.size - 8:
            raise self._damaged(
                f"announces a header of {length:,} bytes but has {self.size:,} bytes in all"
            )
        if length > max_header:
            raise LimitExceeded(
                f"{self.path} has a header of {length:,} bytes; the limit is {max_header:,}",
                code="header_size",
                path=self.path,
            )
        header = strictjson.loads_object(
            self._pread(8, length), source=f"the header of {self.path}", max_bytes=max_header
        )
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._damaged("has metadata that is not a map of strings")
        if max_tensors is not None and len(header) > max_tensors:
            raise LimitExceeded(
                f"{self.path} holds {len(header):,} tensors; the limit is {max_tensors:,}",
                code="tensors",
                path=self.path,
            )
        infos = {name: self._info(name, entry, 8 + length) for name, entry in header.items()}
        self._check_coverage(infos, 8 + length)
        return infos, metadata

    def _info(self, name: str, entry: object, body: int) -> TensorInfo:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"describes tensor {name!r} wrongly")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str):
            raise self._damaged(f"describes tensor {name!r} wrongly")
        if dtype not in DTYPE_BYTES:
            raise Incompatible(
                f"{self.path}: tensor {name!r} has dtype {dtype!r}, which is not supported",
                code="dtype",
                path=self.path,
                tensor=name,
            )
        bounded = _naturals(shape) and len(shape) <= MAX_AXES
        if not bounded or not _naturals(offsets) or len(offsets) != 2:
            raise self._damaged(f"describes tensor {name!r} wrongly")
        start, end = offsets
        wanted = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - start != wanted:
            raise self._damaged(
                f"gives tensor {name!r} {end - start:,} bytes; {dtype} {shape} takes {wanted:,}"
            )
        return TensorInfo(dtype, tuple(shape), body + start, body + end)

    def _check_coverage(self, infos: dict[str, TensorInfo], body: int) -> None:
        """Tensors must tile the body: no overlap, no hole, nothing before or after."""
        expected = body
        for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
            if info.start != expected:
                raise self._damaged(f"has tensor {name!r} at {info.start}, expected {expected}")
            expected = info.end
        if expected != self.size:
            raise self._damaged(f"has {self.size:,} bytes; its tensors need {expected:,}")

    def _damaged(self, what: str) -> Damaged:
        return Damaged(
            f"{self.path} {what}",
            code="file",
            hint="the file is damaged or incomplete; fetch or write it again",
            path=self.path,
            found=self.size,
        )


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch type of a dtype name of the format, e.g. `BF16`."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[name])
    return dtype


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the format's name of a torch type, e.g. `BF16`."""
    word = str(dtype).removeprefix("torch.")
    return next(name for name, torch_name in _TORCH_NAMES.items() if torch_name == word)


def plan_file(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str], int]:
    """Lay a safetensors file out before its data exist.

    Args:
        tensors: Name to dtype name and shape.
        metadata: Header strings; `format: pt` where none are given.

    Returns:
        Everything before the data; the order in which the tensors' data must follow (wide types
        first, as the format's own writer has it, so that all are aligned); the size of the file.
    """
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name][0]], name))
    infos = {}
    place = 0
    for name in order:
        dtype, shape = tensors[name]
        end = place + math.prod(shape) * DTYPE_BYTES[dtype]
        infos[name] = TensorInfo(dtype, shape, place, end)
        place = end
    head = header_bytes(infos, {"format": "pt"} if metadata is None else metadata)
    return head, order, len(head) + place


def header_bytes(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Write everything before the data, in the one form that the format's own writer has.

    Args:
        infos: In the order of the header; byte ranges within the data.
        metadata: Header strings.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, info in infos.items():
        place = [info.start, info.end]
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_regular(path: Path | str, *, follow_links: bool = False) -> int:
    """Open a regular file for reading; never a link, pipe, device or folder.

    Returns:
        A file descriptor.

    Raises:
        NotFound: No such file.
        Unsafe: Not a regular file.
        EnvironmentProblem: No permission, or too many open files.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise NotFound(f"no such file: {path}", code="file", path=path) from error
    except OSError as error:
        if error.errno in _ENVIRONMENT:
            raise EnvironmentProblem(
                f"{path} cannot be opened: {error.strerror}", code="open", path=path
            ) from error
        raise Unsafe(
            f"{path} cannot be opened as a regular file: {error.strerror}",
            code="not_regular",
            hint="symbolic links inside an expert are not followed; copy the file itself",
            path=path,
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unsafe(f"{path} is not a regular file", code="not_regular", path=path)
    return handle


def read_small(
    path: Path | str, *, limit: int = strictjson.MAX_BYTES, follow_links: bool = False
) -> bytes:
    """Read a small regular file whole.

    Raises:
        NotFound, Unsafe: As `open_regular`.
        LimitExceeded: Longer than `limit` bytes.
    """
    handle = open_regular(path, follow_links=follow_links)
    try:  # without a file object, which takes longer than all the rest for a small file
        data = os.read(handle, limit + 1)
        while len(data) <= limit and (more := os.read(handle, limit + 1 - len(data))):
            data += more
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(handle)
    if len(data) > limit:
        raise LimitExceeded(
            f"{path} is longer than the limit of {limit:,} bytes", code="file_size", path=path
        )
    return data


def file_sha256(path: Path, *, follow_links: bool = True) -> str:
    """Hash a regular file, in hexadecimal."""
    handle = open_regular(path, follow_links=follow_links)
    with _naming(path), os.fdopen(handle, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """Let errors of reads name the file; the system knows only a handle by then."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**62 for item in value
    )
