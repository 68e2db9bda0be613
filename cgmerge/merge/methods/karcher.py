"""Mean of the experts on the sphere, at their average length.

The direction from which the weighted sum of squared angles to the experts' directions is smallest
(Karcher or Riemannian mean), found by averaging in the tangent space until nothing moves. All of
it happens in terms of inner products, so that LoRA experts stay in their factors.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.directions import Directions, around
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param


@dataclass(frozen=True, kw_only=True)
class KarcherParams(Params):
    """Parameters of `karcher`."""

    iterations: int = param(100, "at most this many steps", low=1, high=100_000)
    tolerance: float = param(1e-10, "stop when a step is a smaller angle (radians)", above=0)


@method(
    "karcher",
    "gram",
    params=KarcherParams,
    about=About(
        formula="ΔW = scale · argmin_{‖m‖=1} Σ p_e angle(m, ΔW_e)² · Σ p_e ‖ΔW_e‖,  p = w / Σ w",
        paper="Karcher mean as in mergekit (arXiv:2403.13257)",
        differs=(
            "at most 100 steps down to 1e-10 (mergekit 10 steps, 1e-5), since a step costs"
            " nothing on inner products; starts from the average direction, and returns the plain"
            " average where that does not exist"
        ),
        use_when="several experts; differs from multi-slerp when one stands apart",
    ),
    traits=Traits(scope="tensor", identity={}, relative_weights=True),
)
def coefficients(
    gram: Float[Tensor, "experts experts"], weights: Weights, p: KarcherParams
) -> list[float]:
    """Return the experts' coefficients.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Only their ratio counts.
        p: See `KarcherParams`.

    Raises:
        UsageError: The weights sum to zero.
    """

    def settle(found: Directions, point: Tensor) -> Tensor:
        for _ in range(p.iterations):
            point, step = _move(found, point)
            if step < p.tolerance:
                break
        return point

    return around(gram, weights, settle)


def _move(found: Directions, point: Tensor) -> tuple[Tensor, float]:
    """Step to the mean in the tangent space at a point; return the new point and the angle."""
    towards = found.cosines @ point
    sines = (1 - towards.square()).clamp(min=0).sqrt()
    angles = torch.atan2(sines, towards)
    # angle/sine tends to 1 at the point itself; straight across there is no direction to go.
    ratio = torch.where(sines > 1e-8, angles / sines.clamp(min=1e-8), (towards > 0).double())
    pull = found.share * ratio
    tangent = pull - float(pull @ towards) * point
    length = math.sqrt(max(0.0, float(tangent @ found.cosines @ tangent)))
    if length == 0.0:
        return point, 0.0
    moved = point * math.cos(length) + tangent * (math.sin(length) / length)
    norm = math.sqrt(float(moved @ found.cosines @ moved))
    return moved / norm, length
