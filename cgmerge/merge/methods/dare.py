"""Drop entries at random, divide the survivors by the share kept, sum.

Fine-tuned deltas are redundant: with 90 % of their entries dropped and the others made ten times
larger an expert often does as well, and thinned experts collide in fewer entries. Over all seeds
the mean of the result is the weighted sum of the experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.mapped import tensor_sums
from cgmerge.merge.randoms import keep_mask, thin_
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param

RESCALE = "divide by the share kept (paper), restore each tensor's Σ|ΔW| (mergekit), or neither"


@dataclass(frozen=True, kw_only=True)
class DareParams(Params):
    """Parameters of `dare`."""

    drop: float = param(
        0.5,
        "p: share of entries that is dropped, below 1",
        low=0.0,
        high=1.0,
        grid=(0.5, 0.1, 0.3, 0.7, 0.9),
    )
    seed: int = param(0, "another seed drops other entries", low=0)
    rescale: Literal["share", "norm", "none"] = param("share", RESCALE)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_dropping_all(self.drop)


def refuse_dropping_all(drop: float) -> None:
    """Refuse p = 1, which would divide by zero.

    Raises:
        UsageError: Everything would be dropped.
    """
    if drop >= 1:
        raise UsageError(
            f"parameter `drop` must be in [0, 1), found {drop}",
            code="parameter",
            hint="0.9 keeps every tenth entry",
            expected="[0, 1)",
            found=drop,
        )


def norm_shares(blocks: Blocks, drop: float, seed: int) -> dict[str, list[float]]:
    """Return what survives the drop of each expert's Σ|ΔW|, tensor by tensor, as a share.

    Dividing by it restores the sum. A tensor of which nothing survives has share 1: it is zero.
    """
    count = len(blocks.experts)

    def sizes(block: Block) -> Tensor:
        size = block.values.abs()
        keep = [keep_mask(block, place, seed, 1 - drop) for place in range(count)]
        return torch.cat([size, size * torch.stack(keep)])

    found = tensor_sums(blocks, sizes, streams=2 * count)
    return {
        name: [
            kept / total if kept else 1.0
            for total, kept in zip(sums[:count], sums[count:], strict=True)
        ]
        for name, sums in found.items()
    }


def sum_of_kept(
    values: Float[Tensor, "experts *shape"],
    keep: Sequence[Bool[Tensor, "*shape"]],
    weights: Weights,
    shares: Sequence[float],
) -> Float[Tensor, "*shape"]:
    """Apply given masks and sum; the part of DARE that is not random.

    Args:
        values: Deltas; overwritten.
        keep: One mask per expert.
        weights: One per expert.
        shares: What the survivors of each expert are divided by.
    """
    for value, kept, weight, share in zip(values, keep, weights, shares, strict=True):
        thin_(value, kept, share).mul_(weight)
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def prepare(blocks: Blocks, weights: Weights, p: DareParams) -> dict[str, list[float]]:
    """Return what the survivors of each expert are divided by, tensor by tensor."""
    if p.rescale == "norm":
        return norm_shares(blocks, p.drop, p.seed)
    share = 1 - p.drop if p.rescale == "share" else 1.0
    return {name: [share] * len(weights) for name in blocks.names}


@method(
    "dare",
    "entry",
    params=DareParams,
    about=About(
        formula="ΔW = scale · Σ w_e m_e⊙ΔW_e/(1-p),  m_e ~ Bernoulli(1-p)   (w_e = 1)",
        paper="DARE: Language Models are Super Mario (arXiv:2311.03099)",
        differs=(
            "the draw for an entry is a function of seed, expert, tensor and place, so that order,"
            " blocks and threads do not matter (the official code uses the global generator);"
            " mergekit is rescale=norm; PEFT's dare_linear"
            " drops entries of A and B, which is another, biased rule; works on ΔW here"
        ),
        use_when="experts with small, redundant deltas; choose p and scale on validation data",
    ),
    traits=Traits(identity={"drop": 0.0}),
    prepare=prepare,
)
def dare(block: Block, weights: Weights, p: DareParams, state: list[float]) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are absolute: a common factor goes through.
        p: See `DareParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    keep = [keep_mask(block, place, p.seed, 1 - p.drop) for place in range(len(weights))]
    return sum_of_kept(block.values, keep, weights, state)
