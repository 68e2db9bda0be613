"""Keep each expert's few largest entries and put them together; overlaps are averaged.

A skill sits in a small share of the entries that fine-tuning changed. Only those are kept, found
here without data as the largest of the whole expert, so that experts rarely overlap and need no
scale: the default of 1 is the method's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.sparsify import Cut, top_k_cuts, trim_


@dataclass(frozen=True, kw_only=True)
class LocalizeAndStitchParams(Params):
    """Parameters of `localize-and-stitch`."""

    density: float = param(
        0.05,
        "share of entries each expert keeps, over all its tensors",
        above=0.0,
        high=1.0,
        grid=(0.05, 0.01, 0.1, 0.2),
    )


def prepare(blocks: Blocks, _weights: Weights, p: LocalizeAndStitchParams) -> dict[str, list[Cut]]:
    """Find each expert's cut over all its tensors."""
    return dict.fromkeys(blocks.names, top_k_cuts(blocks, p.density))


@method(
    "localize-and-stitch",
    "entry",
    params=LocalizeAndStitchParams,
    about=About(
        formula="ΔW = scale · Σ w_e m_e⊙ΔW_e / Σ |w_e| m_e,  m_e = top entries of |ΔW_e|",
        paper="Localize-and-Stitch (arXiv:2408.13656), the variant without data",
        differs=(
            "masks are not trained on examples; keeps exactly ⌊density·d⌋ entries, lowest index"
            " first among equal ones (the official code one less); entries that are 0 never count"
            " in an overlap; weights and scale are additions"
        ),
        use_when="many experts with skills in few entries; no validation data to tune a scale",
    ),
    traits=Traits(scope="model", identity={"density": 1.0}, relative_weights=True),
    prepare=prepare,
)
def localize_and_stitch(
    block: Block, weights: Weights, _p: LocalizeAndStitchParams, state: list[Cut]
) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are relative: a common factor changes nothing.
        _p: See `LocalizeAndStitchParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    total = torch.zeros_like(block.values[0])
    count = torch.zeros_like(total)
    for values, weight, cut in zip(block.values, weights, state, strict=True):
        trim_(values, block.start, cut)
        total.add_(values, alpha=weight)
        count.add_(values != 0, alpha=abs(weight))
    return total.div_(count.clamp_min_(torch.finfo(total.dtype).tiny))
