"""Weights as shares of one, for rules in which only the ratio of the weights counts."""

from collections.abc import Sequence

from cgmerge.errors import UsageError


def shares(weights: Sequence[float], *, signed: bool = True) -> list[float]:
    """Divide the weights by their sum.

    Args:
        weights: One per expert.
        signed: Whether negative weights make sense.

    Raises:
        UsageError: The sum is zero, or a weight is negative where that makes no sense.

    Example:
        >>> shares([1.0, 3.0])
        [0.25, 0.75]
    """
    total = sum(weights)
    if not signed and min(weights) < 0:
        raise UsageError(
            f"the weights must not be negative here, found {list(weights)}", code="weights"
        )
    if abs(total) < 1e-12:
        raise UsageError(
            f"the weights {list(weights)} sum to zero; only their ratio counts here",
            code="weights",
        )
    return [weight / total for weight in weights]
