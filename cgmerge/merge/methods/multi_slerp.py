"""Average direction of the experts at their average length.

The average of nearly orthogonal experts is much shorter than any of them. Here directions and
lengths are averaged apart. For two experts at equal weights this is the middle of the arc.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method
from cgmerge.merge.shares import shares

_NO_DIRECTION = 1e-4


@dataclass(frozen=True, kw_only=True)
class MultiSlerpParams(Params):
    """Parameters of `multi-slerp`: none of its own."""


@dataclass(frozen=True, slots=True)
class Directions:
    """The experts' directions, as far as they have one.

    Attributes:
        place: Which experts are not zero.
        lengths: Their norms, float64 [active].
        cosines: Between their directions, float64 [active, active].
        share: Their weights, sum 1, float64 [active].
        length: The average norm over all experts, those that are zero included.
    """

    place: list[int]
    lengths: Float[Tensor, " active"]
    cosines: Float[Tensor, "active active"]
    share: Float[Tensor, " active"]
    length: float

    def mean(self) -> Float[Tensor, " active"] | None:
        """Return the average direction in terms of the directions; None where they cancel."""
        square = float(self.share @ self.cosines @ self.share)
        return self.share / square**0.5 if square > _NO_DIRECTION**2 else None


def directions_of(gram: Float[Tensor, "experts experts"], weights: Weights) -> Directions | None:
    """Split the experts into directions and lengths; None when that is not possible."""
    share = torch.tensor(shares(weights), dtype=torch.float64)
    lengths = gram.diagonal().clamp(min=0).sqrt()
    place = [i for i, length in enumerate(lengths.tolist()) if length > 0]
    total = float(share[place].sum())
    if not place or abs(total) < 1e-12:
        return None
    own = lengths[place]
    cosines = gram[place][:, place] / own[:, None] / own
    return Directions(place, own, cosines, share[place] / total, float(share @ lengths))


def spread(found: Directions, direction: Float[Tensor, " active"], experts: int) -> list[float]:
    """Return coefficients of the experts for a direction at the average length."""
    result = [0.0] * experts
    for place, value in zip(found.place, (direction / found.lengths).tolist(), strict=True):
        result[place] = value * found.length
    return result


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
    found = directions_of(gram, weights)
    mean = found.mean() if found is not None else None
    if found is None or mean is None:
        return shares(weights)
    return spread(found, mean, len(weights))
