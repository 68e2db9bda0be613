"""Average direction of the experts at their average length.

The average of nearly orthogonal experts is much shorter than any of them. Here directions and
lengths are averaged apart. For two experts at equal weights this is the middle of the arc.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.directions import around
from cgmerge.merge.registry import About, Params, Traits, Weights, method


@dataclass(frozen=True, kw_only=True)
class MultiSlerpParams(Params):
    """Parameters of `multi-slerp`: none of its own."""


@method(
    "multi-slerp",
    "gram",
    params=MultiSlerpParams,
    about=About(
        formula="ΔW = scale · m/‖m‖ · Σ p_e ‖ΔW_e‖,  m = Σ p_e ΔW_e/‖ΔW_e‖,  p = w / Σ w",
        paper="Multi-SLERP of mergekit (arXiv:2403.13257)",
        differs=(
            "the step in the tangent space of the mergekit code is always zero and is left out;"
            " experts that are zero have no direction and only shorten the result; where the"
            " directions cancel the plain average is returned instead of an error"
        ),
        use_when="several experts, when the average comes out too weak",
    ),
    traits=Traits(scope="tensor", identity={}, relative_weights=True),
)
def coefficients(
    gram: Float[Tensor, "experts experts"], weights: Weights, _p: MultiSlerpParams
) -> list[float]:
    """Return the experts' coefficients.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Only their ratio counts.
        _p: Nothing of its own.

    Raises:
        UsageError: The weights sum to zero.
    """
    return around(gram, weights)
