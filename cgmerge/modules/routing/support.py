"""What a learned router is judged by, and the descent that learns it.

The router learns inside the routed layers themselves: its tensors are the parameters, everything
else is frozen, and the loss is that of the answers. Every skill counts the same, every example
of a skill the same, every token of an answer the same.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Damaged, DataError
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.routing.fitting import Labelled
from cgmerge.modules.teacher import (
    LOGIT_BUDGET,
    Batch,
    batches_of,
    make_batch,
    position_limit,
    target_logits,
)

_ROWS = 64  # in one pass
_GRADIENT_SHARE = 4  # of the logit budget: a backward pass holds several copies


@dataclass(frozen=True, slots=True)
class Mark:
    """What a router reaches on the examples.

    Attributes:
        loss: Mean negative log-likelihood of an answer token, in nats.
        score: Share of answers that are right in every token.
    """

    loss: float
    score: float

    def as_dict(self) -> dict[str, float | None]:
        """Return it for the record, where NaN and infinity cannot stand."""
        return {"loss": self.loss if math.isfinite(self.loss) else None, "score": self.score}


@dataclass(frozen=True, slots=True)
class Part:
    """Some examples for one forward pass.

    Attributes:
        batch: Their tokens.
        weights: What each counts, [rows], float64.
        skills: Whose each is.
    """

    batch: Batch
    weights: Float[Tensor, " rows"]
    skills: Sequence[str]


class Support:
    """Examples in batches, ready for a model.

    Args:
        loaded: The base, with whatever is attached when a method is called.
        examples: Rows by skill.

    Raises:
        DataError: A row without prompt or answer, or longer than the model reads.
    """

    def __init__(self, loaded: LoadedBase, examples: Sequence[Labelled]) -> None:
        self.model = loaded.model
        self.rows = [row for item in examples for row in item.rows]
        _check(self.rows, position_limit(loaded.model))
        self.skills = [item.name for item in examples for _ in item.rows]
        sizes = Counter(self.skills)
        self.weights = [1.0 / (len(sizes) * sizes[skill]) for skill in self.skills]

    def mark(self) -> Mark:
        """Measure the model as it is."""
        loss = score = 0.0
        with torch.no_grad():
            for part in self.parts(range(len(self.rows))):
                losses, right = row_losses(self.model, part.batch)
                loss += float((losses.double() * part.weights).sum())
                score += float((right.double() * part.weights).sum())
        return Mark(loss, round(score, 12))  # a sum of shares: all of them are 1, not 0.999…

    def parts(self, places: Sequence[int]) -> "Iterator[Part]":
        """Yield some examples in batches that fit into memory, with weights that sum to 1."""
        rows, vocab = self.rows, int(self.model.config.get_text_config().vocab_size)
        limit = LOGIT_BUDGET // _GRADIENT_SHARE
        total = sum(self.weights[i] for i in places)
        chosen = [rows[i] for i in places]
        for batch in batches_of(chosen, _ROWS, lambda b: b.logits * vocab <= limit):
            weights = [self.weights[places[i]] / total for i in batch]
            made = make_batch([chosen[i] for i in batch], self.model.device)
            yield Part(
                made,
                torch.tensor(weights, dtype=torch.float64, device=self.model.device),
                [self.skills[places[i]] for i in batch],
            )


def row_losses(
    model: "torch.nn.Module", batch: Batch
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return the mean loss of an answer token of each row, and 1 where all of them are arg-max."""
    logs = target_logits(model, batch).log_softmax(-1)  # type: ignore[arg-type]
    losses = -logs.gather(1, batch.wanted[:, None])[:, 0]
    right = (logs.argmax(-1) == batch.wanted).to(logs)
    counts = list(batch.counts)
    return (
        torch.stack([part.mean() for part in losses.split(counts)]),
        torch.stack([part.amin() for part in right.split(counts)]),
    )


