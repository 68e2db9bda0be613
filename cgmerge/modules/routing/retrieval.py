"""The experts whose examples resemble the prompt, in the base's own embedding.

A prompt is the mean of the base's last hidden states; the mean over all experts is taken out,
because it is what all texts have in common and hides what tells them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.embed import embed
from cgmerge.modules.routing.fitting import FitInput, Fitted, TopK, of_experts
from cgmerge.modules.routing.router import RetrievalRouter
from cgmerge.modules.stats import frozen

_UNSURE = 0.5


@dataclass(frozen=True, kw_only=True)
class RetrievalParams(Checked):
    """Parameters of `retrieval`."""

    choose: Literal["top", "kernel"] = param(
        "top", "the top_k most alike, or all that a kernel of the distance leaves above threshold"
    )
    top_k: TopK = param(TopK("1"), "top: experts per prompt, or `all`")
    temperature: float = param(0.1, "top: cosines are divided by it before the softmax", above=0)
    width: float = param(0.2, "kernel: β in exp(−(1 − cos)/β²)", above=0, high=100)
    threshold: float = param(0.01, "kernel: smaller shares are dropped", low=0, high=0.5)


def make_retrieval(fit: FitInput) -> Fitted:
    """Embed the prompts of every expert's examples.

    Raises:
        UsageError: No base, or no examples.
        Incompatible: Examples that are no expert's, or an expert without.
    """
    p = fit.params
    assert isinstance(p, RetrievalParams)
    examples = of_experts(fit.names, fit.given)
    embedded = []
    with frozen(fit.base.model):
        for done, rows in enumerate(examples, 1):
            embedded.append(embed(fit.base, [row.prompt_ids for row in rows]).cpu())
            fit.report(done, len(examples))
    centroids, centre = centroids_of([part.mean(dim=0) for part in embedded])
    warnings: list[str] = []
    choice = Choice(p.top_k.of(len(fit.names), warnings), p.temperature)
    width = p.width if p.choose == "kernel" else None
    router = RetrievalRouter(centroids, centre, choice, width, p.threshold)
    found = recognised(embedded)
    record = {
        "experts": [
            {"name": name, "rows": len(rows), "recognised": share}
            for name, rows, share in zip(fit.names, examples, found, strict=True)
        ]
    }
    mixed = [n for n, share in zip(fit.names, found, strict=True) if share < _UNSURE]
    if mixed:
        warnings.append(
            f"most prompts of {', '.join(mixed)} look more like another expert's: give more"
            " examples, or let tokens decide (--method gate)"
        )
    return Fitted(router, record, warnings)


def centroids_of(
    means: Sequence[Float[Tensor, " width"]],
) -> tuple[Float[Tensor, "experts width"], Float[Tensor, " width"]]:
    """Return centred means of length 1, and the centre; zero where a mean is the centre."""
    stacked = torch.stack(list(means))
    centre = stacked.mean(dim=0)
    moved = stacked - centre
    lengths = moved.norm(dim=1, keepdim=True)
    return torch.where(lengths > 0, moved / lengths, 0.0), centre


def recognised(embedded: Sequence[Float[Tensor, "rows width"]]) -> list[float]:
    """Return the share of each expert's prompts that lead to it, each without its own help.

    A single example cannot do without itself; it counts as recognised.
    """
    means = [part.mean(dim=0) for part in embedded]
    found = []
    for expert, part in enumerate(embedded):
        right = 0
        for row in part:
            others = list(means)
            if len(part) > 1:
                others[expert] = (part.sum(dim=0) - row) / (len(part) - 1)
            centroids, centre = centroids_of(others)
            right += int((centroids @ (row - centre)).argmax()) == expert
        found.append(right / len(part))
    return found
