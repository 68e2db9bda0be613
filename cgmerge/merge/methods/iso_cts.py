"""Equal singular values, with room kept for directions that only one expert has.

Like `iso-c`, but only part of the directions are those of the sum; the rest are each expert's
own, taken from what the common directions leave of it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.methods.iso_c import EVEN, PAPER, IsoParams
from cgmerge.merge.registry import About, Traits, Weights, method, param
from cgmerge.merge.spectral import Triplets, decompose, nearest_orthonormal, numerical_rank, scaled


@dataclass(frozen=True, kw_only=True)
class IsoCtsParams(IsoParams):
    """Parameters of `iso-cts`."""

    common: float = param(0.8, "share of the directions that come from the sum", low=0, high=1)


@method(
    "iso-cts",
    "matrix",
    params=IsoCtsParams,
    about=About(
        formula=(
            "ΔW = scale · U⊥ s' V⊥ᵀ  of [top c of Σ w_e ΔW_e, top (k-c)/E of each"
            " (I - U_c U_cᵀ) ΔW_e],  s' as in iso-c"
        ),
        paper=f"Iso-CTS, {PAPER}",
        differs=(
            "k is the number of directions that the experts span together, for LoRA the core,"
            " instead of min(m, n); an expert with fewer directions left gives those it has"
        ),
        use_when="many experts of which some share little; the scale needs tuning (1 to 2)",
    ),
    traits=Traits(scope="tensor", sides="both", identity=None, even=EVEN),
)
def iso_cts(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: IsoCtsParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts; a common factor multiplies the result, 0 leaves one out.
        p: See `IsoCtsParams`.
        _stats: Not used.
    """
    active, _ = scaled(matrices, weights)
    count = len(active)
    if not count:
        return matrices.new_zeros(matrices.shape[1:])
    tall, wide = torch.cat(list(active), dim=0), torch.cat(list(active), dim=1)
    total = min(numerical_rank(tall), numerical_rank(wide))
    own = round((total - int(total * p.common + 1e-9)) / count)
    largest = float(active.flatten(1).norm(dim=1).max())
    parts = [decompose(active.sum(dim=0), largest=largest).first(max(0, total - own * count))]
    shared = parts[0].u
    if own:
        left_over = active - shared @ (shared.T @ active)
        for matrix, before in zip(left_over, active, strict=True):
            limit = float(torch.linalg.matrix_norm(before, 2))
            parts.append(decompose(matrix, largest=limit).first(own))
    return _joined(parts, p)


def _joined(parts: list[Triplets], p: IsoCtsParams) -> Tensor:
    """Put directions side by side, make them orthogonal, and give them equal values."""
    left = nearest_orthonormal(torch.cat([part.u for part in parts], dim=1))
    right = nearest_orthonormal(torch.cat([part.v for part in parts], dim=1))
    values = torch.cat([part.s for part in parts])
    return (left * p.flattened(values)) @ right.T
