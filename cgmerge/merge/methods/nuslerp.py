"""Spherical interpolation between two experts, its place given by their weights.

Like `slerp`, with t = w_2 / (w_1 + w_2), so that it is used like a weighted average: the order of
the experts does not matter, and neither does a common factor of the weights.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.methods.slerp import cosine_of, interpolate
from cgmerge.merge.registry import About, Params, Traits, Weights, method
from cgmerge.merge.shares import shares

_PARALLEL = 1e-4


@dataclass(frozen=True, kw_only=True)
class NuslerpParams(Params):
    """Parameters of `nuslerp`: none of its own."""

    def check(self, weights: Weights) -> None:
        """Refuse weights without a ratio."""
        shares(weights)


@method(
    "nuslerp",
    "gram",
    params=NuslerpParams,
    about=About(
        formula="slerp at t = w_2 / (w_1 + w_2)",
        paper="NuSLERP of mergekit (arXiv:2403.13257)",
        differs=(
            "one angle per tensor, not per row or column; straight line when |sin θ| < 1e-4"
            " (mergekit 1e-8), since nearly opposite experts would otherwise be turned into"
            " amplified rounding errors; weights that sum to zero are refused (mergekit: halfway)"
        ),
        use_when="two experts of unequal importance",
    ),
    traits=Traits(scope="tensor", experts=(2, 2), identity={}, relative_weights=True),
)
def coefficients(gram: Float[Tensor, "2 2"], weights: Weights, _p: NuslerpParams) -> list[float]:
    """Return the coefficients of the two experts.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Only their ratio counts.
        _p: Nothing of its own.

    Raises:
        UsageError: The weights sum to zero.
    """
    t = shares(weights)[1]
    cosine = cosine_of(gram)
    if cosine is not None and math.sqrt(1 - cosine * cosine) < _PARALLEL:
        cosine = None
    return list(interpolate(cosine, t))
