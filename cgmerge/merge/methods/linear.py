"""Weighted sum of the experts' deltas; the plain average when no weights are given.

The average of the weights of fine-tuned models ("model soup") is, seen from the base, the average
of their deltas. Weights are used as they are: they need not sum to 1 and may be negative;
`normalize` divides by their sum.
"""

from dataclasses import dataclass

from cgmerge.errors import UsageError
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param


@dataclass(frozen=True, kw_only=True)
class LinearParams(Params):
    """Parameters of `linear`."""

    normalize: bool = param(False, "divide by the sum of the weights")


@method(
    "linear",
    "linear",
    params=LinearParams,
    about=About(
        formula="ΔW = scale · Σ w_e ΔW_e   (no weight given: w_e = 1/experts; any: others 1)",
        paper="Model Soups (arXiv:2203.05482)",
        differs="soups average whole weights; on deltas the base cancels: the result is the same",
        use_when="experts do similar things, or as the safe first try",
    ),
    traits=Traits(default_weight="mean", identity={}),
    aliases={"average": {"normalize": True}},
)
def coefficients(weights: Weights, p: LinearParams) -> list[float]:
    """Return w_e, divided by Σ w with `normalize`.

    Args:
        weights: One per expert.
        p: See `LinearParams`.

    Raises:
        UsageError: `normalize` with weights that sum to zero.

    Example:
        >>> coefficients([1.0, 3.0], LinearParams(normalize=True))
        [0.25, 0.75]
    """
    total = sum(weights) if p.normalize else 1.0
    if abs(total) < 1e-12:
        raise UsageError(
            f"the weights {list(weights)} sum to zero and cannot be normalized",
            code="weights",
            hint="leave out normalize, or use task-arithmetic",
        )
    return [weight / total for weight in weights]
