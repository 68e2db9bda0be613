"""Read `.cge` files: compressed experts in a valid safetensors file. `writer` writes them.

`payload` holds the coded levels, `scales` their factors, `index` what lies where, `dense.*`
tensors as they are; the header's one metadata entry is the manifest. See docs/FORMAT.md.

A reader trusts nothing before it was checked: the header, the manifest against its own digest,
the index against the manifest's, all sizes against each other and the file, and only then, tensor
by tensor, bytes against their checksum. Memory is bounded by the size of the file, not by what
the file says, unless the caller knows the shapes.
"""

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from cgmerge.errors import Damaged, Incompatible, InputError, LimitExceeded, Unsafe
from cgmerge.modules.compress import codec, digests, index, manifest
from cgmerge.modules.compress.dense import Dense, check_values
from cgmerge.modules.compress.index import CodedInfo
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.writer import (
    DENSE,
    MAX_FILE,
    MAX_HEADER,
    METADATA,
    Written,
    good_scales,
    write_cge,
)
from cgmerge.shown import some_of
from cgmerge.tensorfile import TensorFile, TensorInfo, header_bytes

__all__ = ["CgeFile", "Damage", "Written", "read_manifest", "write_cge"]

FREE_BYTES, EXPANSION = 64 << 20, 1024
"""Decoded bytes that any file may take, and that each byte of a file may become beyond that."""

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class Damage:
    """One tensor that is not what was written."""

    name: str
    error: InputError


