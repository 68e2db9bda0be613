"""Sign election and the mean of those who agree, shared by TIES and its relatives."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def elect(values: Float[Tensor, "experts *shape"]) -> Float[Tensor, "*shape"]:
    """Return the sign of the sum over experts: -1, 0 or +1 (0 where the sum is exactly 0)."""
    total = values[0].clone()
    for value in values[1:]:  # much faster than a reduction over the first axis
        total += value
    return total.sign_()


def disjoint_mean_(
    values: Float[Tensor, "experts *shape"],
    weights: Sequence[float],
    signs: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Average, entry by entry, only the experts whose sign is the elected one.

    Args:
        values: w_e·ΔW_e, zero where trimmed; overwritten, and the result lives in its memory
            (fresh memory for every block would cost more than the arithmetic).
        weights: |w_e|, what each agreeing expert counts for.
        signs: The elected signs; entries with sign 0 give 0.

    Returns:
        Σ_agree w_e·ΔW_e / Σ_agree |w_e|; 0 where nobody agrees.
    """
    total = values[0]
    # Positive where value and elected sign agree, 0 elsewhere; exact, since signs are ±1 or 0.
    count = total.mul_(signs).relu_().sign().mul_(weights[0])
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total += value.mul_(signs).relu_()
        count.add_(value.sign_(), alpha=weight)
    return total.mul_(signs).div_(count.clamp_min_(torch.finfo(total.dtype).tiny))
