"""Elect a sign per entry and keep the largest magnitude that has it: one vector for all tasks.

The unified vector holds, for every entry, enough magnitude for the most demanding expert. What an
expert gets back of itself is the unified vector under the expert's mask, times one number: see
`task_masks` and `task_rescalers`. Merged into one model without masks it usually wants a `scale`
below 1.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.engine import one_thread
from cgmerge.merge.mapped import tensor_sums
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import elect

Tie = Literal["negative", "zero", "positive"]
_TIE_SIGNS: dict[Tie, float] = {"negative": -1.0, "zero": 0.0, "positive": 1.0}


@dataclass(frozen=True, kw_only=True)
class EmrParams(Params):
    """Parameters of `emr`."""

    tie: Literal["negative", "zero", "positive"] = param(
        "negative", "the sign where the votes cancel: - (official code), 0 or +"
    )


@method(
    "emr",
    "entry",
    params=EmrParams,
    about=About(
        formula="γ = sign(Σ v_e),  v_e = w_e ΔW_e,  ΔW = scale · γ · max |v_e| with sign γ",
        paper="EMR-Merging (arXiv:2405.17461)",
        differs=(
            "the merged model is the unified vector alone; the official code only ever uses it"
            " under a mask and a rescaler per task, which `task_deltas` computes, with rescalers"
            " over the whole vector as in its 30-task script (the ViT script averages tensor by"
            " tensor). sign(0) is -1 as there: opposite experts give -|ΔW|, or 0 with tie=zero"
        ),
        use_when="tasks are known when the model is used, or as a bolder sign-elected merge",
    ),
    traits=Traits(identity={}),
)
def emr(block: Block, weights: Weights, p: EmrParams, _state: None) -> Tensor:
    """Merge one block into the unified vector.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert; each multiplies its expert in the vote and in the maximum, so a
            common positive factor goes through.
        p: See `EmrParams`.
        _state: Nothing.

    Returns:
        [rows, columns].
    """
    return unify(_weighted(block, weights), p.tie)


def unify(values: Float[Tensor, "experts *shape"], tie: Tie) -> Float[Tensor, "*shape"]:
    """Return the unified vector: elected sign times the largest magnitude that has this sign.

    Args:
        values: w_e·ΔW_e; not modified.
        tie: The sign where the sum is exactly 0.

    Example:
        >>> unify(torch.tensor([[1.0, -2.0, 3.0], [2.0, -1.0, -4.0]]), "negative")
        tensor([ 2., -2., -4.])
    """
    signs = elect(values)
    sign = _TIE_SIGNS[tie]
    if sign:
        signs[signs == 0] = sign
    best = (values[0] * signs).relu_()
    for value in values[1:]:
        best = torch.maximum(best, value * signs)
    # Adding 0 turns the -0 of entries that no expert has into 0.
    return best.mul_(signs).add_(0.0)


def task_masks(
    values: Float[Tensor, "experts *shape"], unified: Float[Tensor, "*shape"]
) -> Bool[Tensor, "experts *shape"]:
    """Return where each expert is non-zero and has the elected sign.

    Args:
        values: w_e·ΔW_e.
        unified: From `unify`.
    """
    # Signs, not products: a product of small numbers is 0.
    return (values.sign() == unified.sign()) & (values != 0)


def task_rescalers(blocks: Blocks, weights: Weights, p: EmrParams | None = None) -> list[float]:
    """Return λ_t of each expert: how much the masked unified vector must shrink to match it.

    λ_t = Σ|w_t·ΔW_t| / Σ|m_t ⊙ unified|, over all entries of all tensors; 0 where the mask is
    empty. The stream is read once; the result does not depend on its blocks.

    Args:
        blocks: All experts' deltas.
        weights: One per expert, as given to the merge.
        p: As given to the merge; default `EmrParams()`.
    """
    tie = (p or EmrParams()).tie

    def both(block: Block) -> Tensor:
        values = _weighted(block, weights)
        unified = unify(values, tie)
        masked = task_masks(values, unified) * unified.abs()
        return torch.cat([values.abs(), masked])

    with one_thread():
        sums = list(tensor_sums(blocks, both, streams=2 * len(weights)).values())
    experts = len(weights)
    own = [math.fsum(one[place] for one in sums) for place in range(experts)]
    masked = [math.fsum(one[experts + place] for one in sums) for place in range(experts)]
    return [total / kept if kept else 0.0 for total, kept in zip(own, masked, strict=True)]


def task_deltas(
    block: Block, weights: Weights, p: EmrParams, rescalers: list[float]
) -> Float[Tensor, "experts rows columns"]:
    """Return what each task's model adds to the base: λ_t · m_t ⊙ unified.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert.
        p: See `EmrParams`; `scale` is not applied.
        rescalers: From `task_rescalers`.
    """
    values = _weighted(block, weights)
    unified = unify(values, p.tie)
    deltas = task_masks(values, unified) * unified
    for delta, rescaler in zip(deltas, rescalers, strict=True):
        delta.mul_(rescaler)
    return deltas


def _weighted(block: Block, weights: Weights) -> Tensor:
    """Return w_e·ΔW_e, in place of the block's values."""
    for values, weight in zip(block.values, weights, strict=True):
        if weight != 1.0:
            values.mul_(weight)
    return block.values
