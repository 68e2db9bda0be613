"""Keep the entries of the summed experts that at least k experts call their own.

An expert selects an entry (its TALL mask) where its own part outweighs what all the others add to
it. Entries that nobody selects hurt everyone, entries that one expert selects serve that one
alone; consensus merging keeps the rest.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import elect, sum_in_order
from cgmerge.merge.sparsify import Cut, top_k_cuts, trim_


@dataclass(frozen=True, kw_only=True)
class ConsensusParams(Params):
    """Parameters of `consensus`."""

    threshold: float = param(
        0.4,
        "λ_mask: how much an expert must outweigh the others; the paper tries 0.2 to 0.6",
        low=0,
        grid=(0.4, 0.2, 0.6),
    )
    agree: int = param(2, "k: how many experts must select an entry; 0 keeps all", low=0)
    multi: Literal["sum", "ties"] = param(
        "sum", "the multi-task vector: the sum, or the sum after TIES trimming and sign election"
    )
    density: float = param(
        0.2, "share of entries each expert keeps; for multi=ties only", above=0.0, high=1.0
    )

    def check(self, weights: Weights) -> None:
        """Refuse more votes than there are experts, which would leave nothing."""
        if self.agree > len(weights):
            raise UsageError(
                f"`agree` is {self.agree}, but there are {len(weights)} experts to agree:"
                " no entry would be left",
                code="parameter",
                expected=len(weights),
                found=self.agree,
            )


def prepare(blocks: Blocks, _weights: Weights, p: ConsensusParams) -> dict[str, list[Cut]]:
    """Find each expert's cut over its whole vector, where the multi-task vector is trimmed."""
    if p.multi == "sum":
        return {}
    return dict.fromkeys(blocks.names, top_k_cuts(blocks, p.density))


@method(
    "consensus",
    "entry",
    params=ConsensusParams,
    about=About(
        formula=(
            "τ = Σ v_e,  v_e = w_e ΔW_e,  m_e = [|v_e| > λ_mask |τ - v_e|],"
            "  ΔW = scale · τ where Σ m_e ≥ k, else 0"
        ),
        paper="TALL-masks and Consensus merging (arXiv:2405.07813)",
        differs=(
            "one λ_mask for all experts (the official code picks it per expert on validation"
            " data); with multi=ties the trim keeps exactly ⌊density·d⌋ entries and cancelled"
            " votes give 0, as in `ties`"
        ),
        use_when="three or more experts that share part of a skill",
    ),
    # One expert selects all that it has, but alone it is not two.
    traits=Traits(scope="model", identity={"agree": 1}),
    prepare=prepare,
)
def consensus(
    block: Block, weights: Weights, p: ConsensusParams, state: list[Cut] | None
) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert; each multiplies its expert from the start, so that an expert of
            weight 0 selects nothing and a common factor of all weights goes through.
        p: See `ConsensusParams`.
        state: The cuts from `prepare`, None for a plain sum.

    Returns:
        [rows, columns].
    """
    trimmed = None
    if state is not None:
        trimmed = block.values.clone()
        for values, weight, cut in zip(trimmed, weights, state, strict=True):
            trim_(values, block.start, cut)
            values.mul_(weight)
    for values, weight in zip(block.values, weights, strict=True):
        if weight != 1.0:
            values.mul_(weight)
    total = sum_in_order(block.values) if trimmed is None else _elected_sum(trimmed)
    votes = task_masks(block.values, total, p.threshold).sum(dim=0)
    return total.mul_(votes >= p.agree)


def task_masks(
    values: Float[Tensor, "experts *shape"], multi: Float[Tensor, "*shape"], threshold: float
) -> Bool[Tensor, "experts *shape"]:
    """Return which entries of the multi-task vector each expert selects (its TALL mask).

    Args:
        values: w_e·ΔW_e.
        multi: The multi-task vector.
        threshold: λ_mask, at least 0.

    Example:
        >>> a = torch.tensor([[1.0, 0.2], [0.1, 1.0]])
        >>> task_masks(a, a.sum(0), 0.5)
        tensor([[ True, False],
                [False,  True]])
    """
    return torch.stack([value.abs() > (multi - value).abs_().mul_(threshold) for value in values])


def _elected_sum(values: Tensor) -> Tensor:
    """Return, entry by entry, the sum of the experts that have the sign of the sum."""
    signs = elect(values)
    return sum_in_order(values.mul_(signs).relu_()).mul_(signs)
