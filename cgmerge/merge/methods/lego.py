"""Take LoRA experts apart into rank-one units and group the units that are alike.

A unit is one row of A with one column of B. Units of all experts are clustered by direction; every
cluster becomes one unit of the merged adapter, whose rank is the number of clusters.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.spectral import decompose, scaled

_Array = np.ndarray[Any, np.dtype[np.float64]]
_ROUNDS = 100
_BELOW = 1 - 1e-15  # a draw never reaches the end of the last interval
_DIGITS = 6  # cosines that agree to so many digits count as equal: rounding must not decide


@dataclass(frozen=True, kw_only=True)
class LegoParams(Params):
    """Parameters of `lego`."""

    rank: int = param(0, "number of clusters (0 = the largest rank of an expert)", low=0)
    seed: int = param(0, "which units the clusters start from", low=0)


@method(
    "lego",
    "matrix",
    params=LegoParams,
    about=About(
        formula="ΔW = scale · Σ_clusters b aᵀ,  [a; b] = mean of the units, at their mean length",
        paper="LoRA-LEGO (arXiv:2409.16167)",
        differs=(
            "units come from the SVD of each delta, since those of the factors depend on how a"
            " delta is factored; units are turned to agree in sign before they are averaged;"
            " lengths are Euclidean; no output factor √r/√clusters (use scale); a unit that is"
            " orthogonal to every cluster has no sign to agree on and is left out, so rank = all"
            " units gives the sum and small ranks of unrelated experts give some of their units"
        ),
        use_when="LoRA experts of related tasks and a small output rank",
    ),
    traits=Traits(scope="tensor", sides="both", identity={}),
)
def lego(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: LegoParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts; a common factor multiplies the result, 0 leaves one out.
        p: See `LegoParams`.
        _stats: Not used.
    """
    active, _ = scaled(matrices, weights)
    if not len(active):
        return matrices.new_zeros(matrices.shape[1:])
    parts = [decompose(matrix) for matrix in active]
    clusters = p.rank or max(part.s.numel() for part in parts)
    if clusters >= sum(part.s.numel() for part in parts):
        return active.sum(dim=0)
    # Long units first, so that the order of the experts does not matter.
    strength = torch.cat([part.s for part in parts])
    order = torch.sort(strength, descending=True, stable=True).indices
    roots = strength[order].sqrt()[:, None]
    left = torch.cat([part.u for part in parts], dim=1).T[order]
    right = torch.cat([part.v for part in parts], dim=1).T[order]
    directions = torch.cat([left, right], dim=1).numpy() / np.sqrt(2)
    generator = np.random.default_rng(p.seed)
    centres = _start(directions, strength[order].numpy(), clusters, generator)
    place, sign = _cluster(directions, centres)
    merged = matrices.new_zeros(matrices.shape[1:])
    for cluster in range(clusters):
        members = np.flatnonzero((place == cluster) & (sign != 0))
        if not members.size:
            continue
        turned = roots[members] * torch.from_numpy(sign[members])[:, None]
        b, a = (turned * left[members]).mean(dim=0), (turned * right[members]).mean(dim=0)
        # A unit [a; b] has length √2 · root; the centroid gets the mean of its members' lengths.
        length = torch.sqrt((a.square().sum() + b.square().sum()) / 2)
        merged += torch.outer(b, a) * (roots[members].mean() / length) ** 2
    return merged


def _cluster(units: _Array, centres: _Array) -> tuple[_Array, _Array]:
    """Group unit vectors by the line they lie on (spherical k-means, ± counts as the same).

    Returns:
        For every unit its cluster, and the sign with which it enters (0: orthogonal to all).
    """
    place, sign = _assign(units, centres)
    for _ in range(_ROUNDS):
        for cluster in range(len(centres)):
            members = (place == cluster) & (sign != 0)
            total = (units[members] * sign[members, None]).sum(axis=0)
            if np.linalg.norm(total) > 0:
                centres[cluster] = total / np.linalg.norm(total)
        before = place, sign
        place, sign = _assign(units, centres)
        if np.array_equal(before[0], place) and np.array_equal(before[1], sign):
            break
    return place, sign


def _start(
    units: _Array, strength: _Array, clusters: int, generator: np.random.Generator
) -> _Array:
    """Draw start units, the likelier the stronger and the farther from those drawn before."""
    distance = np.ones(len(units))
    chosen: list[int] = []
    while len(chosen) < clusters and distance.any():
        reached = np.cumsum(distance * strength / strength[0])
        # The unit that holds the drawn number; units at distance 0 hold none.
        drawn = generator.random() * reached[-1]
        chosen.append(int(np.searchsorted(reached, min(drawn, reached[-1] * _BELOW), "right")))
        cosine = np.round(np.abs(units @ units[chosen[-1]]), _DIGITS)
        distance = np.minimum(distance, 1 - np.minimum(cosine, 1.0) ** 2)
    return units[chosen].copy()


def _assign(units: _Array, centres: _Array) -> tuple[_Array, _Array]:
    cosine = np.round(units @ centres.T, _DIGITS)
    place = np.abs(cosine).argmax(axis=1)
    return place, np.sign(cosine[np.arange(len(units)), place])
