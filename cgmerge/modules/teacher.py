"""Teacher forcing: prompts and targets in padded batches, and the logits that speak about targets.

Scoring and learning share it, so that the loss that is minimised is the one that is reported.
Batches are padded on the right with a mask and explicit positions, so that no row depends on its
batch-mates beyond the rounding of the float type.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cgmerge.modules.encoding import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BUDGET = 1 << 26
"""Most logits computed at once: 256 MB in float32, whatever vocabulary and batch size."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for one forward pass.

    Attributes:
        ids: Tokens without each row's last, padded on the right, [rows, width].
        mask: 1 where there is a token, [rows, width].
        first: The first position whose logits are needed.
        lines: Row of every target token, [targets].
        places: Its position among the logits from `first` on, [targets].
        wanted: The target tokens, one row after the other, [targets].
        counts: Target tokens of each row.
        rows: What it was made of.
    """

    ids: Int[Tensor, "rows width"]
    mask: Int[Tensor, "rows width"]
    first: int
    lines: Int[Tensor, " targets"]
    places: Int[Tensor, " targets"]
    wanted: Int[Tensor, " targets"]
    counts: tuple[int, ...]
    rows: tuple[Encoded, ...]


Logits = Callable[["PreTrainedModel", Batch], Tensor]
"""What speaks about the target tokens of a batch: logits or log-probabilities [targets, vocab]."""


def make_batch(rows: Sequence[Encoded], device: torch.device) -> Batch:
    """Pad rows of at least one prompt and one target token each."""
    inputs = [[*row.prompt_ids, *row.target_ids[:-1]] for row in rows]
    width = max(map(len, inputs))
    # The logits at position p speak about token p + 1.
    first = min(len(row.prompt_ids) for row in rows) - 1
    counts = tuple(len(row.target_ids) for row in rows)
    lines = [i for i, count in enumerate(counts) for _ in range(count)]
    places = [
        len(row.prompt_ids) - 1 - first + step
        for row in rows
        for step in range(len(row.target_ids))
    ]
    return Batch(
        ids=torch.tensor([ids + [0] * (width - len(ids)) for ids in inputs], device=device),
        mask=torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x in inputs], device=device),
        first=first,
        lines=torch.tensor(lines, device=device),
        places=torch.tensor(places, device=device),
        wanted=torch.tensor([token for row in rows for token in row.target_ids], device=device),
        counts=counts,
        rows=tuple(rows),
    )


def target_logits(model: "PreTrainedModel", batch: Batch) -> Float[Tensor, "targets vocab"]:
    """Return the logits that speak about each target token, float32, one row after the other."""
    if model.config.is_encoder_decoder:
        return _answered(model, batch)
    width = batch.ids.shape[1]
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False}
    if "position_ids" in known:
        options["position_ids"] = torch.arange(width, device=batch.ids.device).expand_as(batch.ids)
    if "logits_to_keep" in known:
        # The head is by far the largest layer of a small model with a large vocabulary.
        options["logits_to_keep"] = width - batch.first
    logits: Tensor = model(input_ids=batch.ids, attention_mask=batch.mask, **options).logits
    kept = logits if "logits_to_keep" in known else logits[:, batch.first :]
    return kept[batch.lines, batch.places].float()


def _answered(model: "PreTrainedModel", batch: Batch) -> Float[Tensor, "targets vocab"]:
    """Return the same of a model whose encoder reads the prompts and whose decoder answers."""
    ids, mask = encoder_inputs(model, batch.rows)
    start = decoder_start(model)
    said = [[start, *row.target_ids[:-1]] for row in batch.rows]
    width = max(batch.counts)
    fed = torch.tensor([row + [0] * (width - len(row)) for row in said], device=ids.device)
    logits: Tensor = model(
        input_ids=ids, attention_mask=mask, decoder_input_ids=fed, use_cache=False
    ).logits
    steps = [step for count in batch.counts for step in range(count)]
    return logits[batch.lines, torch.tensor(steps, device=ids.device)].float()


def encoder_inputs(
    model: "PreTrainedModel", rows: Sequence[Encoded]
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows width"]]:
    """Return prompts as encoders were trained on them, ended by the end token, and their mask."""
    end = model.config.eos_token_id
    last = end if isinstance(end, int) else end[0]
    prompts = [[*row.prompt_ids, last] for row in rows]
    width = max(map(len, prompts))
    ids = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
    mask = [[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)


def decoder_start(model: "PreTrainedModel") -> int:
    """Return the token that a decoder begins with."""
    return int(model.config.decoder_start_token_id)


def position_limit(model: "PreTrainedModel") -> int | None:
    """Return the most tokens that the model has positions for, or None without a limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


@dataclass(slots=True)
class Extent:
    """How large a batch is, kept up to date while rows are added."""

    rows: int = 0
    shortest_prompt: int = 0
    longest_prompt: int = 0
    longest_target: int = 0
    longest: int = 0

    @property
    def logits(self) -> int:
        """Positions whose logits are computed: one span that covers all targets, every row."""
        return self.rows * (self.longest - self.shortest_prompt)

    @property
    def width(self) -> int:
        """Positions that generating the targets needs."""
        return self.longest_prompt + self.longest_target

    def grown(self, row: Encoded) -> "Extent":
        """Return the extent with one more row."""
        prompt, target = len(row.prompt_ids), len(row.target_ids)
        return Extent(
            self.rows + 1,
            min(self.shortest_prompt, prompt) if self.rows else prompt,
            max(self.longest_prompt, prompt),
            max(self.longest_target, target),
            max(self.longest, prompt + target),
        )


def batches_of(
    rows: Sequence[Encoded], batch_size: int, fits: Callable[[Extent], bool]
) -> Iterator[list[int]]:
    """Group rows of similar length; a row that does not fit with others is alone.

    Args:
        rows: Any number.
        batch_size: Most rows in a group.
        fits: Whether a group may become that large.

    Yields:
        Places in `rows`.
    """
    order = sorted(
        range(len(rows)), key=lambda i: (len(rows[i].prompt_ids), len(rows[i].target_ids))
    )
    batch: list[int] = []
    extent = Extent()
    for i in order:
        grown = extent.grown(rows[i])
        if batch and (len(batch) == batch_size or not fits(grown)):
            yield batch
            batch, grown = [], Extent().grown(rows[i])
        batch.append(i)
        extent = grown
    if batch:
        yield batch
