"""Sign election and the mean of those who agree, shared by TIES and its relatives."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def elect(values: Float[Tensor, "experts *shape"]) -> Float[Tensor, "*shape"]:
    """Return the sign of the sum over experts: -1, 0 or +1 (0 where the sum is exactly 0)."""
    if len(values) == 1:
        return values[0].sign()
    return sum_in_order(values).sign_()


def disjoint_mean_(
    values: Float[Tensor, "experts *shape"],
    weights: Sequence[float],
    signs: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Average, entry by entry, only the experts whose sign is the elected one.

    Args:
        values: w_e·ΔW_e, zero where trimmed; overwritten.
        weights: |w_e|, what each agreeing expert counts for.
        signs: The elected signs; entries with sign 0 give 0.

    Returns:
        Σ_agree w_e·ΔW_e / Σ_agree |w_e|; 0 where nobody agrees.
    """
    # Positive where value and elected sign agree, 0 elsewhere; exact, since signs are ±1 or 0.
    # Few operations on all experts at once: each costs a pass over the block.
    total = sum_in_order(values.mul_(signs).relu_())
    count, *others = values.sign_().unbind()
    if weights[0] != 1.0:
        count.mul_(weights[0])
    for agrees, weight in zip(others, weights[1:], strict=True):
        count.add_(agrees, alpha=weight)
    return total.mul_(signs).div_(count.clamp_min_(torch.finfo(total.dtype).tiny))


def break_ties(
    signs: Float[Tensor, "*shape"], values: Float[Tensor, "experts *shape"], sign: float
) -> Float[Tensor, "*shape"]:
    """Give cancelled votes a sign; entries for which nobody votes keep 0.

    Args:
        signs: The elected signs.
        values: What was voted with.
        sign: -1, 0 or +1.
    """
    if not sign:
        return signs
    voted = (values != 0).any(dim=0)
    return torch.where((signs == 0) & voted, sign, signs)


def disjoint_sum_(
    values: Float[Tensor, "experts *shape"], signs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Add up, entry by entry, only the experts whose sign is the elected one.

    Args:
        values: w_e·ΔW_e, zero where trimmed; overwritten.
        signs: The elected signs; entries with sign 0 give 0.
    """
    return sum_in_order(values.mul_(signs).relu_()).mul_(signs)


def sum_in_order(values: Tensor) -> Tensor:
    """Sum over the first axis in its order; faster than a reduction, which also reorders."""
    first, *others = values.unbind()
    if not others:
        return first.clone()
    total = first + others[0]
    for value in others[1:]:
        total += value
    return total
