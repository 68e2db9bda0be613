"""Choose the merged weight whose outputs are nearest to each expert's on that expert's inputs.

For a linear layer this is least squares with an exact answer. It needs the Gram matrix of each
expert's inputs, no labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.inputstats import build_system
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param

_CUT = 1e-6
_SURELY_REGULAR = 1e-3


@dataclass(frozen=True, kw_only=True)
class RegmeanParams(Params):
    """Parameters of `regmean`."""

    alpha: float = param(
        0.9,
        "share of the Gram matrix off the diagonal that is kept",
        low=0.0,
        high=1.0,
        grid=(0.9, 0.5, 0.99),
    )


@method(
    "regmean",
    "matrix",
    params=RegmeanParams,
    about=About(
        formula=(
            "ΔW = scale · (Σ p_e ΔW_e G̃_e)(Σ p_e G̃_e)⁺,  G̃ = alpha G + (1-alpha) diag G,"
            "  p = w / Σ w"
        ),
        paper="RegMean (arXiv:2212.09849)",
        differs=(
            "solved for the deviation from the average, so that inputs that never occur keep the"
            " average instead of 0; directions with less than 1e-6 of an input's own energy keep"
            " it too; modules without statistics are averaged; weights multiply the Gram matrices"
        ),
        use_when="a few hundred unlabelled inputs per expert are at hand; the strongest rule then",
    ),
    traits=Traits(scope="tensor", sides="left", identity={}, stats="gram", relative_weights=True),
)
def regmean(
    matrices: Float[Tensor, "experts m n"],
    weights: Weights,
    p: RegmeanParams,
    stats: Sequence[Tensor | None] | None,
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        p: See `RegmeanParams`.
        stats: XᵀX/N of every expert, [n, n]; the average is returned where one lacks.

    Raises:
        UsageError: Weights that are negative or sum to zero.
        Incompatible: A Gram matrix of another size.
    """
    system = build_system(matrices, weights, stats, p.alpha)
    if system.total is None:
        return system.mean
    energy = system.total.diagonal()
    alive = energy > 0
    if not bool(alive.any()):
        return system.mean
    # In units of each input's own size: activations of LLMs differ by many orders of magnitude.
    unit = energy[alive].rsqrt()
    correlation = system.total[alive][:, alive] * unit[:, None] * unit
    merged = system.mean.clone()
    merged[:, alive] += _solve(correlation, system.gap[:, alive] * unit, p.alpha) * unit
    return merged


def _solve(correlation: Tensor, gap: Tensor, alpha: float) -> Tensor:
    """Return gap · correlation⁺ for a correlation matrix (unit diagonal)."""
    if 1 - alpha >= _SURELY_REGULAR:
        # No eigenvalue is below 1 - alpha: the pseudo-inverse is the inverse.
        factor, failed = torch.linalg.cholesky_ex(correlation)
        if not int(failed):
            return torch.cholesky_solve(gap.T, factor).T
    values, basis = torch.linalg.eigh(correlation)
    basis = basis[:, values > _CUT]
    solved: Tensor = (gap @ basis / values[values > _CUT]) @ basis.T
    return solved
