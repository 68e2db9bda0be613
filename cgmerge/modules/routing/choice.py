"""From scores to weights: temperature, the best k, softmax over what is kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

import torch
from jaxtyping import Float, Int
from torch import Tensor

LEAST, MOST = 1e-6, 1e6
"""Bounds of temperatures and the like: what is divided by them stays within float32."""

_FEW = 4
_SMALL = 1 << 11


@dataclass(frozen=True, slots=True)
class Choice:
    """How scores become weights.

    Attributes:
        top_k: Experts kept per token or sequence; None keeps all.
        temperature: Scores are divided by it before the softmax.
    """

    top_k: int | None = None
    temperature: float = 1.0

    def weights(self, scores: Float[Tensor, "*batch experts"]) -> Float[Tensor, "*batch experts"]:
        """Return softmax weights that sum to 1, zero for experts that are not kept.

        Args:
            scores: Higher is better; -inf for experts that cannot be chosen.
        """
        if self.top_k is None or self.top_k >= scores.shape[-1]:
            return (scores / self.temperature).softmax(dim=-1)
        chosen, kept = self.best(scores)
        return torch.zeros_like(scores).scatter(-1, chosen, kept)

    def best(
        self, scores: Float[Tensor, "*batch experts"]
    ) -> tuple[Int[Tensor, "*batch k"], Float[Tensor, "*batch k"]]:
        """Return the k best experts and their weights; of equal scores the first expert."""
        k = min(self.top_k or scores.shape[-1], scores.shape[-1])
        chosen, kept = first_best(scores, k)
        return chosen, (kept / self.temperature).softmax(dim=-1)

    def best_of(self, scores: Sequence[float]) -> list[tuple[int, float]]:
        """Return what `best` does, for the scores of one token that Python has read already."""
        k = min(self.top_k or len(scores), len(scores))
        chosen = nsmallest(k, range(len(scores)), key=lambda e: (-scores[e], e))
        highest = scores[chosen[0]]
        if highest == -math.inf:  # nobody can be chosen: as a softmax of nothing but -inf
            return [(e, math.nan) for e in chosen]
        parts = [math.exp((scores[e] - highest) / self.temperature) for e in chosen]
        total = math.fsum(parts)
        return [(e, part / total) for e, part in zip(chosen, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Sigmoid(Choice):
    """Every expert says as much as its own score allows, whatever the others say."""

    def weights(self, scores: Float[Tensor, "*batch experts"]) -> Float[Tensor, "*batch experts"]:
        """Return weights between 0 and 1."""
        return scores.sigmoid()


def first_best(
    scores: Float[Tensor, "*batch experts"], k: int
) -> tuple[Int[Tensor, "*batch k"], Float[Tensor, "*batch k"]]:
    """Return indices and values of the k highest scores, best first, of equal ones the first.

    `topk` leaves open which of equal scores it takes.
    """
    if k > _FEW or scores.numel() <= _SMALL:  # one operation, but all experts are put in order
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        return order[..., :k], values[..., :k]
    # -inf marks what is taken already; what cannot be chosen comes after everything else.
    left, found = scores.clamp_min(torch.finfo(scores.dtype).min), []
    for _ in range(k):
        best = left.argmax(dim=-1, keepdim=True)  # the first of equals
        found.append(best)
        if len(found) < k:
            left = left.scatter(-1, best, -torch.inf)
    chosen = torch.cat(found, dim=-1)
    return chosen, scores.gather(-1, chosen)
