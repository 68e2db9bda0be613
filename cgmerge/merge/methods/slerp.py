"""Spherical interpolation between two experts.

The straight line between two vectors passes closer to zero than either of them; the arc does
not. The angle is that between the experts' deltas of one tensor, from inner products, so that
LoRA experts are merged in their factors.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param

_NEARLY_PARALLEL = 0.9995


@dataclass(frozen=True, kw_only=True)
class SlerpParams(Params):
    """Parameters of `slerp`."""

    t: float = param(
        0.5,
        "place between the first expert (0) and the second (1)",
        low=0,
        high=1,
        grid=(0.5, 0.3, 0.7),
    )


@method(
    "slerp",
    "gram",
    params=SlerpParams,
    about=About(
        formula="ΔW = scale · [sin((1-t)θ) ΔW_1 + sin(tθ) ΔW_2] / sin θ,  θ = angle(ΔW_1, ΔW_2)",
        paper="Shoemake, Animating rotation with quaternion curves (1985); for experts as in"
        " Tam et al. (arXiv:2409.18314)",
        differs=(
            "the angle is that of the deltas, tensor by tensor, where mergekit takes whole"
            " weights; straight line when |cos θ| > 0.9995, also for opposite experts and zeros"
        ),
        use_when="two experts, when the average comes out too weak",
    ),
    traits=Traits(scope="tensor", experts=(2, 2), identity={}, ordered=True),
)
def coefficients(gram: Float[Tensor, "2 2"], weights: Weights, p: SlerpParams) -> list[float]:
    """Return the coefficients of the two experts.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Factors on the experts before they are interpolated; a common factor multiplies
            the result.
        p: See `SlerpParams`.
    """
    cosine = cosine_of(gram)
    if cosine is not None and weights[0] * weights[1] < 0:
        cosine = -cosine
    straight = cosine is None or abs(cosine) > _NEARLY_PARALLEL
    first, second = interpolate(None if straight else cosine, p.t)
    return [weights[0] * first, weights[1] * second]


def cosine_of(gram: Float[Tensor, "2 2"]) -> float | None:
    """Return the cosine of the angle between two experts, None where one is zero."""
    length = math.sqrt(float(gram[0, 0])) * math.sqrt(float(gram[1, 1]))
    return max(-1.0, min(1.0, float(gram[0, 1]) / length)) if length > 0 else None


def interpolate(cosine: float | None, t: float) -> tuple[float, float]:
    """Return the coefficients on the arc, or on the straight line when there is no angle."""
    if cosine is None:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
