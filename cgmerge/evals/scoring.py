"""Right or wrong, item by item: one teacher-forced pass, or real greedy generation.

For greedy decoding and one fixed answer, "every target token, end token included, is the arg-max"
is the same event as "generation writes exactly the target", at a tenth of the cost or less.
Batches are padded on the right with a mask and explicit positions for scoring, on the left for
generation, so that no row depends on its batch-mates beyond the rounding of the float type.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.teacher import (
    LOGIT_BUDGET,
    Extent,
    Logits,
    batches_of,
    decoder_start,
    encoder_inputs,
    make_batch,
    position_limit,
    target_logits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MARGIN = 2
"""Tokens that generation may write beyond a row's target: enough to show that it went on."""

Advance = Callable[[int], None]
"""Called with the number of rows just finished."""
Prepare = Callable[[Sequence[int]], None]
"""Called before every batch with the rows it is made of: routers decide on their prompts."""
Stopping = Callable[[int], Any]
"""Makes a stopping criterion of transformers for a batch whose prompts have so many columns."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What one pass says about one item.

    Attributes:
        correct: Every target token is the arg-max.
        loglik: Mean natural log-likelihood of a target token, in float32 over the vocabulary.
        predicted: The arg-max at each target position.
        tied: At some position several tokens share the highest logit exactly, so that arg-max
            and generation may differ.
        right: Target tokens that are the arg-max.
    """

    correct: bool
    loglik: float
    predicted: tuple[int, ...]
    tied: bool
    right: int

    @property
    def tokens(self) -> int:
        """Return the number of target tokens."""
        return len(self.predicted)


def score(
    model: "PreTrainedModel",
    rows: Sequence[Encoded],
    *,
    batch_size: int,
    advance: Advance | None = None,
    prepare: Prepare | None = None,
    logits: Logits = target_logits,
) -> list[TokenScore]:
    """Score targets by teacher forcing, in one forward pass per batch.

    Args:
        model: A causal language model; put into evaluation mode for the call.
        rows: Prompts and targets of at least one token each.
        batch_size: Most rows in a pass; fewer where the logits would pass `LOGIT_BUDGET`.
        advance: Progress.
        prepare: Called before each batch.
        logits: What speaks about the target tokens of a batch.

    Returns:
        One score per row, in order. In float32 it is the same for every batch size to 1e-5.

    Raises:
        UsageError: A batch size below 1, or a row without prompt or target.
        Damaged: Logits that are not finite.
    """
    _check(rows, batch_size)
    found: dict[int, TokenScore] = {}
    vocab = int(model.config.get_text_config().vocab_size)
    with _evaluating(model):
        for batch in batches_of(rows, batch_size, lambda b: b.logits * vocab <= LOGIT_BUDGET):
            if prepare is not None:
                prepare(batch)
            scores = _score_batch(model, [rows[i] for i in batch], logits)
            found.update(zip(batch, scores, strict=True))
            if advance is not None:
                advance(len(batch))
    return [found[i] for i in range(len(rows))]


def generate(
    model: "PreTrainedModel",
    rows: Sequence[Encoded],
    *,
    ends: Sequence[int],
    batch_size: int,
    longest: int | None = None,
    advance: Advance | None = None,
    prepare: Prepare | None = None,
    stopping: Stopping | None = None,
) -> list[tuple[int, ...]]:
    """Continue prompts greedily with a key-value cache, as a user would see it.

    Sampling, penalties and forbidden words that the model's own generation config asks for are
    left out, because they would make the answer depend on more than the model.

    Args:
        model: A causal language model; put into evaluation mode for the call.
        rows: Prompts; the target's length sets how many tokens are written.
        ends: Token ids that stop a row.
        batch_size: Most rows at once.
        longest: Most tokens of a row; None for `MARGIN` more than its target has.
        advance: Progress.
        prepare: Called before each batch.
        stopping: What else stops a row, besides end tokens.

    Returns:
        Per row the new tokens up to and including the first end token, fewer than asked for where
        the model has no more positions.

    Raises:
        UsageError: A batch size or length below 1, or a row without prompt or target.
    """
    _check(rows, batch_size)
    if longest is not None and longest < 1:
        raise UsageError(f"an answer of {longest} tokens is not possible", code="max_new_tokens")

    def width(extent: Extent) -> int:
        return extent.width + MARGIN if longest is None else extent.longest_prompt + longest

    limit = position_limit(model)
    found: dict[int, tuple[int, ...]] = {}
    with _evaluating(model), _plain_generation(model):
        for batch in batches_of(rows, batch_size, lambda b: limit is None or width(b) <= limit):
            if prepare is not None:
                prepare(batch)
            written = _generate_batch(
                model, [rows[i] for i in batch], ends, (longest, limit), stopping
            )
            found.update(zip(batch, written, strict=True))
            if advance is not None:
                advance(len(batch))
    return [found[i] for i in range(len(rows))]


