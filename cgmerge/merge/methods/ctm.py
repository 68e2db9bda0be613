"""Compress, then merge: find one small space for all experts first, and merge inside it.

The result has the chosen rank by construction, so nothing is cut away after the merge.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Blocks
from cgmerge.merge.methods.tsv import join_orthogonal
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import disjoint_mean_, elect
from cgmerge.merge.sparsify import top_k_cuts, trim_
from cgmerge.merge.spectral import NEGLIGIBLE, numerical_rank, scaled


@dataclass(frozen=True, kw_only=True)
class CtmParams(Params):
    """Parameters of `ctm`."""

    rank: int = param(0, "rank of the result (0 = the largest rank of an expert)", low=0)
    inner: Literal["sum", "ties", "tsv"] = param(
        "sum", "what merges the small matrices", grid=("sum", "ties", "tsv")
    )
    density: float = param(
        0.2, "ties: share of entries each small matrix keeps", above=0.0, high=1.0
    )


@method(
    "ctm",
    "matrix",
    params=CtmParams,
    about=About(
        formula=(
            "ΔW = scale · U · merge(Uᵀ w_e ΔW_e V) · Vᵀ,  U: top eigenvectors of"
            " Σ ΔW_e ΔW_eᵀ / ‖ΔW_e‖², V: of Σ ΔW_eᵀ ΔW_e / ‖ΔW_e‖²"
        ),
        paper="Compress-then-Merge (arXiv:2606.03723)",
        differs=(
            "built after the abstract, the paper's own rule for the bases was not at hand; ties"
            " trims within each small matrix and averages, while sum and tsv add"
        ),
        use_when="one adapter of small rank is wanted",
    ),
    traits=Traits(scope="tensor", sides="both", identity={}),
)
def ctm(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: CtmParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts, 0 leaves one out. A common factor multiplies the result;
            with ties it does not matter.
        p: See `CtmParams`.
        _stats: Not used.
    """
    active, factors = scaled(matrices, weights)
    if not len(active):
        return matrices.new_zeros(matrices.shape[1:])
    rank = p.rank or max(numerical_rank(matrix) for matrix in active)
    left, right = _bases(active, rank)
    small = left.T @ active @ right
    if p.inner == "sum":
        merged = small.sum(dim=0)
    elif p.inner == "tsv":
        inside = small.flatten(1).norm(dim=1) > NEGLIGIBLE * active.flatten(1).norm(dim=1)
        merged = join_orthogonal(small[inside])
    else:
        merged = _ties(small, factors, p.density)
    return left @ merged @ right.T


def _bases(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading common directions of both sides, every expert counting the same."""
    _, m, n = matrices.shape
    rows, columns = matrices.new_zeros(m, m), matrices.new_zeros(n, n)
    for matrix in matrices:
        unit = matrix / torch.linalg.norm(matrix)
        rows += unit @ unit.T
        columns += unit.T @ unit
    return _leading(rows, rank), _leading(columns, rank)


def _leading(gram: Tensor, rank: int) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    count = min(rank, int((values > NEGLIGIBLE**2 * values[-1]).sum()))
    leading: Tensor = vectors[:, len(values) - count :]
    return leading


def _ties(small: Tensor, factors: list[float], density: float) -> Tensor:
    """Trim, elect, average those that agree; signs of the bases' columns do not matter to it."""
    cuts = top_k_cuts(Blocks([{"": matrix} for matrix in small], dtype=small.dtype), density)
    for matrix, cut in zip(small, cuts, strict=True):
        trim_(matrix, 0, cut)
    return disjoint_mean_(small, [abs(factor) for factor in factors], elect(small))
