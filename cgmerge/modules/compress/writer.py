"""Write `.cge` files: compressed experts in a valid safetensors file. See docs/FORMAT.md."""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgmerge import fs
from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.compress import codec, digests, index, manifest
from cgmerge.modules.compress.dense import Dense, check_values
from cgmerge.modules.compress.index import CodedInfo
from cgmerge.modules.compress.sections import Coded
from cgmerge.tensorfile import plan_file

if TYPE_CHECKING:
    import torch

Pieces = list[bytes | memoryview]

MAX_HEADER = 1 << 20
MAX_FILE = 1 << 36
MAX_SCALE = 2.0**64
METADATA = "cgmerge"
DENSE = "dense."


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_cge` wrote.

    Attributes:
        size: Bytes of the file.
        content: Digest of the tensors, by which the expert is known.
        payload: Bytes of the coded levels alone.
    """

    size: int
    content: str
    payload: int


def write_cge(
    path: Path,
    coded: Iterable[Coded],
    dense: "Mapping[str, Dense | np.ndarray[Any, Any] | torch.Tensor]",
    fields: Mapping[str, Any],
    *,
    details: Mapping[str, Any] | None = None,
    overwrite: bool = True,
) -> Written:
    """Write a compressed expert; equal input gives equal bytes.

    Args:
        path: Target, put in place atomically.
        coded: Tensors in any order, one after the other.
        dense: Tensors to be stored as they are.
        fields: The manifest but for what only this function knows (`manifest.WRITTEN_HERE`).
        details: A JSON object for what is too long for the header: it is deflated and not read
            by those who only want to know what the file is.
        overwrite: Replace a file that exists.

    Raises:
        Damaged: Scales or entries that are not finite.
        UsageError: Names, shapes or fields that the format does not have; an existing file.
        StorageError: The operating system refused.
    """
    encoded: dict[str, tuple[bytes, bytes, CodedInfo]] = {}
    sums: dict[str, str] = {}
    for tensor in coded:
        _check_name(tensor.name, encoded)
        encoded[tensor.name] = _encode(tensor)
        _, factors, info = encoded[tensor.name]
        sums[tensor.name] = digests.of_coded(tensor.name, info, tensor.levels, factors)
    plain: dict[str, Dense] = {}
    for name, value in dense.items():
        _check_name(name, encoded)
        plain[name] = value if isinstance(value, Dense) else Dense.of(value)
        check_values(plain[name].dtype, plain[name].data, name)
        sums[name] = digests.of_dense(
            name, plain[name].dtype, plain[name].shape, [plain[name].data]
        )
    parts: dict[str, Pieces] = {
        "payload": [encoded[name][0] for name in sorted(encoded)],
        "scales": [encoded[name][1] for name in sorted(encoded)],
        "index": [_pack_index(encoded, plain, details)],
    }
    content = digests.of_content(sums)
    numel = sum(info.numel for _, _, info in encoded.values())
    numel += sum(math.prod(value.shape) for value in plain.values())
    stated = hashlib.sha256(parts["index"][0]).hexdigest()
    text = manifest.build(dict(fields), numel=numel, content=content, index=stated)
    counts = {name: sum(map(len, pieces)) for name, pieces in parts.items()}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "payload": ("U8", (counts["payload"],)),
        "scales": ("F32", (counts["scales"] // 4,)),
        "index": ("U8", (counts["index"],)),
    }
    for name, value in plain.items():
        parts[DENSE + name] = [value.data]
        shapes[DENSE + name] = (value.dtype, value.shape)
    head, order, size = plan_file(shapes, {METADATA: text})
    if len(head) > 8 + MAX_HEADER or size > MAX_FILE:
        raise UsageError(
            f"a .cge of {size:,} bytes with a header of {len(head) - 8:,} cannot be written; the"
            f" limits are {MAX_FILE:,} and {MAX_HEADER:,}",
            code="size",
        )
    fs.replace_chunks(path, _join(head, parts, order), size, overwrite=overwrite)
    return Written(size, content, counts["payload"])


def good_scales(scales: "np.ndarray[Any, Any]") -> bool:
    """Whether all scales are numbers above 0 and not absurdly large."""
    # Written so that NaN, of which nothing is true, fails.
    return bool(np.all((scales > 0) & (scales <= MAX_SCALE)))


def _join(
    head: bytes, parts: Mapping[str, Pieces], order: list[str]
) -> Iterator[bytes | memoryview]:
    yield head
    for name in order:
        yield from parts[name]


def _encode(tensor: Coded) -> tuple[bytes, bytes, CodedInfo]:
    """Check and code one tensor: section, scales as bytes, and what the index says of it."""
    name, scales = tensor.name, np.asarray(tensor.scales)
    section = _as_usage(lambda: codec.encode(tensor.levels), f"tensor {name!r}")
    rows, columns = tensor.levels.shape
    if scales.dtype != np.float32 or scales.shape not in ((1,), (rows,)):
        raise UsageError(
            f"tensor {name!r} has {scales.dtype} scales {scales.shape}; float32 (1,) or ({rows},)"
            " is wanted",
            code="scale",
            tensor=name,
        )
    if not good_scales(scales):
        raise Damaged(
            f"tensor {name!r} has scales that are not finite and above 0", code="scale", tensor=name
        )
    factors = scales.astype("<f4").tobytes()
    info = CodedInfo(
        rows=rows,
        columns=columns,
        dtype=codec.dtype_of(tensor.levels),
        scales=len(scales),
        transposed=tensor.transposed,
        bytes=len(section),
        crc32=zlib.crc32(factors, zlib.crc32(section)),
    )
    return section, factors, info


def _pack_index(
    encoded: Mapping[str, tuple[bytes, bytes, CodedInfo]],
    plain: Mapping[str, Dense],
    details: Mapping[str, Any] | None,
) -> bytes:
    infos = {name: encoded[name][2] for name in sorted(encoded)}
    sums = {name: zlib.crc32(value.data) for name, value in plain.items()}
    if len(infos) + len(sums) > index.MAX_TENSORS:
        raise UsageError(
            f"{len(infos) + len(sums):,} tensors are too many; the limit is {index.MAX_TENSORS:,}",
            code="tensors",
        )
    return _as_usage(lambda: index.pack(infos, sums, details), "the index")


def _check_name(name: str, taken: Mapping[str, object]) -> None:
    if not index.check_name(name):
        raise UsageError(f"a tensor cannot be stored under the name {name!r}", code="name")
    if name in taken:
        raise UsageError(f"the tensor {name!r} is there twice", code="name", tensor=name)


def _as_usage(make: Callable[[], bytes], what: str) -> bytes:
    """Make bytes, and say of what they could not be made."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise UsageError(f"{what} cannot be written: {error}", code="format") from error
