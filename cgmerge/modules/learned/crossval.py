"""What a choice is worth on examples that it did not see: k-fold cross-validation.

A candidate is anything that can be fitted to some of the examples and measured on all of them:
one expert, a merge rule with its scale chosen, learned coefficients. `fit` gets the weights of the
examples (0: not to be looked at) and returns what was made; nothing else is asked of it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.learned.objectives import Outcome, Support
from cgmerge.modules.recipe import Recipe

Weights = Float[Tensor, " examples"]
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a candidate became on some examples.

    Attributes:
        outcome: Of all examples.
        note: What was chosen, e.g. `scale 0.6`.
        recipe: What composes it; None for what is only compared with.
        record: What there is to keep beyond the note.
    """

    outcome: Outcome
    note: str = ""
    recipe: Recipe | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """Something to choose.

    Attributes:
        name: What tables call it.
        fit: Makes it from the examples with a weight above 0.
        passes: About how many passes over the examples all its fits together take.
        recipe: What composes it, where composing fits it to all examples anyway.
    """

    name: str
    fit: Callable[[Weights], Fitted]
    passes: int = 1
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate on the examples that its fits did not see.

    Attributes:
        name: The candidate's.
        score: Share of answers that are right in every token; every skill counts the same.
        loss: Mean negative log-likelihood of an answer token.
    """

    name: str
    score: float
    loss: float

    @property
    def rank(self) -> tuple[float, float]:
        """Return what candidates are ordered by: right answers, then likelihood."""
        return self.score, -self.loss


def folds_of(support: Support, folds: int) -> list[list[int]]:
    """Split examples into parts that hold every skill alike; equal rows stay together.

    The order of the examples does not matter.

    Args:
        support: The examples.
        folds: Most parts; no more than there are different examples.

    Returns:
        Places of each part, or nothing where fewer than two parts are possible.
    """
    keys = [
        (skill, hashlib.sha256(repr((row.prompt_ids, row.target_ids)).encode()).hexdigest())
        for skill, row in zip(support.skills, support.rows, strict=True)
    ]
    number = {key: place for place, key in enumerate(sorted(set(keys)))}
    parts = min(folds, len(number))
    if parts < 2:
        return []
    return [[i for i, key in enumerate(keys) if number[key] % parts == part]
            for part in range(parts)]  # fmt: skip


def cross_validate(
    candidates: Sequence[Candidate],
    support: Support,
    parts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> list[Row]:
    """Fit every candidate without each part in turn, and measure it there.

    Args:
        candidates: What to compare.
        support: The examples.
        parts: From `folds_of`.
        progress: Called with the number of finished fits.

    Returns:
        One row per candidate, in order.
    """
    weights, rows = support.weights(), []
    for number, candidate in enumerate(candidates):
        loss, correct = torch.zeros(len(support)).double(), torch.zeros(len(support)).double()
        for turn, part in enumerate(parts):
            held = list(part)
            kept = [i for i in range(len(support)) if i not in set(held)]
            outcome = candidate.fit(support.weights(kept)).outcome
            loss[held], correct[held] = outcome.loss[held], outcome.correct[held]
            if progress:
                progress(number * len(parts) + turn + 1)
        rows.append(
            Row(candidate.name, float((weights * correct).sum()), float((weights * loss).sum()))
        )
    return rows


def table_record(rows: Sequence[Row], parts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return plain data: how many parts, and every row."""
    return {"folds": len(parts), "rows": [asdict(row) for row in rows]}
