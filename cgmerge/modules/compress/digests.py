"""Digests of tensors: what they are known by, however they are coded and wherever they lie.

The digest of the content is the sha256 of a text with one line for each tensor, sorted by name:
digest of the tensor, two spaces, name, as `sha256sum` writes them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cgmerge.modules.compress.codec import DTYPES
from cgmerge.modules.compress.index import CodedInfo


def of_coded(name: str, info: CodedInfo, levels: "np.ndarray[Any, Any]", factors: bytes) -> str:
    """Hash a line that describes a coded tensor, its scales, and its levels in their type."""
    line = f"coded {name} {info.dtype} {info.rows} {info.columns} {info.scales}"
    digest = hashlib.sha256(f"{line} {int(info.transposed)}\n".encode())
    digest.update(factors)
    plain = np.ascontiguousarray(levels, DTYPES[info.dtype])
    digest.update(plain.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def of_dense(
    name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes | memoryview]
) -> str:
    """Hash a line that describes a tensor stored as it is, and its bytes."""
    axes = "".join(f" {axis}" for axis in shape)
    digest = hashlib.sha256(f"dense {name} {dtype}{axes}\n".encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def of_content(digests: Mapping[str, str]) -> str:
    """Hash the digests of all tensors, given by name."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
