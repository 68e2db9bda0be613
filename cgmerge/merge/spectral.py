"""Singular values, numerical ranks and nearest orthonormal columns, shared by matrix rules.

Everything here commutes with rotations of both sides and does not depend on how large a matrix of
zeros surrounds the experts: a rule that asks for ranks instead of sizes gives the same answer on
the small cores of LoRA experts and on their dense deltas.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

NEGLIGIBLE = 1e-5
"""Singular values below this share of the largest are rounding errors of float32 factors."""

SAME_DIRECTION = 1e-3
"""Directions that lie closer together than this angle count as one. Singular vectors of small
singular values carry rounding errors of this size, which orthogonalising would blow up."""


class Triplets(NamedTuple):
    """Singular triplets, largest first: u [m, k], s [k], v [n, k]."""

    u: Float[Tensor, "m k"]
    s: Float[Tensor, " k"]
    v: Float[Tensor, "n k"]

    def first(self, count: int) -> "Triplets":
        """Return the leading ones."""
        return Triplets(self.u[:, :count], self.s[:count], self.v[:, :count])


def scaled(
    matrices: Float[Tensor, "experts m n"], weights: Sequence[float]
) -> tuple[Float[Tensor, "active m n"], list[float]]:
    """Return w_e·ΔW_e of the experts for which this is not zero, and their weights."""
    active = [i for i, w in enumerate(weights) if w != 0.0 and bool((matrices[i] != 0).any())]
    kept = [weights[i] for i in active]
    if len(active) == len(weights) and all(weight == 1.0 for weight in kept):
        return matrices, kept
    return matrices[active] * matrices.new_tensor(kept)[:, None, None], kept


def decompose(matrix: Float[Tensor, "m n"], *, largest: float | None = None) -> Triplets:
    """Return the singular triplets that are not negligible (none of a zero matrix).

    Args:
        matrix: float64.
        largest: What they are compared with; default the largest singular value.
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    limit = largest if largest is not None else (float(s[0]) if s.numel() else 0.0)
    rank = int((s > NEGLIGIBLE * limit).sum())
    return Triplets(u, s, vh.T).first(rank)


def numerical_rank(matrix: Float[Tensor, "m n"]) -> int:
    """Return how many singular values are not negligible."""
    values = torch.linalg.svdvals(matrix)
    return int((values > NEGLIGIBLE * values[:1]).sum())


def nearest_orthonormal(columns: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
    """Return the polar factor: the nearest matrix with orthonormal columns (rows if k > m).

    Directions that the columns do not span stay out (the factor is then a partial isometry), so
    that equal columns share one direction, each with its part of the length.
    """
    p, s, qh = torch.linalg.svd(columns, full_matrices=False)
    kept = int((s > SAME_DIRECTION * s[:1]).sum())
    polar: Tensor = p[:, :kept] @ qh[:kept]
    return polar
