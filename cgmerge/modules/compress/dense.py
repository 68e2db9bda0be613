"""Tensors that are stored as they are: biases, heads, whole experts without loss."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgmerge.errors import Damaged, Incompatible
from cgmerge.tensorfile import DTYPE_BYTES, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
# Of floats: bits that are all set in numbers that are not finite, and the type to look at them.
_NOT_FINITE = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80), "F8_E5M2": ("|u1", 0x7C), "F8_E4M3": ("|u1", 0x7F),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """A tensor as it lies in a file.

    Attributes:
        dtype: Name as in safetensors, e.g. `BF16`.
        shape: Axes.
        data: Little-endian entries in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @classmethod
    def of(cls, tensor: "torch.Tensor | np.ndarray[Any, Any]") -> "Dense":
        """Take over a numpy array or a torch tensor.

        Raises:
            Incompatible: A type that the format does not have.
        """
        if isinstance(tensor, np.ndarray):
            word = tensor.dtype.newbyteorder("<").str
            name = next((key for key, known in _NUMPY.items() if known == word), None)
            if name is None:
                raise Incompatible(f"arrays of {tensor.dtype} cannot be stored", code="dtype")
            plain = np.ascontiguousarray(tensor, dtype=_NUMPY[name]).reshape(-1)
            return cls(name, tensor.shape, plain.view(np.uint8).data)
        import torch

        try:
            name = dtype_name(tensor.dtype)
        except StopIteration:
            raise Incompatible(
                f"tensors of {tensor.dtype} cannot be stored", code="dtype"
            ) from None
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(name, tuple(tensor.shape), flat.numpy().data)

    def array(self) -> "np.ndarray[Any, Any]":
        """Return the entries as numpy has them; 16 or 8 bits unread for types it lacks."""
        word = _NUMPY.get(self.dtype, f"<u{DTYPE_BYTES[self.dtype]}")
        return np.frombuffer(self.data, word).reshape(self.shape)

    def tensor(self) -> "torch.Tensor":
        """Return the entries as a torch tensor of their type."""
        import torch

        dtype = torch_dtype(self.dtype)
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def check_values(dtype: str, data: bytes | memoryview, name: str) -> None:
    """Refuse entries that are not finite, and truth values that are neither 0 nor 1.

    Raises:
        Damaged: Says how many there are.
    """
    if dtype == "BOOL":
        bad = int(np.count_nonzero(np.frombuffer(data, np.uint8) > 1))
    elif dtype in _NOT_FINITE:
        word, mask = _NOT_FINITE[dtype]
        bits = np.frombuffer(data, word)
        bad = int(np.count_nonzero((bits & bits.dtype.type(mask)) == mask))
    else:
        bad = 0
    if bad:
        raise Damaged(
            f"tensor {name!r} holds {bad:,} entries that are not finite numbers",
            code="not_finite",
            tensor=name,
            found=bad,
        )
