"""Choose the merged delta that leaves each expert's output alone on that expert's own inputs.

The rows of a delta span the inputs it was trained on. The squared interference of the merged
delta with every expert, measured on these rows, is a least-squares problem with an exact answer:
no data, no training.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.spectral import NEGLIGIBLE, scaled


@dataclass(frozen=True, kw_only=True)
class WudiParams(Params):
    """Parameters of `wudi`."""

    form: Literal["closed", "filtered"] = param(
        "closed",
        "the exact minimum, or SWUDI: only strong directions, and not all the way",
        grid=("closed", "filtered"),
    )
    ratio: float = param(0.65, "filtered: share of the directions that move", low=0, high=1)
    steps: int = param(300, "filtered: how far they move from the sum", low=0)


@method(
    "wudi",
    "matrix",
    params=WudiParams,
    about=About(
        formula="argmin_X Σ ‖(X - w_e ΔW_e) ΔW_eᵀ‖² / ‖ΔW_e‖²  =  D C⁺",
        paper="WUDI-Merging (arXiv:2503.08099)",
        differs=(
            "the minimum itself instead of 300 steps of Adam, whose result depends on the size of"
            " the deltas; `filtered` is SWUDI's spectral filter, its ratio counted within the"
            " directions that the experts span"
        ),
        use_when="experts of different tasks, no data",
    ),
    traits=Traits(scope="tensor", sides="both", identity={}),
)
def wudi(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: WudiParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts; a common factor multiplies the result, 0 leaves one out.
        p: See `WudiParams`.
        _stats: Not used.
    """
    active, _ = scaled(matrices, weights)
    if not len(active):
        return matrices.new_zeros(matrices.shape[1:])
    # One expert after the other: no second copy of all of them. Divided by the norm before
    # anything is squared, so that very small deltas do not underflow.
    inputs = active.new_zeros(active.shape[2], active.shape[2])
    wanted = active.new_zeros(active.shape[1:])
    for matrix in active:
        unit = matrix / torch.linalg.norm(matrix)
        own = unit.T @ unit
        inputs += own
        wanted += matrix @ own
    strength, basis = torch.linalg.eigh(inputs)
    kept = strength > NEGLIGIBLE**2 * strength[-1]
    strength, basis = strength[kept], basis[:, kept]
    if p.form == "closed":
        exact: Tensor = (wanted @ basis / strength) @ basis.T
        return exact
    moved = 1 - torch.exp(-p.steps * strength)
    moved[: len(moved) - math.ceil(p.ratio * len(moved) - 1e-9)] = 0
    total = active.sum(dim=0)
    change: Tensor = ((wanted @ basis / strength - total @ basis) * moved) @ basis.T
    return total + change
