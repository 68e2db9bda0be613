"""Move from a simple merge towards the RegMean solution, by a number of conjugate-gradient steps.

Stopping early is a way to trust the statistics only in the directions that they are sure of: the
first steps change what matters most for the outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.inputstats import build_system
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param

_DONE = 1e-12


@dataclass(frozen=True, kw_only=True)
class MatsParams(Params):
    """Parameters of `mats`."""

    iterations: int = param(
        100, "steps; many give regmean with alpha=1", low=0, high=100_000, grid=(100, 20, 50)
    )
    start: Literal["average", "sum"] = param("average", "where they start")


@method(
    "mats",
    "matrix",
    params=MatsParams,
    about=About(
        formula="steps of conjugate gradients on X · Σ p_e G_e = Σ p_e ΔW_e G_e,  p = w / Σ w",
        paper="MaTS (arXiv:2312.04339)",
        differs=(
            "input statistics only (the paper's Kronecker form adds gradients); float64; starts"
            " from the plain average or sum, not from the best tuned scale; all rows of a module"
            " share one step length, as in the official code"
        ),
        use_when="as regmean, with the number of steps as the knob",
    ),
    traits=Traits(scope="tensor", sides="left", identity={}, stats="gram", relative_weights=True),
)
def mats(
    matrices: Float[Tensor, "experts m n"],
    weights: Weights,
    p: MatsParams,
    stats: Sequence[Tensor | None] | None,
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        p: See `MatsParams`.
        stats: XᵀX/N of every expert, [n, n]; the average is returned where one lacks.

    Raises:
        UsageError: Weights that are negative or sum to zero.
        Incompatible: A Gram matrix of another size.
    """
    system = build_system(matrices, weights, stats, 1.0)
    if system.total is None:
        return system.mean
    if p.start == "average":
        return system.mean + _conjugate_gradients(system.total, system.gap, p.iterations)
    start = system.mean * len(weights)
    rest = system.gap - (start - system.mean) @ system.total
    return start + _conjugate_gradients(system.total, rest, p.iterations)


def _conjugate_gradients(total: Tensor, wanted: Tensor, iterations: int) -> Tensor:
    """Solve X · total = wanted from X = 0; the rows are one system, so rotating them is harmless.

    Args:
        total: Positive semi-definite, [n, n].
        wanted: [m, n].
        iterations: At most this many; fewer when nothing is left to do.
    """
    found = torch.zeros_like(wanted)
    rest, direction = wanted, wanted
    square = float(rest.square().sum())
    limit = square * _DONE**2
    for _ in range(iterations):
        if square <= limit:
            break
        image = direction @ total
        curvature = float((direction * image).sum())
        if curvature <= 0.0:  # nothing but rounding errors is left
            break
        found = found + direction * (square / curvature)
        rest = rest - image * (square / curvature)
        before, square = square, float(rest.square().sum())
        direction = rest + direction * (square / before)
    return found
