"""Average of experts of the same task, shrunk by how much they agree.

Fine-tuned models lie on a shell around their centre; the angle between them tells how far along
the way from the base to their average the centre is. Experts of different tasks are nearly
orthogonal, for which the rule returns nearly the base: it is made for several runs of one task.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.registry import About, Params, Traits, Weights, method
from cgmerge.merge.shares import shares


@dataclass(frozen=True, kw_only=True)
class ModelStockParams(Params):
    """Parameters of `model-stock`: none of its own."""


@method(
    "model-stock",
    "gram",
    params=ModelStockParams,
    about=About(
        formula="ΔW = scale · t · Σ p_e ΔW_e,  t = N c / (1 + (N-1) c),  c = mean cosine, p = w/Σw",
        paper="Model Stock (arXiv:2403.19522)",
        differs=(
            "any number of experts instead of pairs in sequence; c below 0 counts as 0, where the"
            " formula would turn the experts around or divide by zero; an expert that is zero has"
            " cosine 0 with the others"
        ),
        use_when="several runs of the same task; not for experts of different tasks",
    ),
    traits=Traits(scope="tensor", experts=(2, None), identity={}, relative_weights=True),
)
def coefficients(
    gram: Float[Tensor, "experts experts"], weights: Weights, _p: ModelStockParams
) -> list[float]:
    """Return the experts' coefficients.

    Args:
        gram: Inner products of the deltas, float64.
        weights: Only their ratio counts, and only in the average; weight 0 leaves an expert out.
        _p: Nothing of its own.

    Raises:
        UsageError: The weights sum to zero.
    """
    share = shares(weights)
    active = [i for i, weight in enumerate(weights) if weight != 0.0]
    count = len(active)
    if count < 2:
        return share
    lengths = gram.diagonal()[active].clamp(min=0).sqrt()
    outer = lengths[:, None] * lengths
    cosines = torch.where(outer > 0, gram[active][:, active] / outer, 0.0)
    total = float(cosines.sum() - cosines.diagonal().sum())
    cosine = max(0.0, min(1.0, total / (count * (count - 1))))
    step = count * cosine / (1 + (count - 1) * cosine)
    return [step * value for value in share]
