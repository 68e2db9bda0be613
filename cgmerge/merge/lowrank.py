"""Back to rank r, with the error known exactly.

`truncate` gives the best rank-r approximation of a low-rank delta through two thin QRs and an SVD
of the small core (cost O((out + in)·R²), never a dense matrix). `truncate_dense` does it for a
dense matrix whose row space is roughly known, by subspace iteration. Both return the error that
was actually made, not an estimate.

Source: the QR–SVD route is standard (Golub & Van Loan); randomized subspace iteration follows
Halko, Martinsson & Tropp (arXiv:0909.4061), started from the experts' own row space instead of a
random one, so that it needs no generator and converges in fewer passes.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import LowRank

PASSES = 1
"""Subspace iterations of `truncate_dense`; each costs two products with the matrix."""

_CANCELLATION = 1e-4

EXACT_SIDE = 2048
"""Smaller side up to which `best_dense` decomposes exactly (a few seconds at most)."""

_MOST_PASSES = 8

OVERSAMPLE = 8
"""Extra directions beyond the rank that `truncate_dense` carries along."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A delta of bounded rank and what it lost.

    Attributes:
        delta: Factors, balanced so that A and B have equal singular values.
        norm_sq: ‖M‖²_F of the matrix that was asked for.
        error_sq: ‖M − delta‖²_F.
    """

    delta: LowRank
    norm_sq: float
    error_sq: float


def truncate(delta: LowRank, rank: int) -> Truncated:
    """Return the best approximation of rank at most `rank`.

    Args:
        delta: Any factors, also linearly dependent ones.
        rank: At least 1.

    Returns:
        Factors of rank min(rank, R, out, in); when nothing has to be cut and R is already small
        enough the factors are returned as they are, with error 0.
    """
    out, into = delta.shape
    if delta.rank <= min(rank, out, into):
        return Truncated(delta, max(_norm_sq(delta), 0.0), 0.0)
    q_b, r_b = torch.linalg.qr(delta.b)
    q_a, r_a = torch.linalg.qr(delta.a.T)
    core = r_b.double() @ r_a.double().T
    left, values, right = torch.linalg.svd(core, full_matrices=False)
    kept = min(rank, values.numel())
    root = values[:kept].sqrt()
    b = q_b @ (left[:, :kept] * root).to(q_b.dtype)
    a = (root[:, None] * right[:kept]).to(q_a.dtype) @ q_a.T
    squares = values.square()
    return Truncated(LowRank(a, b), float(squares.sum()), float(squares[kept:].sum()))


def truncate_dense(
    matrix: Float[Tensor, "out in"], rank: int, rows: Float[Tensor, "guess in"]
) -> Truncated:
    """Approximate a dense matrix at rank `rank`.

    Args:
        matrix: float32 or float64, not modified.
        rank: At least 1.
        rows: Rows that probably span most of the matrix's row space, most important first; the
            number of rows may be anything, also 0.

    Returns:
        Factors of rank min(rank, out, in). The error is exact for these factors; they are the
        optimum up to the convergence of the subspace iteration (small matrices: the optimum).
    """
    out, into = matrix.shape
    kept = min(rank, out, into)
    norm_sq = _sum_squares(matrix)
    width = kept + OVERSAMPLE
    if min(out, into) <= 2 * width:
        basis = _orthonormal_columns(matrix) if out <= into else None
        if basis is None:
            flipped = truncate_dense(matrix.T, rank, matrix.new_zeros(0, out))
            delta = LowRank(flipped.delta.b.T.contiguous(), flipped.delta.a.T.contiguous())
            return Truncated(delta, flipped.norm_sq, flipped.error_sq)
    else:
        basis = _iterate(matrix, width, rows)
    core = basis.T @ matrix  # [width, in]
    q, r = torch.linalg.qr(core.T)
    left, values, right = torch.linalg.svd(r.T.double(), full_matrices=False)
    root = values[:kept].sqrt()
    b = basis @ (left[:, :kept] * root).to(matrix.dtype)
    a = (root[:, None] * right[:kept]).to(matrix.dtype) @ q.T
    error_sq = norm_sq - float(values[:kept].square().sum())
    if error_sq < _CANCELLATION * norm_sq:
        # The difference of two nearly equal float32 sums is noise: measure what is left instead.
        error_sq = _sum_squares(matrix - b @ a)
    return Truncated(LowRank(a, b), norm_sq, error_sq)


def best_dense(matrix: Float[Tensor, "out in"], rank: int) -> Truncated:
    """Return the best approximation of rank at most `rank` of any dense matrix.

    Up to `EXACT_SIDE` rows or columns through the eigenvectors of the smaller Gram matrix, in
    float64; beyond, subspace iteration until another pass gains less than 0.1 % of the error.

    Args:
        matrix: float32 or float64, not modified.
        rank: At least 1.
    """
    out, into = matrix.shape
    if min(out, into) > EXACT_SIDE:
        found = truncate_dense(matrix, rank, matrix.new_zeros(0, into))
        for _ in range(_MOST_PASSES):
            again = truncate_dense(matrix, rank, found.delta.a)
            gained = found.error_sq - again.error_sq
            found = again if gained > 0 else found
            if gained <= 0.002 * found.error_sq:
                break
        return found
    if out > into:
        flipped = best_dense(matrix.T, rank)
        delta = LowRank(flipped.delta.b.T.contiguous(), flipped.delta.a.T.contiguous())
        return Truncated(delta, flipped.norm_sq, flipped.error_sq)
    kept = min(rank, out)
    wide = matrix.double()
    basis = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(1)[:, :kept]
    right = basis.T @ wide
    sizes = torch.linalg.vector_norm(right, dim=1)
    root = sizes.sqrt()
    inverse = torch.where(sizes > 0, 1.0 / root, torch.zeros_like(root))
    b, a = (basis * root).to(matrix.dtype), (inverse[:, None] * right).to(matrix.dtype)
    norm_sq = float(wide.square().sum())
    error_sq = norm_sq - float(sizes.square().sum())
    if error_sq < _CANCELLATION * norm_sq:
        error_sq = float((wide - b.double() @ a.double()).square().sum())
    return Truncated(LowRank(a.contiguous(), b.contiguous()), norm_sq, error_sq)


def _iterate(matrix: Tensor, width: int, rows: Tensor) -> Tensor:
    """Subspace iteration: an orthonormal basis, [out, width], of the dominant column space."""
    start = _start(matrix, width, rows)
    basis: Tensor = torch.linalg.qr(matrix @ start).Q
    for _ in range(PASSES):
        basis = torch.linalg.qr(matrix.T @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    return basis


def _start(matrix: Tensor, width: int, rows: Tensor) -> Tensor:
    """Return start directions [in, ≥ width]: the given rows, then the matrix's own largest rows."""
    missing = width - rows.shape[0]
    if missing <= 0:
        return rows[:width].T.to(matrix.dtype)
    strength = matrix.square().sum(dim=1)
    # `sort` with `stable` makes the choice among equal rows deterministic.
    chosen = torch.sort(strength, descending=True, stable=True).indices[:missing]
    return torch.cat([rows.to(matrix.dtype), matrix[chosen]]).T


def _orthonormal_columns(matrix: Tensor) -> Tensor:
    """Return the whole space, for matrices so small that iteration would not pay."""
    return torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)


def _norm_sq(delta: LowRank) -> float:
    return delta.norm() ** 2


def _sum_squares(matrix: Tensor) -> float:
    """Sum of squares: float32 within short pieces, float64 across them."""
    pieces = torch.split(matrix.reshape(-1), 1 << 14)
    return math.fsum(torch.dot(piece, piece).item() for piece in pieces)
