"""The experts whose examples resemble the prompt, in the base's own embedding or an encoder's.

A prompt is the mean of the base's last hidden states, or what a sentence encoder makes of it. What
all experts have in common, their mean, is taken out; and directions in which prompts of one and the
same expert differ count less (a linear discriminant with a shrunk covariance). Without that, a few
examples per expert say more about their words than about their kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.engine import one_thread
from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.choice import LEAST, MOST, Choice
from cgmerge.modules.routing.encoder import embed_by, open_encoder
from cgmerge.modules.routing.fitting import FitInput, Fitted, TopK, of_experts
from cgmerge.modules.routing.router import RetrievalRouter
from cgmerge.modules.stats import frozen

_FOLDS = 5
_MOST_NOISE = 128
_SHRINK = 0.2  # ρ; results hardly differ between 0.1 and 0.5
_UNSURE = 0.5


_TOP_K = TopK("1")


@dataclass(frozen=True, kw_only=True)
class RetrievalParams(Checked):
    """Parameters of `retrieval`."""

    choose: Literal["top", "kernel"] = param(
        "top", "the top_k most alike, or all that a kernel of the distance leaves above threshold"
    )
    top_k: TopK = param(_TOP_K, "top: experts per prompt, or `all`")
    temperature: float = param(
        0.1, "top: cosines are divided by it before the softmax", low=LEAST, high=MOST
    )
    width: float = param(0.2, "kernel: β in exp(−(1 − cos)/β²)", low=LEAST, high=100)
    threshold: float = param(
        0.01, "kernel: smaller shares are dropped, but for the largest", low=0, high=0.5
    )
    encoder: str = param(
        "", "a sentence-transformers model in place of the base: a folder, or hf://user/repo"
    )


def make_retrieval(fit: FitInput) -> Fitted:
    """Embed the prompts of every expert's examples.

    Raises:
        UsageError: No base, or no examples.
        Incompatible: Examples that are no expert's, or an expert without.
        CgmergeError: As `open_encoder`, where an encoder is named.
    """
    p = fit.params
    assert isinstance(p, RetrievalParams)
    examples = of_experts(fit.names, fit.given)
    encoder = open_encoder(p.encoder) if p.encoder else None
    embedded = []
    with frozen(fit.base.model):
        for done, rows in enumerate(examples, 1):
            prompts = [row.prompt_ids for row in rows]
            embedded.append(embed_by(encoder, fit.base, prompts).cpu())
            fit.report(done, len(examples))
    with one_thread():
        likeness = Likeness.of(embedded)
        found = recognised(embedded)
    warnings: list[str] = []
    choice = Choice(p.top_k.of(len(fit.names), warnings, default=_TOP_K), p.temperature)
    width = p.width if p.choose == "kernel" else None
    router = RetrievalRouter(
        likeness.centroids, likeness.centre, likeness.noise, choice, width, p.threshold, encoder
    )
    record = {
        "experts": [
            {"name": name, "rows": len(rows), "recognised": share}
            for name, rows, share in zip(fit.names, examples, found, strict=True)
        ]
    }
    mixed = [
        name
        for name, share in zip(fit.names, found, strict=True)
        if share is not None and share < _UNSURE
    ]
    if mixed:
        warnings.append(
            f"most prompts of {', '.join(mixed)} look more like another expert's: give more"
            " examples, or let tokens decide (--method gate)"
        )
    return Fitted(router, record, warnings)


@dataclass(frozen=True)
class Likeness:
    """What tells the prompts of experts apart; see `RetrievalRouter` for the fields."""

    centroids: Float[Tensor, "experts width"]
    centre: Float[Tensor, " width"]
    noise: Float[Tensor, "directions width"]

    @classmethod
    def of(cls, embedded: Sequence[Float[Tensor, "rows width"]]) -> "Likeness":
        """Fit it to the prompts of each expert.

        With covariance S within experts and its mean variance v, x is multiplied by
        ((1 − ρ)·S + ρ·v)^(−1/2), but for a common factor I − UᵀU with few rows U.
        """
        parts = [part.double() for part in embedded]
        means = torch.stack([part.mean(dim=0) for part in parts])
        centre = means.mean(dim=0)
        within = torch.cat([part - mean for part, mean in zip(parts, means, strict=True)])
        noise = _noise(within, len(within) - len(parts))
        moved = (means - centre) - ((means - centre) @ noise.T) @ noise
        lengths = moved.norm(dim=1, keepdim=True)
        centroids = torch.where(lengths > 0, moved / lengths, 0.0)
        return cls(centroids.float(), centre.float(), noise.float())


def _noise(within: Float[Tensor, "rows width"], freedom: int) -> Float[Tensor, "n width"]:
    """Return the rows U of `Likeness.of`, none where every expert has one example."""
    if freedom < 1:
        return within.new_zeros(0, within.shape[1])
    _, values, rows = torch.linalg.svd(within, full_matrices=False)
    kept = min(freedom, _MOST_NOISE, int((values > values[:1] * 1e-6).sum()))
    spread = values.square() / freedom
    floor = _SHRINK * spread.sum() / within.shape[1]
    shares = 1.0 - (floor / ((1.0 - _SHRINK) * spread[:kept] + floor)).sqrt()
    found: Tensor = shares.sqrt()[:, None] * rows[:kept]
    return found


def recognised(embedded: Sequence[Float[Tensor, "rows width"]]) -> list[float | None]:
    """Return the share of each expert's prompts that lead to it, found without their help.

    A fifth of the examples is left out at a time. None for an expert with a single example.
    """
    right = [0] * len(embedded)
    for fold in range(_FOLDS):
        rest = [_without(part, fold) for part in embedded]
        if all(len(left) == len(part) for left, part in zip(rest, embedded, strict=True)):
            continue
        likeness = Likeness.of(rest)
        router = RetrievalRouter(likeness.centroids, likeness.centre, likeness.noise)
        for expert, part in enumerate(embedded):
            if len(part) > 1:
                found = router.similarities(part[fold::_FOLDS]).argmax(dim=1)
                right[expert] += int((found == expert).sum())
    return [
        count / len(part) if len(part) > 1 else None
        for count, part in zip(right, embedded, strict=True)
    ]


def _without(part: Tensor, fold: int) -> Tensor:
    if len(part) == 1:
        return part
    kept = [i for i in range(len(part)) if i % _FOLDS != fold]
    return part[kept]