def _score_batch(
    model: "PreTrainedModel", rows: Sequence[Encoded], logits: Logits
) -> list[TokenScore]:
    batch = make_batch(rows, model.device)
    picked, wanted, counts = logits(model, batch), batch.wanted, batch.counts
    predicted = picked.argmax(dim=-1)  # the first of equals, as generation takes it
    best = picked.gather(1, predicted[:, None])
    logliks = picked.gather(1, wanted[:, None])[:, 0] - picked.logsumexp(dim=-1)
    tied = (picked == best).sum(dim=-1) > 1
    if not bool(torch.isfinite(logliks).all()):
        raise Damaged(
            "the model gives values that are not finite (NaN or infinity)",
            code="not_finite",
            hint="the weights hold NaN or infinity, or overflow their type: try --dtype float32",
        )
    columns = (predicted.tolist(), logliks.double().tolist(), tied.tolist())
    ends = list(accumulate(counts))
    return [
        _item(row, *(column[end - len(row.target_ids) : end] for column in columns))
        for row, end in zip(rows, ends, strict=True)
    ]


def _item(row: Encoded, predicted: list[int], logliks: list[float], tied: list[bool]) -> TokenScore:
    """Gather one row's tokens."""
    return TokenScore(
        correct=predicted == row.target_ids,
        loglik=sum(logliks) / len(logliks),
        predicted=tuple(predicted),
        tied=any(tied),
        right=sum(a == b for a, b in zip(predicted, row.target_ids, strict=True)),
    )


def _generate_batch(
    model: "PreTrainedModel",
    rows: Sequence[Encoded],
    ends: Sequence[int],
    most: tuple[int | None, int | None],
    stopping: Stopping | None,
) -> list[tuple[int, ...]]:
    """Continue rows by at most so many tokens, in so many positions."""
    longest, limit = most
    lengths = [longest or len(row.target_ids) + MARGIN for row in rows]
    width = max(len(row.prompt_ids) for row in rows)
    length = max(lengths)
    if limit is not None:
        length = min(length, limit - width)
    ids, mask, start, more = _prompts(model, rows, width)
    write: Any = model.generate
    # Beyond the first end token a finished row is filled with the pad token.
    written: Tensor = write(
        ids,
        attention_mask=mask,
        max_new_tokens=length,
        do_sample=False,
        use_cache=True,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        stopping_criteria=None if stopping is None else [stopping(start)],
        **more,
    )
    # The longest target of the batch must not decide how far the others are shown.
    return [
        _until_end(tokens[:own], ends)
        for tokens, own in zip(written[:, start:].tolist(), lengths, strict=True)
    ]


def _prompts(
    model: "PreTrainedModel", rows: Sequence[Encoded], width: int
) -> tuple[Tensor, Tensor, int, dict[str, Any]]:
    """Return prompts, their mask, where the answer begins in what is written, and options."""
    if model.config.is_encoder_decoder:
        return *encoder_inputs(model, rows), 1, {"decoder_start_token_id": decoder_start(model)}
    pads = [width - len(row.prompt_ids) for row in rows]
    ids = [[0] * pad + row.prompt_ids for pad, row in zip(pads, rows, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    return (
        torch.tensor(ids, device=model.device),
        torch.tensor(mask, device=model.device),
        width,
        {},
    )


def _until_end(tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    for place, token in enumerate(tokens):
        if token in ends:
            return tuple(tokens[: place + 1])
    return tuple(tokens)


@contextmanager
def _evaluating(model: "PreTrainedModel") -> Iterator[None]:
    """Switch dropout and gradients off, and give the model back as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        # Not inference_mode: rotary caches that are refreshed inside it cannot be trained with.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _plain_generation(model: "PreTrainedModel") -> Iterator[None]:
    """Hide the model's own generation settings, which fill whatever a call leaves open."""
    from transformers import GenerationConfig

    own, plain = model.generation_config, cast("Any", GenerationConfig)()
    model.generation_config = plain
    try:
        yield
    finally:
        model.generation_config = own


def _check(rows: Sequence[Encoded], batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} rows is not possible", code="batch_size")
    for row in rows:
        if not row.prompt_ids or not row.target_ids:
            raise UsageError("an item needs at least one prompt and one target token", code="item")
