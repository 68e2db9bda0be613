"""Take, entry by entry, the delta of the expert with the largest magnitude.

The largest change of a parameter is taken for the one that matters. Nothing is averaged, so that
the result is larger than any expert: a scale below 1 often helps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cgmerge.merge.deltas import Block
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param


@dataclass(frozen=True, kw_only=True)
class MagMaxParams(Params):
    """Parameters of `magmax`."""

    tie: Literal["zero", "last"] = param(
        "zero", "where opposite values are equally large: 0, or the last expert (official code)"
    )


@method(
    "magmax",
    "entry",
    params=MagMaxParams,
    about=About(
        formula="ΔW_j = scale · w_e ΔW_ej  with e = argmax |w_e ΔW_ej|   (w_e = 1)",
        paper="MagMax (arXiv:2407.06322)",
        differs=(
            "opposite values of exactly equal size give 0, so that the order of the experts does"
            " not matter (official code: the later one wins, tie=last); weights multiply the"
            " experts before the choice; the paper also trains the experts one after the other and"
            " uses scale 0.5"
        ),
        use_when="experts trained one from the other; try scale 0.5",
    ),
    traits=Traits(identity={}),
)
def magmax(block: Block, weights: Weights, p: MagMaxParams, _state: None) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are absolute: a common factor goes through.
        p: See `MagMaxParams`.
        _state: Nothing.

    Returns:
        [rows, columns].
    """
    values = block.values
    for value, weight in zip(values, weights, strict=True):
        value.mul_(weight)
    # The largest magnitude is the maximum or the minimum, and a tie of signs is where they cancel.
    high, low = values.amax(dim=0), values.amin(dim=0)
    if p.tie == "zero":
        return torch.where(high > -low, high, low).mul_(high != -low)
    size = torch.maximum(high, -low)
    merged = torch.zeros_like(size)
    for value in values:
        merged = torch.where(value.abs() == size, value, merged)
    return merged
