"""Average of the experts plus the leading directions in which each differs from it.

What an expert adds to the average lies in few directions; the rest is where experts disturb each
other. Each deviation from the average is cut to a low rank, and their sum is added.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.shares import shares
from cgmerge.merge.spectral import decompose


@dataclass(frozen=True, kw_only=True)
class CartParams(Params):
    """Parameters of `cart`."""

    ratio: float = param(0.04, "share of each deviation's rank that is kept", low=0, high=1)
    boost: float = param(1.0, "factor on the sum of the deviations", low=0)


@method(
    "cart",
    "matrix",
    params=CartParams,
    about=About(
        formula=(
            "ΔW = scale · [M + boost · Σ E p_e · top_k(ΔW_e - M)],  M = Σ p_e ΔW_e, p = w / Σ w,"
            " E experts"
        ),
        paper="CART, Revisiting Weight Averaging for Model Merging (arXiv:2412.12153)",
        differs=(
            "k is a share of the deviation's numerical rank instead of min(m, n), which for LoRA"
            " is mostly zeros; the boost is not tuned per number of experts; weights added"
        ),
        use_when="experts that are similar enough for the average to work",
    ),
    traits=Traits(scope="tensor", sides="both", identity={}),
)
def cart(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: CartParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        p: See `CartParams`.
        _stats: Not used.

    Raises:
        UsageError: The weights sum to zero.
    """
    share = shares(weights)
    mean = torch.einsum("e,emn->mn", matrices.new_tensor(share), matrices)
    merged = mean.clone()
    # Deviations are differences: what is negligible is told by the experts, not by themselves.
    largest = max((float(torch.linalg.norm(matrix)) for matrix in matrices), default=0.0)
    for matrix, part in zip(matrices, share, strict=True):
        found = decompose(matrix - mean, largest=largest)
        found = found.first(math.ceil(p.ratio * found.s.numel() - 1e-9))
        merged += p.boost * len(share) * part * ((found.u * found.s) @ found.v.T)
    return merged
