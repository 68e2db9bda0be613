"""Sum the experts and make all its singular values equal.

The sum is dominated by the directions that experts share. Equal singular values give the
directions of a single expert the same say, while the total (nuclear norm) stays.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.spectral import decompose, scaled

EVEN = {"flatten": 1.0}
PAPER = "No Task Left Behind (arXiv:2502.04959)"


@dataclass(frozen=True, kw_only=True)
class IsoParams(Params):
    """What `iso-c` and `iso-cts` have in common."""

    flatten: float = param(
        1.0,
        "1 makes all values equal, as published; cut to a lower rank that keeps arbitrary"
        " directions, and 0.99 the leading ones",
        low=0,
        high=1,
    )

    def flattened(self, values: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Move singular values towards their mean; their sum stays."""
        if not values.numel():
            return values
        return values.mean() * self.flatten + values * (1 - self.flatten)


@dataclass(frozen=True, kw_only=True)
class IsoCParams(IsoParams):
    """Parameters of `iso-c`."""

    rank: int = param(0, "keep only this many directions of the sum (0 = all)", low=0)


@method(
    "iso-c",
    "matrix",
    params=IsoCParams,
    about=About(
        formula=(
            "ΔW = scale · U s' Vᵀ,  U s Vᵀ = Σ w_e ΔW_e,"
            "  s' = flatten · mean(s) + (1 - flatten) · s"
        ),
        paper=f"Iso-C, {PAPER}",
        differs=(
            "the mean is over the rank of the sum, for LoRA the core directions, instead of all"
            " min(m, n), most of which are arbitrary for LoRA (scales differ accordingly)"
        ),
        use_when="many experts that share a lot; the scale needs tuning (1 to 2)",
    ),
    traits=Traits(scope="tensor", sides="both", identity=None, even=EVEN),
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
    return (found.u * p.flattened(found.s)) @ found.v.T
