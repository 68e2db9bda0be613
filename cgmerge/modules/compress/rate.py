"""What sparse signs cost to store, in bits: the entropy of where they are, and one bit each."""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

SCALE_BITS = 32
"""A scale in the file."""


@lru_cache(maxsize=64)
def sign_bits(length: int) -> Float[Tensor, "length"]:
    """Return the bits of a vector with 1, 2 … `length` signs: n·H(J/n) + J, float64.

    Args:
        length: Number of entries n, at least 1.
    """
    count = torch.arange(1, length + 1, dtype=torch.float64)
    share = count / length
    return length * (_plogp(share) + _plogp(1.0 - share)) + count


def entropy_bits(levels: np.ndarray) -> float:
    """Return entries times empirical entropy: what no coder of single entries can go below."""
    if not levels.size:
        return 0.0
    _, counts = np.unique(levels, return_counts=True)
    shares = counts / levels.size
    return float(-levels.size * (shares * np.log2(shares)).sum())


def _plogp(share: Tensor) -> Tensor:
    return -torch.where(share > 0, share * torch.log2(share.clamp_min(1e-300)), share.new_zeros(()))
