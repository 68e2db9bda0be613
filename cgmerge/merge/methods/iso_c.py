"""Sum the experts and make all its singular values equal.

The sum is dominated by the directions that experts share. Equal singular values give the
directions of a single expert the same say, while the total (nuclear norm) stays.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.spectral import decompose, scaled


@dataclass(frozen=True, kw_only=True)
class IsoCParams(Params):
    """Parameters of `iso-c`."""

    rank: int = param(0, "keep only this many directions of the sum (0 = all)", low=0)
    flatten: float = param(
        0.99,
        "1 makes the values exactly equal, and cutting the result to a lower rank arbitrary",
        low=0,
        high=1,
    )


@method(
    "iso-c",
    "matrix",
    params=IsoCParams,
    about=About(
        formula=(
            "ΔW = scale · U s' Vᵀ,  U s Vᵀ = Σ w_e ΔW_e,"
            "  s' = flatten · mean(s) + (1 - flatten) · s"
        ),
        paper="Iso-C, No Task Left Behind (arXiv:2502.04959)",
        differs=(
            "the mean is over the rank of the sum, for LoRA the core directions, instead of all"
            " min(m, n), most of which are arbitrary for LoRA (scales differ accordingly); leaves"
            " 1 % of the spread, so that a lower output rank keeps the leading directions:"
            " flatten=1 is the paper"
        ),
        use_when="many experts that share a lot; the scale needs tuning (1 to 2)",
    ),
    traits=Traits(scope="tensor", sides="both", identity=None),
)
def iso_c(
    matrices: Float[Tensor, "experts m n"], weights: Weights, p: IsoCParams, _stats: object
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Factors on the experts; a common factor multiplies the result.
        p: See `IsoCParams`.
        _stats: Not used.
    """
    active, _ = scaled(matrices, weights)
    largest = float(active.flatten(1).norm(dim=1).max()) if len(active) else 0.0
    found = decompose(active.sum(dim=0), largest=largest)
    if p.rank:
        found = found.first(p.rank)
    return (found.u * flattened(found.s, p.flatten)) @ found.v.T


def flattened(values: Float[Tensor, " k"], share: float) -> Float[Tensor, " k"]:
    """Move values towards their mean: `share` 1 makes them equal, 0 leaves them."""
    return values.mean() * share + values * (1 - share) if values.numel() else values