@dataclass(frozen=True)
class Descent:
    """How parameters came down.

    Attributes:
        curve: The loss at every step, before it was taken, penalties included.
        best: The lowest loss over all examples that was seen; the parameters are those.
        failed: The step whose loss was not finite; None where none was.
    """

    curve: list[float]
    best: float
    failed: int | None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How to come down.

    Attributes:
        count: Number of steps.
        lr: Step size of Adam, falling to 0 along a cosine.
        batch: Most examples in a step.
        seed: Of the order in which examples come, where not all are in every step.
        penalty: Added to the loss of a part.
        report: Called after every step.
    """

    count: int
    lr: float
    batch: int
    seed: int = 0
    penalty: Callable[[Part], Tensor] | None = None
    report: Callable[[], None] | None = None


def descend(support: Support, parameters: Sequence[Tensor], steps: Steps) -> Descent:
    """Follow the gradient, and leave the parameters where the loss over all examples was lowest.

    With all examples in every step that loss is known anyway; otherwise it is measured at the
    start, at the end and after each time through the examples.

    Args:
        support: With the parameters in its model.
        parameters: Leaves that require gradients; changed in place.
        steps: How.

    Raises:
        Damaged: The loss at the start is not finite.
    """
    optimiser = torch.optim.Adam(list(parameters), lr=steps.lr)
    run = _Run(support, parameters, steps)
    order = _order(len(support.rows), steps)
    failed = None
    for step in range(steps.count):
        optimiser.param_groups[0]["lr"] = steps.lr * (
            0.5 + 0.5 * math.cos(math.pi * step / steps.count)
        )
        optimiser.zero_grad()
        places, fresh = next(order)
        loss = run.step(places, fresh=fresh)
        slopes = [p.grad for p in parameters if p.grad is not None]
        if not math.isfinite(loss) or not all(bool(torch.isfinite(g).all()) for g in slopes):
            failed = step + 1
            break
        optimiser.step()
        if steps.report is not None:
            steps.report()
    if failed is None:
        run.look()
    run.restore()
    return Descent(run.curve, run.best, failed)


class _Run:
    """Parameters, the best of them so far, and losses."""

    def __init__(self, support: Support, parameters: Sequence[Tensor], steps: Steps) -> None:
        self.support, self.parameters, self.steps = support, parameters, steps
        self.full = len(support.rows) <= steps.batch
        self.curve: list[float] = []
        self.best = math.inf
        self.kept = [p.detach().clone() for p in parameters]

    def step(self, places: Sequence[int], *, fresh: bool) -> float:
        """Add the gradient of some examples, and return the loss with penalties."""
        if not self.full and fresh:
            self.look()
        whole = 0.0
        with torch.enable_grad():
            for part in self.support.parts(places):
                losses, _ = row_losses(self.support.model, part.batch)
                loss = (losses * part.weights.to(losses)).sum()
                if self.steps.penalty is not None:
                    loss = loss + self.steps.penalty(part) * float(part.weights.sum())
                whole += float(loss.detach())
                loss.backward()
        if self.full:
            self.note(whole)
        if math.isfinite(whole):
            self.curve.append(whole)
        return whole

    def look(self) -> None:
        """Measure over all examples, penalties included."""
        whole = 0.0
        with torch.no_grad():
            for part in self.support.parts(range(len(self.support.rows))):
                losses, _ = row_losses(self.support.model, part.batch)
                whole += float((losses.double() * part.weights).sum())
                if self.steps.penalty is not None:
                    whole += float(self.steps.penalty(part)) * float(part.weights.sum())
        self.note(whole)

    def note(self, loss: float) -> None:
        """Keep the parameters where this loss is the lowest; refuse to begin with none."""
        first = math.isinf(self.best)
        if first and not math.isfinite(loss):
            raise Damaged(
                f"the loss on the examples is not finite before the first step: {loss}",
                code="not_finite",
                hint="the base or an expert gives NaN or infinity; try --dtype float32",
            )
        if loss < self.best:
            self.best = loss
            for kept, parameter in zip(self.kept, self.parameters, strict=True):
                kept.copy_(parameter.detach())

    def restore(self) -> None:
        """Go back to the best parameters."""
        with torch.no_grad():
            for kept, parameter in zip(self.kept, self.parameters, strict=True):
                parameter.copy_(kept)


def _order(count: int, steps: Steps) -> Iterator[tuple[list[int], bool]]:
    """Yield the examples of every step, and whether it is the first of a time through all."""
    generator = torch.Generator().manual_seed(steps.seed)
    while True:
        if count <= steps.batch:
            yield list(range(count)), True
            continue
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, steps.batch):
            yield order[first : first + steps.batch], first == 0


def _check(rows: Sequence[Encoded], limit: int | None) -> None:
    for number, row in enumerate(rows, 1):
        if not row.prompt_ids or not row.target_ids:
            raise DataError(
                f"example {number} has no prompt or no answer", code="empty_row", row=number
            )
        if limit is not None and len(row) > limit + 1:
            raise DataError(
                f"example {number} has {len(row)} tokens; the base reads {limit}",
                code="too_long",
                row=number,
                expected=limit,
                found=len(row),
            )
