"""RegMean with inputs as the merged model makes them, one layer after the other.

RegMean weighs experts by the inputs that each sees in its own model. In the merged model a layer
sees what the merged layers below make of them: here every layer is solved for those inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.methods.regmean import RegmeanParams, regmean
from cgmerge.merge.registry import About, Traits, Weights, method, param


@dataclass(frozen=True, kw_only=True)
class RegmeanPpParams(RegmeanParams):
    """Parameters of `regmean++`; alpha is not tuned, since the statistics depend on it."""

    alpha: float = param(
        0.9,
        "share of the Gram matrix off the diagonal that is kept; as given to `stats`",
        low=0.0,
        high=1.0,
    )


@method(
    "regmean++",
    "matrix",
    params=RegmeanPpParams,
    about=About(
        formula="as regmean, G_e from expert e's data in its own layer on top of merged layers",
        paper="RegMean++ (arXiv:2508.03121)",
        differs=(
            "as `regmean`; the statistics are collected for one set of experts, weights and alpha,"
            " at scale 1, and are refused for another; a layer is a block of the model, as in the"
            " official code; what is not adapted is the base's, where the official code averages"
            " embeddings"
        ),
        use_when="as regmean, when many layers are merged; costs a pass per layer and expert",
    ),
    traits=Traits(
        scope="tensor", sides="left", identity={}, stats="layerwise", relative_weights=True
    ),
)
def regmean_pp(
    matrices: Float[Tensor, "experts m n"],
    weights: Weights,
    p: RegmeanPpParams,
    stats: Sequence[Tensor | None] | None,
) -> Float[Tensor, "m n"]:
    """Merge one module; the rule is that of `regmean`, the statistics are others.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        p: See `RegmeanPpParams`.
        stats: XᵀX/N of every expert, [n, n], from `cgmerge stats --kind layerwise`.
    """
    return regmean(matrices, weights, p, stats)
