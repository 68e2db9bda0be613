"""What coefficients are judged by: the experts attached once, the examples encoded once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import DataError
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.learned.mixture import Mixture
from cgmerge.modules.stats import frozen
from cgmerge.modules.teacher import LOGIT_BUDGET, Batch, batches_of, make_batch, target_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 32
_GRADIENT_SHARE = 4  # of the logit budget: a backward pass holds several copies
Aim = Literal["loss", "prompt", "answer"]
"""What is minimised: the loss, or the entropy of the first answer token or of all of them."""


@dataclass(frozen=True)
class Support:
    """The examples that are learned from.

    Attributes:
        rows: Their tokens.
        skills: The skill of each; every skill counts the same.
        answered: Whether each has an answer; without one the whole text is a prompt.
    """

    rows: tuple[Encoded, ...]
    skills: tuple[str, ...]
    answered: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(
                "there are no examples to learn from",
                code="empty",
                hint='give rows like {"prompt": …, "completion": …}',
            )

    def __len__(self) -> int:
        return len(self.rows)

    def weights(self, places: Sequence[int] | None = None) -> Float[Tensor, " examples"]:
        """Return each example's part in the mean over skills of the mean over their examples.

        Args:
            places: Use only these; the others get 0.
        """
        chosen = range(len(self.rows)) if places is None else places
        counts = Counter(self.skills[i] for i in chosen)
        found = torch.zeros(len(self.rows), dtype=torch.float64)
        for i in chosen:
            found[i] = 1.0 / (len(counts) * counts[self.skills[i]])
        return found


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one pass says about each example, [examples], float64.

    Attributes:
        aim: What is minimised.
        loss: Mean negative log-likelihood of an answer token, in nats.
        correct: 1 where every answer token is the arg-max.
    """

    aim: Float[Tensor, " examples"]
    loss: Float[Tensor, " examples"]
    correct: Float[Tensor, " examples"]


class Problem:
    """Experts in a model and the examples they are judged on.

    Args:
        model: With `mixture` attached and no gradients of its own; see `attach`.
        mixture: The experts.
        support: The examples.
        aim: What is minimised.

    Attributes:
        passes: How many passes over the examples were made; one with a gradient counts as three.
    """

    def __init__(
        self, model: "PreTrainedModel", mixture: Mixture, support: Support, aim: Aim
    ) -> None:
        self.model, self.mixture, self.support, self.aim = model, mixture, support, aim
        self.passes = 0
        self._known: dict[bytes, Outcome] = {}
        vocab = int(model.config.get_text_config().vocab_size)
        limit = LOGIT_BUDGET // _GRADIENT_SHARE
        rows = support.rows
        self._places = list(batches_of(rows, BATCH, lambda b: b.logits * vocab <= limit))
        self._batches = [make_batch([rows[i] for i in p], model.device) for p in self._places]

    @property
    def shape(self) -> tuple[int, int]:
        """Return (experts, modules)."""
        return len(self.mixture.experts), len(self.mixture.modules)

    def outcome(self, values: Float[Tensor, "experts modules"]) -> Outcome:
        """Measure coefficients; what was measured before is remembered."""
        key = values.numpy().tobytes()
        if key not in self._known:
            self.mixture.set(values)
            self._known[key] = self.measure()
        return self._known[key]

    def measure(self, route: Callable[[list[list[int]]], object] | None = None) -> Outcome:
        """Measure the model as it is, with whatever is attached.

        Args:
            route: Told about the prompts of every batch before the model is.
        """
        found = torch.zeros(3, len(self.support), dtype=torch.float64)
        with torch.no_grad():
            for places, batch in zip(self._places, self._batches, strict=True):
                if route is not None:
                    route([list(self.support.rows[i].prompt_ids) for i in places])
                found[:, places] = self._rows(places, batch).double().cpu()
        self.passes += 1
        return Outcome(*found)

    def gradient(
        self, values: Float[Tensor, "experts modules"], weights: Float[Tensor, " examples"]
    ) -> tuple[Outcome, Float[Tensor, "experts modules"]]:
        """Measure coefficients, and return the gradient of Σ weights·aim in them, float64."""
        self.mixture.set(values)
        self.mixture.values.requires_grad_()
        found = torch.zeros(3, len(self.support), dtype=torch.float64)
        with torch.enable_grad():
            for places, batch in zip(self._places, self._batches, strict=True):
                rows = self._rows(places, batch)
                found[:, places] = rows.detach().double().cpu()
                (rows[0] * weights[places].to(rows)).sum().backward()
        self.passes += 3
        gradient = self.mixture.values.grad
        assert gradient is not None
        return Outcome(*found), gradient.double().cpu()

    def _rows(self, places: Sequence[int], batch: Batch) -> Float[Tensor, "3 rows"]:
        """Return aim, loss and correctness of the rows of a batch."""
        logs = target_logits(self.model, batch).log_softmax(-1)
        right = (logs.argmax(-1) == batch.wanted).to(logs)
        losses = _means(-logs.gather(1, batch.wanted[:, None])[:, 0], batch.counts)
        correct = torch.stack([part.amin() for part in right.split(batch.counts)])
        aim = losses
        if self.aim != "loss":
            parts = (-(logs.exp() * logs).sum(-1)).split(batch.counts)
            answered = [self.support.answered[i] for i in places]
            aim = torch.stack([self._entropy(p, a) for p, a in zip(parts, answered, strict=True)])
        return torch.stack([aim, losses, correct])

    def _entropy(self, entropies: Tensor, answered: bool) -> Tensor:  # noqa: FBT001
        """Choose positions: what comes after a text without an answer is its end token's place."""
        if not answered:
            return entropies[-1]
        return entropies[0] if self.aim == "prompt" else entropies.mean()


@contextmanager
def attach(
    model: "PreTrainedModel", mixture: Mixture, support: Support, aim: Aim = "loss"
) -> Iterator[Problem]:
    """Have experts in a frozen model for the length of a `with` block.

    Raises:
        Incompatible: A module that the model does not have.
    """
    with frozen(model), mixture.attached(model):
        yield Problem(model, mixture, support, aim)


def _means(values: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.stack([part.mean() for part in values.split(list(counts))])
