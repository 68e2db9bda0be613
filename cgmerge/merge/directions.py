"""Directions and lengths of experts from their inner products, for means on the sphere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.shares import shares

_NO_DIRECTION = 1e-4


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


def directions_of(
    gram: Float[Tensor, "experts experts"], weights: Sequence[float]
) -> Directions | None:
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


def around(
    gram: Float[Tensor, "experts experts"],
    weights: Sequence[float],
    refine: Callable[[Directions, Tensor], Tensor] | None = None,
) -> list[float]:
    """Return coefficients of the experts for their mean direction at their average length.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Only their ratio counts.
        refine: Finds a better mean, starting from the average direction. Both are given as
            coefficients of the directions.

    Returns:
        One per expert; the plain average where the directions cancel.

    Raises:
        UsageError: The weights sum to zero.
    """
    found = directions_of(gram, weights)
    mean = found.mean() if found is not None else None
    if found is None or mean is None:
        return shares(weights)
    direction = mean if refine is None else refine(found, mean)
    result = [0.0] * len(weights)
    for place, value in zip(found.place, (direction / found.lengths).tolist(), strict=True):
        result[place] = value * found.length
    return result
