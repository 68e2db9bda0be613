"""Several experts asked at once: an ensemble in output space, what merging tries to reach for less.

Every expert says how likely each next token is, and the probabilities are averaged: with equal
weights, or with weights that make validation data most likely (stacking: Wolpert, Neural Networks
5, 1992; the weights of a linear pool by expectation maximisation, where every step gains and the
optimum is global). All experts run on every token, so that it costs as many models.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.evals.suite import SkillSet, encode_questions, questions
from cgmerge.evals.targets import Target
from cgmerge.modules.attach import Factors, attached
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.teacher import (
    LOGIT_BUDGET,
    Batch,
    Extent,
    Logits,
    batches_of,
    make_batch,
    position_limit,
    target_logits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENSEMBLE = "ensemble"
"""Name of the column of all experts with equal weights."""
STACKED = "stacked"
"""Name of the column whose weights come from validation data."""

_PASSES = 1_000
_SETTLED = 1e-9  # nats per token that another pass must gain


def ensemble_of(
    experts: Sequence[Target], weights: Sequence[float] | None = None, *, note: str = ""
) -> Target:
    """Make a target that averages the next-token probabilities of adapters.

    Args:
        experts: At least two adapters on one base.
        weights: One per expert, not negative, of sum 1; equal ones when left out.
        note: Where the weights are from.

    Raises:
        UsageError: Fewer than two experts.
    """
    if len(experts) < 2:
        raise UsageError(
            f"an ensemble needs at least two experts, found {len(experts)}",
            code="experts",
            hint="name the experts that were merged as targets too",
            found=len(experts),
        )
    shares = tuple(weights) if weights is not None else (1 / len(experts),) * len(experts)
    said = ", ".join(f"{one.name} {share:.3g}" for one, share in zip(experts, shares, strict=True))
    digest = hashlib.sha256(
        "".join(f"{one.digest} {share!r}\n" for one, share in zip(experts, shares, strict=True))
        .encode()
    )  # fmt: skip
    return Target(
        ENSEMBLE if weights is None else STACKED,
        "baseline",
        digest.hexdigest(),
        members=tuple(zip(experts, shares, strict=True)),
        note=f"mean of next-token probabilities: {said}{f' ({note})' if note else ''}",
    )


def pooled(members: Sequence[tuple[Mapping[str, Factors], float]]) -> Logits:
    """Return what speaks about target tokens for the experts together: log-probabilities.

    Args:
        members: Deltas of each expert, and its weight above 0.
    """

    def speak(model: "PreTrainedModel", batch: Batch) -> Float[Tensor, "targets vocab"]:
        total: Tensor | None = None
        for deltas, weight in members:
            with attached(model, deltas):
                said = target_logits(model, batch).log_softmax(dim=-1) + math.log(weight)
            total = said if total is None else torch.logaddexp(total, said)
        assert total is not None
        return total

    return speak


def logits_of(target: Target) -> Logits:
    """Return what speaks for a target: the model as it stands, or the members of an ensemble."""
    if not target.members:
        return target_logits
    # Read once: every batch asks every expert. One without weight would say nothing.
    return pooled([(dict(one.deltas or {}), share) for one, share in target.members if share > 0])


def stack(
    loaded: LoadedBase,
    experts: Sequence[Target],
    validation: Sequence[SkillSet],
    *,
    batch_size: int,
    advance: Callable[[int], None] | None = None,
) -> Target:
    """Make the ensemble whose weights give validation data the highest likelihood.

    Args:
        loaded: The base.
        experts: Adapters.
        validation: Not what is scored; every item weighs the same.
        batch_size: Items in a pass.
        advance: Told of rows that one expert was asked about.
    """
    rows = encode_questions(
        questions(validation), loaded.tokenizer, position_limit(loaded.model)
    ).encoded
    vocab = int(loaded.model.config.get_text_config().vocab_size)

    def fits(extent: Extent) -> bool:
        return extent.logits * vocab <= LOGIT_BUDGET

    batches = [
        make_batch([rows[i] for i in places], loaded.model.device)
        for places in batches_of(rows, batch_size, fits)
    ]
    said = [_logliks(loaded, expert, batches, advance) for expert in experts]
    shares = [1 / count for batch in batches for count in batch.counts for _ in range(count)]
    weights = pool_weights(torch.stack(said), torch.tensor(shares).double() / len(rows))
    files = ", ".join(f"{one.source or one.name} (sha256 {one.sha256[:12]})" for one in validation)
    return ensemble_of(experts, weights, note=f"weights from {files}")


def _logliks(
    loaded: LoadedBase,
    expert: Target,
    batches: Sequence[Batch],
    advance: Callable[[int], None] | None,
) -> Float[Tensor, " tokens"]:
    """Return how likely an expert finds each right token, in the order of the batches."""
    parts = []
    with torch.no_grad(), attached(loaded.model, dict(expert.deltas or {})):
        for batch in batches:
            said = target_logits(loaded.model, batch).log_softmax(dim=-1)
            parts.append(said.gather(1, batch.wanted[:, None])[:, 0].double().cpu())
            if advance is not None:
                advance(len(batch.rows))
    return torch.cat(parts)


def pool_weights(
    logliks: Float[Tensor, "experts tokens"], shares: Float[Tensor, " tokens"]
) -> list[float]:
    """Return the weights of a linear pool that maximise Σ share·log Σ weight·probability.

    Args:
        logliks: Log-probability that each expert gives each right token, float64.
        shares: How much each token counts, of sum 1.

    Returns:
        One weight per expert, not negative, of sum 1.
    """
    weights = torch.full((len(logliks),), 1 / len(logliks), dtype=torch.float64)
    # Scaled token by token: how likely the likeliest expert finds it makes no difference.
    likely = (logliks - logliks.max(dim=0).values).exp()
    before = -math.inf
    for _ in range(_PASSES):
        pooled_ = weights @ likely
        gained = float(shares @ pooled_.log())
        if gained - before < _SETTLED:
            break
        before = gained
        weights = weights * (likely @ (shares / pooled_))
        weights = weights / weights.sum()
    found: list[float] = weights.tolist()
    return found
