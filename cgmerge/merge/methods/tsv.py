"""Keep each expert's leading singular directions and make those of different experts orthogonal.

Experts get in each other's way where their singular directions overlap. The directions of all
experts are stacked and replaced by the nearest orthonormal ones, on both sides; the singular
values stay.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method
from cgmerge.merge.spectral import decompose, nearest_orthonormal, scaled


@dataclass(frozen=True, kw_only=True)
class TsvParams(Params):
    """Parameters of `tsv`: none of its own."""


@method(
    "tsv",
    "matrix",
    params=TsvParams,
    about=About(
        formula=(
            "ΔW = scale · U⊥ diag(s) V⊥ᵀ,  U⊥ = polar([U_1 … U_E]), V⊥ alike,"
            "  U_e diag(s_e) V_eᵀ = w_e ΔW_e"
        ),
        paper="Task Singular Vectors, TSV-Merge (arXiv:2412.00081)",
        differs=(
            "every expert keeps its whole numerical rank when the ranks' sum fits into the matrix"
            " (LoRA), and ⌊min(m, n)/experts⌋ directions otherwise; the official code always does"
            " the latter, which on LoRA takes arbitrary directions of the null space or drops"
            " true ones; directions that experts share stay shared"
        ),
        use_when="experts of different tasks; a good default for LoRA without any data",
    ),
    traits=Traits(scope="tensor", sides="both", identity={}),
)
def tsv(
    matrices: Float[Tensor, "experts m n"], weights: Weights, _p: TsvParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts; a common factor multiplies the result, 0 leaves one out.
        _p: Nothing of its own.
        _stats: Not used.
    """
    active, _ = scaled(matrices, weights)
    return join_orthogonal(active)


def join_orthogonal(matrices: Float[Tensor, "experts m n"]) -> Float[Tensor, "m n"]:
    """Sum matrices after making their singular directions orthogonal; none of them is zero."""
    size = matrices.shape[1:]
    if not len(matrices):
        return matrices.new_zeros(size)
    parts = [decompose(matrix) for matrix in matrices]
    if sum(part.s.numel() for part in parts) > min(size):
        parts = [part.first(max(1, min(size) // len(parts))) for part in parts]
    left = nearest_orthonormal(torch.cat([part.u for part in parts], dim=1))
    right = nearest_orthonormal(torch.cat([part.v for part in parts], dim=1))
    return (left * torch.cat([part.s for part in parts])) @ right.T
