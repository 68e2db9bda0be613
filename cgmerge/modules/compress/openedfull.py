"""Compressed full fine-tunes as experts: deltas of signs, composed without being expanded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgmerge.errors import Incompatible, readable
from cgmerge.merge.deltas import Rows
from cgmerge.merge.ternary import Ternary
from cgmerge.modules.base import Base
from cgmerge.modules.compress.container import CgeFile
from cgmerge.shown import some_of

if TYPE_CHECKING:
    import torch

    from cgmerge.modules.compress.index import CodedInfo


@dataclass(frozen=True)
class CompressedFull:
    """The delta of one full fine-tune in a `.cge` file.

    Attributes:
        ref: What the user wrote.
        name: The model's name, from the manifest.
        folder: Absolute path of the file.
        file: Open; its header, manifest and index are checked.
        warnings: What the user should know.
    """

    ref: str
    name: str
    folder: Path
    file: CgeFile = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def base_fingerprint(self) -> str | None:
        """Return the fingerprint of the base it is relative to, where the file tells."""
        found: str | None = self.file.manifest["base"].get("fingerprint")
        return found

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the file: equal experts have equal bytes."""
        return self.file.sha256()


def open_compressed_full(
    path: Path, ref: str, base: Base, *, force_base: bool = False
) -> CompressedFull:
    """Open the compressed delta of a full fine-tune of a base; nothing is decoded.

    Args:
        path: The `.cge` file.
        ref: What the user wrote.
        base: What it is relative to; its shapes bound what the file may expand to.
        force_base: Accept another fingerprint (the shapes must still fit).

    Raises:
        Damaged: Truncated or altered.
        Incompatible: Another base, or weights that the base does not have.
        Unsafe: Beyond a limit.
    """
    shapes = _shapes(base)
    file = CgeFile.open(path, shapes=shapes)
    try:
        name = str((file.manifest.get("parents") or [{}])[0].get("name", path.stem))
        expert = CompressedFull(ref, readable(name, 200).replace("\n", " "), path, file)
        _check_base(expert, base, force=force_base)
        if file.dense or not file.coded:
            held = f"dense weights: {some_of(list(file.dense))}" if file.dense else "nothing"
            raise Incompatible(f"{path} holds {held}", code="weights", path=path)
    except BaseException:
        file.close()
        raise
    return expert


class CompressedDeltas(Mapping[str, Rows]):
    """Weight name to delta; a tensor is decoded when its rows are first asked for.

    Args:
        expert: From `open_compressed_full`.
        base: The same base.
        embedding: Where head and embedding are apart in the result but one in the file, the
            embedding's name and the head's.
    """

    def __init__(
        self, expert: CompressedFull, base: Base, embedding: tuple[str, str] | None = None
    ) -> None:
        self.expert = expert
        self.base = base
        self._sources = {name: name for name in expert.file.coded}
        if embedding is not None and embedding[1] not in self._sources:
            self._sources[embedding[1]] = embedding[0]

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return (out, in, rank) of every weight, without decoding it."""
        found = {}
        for name, source in self._sources.items():
            info = self.expert.file.coded[source]
            found[name] = info.rows, info.columns, min(info.rows, info.columns)
        return found

    @cached_property
    def nonzeros(self) -> dict[str, int]:
        """Return how many entries of every weight are not 0; decodes all of them once."""
        read = self.expert.file.read
        counts = {s: int(np.count_nonzero(read(s).levels)) for s in set(self._sources.values())}
        return {name: counts[source] for name, source in self._sources.items()}

    def __getitem__(self, name: str) -> Rows:
        source = self._sources[name]
        info = self.expert.file.coded[source]
        shape = self.base.infos[source].shape
        if len(shape) == 2:  # the file's orientation: [out, in], whatever the base's files have
            shape = info.rows, info.columns
        if info.dtype == "I8" and info.scales == 1 and not info.transposed:
            return _Signs(self.expert.file, source, shape)
        return _Levels(self.expert.file, source, info, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class _Signs(Ternary):
    """One weight of signs times a scale."""

    def __init__(self, file: CgeFile, name: str, shape: tuple[int, ...]) -> None:
        self.file = file
        self.name = name
        self.shape = shape

    @cached_property
    def _coded(self) -> "tuple[np.ndarray[Any, np.dtype[np.int8]], float]":
        coded = self.file.read(self.name)
        if coded.levels.size and int(np.abs(coded.levels).max()) > 1:
            raise Incompatible(
                f"{self.file.path}: weight {self.name!r} is not made of signs",
                code="levels",
                tensor=self.name,
            )
        return coded.levels, float(coded.scales[0])

    @property
    def scale(self) -> float:  # type: ignore[override]  # read when asked for
        """Return the scale of the signs."""
        return self._coded[1]

    def trits(self, first: int, last: int) -> "np.ndarray[Any, np.dtype[np.int8]]":
        """Return rows of signs."""
        return self._coded[0][first:last]


class _Levels(Rows):
    """One weight of whole numbers with a scale for each row."""

    def __init__(self, file: CgeFile, name: str, info: "CodedInfo", shape: tuple[int, ...]) -> None:
        if info.transposed:
            raise Incompatible(
                f"{file.path}: weight {name!r} is stored by columns", code="levels", tensor=name
            )
        self.file = file
        self.name = name
        self.shape = shape

    @cached_property
    def _whole(self) -> "torch.Tensor":
        return self.file.read(self.name).tensor()

    def rows(self, first: int, last: int) -> "torch.Tensor":
        """Return rows, float32."""
        return self._whole[first:last].clone()


def _shapes(base: Base) -> dict[str, tuple[int, int]]:
    """Return rows and columns of every weight as the file has it: matrices are [out, in]."""
    transposed = {shape.weight for shape in base.modules.values() if shape.transposed}
    found = {}
    for name, info in base.infos.items():
        shape = info.shape
        if len(shape) < 2:
            found[name] = 1, shape[0] if shape else 1
        else:
            rows, columns = shape[0], int(np.prod(shape[1:]))
            found[name] = (columns, rows) if name in transposed else (rows, columns)
    if base.embedding is not None and "lm_head.weight" not in found:
        found["lm_head.weight"] = found[base.embedding]
    return found


def _check_base(expert: CompressedFull, base: Base, *, force: bool) -> None:
    expected = expert.base_fingerprint
    if expected in (None, base.fingerprint) or force:
        return
    raise Incompatible(
        f"{expert.folder} is relative to another base: {expert.file.manifest['base']['id']}"
        f" {expected}, but {base.ref} is {base.fingerprint}",
        code="base",
        hint="pass the base it was made with, or --force-base where the command has it",
        path=expert.folder,
        expected=expected,
        found=base.fingerprint,
    )
