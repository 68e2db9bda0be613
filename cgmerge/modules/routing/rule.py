"""Scores and choice together: what gives every token its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.scores import Scorer


@dataclass(frozen=True)
class TokenRule:
    """What gives every token its weights.

    Attributes:
        scorer: Scores from the input.
        choice: Weights from the scores.
        after: Added to the weights, [experts] (LoRA-Flow); weights then need not sum to 1.
    """

    scorer: Scorer
    choice: Choice
    after: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> "TokenRule":
        """Return the rule with every tensor changed, e.g. moved to a device."""
        after = None if self.after is None else change(self.after)
        return TokenRule(self.scorer.changed(change), self.choice, after)

    def to(self, device: torch.device) -> "TokenRule":
        """Return the rule on a device; its own tensors where they are there already."""
        return self.changed(lambda tensor: tensor.to(device))

    def joined(self, others: "Sequence[TokenRule]") -> "TokenRule":
        """Return one rule for several modules with the same input; see `Scorer.joined`."""
        if not others:
            return self
        afters = [rule.after for rule in (self, *others) if rule.after is not None]
        return TokenRule(
            self.scorer.joined([rule.scorer for rule in others]),
            self.choice,
            torch.cat(afters) if afters else None,
        )

    def simplified(self) -> "TokenRule":
        """Return the rule without a mark of who is present where everybody is."""
        present = self.scorer.present
        if present is None or not bool(present.all()):
            return self
        return replace(self, scorer=replace(self.scorer, present=None))

    def tensors(self) -> list[Tensor]:
        """Return everything that decides."""
        return [*self.scorer.tensors().values(), *([] if self.after is None else [self.after])]
