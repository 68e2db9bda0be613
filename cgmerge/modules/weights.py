"""A model's weights in ranges of rows, from files that stay open: nothing is held whole."""

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge.errors import Damaged
from cgmerge.modules.base import Base
from cgmerge.tensorfile import TensorFile

if TYPE_CHECKING:
    import torch

CHUNK_ENTRIES = 1 << 20
"""Entries that are read at once where the whole tensor is not needed."""

_AHEAD = 8  # requests that are read at once for who reads a weight from front to back


class WeightReader:
    """The weights of one model folder.

    Args:
        model: Opened by its headers; a file is opened again when a weight of it is first read,
            and stays open, so that a rename does not change what is read.
    """

    def __init__(self, model: Base) -> None:
        self.model = model
        self._open: dict[Path, TensorFile] = {}
        self._window: tuple[str, int, torch.Tensor] | None = None
        self._next: tuple[str, int] | None = None
        self._last: tuple[tuple[str, int, int], torch.Tensor] | None = None

    def count(self, name: str) -> int:
        """Return the number of entries of a weight."""
        return math.prod(self.model.infos[name].shape)

    def entries(self, name: str, first: int, last: int) -> "torch.Tensor":
        """Read entries `first:last` of a weight, flattened row by row, in the stored dtype.

        Not to be modified: a few requests are read ahead, and may be answered twice.

        Raises:
            Damaged: The file is no longer what its header said.
        """
        in_order, self._next = self._next == (name, first), (name, last)
        if self._window is not None:
            held, start, values = self._window
            if held == name and start <= first and last <= start + values.numel():
                return values[first - start : last - start]
        end = last
        if in_order:  # small reads cost more for being asked than for being read
            most = max(last, first + CHUNK_ENTRIES // 2)
            end = min(first + _AHEAD * (last - first), most, self.count(name))
        found = self._read(name, first, end)
        self._window = name, first, found
        return found[: last - first]

    def _read(self, name: str, first: int, last: int) -> "torch.Tensor":
        path = self.model.files[name]
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = TensorFile(path, follow_links=True)
        if file.infos.get(name) != self.model.infos[name]:
            raise Damaged(f"{path} was changed while it was read", code="changed", path=path)
        return file.read_entries(name, first, last)

    def floats(self, name: str, first: int, last: int) -> "torch.Tensor":
        """Read entries as float32.

        Raises:
            Damaged: Some are NaN or infinite.
        """
        import torch

        return self.checked(name, self.entries(name, first, last).to(torch.float32))

    def shared_floats(self, name: str, first: int, last: int) -> "torch.Tensor":
        """Read entries as float32, once for all who ask for the same ones in a row.

        Not to be modified, and valid until other entries are asked for. Not checked: whoever
        computes with them checks the result.
        """
        import torch

        key = name, first, last
        if self._last is None or self._last[0] != key:
            entries = self.entries(name, first, last)
            memory = self._last[1] if self._last else torch.empty(0)
            if memory.numel() != last - first:
                memory = torch.empty(last - first)
            self._last = key, memory.copy_(entries)
        return self._last[1]

    def checked(self, name: str, values: "torch.Tensor") -> "torch.Tensor":
        """Return values of a weight as they are.

        Raises:
            Damaged: Some are NaN or infinite.
        """
        import torch

        if not values.numel():
            return values
        low, high = torch.aminmax(values)  # one pass; NaN goes through
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Damaged(
                f"{self.model.folder}: weight {name!r} holds values that are NaN or infinite",
                code="not_finite",
                hint="the model is broken (often a diverged training)",
                path=self.model.files[name],
                tensor=name,
            )
        return values

    def same(self, name: str, other: str) -> bool:
        """Whether two weights have the same type, shape and bytes."""
        import torch

        one, two = self.model.infos[name], self.model.infos[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        total = self.count(name)
        return all(
            torch.equal(
                self.entries(name, first, min(first + CHUNK_ENTRIES, total)).view(torch.uint8),
                self.entries(other, first, min(first + CHUNK_ENTRIES, total)).view(torch.uint8),
            )
            for first in range(0, total, CHUNK_ENTRIES)
        )

    def sha256(self, name: str) -> str:
        """Hash the bytes of one weight, in hexadecimal."""
        digest = hashlib.sha256()
        info = self.model.infos[name]
        total = self.count(name)
        for first in range(0, total, CHUNK_ENTRIES):
            part = self.entries(name, first, min(first + CHUNK_ENTRIES, total))
            digest.update(raw(part))
        return f"{info.dtype} {list(info.shape)} {digest.hexdigest()}"


def raw(values: "torch.Tensor") -> memoryview:
    """Return the bytes of a contiguous tensor without copying them."""
    import torch

    return values.reshape(-1).view(torch.uint8).numpy().data