class CgeFile:
    """An open compressed expert whose header, manifest and index have been checked.

    Use as a context manager. `manifest` holds the fields, `coded` and `dense` say what there is;
    nothing is decoded before `read`.

    Args:
        path: The file.
        follow_links: Allow a link as the last part of the path (hub caches are made of links).
        shapes: Rows and columns of the levels of every tensor, from the base model. Where they
            are given, the file must agree; where not, what it may expand to is bounded by its
            size.

    Raises:
        NotFound: No such file.
        Damaged: Truncated, altered, or not a `.cge` at all.
        Incompatible: A newer format, or other shapes.
        Unsafe: Beyond a limit, a link, or names that no tensor may have.
    """

    def __init__(
        self,
        path: Path,
        *,
        follow_links: bool = False,
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.path = path
        self._file = _open(path, follow_links=follow_links)
        try:
            self.manifest = manifest.parse(_manifest_text(self._file), str(path))
            _check_header(self._file)
            self._index = self._read_index()
            self.coded: Mapping[str, CodedInfo] = self._index.coded
            self.dense: Mapping[str, TensorInfo] = self._dense_infos()
            self.details: Mapping[str, Any] = self._index.details
            self._check_sizes()
            self._check_expansion(shapes)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        follow_links: bool = False,
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> Self:
        """Open a file; see the class."""
        return cls(path, follow_links=follow_links, shapes=shapes)

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
        self._file.close()

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return self._file.size

    def sha256(self) -> str:
        """Return the sha256 of the file's bytes."""
        return self._file.sha256()

    @property
    def content(self) -> str:
        """Return the digest of the tensors that the manifest states; `verify` checks it."""
        digest: str = self.manifest["digest"]["content"]
        return digest

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(sorted([*self.coded, *self.dense]))

    def read(self, name: str) -> Coded:
        """Read one coded tensor, checksum included.

        Raises:
            Damaged: Names the tensor.
        """
        info = self.coded[name]
        section = self._file.read_rows("payload", info.start, info.start + info.bytes)
        first = 4 * info.first_scale
        factors = self._file.read_rows("scales", first, first + 4 * info.scales)
        if zlib.crc32(factors, zlib.crc32(section)) != info.crc32:
            raise self._damaged(name, "is not what was written (crc32)", "crc32")
        scales = np.frombuffer(factors, "<f4").astype(np.float32)
        if not good_scales(scales):
            raise self._damaged(name, "has scales that are not finite and above 0", "scale")
        try:
            levels = codec.decode(section, info.rows, info.columns, info.dtype)
        except Damaged as error:
            raise self._damaged(name, error.message, "codec") from error
        return Coded(name, levels, scales, info.transposed)

    def read_dense(self, name: str) -> Dense:
        """Read one tensor that is stored as it is, checksum included.

        Raises:
            Damaged: Names the tensor.
        """
        info = self.dense[name]
        data = self._file.read_rows(DENSE + name, 0, info.end - info.start)
        if zlib.crc32(data) != self._index.dense[name]:
            raise self._damaged(name, "is not what was written (crc32)", "crc32")
        self._check_values(name, data)
        return Dense(info.dtype, info.shape, data)

    def damages(self) -> list[Damage]:
        """Read everything and list each tensor that is damaged; empty where none is."""
        found: list[Damage] = []
        sums: dict[str, str] = {}
        for name in self.names:
            try:
                sums[name] = self._digest(name)
            except InputError as error:
                found.append(Damage(name, error))
        if not found and digests.of_content(sums) != self.content:
            message = f"the tensors of {self.path} do not have the sha256 of the manifest"
            found.append(Damage("", Damaged(message, code="digest", field="digest.content")))
        return found

    def verify(self) -> None:
        """Check all checksums, all values and the digest of the tensors.

        Raises:
            Damaged: Names every damaged tensor.
        """
        found = self.damages()
        if not found:
            return
        named = [damage.name for damage in found if damage.name]
        rest = f" (and in {len(found) - 1:,} more: {', '.join(named[1:6])})" if named[1:] else ""
        raise Damaged(
            found[0].error.message + rest,
            code=found[0].error.code.split(".")[-1],
            hint="the file is damaged; fetch or write it again",
            path=self.path,
            tensor=named[0] if named else None,
            tensors=named,
        )

    def _digest(self, name: str) -> str:
        if name in self.coded:
            tensor = self.read(name)
            factors = tensor.scales.astype("<f4").tobytes()
            return digests.of_coded(name, self.coded[name], tensor.levels, factors)
        info, crc = self.dense[name], 0

        def pieces() -> Iterator[bytes]:
            nonlocal crc
            for start in range(0, info.end - info.start, _PIECE):
                end = min(start + _PIECE, info.end - info.start)
                piece = self._file.read_rows(DENSE + name, start, end)
                crc = zlib.crc32(piece, crc)
                self._check_values(name, piece)
                yield piece

        digest = digests.of_dense(name, info.dtype, info.shape, pieces())
        if crc != self._index.dense[name]:
            raise self._damaged(name, "is not what was written (crc32)", "crc32")
        return digest

    def _read_index(self) -> index.Index:
        infos = self._file.infos
        for name, dtype in (("payload", "U8"), ("scales", "F32"), ("index", "U8")):
            info = infos.get(name)
            if info is None or info.dtype != dtype or len(info.shape) != 1:
                raise Damaged(f"{self.path} lacks the {dtype} vector {name!r}", code="layout")
        size = infos["index"].shape[0]
        if size > index.MAX_INDEX:
            raise Unsafe(
                f"{self.path} has an index of {size:,} bytes; the limit is {index.MAX_INDEX:,}",
                code="index_size",
            )
        stored = self._file.read_rows("index", 0, size)
        if hashlib.sha256(stored).hexdigest() != self.manifest["digest"]["index"]:
            raise Damaged(
                f"the index of {self.path} does not have the sha256 of the manifest",
                code="digest",
                hint="the file is damaged; fetch or write it again",
                field="digest.index",
            )
        return index.unpack(stored, str(self.path))

    def _dense_infos(self) -> dict[str, TensorInfo]:
        fixed = {"payload", "scales", "index"}
        infos = {}
        for name, info in self._file.infos.items():
            if name not in fixed:
                if not name.startswith(DENSE) or not index.check_name(name[len(DENSE) :]):
                    raise Unsafe(f"{self.path} holds a tensor {name!r}", code="name", tensor=name)
                infos[name[len(DENSE) :]] = info
        if set(infos) != set(self._index.dense):
            odd = sorted(set(infos) ^ set(self._index.dense))[0]
            raise Damaged(
                f"header and index of {self.path} disagree on the tensor {odd!r}",
                code="layout",
                tensor=odd,
            )
        return dict(sorted(infos.items()))

    def _check_sizes(self) -> None:
        infos, coded = self._file.infos, self.coded.values()
        dense = sum(math.prod(info.shape) for info in self.dense.values())
        for what, expected, found in (
            ("bytes in payload", sum(info.bytes for info in coded), infos["payload"].shape[0]),
            ("scales", sum(info.scales for info in coded), infos["scales"].shape[0]),
            ("entries", sum(info.numel for info in coded) + dense, self.manifest["numel"]),
        ):
            if expected != found:
                raise Damaged(
                    f"the index of {self.path} makes {expected:,} {what}; there are {found:,}",
                    code="layout",
                    expected=expected,
                    found=found,
                )

    def _check_expansion(self, shapes: Mapping[str, tuple[int, int]] | None) -> None:
        if shapes is not None:
            for name, info in self.coded.items():
                if shapes.get(name) != (info.rows, info.columns):
                    raise Incompatible(
                        f"{self.path}: tensor {name!r} is {info.rows:,} × {info.columns:,};"
                        f" expected {shapes.get(name, 'no such tensor')}",
                        code="shape",
                        tensor=name,
                        expected=shapes.get(name),
                        found=(info.rows, info.columns),
                    )
            return
        decoded = sum(info.decoded_bytes for info in self.coded.values())
        limit = FREE_BYTES + EXPANSION * self.size
        if decoded > limit:
            largest = max(self.coded, key=lambda name: self.coded[name].decoded_bytes)
            raise Unsafe(
                f"{self.path} has {self.size:,} bytes and says that it expands to {decoded:,};"
                f" the limit is {limit:,} (largest tensor: {largest!r})",
                code="expansion",
                hint="give the base model, whose shapes then decide",
                tensor=largest,
                expected=limit,
                found=decoded,
            )

    def _check_values(self, name: str, data: bytes) -> None:
        try:
            check_values(self.dense[name].dtype, data, name)
        except Damaged as error:
            raise Damaged(
                f"{self.path}: {error.message}", code="not_finite", path=self.path, **error.details
            ) from error

    def _damaged(self, name: str, what: str, code: str) -> Damaged:
        return Damaged(
            f"{self.path}: tensor {name!r}: {what}",
            code=code,
            hint="the file is damaged; fetch or write it again",
            path=self.path,
            tensor=name,
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what a file says about itself, and nothing else.

    Raises:
        Damaged: Not a `.cge`, or altered.
        Incompatible: A newer format.
    """
    with _open(path, follow_links=False) as file:
        return manifest.parse(_manifest_text(file), str(path))


def _open(path: Path, *, follow_links: bool) -> TensorFile:
    """Open a safetensors file within this format's limits, which are those of a file, not ours."""
    try:
        file = TensorFile(
            path,
            max_header=MAX_HEADER,
            max_tensors=index.MAX_TENSORS + 3,
            follow_links=follow_links,
        )
    except LimitExceeded as error:
        raise Unsafe(error.message, code=error.code.split(".")[-1], **error.details) from error
    if file.size > MAX_FILE:
        file.close()
        raise Unsafe(f"{path} has {file.size:,} bytes; the limit is {MAX_FILE:,}", code="file_size")
    return file


def _manifest_text(file: TensorFile) -> str:
    if set(file.metadata) != {METADATA}:
        raise Damaged(
            f"{file.path} is no compressed expert: its metadata are"
            f" {some_of(sorted(file.metadata)) or 'none'}, not {METADATA}",
            code="metadata",
            hint="a .cge file comes from cgmerge compress",
            path=file.path,
        )
    return file.metadata[METADATA]


def _check_header(file: TensorFile) -> None:
    """Refuse a header with room for anything else: its bytes follow from what it says."""
    body = 8 + int.from_bytes(file.read_span(0, 8), "little")
    infos = {
        name: TensorInfo(info.dtype, info.shape, info.start - body, info.end - body)
        for name, info in file.infos.items()
    }
    if file.read_span(0, body) != header_bytes(infos, file.metadata):
        raise Damaged(f"{file.path} has a header that is not in its one form", code="header")
