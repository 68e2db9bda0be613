"""Look at experts before merging them: how large, how alike, how much they disagree.

Everything but the share of conflicting signs comes from the factors: with ΔW_e = Q_b·C_e·Q_aᵀ
(see `spaces`) norms, inner products and singular values are those of the small C_e.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Blocks, LowRank
from cgmerge.merge.engine import one_thread
from cgmerge.merge.spaces import project

_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class ModuleComparison:
    """One module, all experts.

    Attributes:
        norms: ‖ΔW_e‖; 0 where the expert does not touch the module.
        effective_ranks: exp of the entropy of σ²/Σσ², [experts]; 0 for a zero delta.
        gram: ⟨ΔW_i, ΔW_j⟩, [experts, experts].
        conflicts: Share of entries in which two experts have opposite signs, of those in which
            both are not zero, [experts, experts]; 0.5 is what unrelated experts have.
        counted: How many entries these are, [experts, experts].
        left_overlap: ‖U_iᵀU_j‖² / min(rank_i, rank_j) of the output spaces, [experts, experts].
        right_overlap: The same of the input spaces.
        spectrum: Singular values of the weighted sum, falling.
    """

    norms: list[float]
    effective_ranks: list[float]
    gram: Float[Tensor, "experts experts"]
    conflicts: Float[Tensor, "experts experts"]
    counted: Float[Tensor, "experts experts"]
    left_overlap: Float[Tensor, "experts experts"]
    right_overlap: Float[Tensor, "experts experts"]
    spectrum: Float[Tensor, " values"]

    @property
    def exact_rank(self) -> int:
        """Return the rank that holds the weighted sum without loss."""
        return _rank_of(self.spectrum)

    def lost(self, rank: int) -> float:
        """Return the squared norm that the best approximation of rank `rank` loses."""
        return float(self.spectrum[rank:].square().sum())


def compare(
    experts: Sequence[Mapping[str, LowRank]], weights: Sequence[float] | None = None
) -> dict[str, ModuleComparison]:
    """Compare experts module by module.

    Args:
        experts: One mapping per expert; modules and ranks may differ.
        weights: Of the sum whose spectrum is reported; default 1 each.

    Returns:
        Module name to its comparison, names sorted.
    """
    factors = torch.tensor([1.0] * len(experts) if weights is None else list(weights)).double()
    blocks = Blocks(experts)
    with one_thread():
        return {name: _compare(blocks, name, factors) for name in blocks.names}


def cosines(gram: Float[Tensor, "experts experts"]) -> Float[Tensor, "experts experts"]:
    """Return the cosine of every pair; 0 where one of them is zero."""
    norms = gram.diagonal().clamp_min(0.0).sqrt()
    scale = norms[:, None] * norms
    return torch.where(scale > 0, gram / scale.clamp_min(torch.finfo(gram.dtype).tiny), 0.0)


def _compare(blocks: Blocks, name: str, weights: Tensor) -> ModuleComparison:
    cores = project(blocks.fetch(name), "both").matrices
    flat = cores.flatten(1)
    gram = flat @ flat.T
    u, s, v = torch.linalg.svd(cores, full_matrices=False)
    ranks = [_rank_of(values) for values in s]
    conflicts, counted = _conflicts(blocks, name)
    return ModuleComparison(
        norms=[float(value) for value in gram.diagonal().clamp_min(0.0).sqrt()],
        effective_ranks=[_effective_rank(values) for values in s],
        gram=gram,
        conflicts=conflicts,
        counted=counted,
        left_overlap=_overlaps([x[:, :r] for x, r in zip(u, ranks, strict=True)]),
        right_overlap=_overlaps([x[:r].T for x, r in zip(v, ranks, strict=True)]),
        spectrum=torch.linalg.svdvals((cores * weights[:, None, None]).sum(dim=0)),
    )


def _rank_of(values: Tensor) -> int:
    return int((values > _NEGLIGIBLE * values[:1]).sum()) if values.numel() else 0


def _effective_rank(values: Tensor) -> float:
    squares = values.square()
    total = squares.sum()
    if float(total) == 0.0:
        return 0.0
    shares = squares / total
    return float(torch.special.entr(shares).sum().exp())


def _overlaps(bases: list[Tensor]) -> Tensor:
    result = torch.zeros(len(bases), len(bases), dtype=torch.float64)
    for i, x in enumerate(bases):
        for j, y in enumerate(bases):
            least = min(x.shape[1], y.shape[1])
            result[i, j] = float((x.T @ y).square().sum()) / least if least else 0.0
    return result


def _conflicts(blocks: Blocks, name: str) -> tuple[Tensor, Tensor]:
    """Count opposite signs through products of sign matrices, block by block.

    Returns:
        The share of entries with opposite signs, and of how many.
    """
    count = len(blocks.experts)
    balance = torch.zeros(count, count, dtype=torch.float64)
    both = torch.zeros(count, count, dtype=torch.float64)
    for block in blocks.only(name):
        signs = block.values.flatten(1).sign_()
        balance += (signs @ signs.T).double()  # agreeing minus opposite
        signs.abs_()
        both += (signs @ signs.T).double()
    return torch.where(both > 0, (both - balance) / (2 * both.clamp_min(1.0)), 0.0), both
