"""Back to rank r, with the error known exactly.

`truncate` gives the best rank-r approximation of a low-rank delta through two thin QRs and the
small core between them (cost O((out + in)·R²), never a dense matrix; only the r directions kept
are carried back). `truncate_dense` does it for a dense matrix whose row space is roughly known, by
subspace iteration. Both return the error that was actually made, not an estimate.

Source: the QR–SVD route is standard (Golub & Van Loan); randomized subspace iteration follows
Halko, Martinsson & Tropp (arXiv:0909.4061), started from the experts' own row space instead of a
random one, so that it needs no generator, and ended when another pass would gain nothing.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import LowRank

OVERSAMPLE = 8
"""Extra directions beyond the rank that the subspace iteration carries along."""

SMALL_SIDE = 256
"""Smaller side up to which `truncate_dense` decomposes exactly: iterating would not pay."""

EXACT_SIDE = 2048
"""Smaller side up to which `best_dense` decomposes exactly (a few seconds at most)."""

_MOST_PASSES = 16
_SETTLED = 0.002  # of the squared error: another pass that gains less ends the iteration
_CANCELLATION = 1e-4


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
    if out < into:  # the side whose orthogonal factor is needed should be the short one
        flipped = truncate(LowRank(delta.b.T, delta.a.T), rank)
        turned = LowRank(flipped.delta.b.T.contiguous(), flipped.delta.a.T.contiguous())
        return Truncated(turned, flipped.norm_sq, flipped.error_sq)
    tall, wide = torch.geqrf(delta.b)[0], torch.geqrf(delta.a.T)
    r_b, r_a = (packed[: delta.rank].triu().double() for packed in (tall, wide[0]))
    core = r_b @ r_a.T
    small = _decompose(core, min(rank, *core.shape))
    # Rows √σ·vᵀ of core ≈ Σ σ·u·vᵀ; B·(R_aᵀ·v) is σ·u in the whole space, without the Q of B.
    right = small.delta.a
    values = right.square().sum(dim=1)
    mix = r_a.T @ torch.where(values > 0, right.T / values, 0.0)
    b = delta.b @ mix.to(delta.b.dtype)
    a = _times_q(wide, right.T.to(delta.a.dtype)).T.contiguous()
    cut = rank < min(core.shape)
    return Truncated(LowRank(a, b), small.norm_sq, small.error_sq if cut else 0.0)


def _times_q(reflectors: tuple[Tensor, Tensor], few: Float[Tensor, "k few"]) -> Tensor:
    """Return Q @ few for the Q of a QR that is left as it was packed: forming Q would cost more."""
    packed, tau = reflectors
    k = tau.numel()
    padded = packed.new_zeros(packed.shape[0], few.shape[1])
    padded[:k] = few
    return torch.ormqr(packed[:, :k], tau, padded)


def main_rows(delta: LowRank, rank: int) -> Float[Tensor, "rank in"]:
    """Return the directions of the row space that matter most, as a start for `truncate_dense`.

    From the Gram matrices of the factors: half the time of `truncate`, but directions below
    1e-4 of the largest are noise.

    Args:
        delta: Any factors, also linearly dependent ones.
        rank: How many directions at most.
    """
    values, vectors = torch.linalg.eigh((delta.b.T @ delta.b).double())
    left = vectors * values.clamp_min(0).sqrt()  # left·leftᵀ = BᵀB: leftᵀ·A has the rows of B·A
    core = left.T @ (delta.a @ delta.a.T).double() @ left
    right = torch.linalg.eigh(core).eigenvectors.flip(1)[:, :rank]
    mix: Tensor = (left @ right).T.to(delta.a.dtype)
    return mix @ delta.a


def truncate_dense(
    matrix: Float[Tensor, "out in"], rank: int, rows: Float[Tensor, "guess in"]
) -> Truncated:
    """Approximate a dense matrix at rank `rank`.

    Args:
        matrix: float32 or float64, not modified.
        rank: At least 1.
        rows: Rows that probably span most of the matrix's row space, most important first; any
            number of them, also 0.

    Returns:
        Factors of rank min(rank, out, in). The error is exact for these factors; they are the
        optimum up to the convergence of the subspace iteration, which goes on until another pass
        makes the error less than 0.1 % smaller (small matrices: the optimum).
    """
    out, into = matrix.shape
    kept = min(rank, out, into)
    width = kept + OVERSAMPLE
    if min(out, into) <= max(SMALL_SIDE, 2 * width):
        return _decompose(matrix, kept)
    strength = torch.linalg.vector_norm(matrix, dim=1).double().square()
    norm_sq = float(strength.sum())
    basis = torch.linalg.qr(_start(matrix, width, rows[:kept], strength).T).Q
    q, flipped, captured = basis, True, -1.0
    for turn in range(_MOST_PASSES):
        basis, flipped = q, not flipped
        # (basisᵀ·M)ᵀ, not Mᵀ·basis: half the time for a matrix in rows.
        image = (basis.T @ matrix).T if flipped else matrix @ basis
        q, r = torch.linalg.qr(image)
        left, values, right = torch.linalg.svd(r.double(), full_matrices=False)
        before, captured = captured, float(values[:kept].square().sum())
        if turn and captured - before <= _SETTLED * (norm_sq - captured):
            break
    root = values[:kept].sqrt()
    b = q @ (left[:, :kept] * root).to(matrix.dtype)
    a = (root[:, None] * right[:kept]).to(matrix.dtype) @ basis.T
    delta = LowRank(b.T.contiguous(), a.T.contiguous()) if flipped else LowRank(a, b)
    error_sq = norm_sq - captured
    if error_sq < _CANCELLATION * norm_sq:
        # The difference of two nearly equal float32 sums is noise: measure what is left instead.
        error_sq = _sum_squares(matrix - delta.dense())
    return Truncated(delta, norm_sq, error_sq)


def best_dense(matrix: Float[Tensor, "out in"], rank: int) -> Truncated:
    """Return the best approximation of rank at most `rank` of any dense matrix.

    Up to `EXACT_SIDE` rows or columns exactly, beyond by `truncate_dense` without a guess.

    Args:
        matrix: float32 or float64, not modified.
        rank: At least 1.
    """
    out, into = matrix.shape
    if min(out, into) <= EXACT_SIDE:
        return _decompose(matrix, min(rank, out, into))
    return truncate_dense(matrix, rank, matrix.new_zeros(0, into))


def _decompose(matrix: Tensor, kept: int) -> Truncated:
    """Truncate exactly, through the eigenvectors of the smaller Gram matrix in float64."""
    out, into = matrix.shape
    if out > into:
        flipped = _decompose(matrix.T, kept)
        delta = LowRank(flipped.delta.b.T.contiguous(), flipped.delta.a.T.contiguous())
        return Truncated(delta, flipped.norm_sq, flipped.error_sq)
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


def _start(matrix: Tensor, width: int, rows: Tensor, strength: Tensor) -> Tensor:
    """Return `width` directions [width, in]: the given rows, then the matrix's own largest ones.

    The matrix's rows also keep the iteration from resting in a subspace that the given rows span
    and the matrix maps into itself, without being the dominant one.
    """
    # `sort` with `stable` makes the choice among equal rows deterministic.
    order = torch.sort(strength, descending=True, stable=True).indices
    return torch.cat([rows.to(matrix.dtype), matrix[order[: width - rows.shape[0]]]])


def _norm_sq(delta: LowRank) -> float:
    return delta.norm() ** 2


def _sum_squares(matrix: Tensor) -> float:
    """Sum of squares: float32 within a row, float64 across the rows."""
    return float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
