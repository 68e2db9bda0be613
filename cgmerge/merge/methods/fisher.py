"""Average each weight by how much it matters to each expert.

Importance is the diagonal of the Fisher information: the mean squared gradient of the
log-likelihood on the expert's own examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Incompatible
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.shares import shares


@dataclass(frozen=True, kw_only=True)
class FisherParams(Params):
    """Parameters of `fisher`."""

    floor: float = param(1e-8, "importance is at least this", low=0.0)
    floor_kind: Literal["relative", "absolute"] = param(
        "relative", "the floor is a share of the module's largest importance, or a number"
    )
    normalize: bool = param(
        False, "divide each expert's importance by its L2 norm within the module"
    )


@method(
    "fisher",
    "matrix",
    params=FisherParams,
    about=About(
        formula="ΔW = scale · Σ p_e F_e ΔW_e / Σ p_e F_e  (entry by entry),  p = w / Σ w",
        paper="Fisher merging (arXiv:2111.09832)",
        differs=(
            "the floor is relative by default, so that the size of the gradients does not matter"
            " (MaTS code: 1e-8 for all; original: 1e-6 for one model); the norm of `normalize` is"
            " that of one module instead of the whole model; where no expert has any importance"
            " the average is taken, as for tensors of fewer than two dimensions (norms, biases)"
        ),
        use_when="labelled examples of every expert are at hand",
    ),
    traits=Traits(scope="tensor", sides="none", identity={}, stats="fisher", relative_weights=True),
)
def fisher(
    matrices: Float[Tensor, "experts m n"],
    weights: Weights,
    p: FisherParams,
    stats: Sequence[Tensor | None] | None,
) -> Float[Tensor, "m n"]:
    """Merge one module.

    Args:
        matrices: The experts' deltas, float64.
        weights: Only their ratio counts.
        p: See `FisherParams`.
        stats: Importance of every entry, shaped as the module; the average where one lacks.

    Raises:
        UsageError: Weights that are negative or sum to zero.
        Incompatible: Importance of another shape.
    """
    share = shares(weights, signed=False)
    mean = torch.einsum("e,emn->mn", matrices.new_tensor(share), matrices)
    active = [i for i, part in enumerate(share) if part > 0]
    if stats is None or any(stats[i] is None for i in active):
        return mean
    # Twice over the experts, so that only one importance is held in float64 at a time.
    floor = p.floor
    if p.floor_kind == "relative":
        floor *= max(
            (float(_read(stats, i, mean, p).max()) for i in active if mean.numel()), default=0.0
        )
    top, bottom = torch.zeros_like(mean), torch.zeros_like(mean)
    for i in active:
        importance = _read(stats, i, mean, p).clamp_(min=floor).mul_(share[i])
        top += importance * (matrices[i] - mean)
        bottom += importance
    return mean + torch.where(bottom > 0, top / bottom, 0.0)


def _read(
    stats: Sequence[Tensor | None], place: int, like: Tensor, p: FisherParams
) -> Float[Tensor, "m n"]:
    """Return a copy of one expert's importance in float64."""
    found = stats[place]
    assert found is not None
    if found.numel() != like.numel() or found.shape[:1] != like.shape[:1]:
        raise Incompatible(
            f"the importance of expert {place} has shape {list(found.shape)},"
            f" {list(like.shape)} is wanted",
            code="stats",
            expected=list(like.shape),
            found=list(found.shape),
        )
    importance = found.reshape(like.shape).to(torch.float64, copy=True)
    norm = float(torch.linalg.norm(importance)) if p.normalize else 0.0
    return importance.div_(norm) if norm > 0 else importance
