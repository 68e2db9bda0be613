"""Trim small entries, elect a sign per entry, average the experts that agree.

Experts mostly disagree in entries that matter to none of them. TIES keeps each expert's largest
entries, lets the experts vote on the sign of every entry by total mass, and takes the mean over
the experts that voted with the majority.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import break_ties, disjoint_mean_, disjoint_sum_, elect
from cgmerge.merge.sparsify import Cut, top_k_cuts, trim_


@dataclass(frozen=True, kw_only=True)
class TiesParams(Params):
    """Parameters of `ties`."""

    density: float = param(
        0.2, "share of entries each expert keeps", above=0.0, high=1.0, grid=(0.2, 0.1, 0.4, 0.7)
    )
    trim: Literal["global", "tensor"] = param(
        "global", "rank magnitudes over the whole expert (paper) or within each tensor"
    )
    tie: Literal["zero", "majority", "positive"] = param(
        "zero", "where the votes cancel: 0, the sign of the whole vector (official code), or +"
    )
    normalize: bool = param(True, "divide by the sum of |w| that agree; false: the plain sum")


@dataclass(frozen=True, slots=True)
class TiesState:
    """What one tensor needs to know about the whole: cuts, and the sign for cancelled votes."""

    cuts: list[Cut]
    tie_sign: float


def prepare(blocks: Blocks, weights: Weights, p: TiesParams) -> dict[str, TiesState]:
    """Find each expert's cut, and the majority sign where the tie rule needs it."""
    if p.trim == "global":
        shared = top_k_cuts(blocks, p.density)
        cuts = dict.fromkeys(blocks.names, shared)
    else:
        cuts = {name: top_k_cuts(blocks.only(name), p.density) for name in blocks.names}
    sign = {"zero": 0.0, "positive": 1.0}.get(p.tie)
    if sign is None:
        votes = sum(
            float(elect(_trimmed(block, weights, cuts[block.name])).sum()) for block in blocks
        )
        sign = float((votes > 0) - (votes < 0))
    return {name: TiesState(cuts[name], sign) for name in blocks.names}


@method(
    "ties",
    "entry",
    params=TiesParams,
    about=About(
        formula="γ = sign(Σ w_e trim(ΔW_e)),  ΔW = scale · mean of w_e trim(ΔW_e) with sign γ",
        paper="TIES-Merging (arXiv:2306.01708)",
        differs=(
            "keeps exactly ⌊density·d⌋ entries, lowest index first among equal ones (the official"
            " code keeps one more and fails at 100 %); cancelled votes give 0 by default, so that"
            " opposite experts give 0; weights take part in the vote and the mean divides by the"
            " sum of |w| that agree. mergekit: trim=tensor, tie=positive, and its mean divides by"
            " the sum of w, which undoes negative weights"
        ),
        use_when="several experts whose skills interfere; keeps more of the base than a sum",
    ),
    traits=Traits(
        scope="model",
        identity={"density": 1.0},
        relative_weights=True,
        pointwise=lambda state: all(cut.last is None for cut in state.cuts),
    ),
    prepare=prepare,
)
def ties(block: Block, weights: Weights, p: TiesParams, state: TiesState) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are relative: a common factor changes nothing, unless
            `normalize` is false.
        p: See `TiesParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    values = _trimmed(block, weights, state.cuts)
    signs = break_ties(elect(values), values, state.tie_sign)
    if not p.normalize:
        return disjoint_sum_(values, signs)
    return disjoint_mean_(values, [abs(weight) for weight in weights], signs)


def _trimmed(block: Block, weights: Weights, cuts: list[Cut]) -> Tensor:
    """Return w_e·trim(ΔW_e), in place of the block's values."""
    for values, weight, cut in zip(block.values, weights, cuts, strict=True):
        trim_(values, block.start, cut)
        if weight != 1.0:
            values.mul_(weight)
    return block.values
