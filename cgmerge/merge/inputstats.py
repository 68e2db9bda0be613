"""The linear system that RegMean and MaTS share: input Gram matrices and what they are asked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Incompatible
from cgmerge.merge.shares import shares


@dataclass(frozen=True, slots=True)
class System:
    """X · total = Σ p_e ΔW_e G_e.

    Attributes:
        mean: Σ p_e ΔW_e, [m, n].
        total: Σ p_e G_e, [n, n]; None when an expert that counts has no statistics.
        gap: Σ p_e (ΔW_e - mean) G_e, [m, n]: what the mean leaves open.
    """

    mean: Float[Tensor, "m n"]
    total: Float[Tensor, "n n"] | None
    gap: Float[Tensor, "m n"]


def build_system(
    matrices: Float[Tensor, "experts m n"],
    weights: Sequence[float],
    stats: Sequence[Tensor | None] | None,
    alpha: float,
) -> System:
    """Put the system together, one Gram matrix after the other.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        stats: Input Gram matrices XᵀX/N, [n, n], None where there are none.
        alpha: Share of the entries off the diagonal that is kept.

    Raises:
        UsageError: Weights that are negative or sum to zero.
        Incompatible: A Gram matrix of another size.
    """
    share = shares(weights, signed=False)
    mean = torch.einsum("e,emn->mn", matrices.new_tensor(share), matrices)
    active = [i for i, part in enumerate(share) if part > 0]
    if stats is None or any(stats[i] is None for i in active):
        return System(mean, None, torch.zeros_like(mean))
    n = matrices.shape[2]
    total, gap = matrices.new_zeros(n, n), torch.zeros_like(mean)
    for i in active:
        found = stats[i]
        assert found is not None
        if tuple(found.shape) != (n, n):
            raise Incompatible(
                f"the input statistics of expert {i} have shape {list(found.shape)},"
                f" [{n}, {n}] is wanted",
                code="stats",
                expected=[n, n],
                found=list(found.shape),
            )
        gram = found.double() * (alpha * share[i])
        gram.diagonal().copy_(found.diagonal().double() * share[i])
        total += gram
        gap += (matrices[i] - mean) @ gram
    return System(mean, total, gap)
