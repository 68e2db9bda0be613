"""Drop entries at random, large ones rarely, then elect a sign per entry and average.

Within every row the chance to survive grows with the rank of the magnitude, from density - epsilon
for the smallest entry to density + epsilon for the largest; survivors are divided by their own
chance. What is left is merged as TIES does: vote on the sign by mass, mean of those who agree. A
row is one output of a matrix; a vector is one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block
from cgmerge.merge.randoms import keep_mask, thin_
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.rows import ranks_of_rows
from cgmerge.merge.signs import disjoint_mean_, elect


@dataclass(frozen=True, kw_only=True)
class DellaParams(Params):
    """Parameters of `della`."""

    density: float = param(
        0.7,
        "mean chance of an entry to survive",
        above=0.0,
        high=1.0,
        grid=(0.7, 0.3, 0.5, 0.9),
    )
    epsilon: float = param(
        0.07, "half the spread of the chances: density ± epsilon", low=0.0, high=0.5
    )
    seed: int = param(0, "another seed drops other entries", low=0)
    rescale: bool = param(True, "divide survivors by their own chance")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Decimals, as typed: 0.9 + 0.1 is 1.
        density, epsilon = Decimal(repr(self.density)), Decimal(repr(self.epsilon))
        if density - epsilon <= 0 or density + epsilon > 1:
            raise UsageError(
                f"chances go from density - epsilon = {density - epsilon} to density + epsilon ="
                f" {density + epsilon}, which must lie in (0, 1]",
                code="parameter",
                hint=f"epsilon must be below {density} and at most {1 - density}",
            )


def chances(
    values: Float[Tensor, "rows columns"], density: float, epsilon: float
) -> NDArray[np.float64]:
    """Return the probability of every entry to survive, by rank within its row.

    Args:
        values: Deltas of one expert.
        density: The mean probability; all there is where a row has one entry.
        epsilon: Added for the largest entry, subtracted for the smallest.

    Returns:
        [rows, columns]; among equal magnitudes the lowest index has the largest.
    """
    columns = values.shape[-1]
    if columns == 1:
        return np.full(values.shape, density)
    by_rank = np.linspace(density - epsilon, density + epsilon, columns)
    by_entry: NDArray[np.float64] = by_rank[ranks_of_rows(values)]
    return by_entry


def mean_of_kept(
    values: Float[Tensor, "experts rows columns"],
    keep: Sequence[Bool[Tensor, "rows columns"]],
    share: Sequence[Float[Tensor, "rows columns"] | float],
    weights: Weights,
) -> Float[Tensor, "rows columns"]:
    """Apply given masks, elect and average; the part of DELLA that is not random.

    Args:
        values: Deltas; overwritten.
        keep: One mask per expert.
        share: For each expert what survivors are divided by.
        weights: One per expert.
    """
    for value, kept, divisor, weight in zip(values, keep, share, weights, strict=True):
        thin_(value, kept, divisor).mul_(weight)
    return disjoint_mean_(values, [abs(weight) for weight in weights], elect(values))


@method(
    "della",
    "entry",
    params=DellaParams,
    about=About(
        formula=(
            "q_e = density - ε + 2ε·rank(|ΔW_e|)/(n-1) per row,  ΔW = scale · elected mean of"
            " w_e m_e⊙ΔW_e/q_e,  m_e ~ Bernoulli(q_e)"
        ),
        paper="DELLA-Merging (arXiv:2406.11617)",
        differs=(
            "the official code speaks of drop rate 1 - density and of a window 2ε; draws as in"
            " `dare`; a chance of exactly 1 is allowed; cancelled votes give 0; weights take part"
            " in the vote and the mean divides by the sum of |w| that agree; mergekit does not"
            " divide by q: rescale=false"
        ),
        use_when="as `dare-ties`, where large entries should be spared",
    ),
    traits=Traits(scope="tensor", identity={"density": 1.0, "epsilon": 0.0}, relative_weights=True),
)
def della(block: Block, weights: Weights, p: DellaParams, _state: None) -> Tensor:
    """Merge one block; a block holds whole rows, which is all that the ranks need.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are relative: a common factor changes nothing.
        p: See `DellaParams`.
        _state: Nothing.

    Returns:
        [rows, columns].
    """
    keep: list[Tensor] = []
    share: list[Tensor | float] = []
    for place, values in enumerate(block.values):
        chance = chances(values, p.density, p.epsilon)
        keep.append(keep_mask(block, place, p.seed, chance))
        share.append(torch.from_numpy(chance).to(values) if p.rescale else 1.0)
    return mean_of_kept(block.values, keep, share, weights)
