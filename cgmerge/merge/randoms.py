"""Random numbers that belong to an entry: the same whatever is computed before, around or besides.

The draw for an entry depends on the seed, on what the expert is called, on the tensor's name and on
the entry's place in the tensor, and on nothing else: not on blocks, threads, the order of the
experts, the dtype or the global generator. The first three are hashed into the key of a
counter-based generator (Philox, 4 x 64 bits), and the place is its counter, so that any stretch of
the stream can be computed alone.

Two experts of the same name draw the same numbers.
"""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from cgmerge.merge.deltas import Block

_PER_STEP = 8
"""32-bit draws in one step of the counter."""
_DOMAIN = b"cgmerge-draws-1"


def draws(seed: int, expert: str, tensor: str, offset: int, count: int) -> NDArray[np.uint32]:
    """Return the draws of consecutive entries, uniform over all 32-bit numbers.

    Args:
        seed: Chosen by the user.
        expert: What the expert is called.
        tensor: The tensor's name.
        offset: Flat index of the first entry within the tensor.
        count: How many entries.

    Returns:
        [count].
    """
    # As JSON, since plain concatenation would not tell ("a", "bc") from ("ab", "c").
    words = json.dumps([seed, expert, tensor]).encode()
    digest = hashlib.blake2b(words, digest_size=16, person=_DOMAIN).digest()
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))
    generator.advance(offset // _PER_STEP)
    skip = offset % _PER_STEP
    raw: NDArray[np.uint64] = generator.random_raw((skip + count + 1) // 2)
    # Little-endian on every machine, so that the low half comes first.
    halves: NDArray[np.uint32] = raw.astype("<u8", copy=False).view("<u4")
    return halves[skip : skip + count]


def keep_mask(
    block: Block, place: int, seed: int, share: float | NDArray[np.float64]
) -> Bool[Tensor, "rows columns"]:
    """Decide which entries of one expert survive.

    Args:
        block: Says which expert, tensor and entries; values are not read.
        place: Which of the experts.
        seed: Chosen by the user.
        share: Probability to survive, for all entries or for each of them ([rows, columns]).
    """
    shape = block.values.shape[1:]
    # A block built by hand may have no names; they default to the position, as in a stream.
    expert = block.ids[place] if block.ids else str(place)
    drawn = draws(seed, expert, block.name, block.offset, shape.numel()).reshape(shape)
    kept: NDArray[Any] = drawn < np.float64(2.0**32) * share
    return torch.from_numpy(kept).to(block.values.device)


def thin_(
    values: Float[Tensor, "*shape"],
    keep: Bool[Tensor, "*shape"],
    share: float | Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Drop entries and divide the others by their probability to survive, in place.

    The mean over all masks is the input.

    Args:
        values: Any shape.
        keep: Which entries survive.
        share: Probability that an entry survives.
    """
    return values.mul_(keep).div_(share)
