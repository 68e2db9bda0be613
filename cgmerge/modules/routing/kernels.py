"""Σ_e w_e·B_e·A_e·x in three ways that give the same result at different cost.

| kernel   | products per token      | good for                                           |
|----------|-------------------------|----------------------------------------------------|
| `dense`  | Σr·(in + out)           | few experts, weights that are all non-zero, training |
| `sparse` | k·r·(in + out)          | many experts, of which each token uses few         |
| `by_row` | k·r·(in + out)          | one choice for a whole sequence                    |
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cgmerge.modules.routing.stack import Stack


def dense(
    z: Float[Tensor, "*batch ranks"], stack: Stack, weights: Float[Tensor, "*batch experts"]
) -> Float[Tensor, "*batch out"]:
    """Weigh all experts at once.

    Args:
        z: A_all·x, see `Stack`.
        stack: The experts.
        weights: One row per token, or rows that broadcast over tokens.
    """
    return weigh(z, stack, weights) @ stack.b.T


def weigh(
    z: Float[Tensor, "*batch ranks"], stack: Stack, weights: Float[Tensor, "*batch experts"]
) -> Float[Tensor, "*batch ranks"]:
    """Multiply every expert's part of z with its weight, in the type of z."""
    shares = weights.to(z.dtype)
    if stack.uniform is not None:  # views and one product: far cheaper than indexing
        parts: Tensor = z.unflatten(-1, (-1, stack.uniform))
        return (parts * shares.unsqueeze(-1)).flatten(-2)
    return z * shares.index_select(-1, stack.owner)


def norms(z: Float[Tensor, "*batch ranks"], stack: Stack) -> Float[Tensor, "*batch experts"]:
    """Return the norm of every expert's part of z, float32."""
    squares = z.float().square()
    if stack.uniform is not None:
        parts: Tensor = squares.unflatten(-1, (-1, stack.uniform))
        return parts.sum(dim=-1).sqrt()
    found = squares.new_zeros(*z.shape[:-1], stack.experts)
    return found.index_add_(-1, stack.owner, squares).sqrt()


def sparse(
    x: Float[Tensor, "tokens in"],
    stack: Stack,
    chosen: Int[Tensor, "tokens k"],
    weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens out"]:
    """Send each token through its chosen experts only.

    Args:
        x: Inputs.
        stack: The experts.
        chosen: Experts of each token, all different.
        weights: Their weights.
    """
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=stack.experts).tolist()
    token = order // k
    share = weights.flatten()[order].to(x.dtype)
    result = x.new_zeros(x.shape[0], stack.b.shape[0])
    first = 0
    for expert, count in enumerate(counts):
        delta, last = stack.delta(expert), first + count
        if count and delta.rank:
            places = token[first:last]
            z = (x.index_select(0, places) @ delta.a.T) * share[first:last, None]
            result.index_add_(0, places, z @ delta.b.T)
        first = last
    return result


@dataclass(frozen=True)
class RowPlan:
    """Which experts each sequence of a batch uses; rows with the same experts are one group.

    Attributes:
        batch: Number of sequences.
        groups: (rows, experts, their weights [rows, experts]).
    """

    batch: int
    groups: tuple[tuple[Tensor, tuple[int, ...], Tensor], ...]

    @classmethod
    def of(cls, weights: Float[Tensor, "batch experts"]) -> "RowPlan":
        """Group the rows; weights of exactly zero cost nothing later."""
        used = weights != 0
        groups = []
        for pattern in torch.unique(used, dim=0):
            rows = (used == pattern).all(dim=1).nonzero().flatten()
            experts = pattern.nonzero().flatten().tolist()
            groups.append((rows, tuple(experts), weights[rows][:, experts]))
        return cls(weights.shape[0], tuple(groups))

    def weights(self, experts: int) -> Float[Tensor, "batch experts"]:
        """Return the weights as they were given."""
        found = torch.zeros(self.batch, experts, device=self.groups[0][0].device)
        for rows, used, weights in self.groups:
            found[rows[:, None], list(used)] = weights.to(found)
        return found

    def repeated(self, times: int) -> "RowPlan":
        """Return the plan for `times` beams of every sequence, those of one beside each other."""
        beams = torch.arange(times, device=self.groups[0][0].device)
        return RowPlan(
            self.batch * times,
            tuple(
                ((rows[:, None] * times + beams).flatten(), used, w.repeat_interleave(times, 0))
                for rows, used, w in self.groups
            ),
        )


def by_row(
    x: Float[Tensor, "batch tokens in"], stack: Stack, plan: RowPlan
) -> Float[Tensor, "batch tokens out"]:
    """Send each sequence through the experts of its row.

    A batch of one skill costs what one adapter costs.

    Args:
        x: Inputs; as many sequences as the plan has.
        stack: The experts.
        plan: Experts and weights of the sequences.
    """
    result = x.new_zeros(*x.shape[:-1], stack.b.shape[0])
    for rows, experts, weights in plan.groups:
        kept = [place for place, expert in enumerate(experts) if stack.ranks[expert]]
        if not kept:
            continue
        part = stack.only([experts[place] for place in kept])
        share = weights[:, kept][:, None, :]
        if len(plan.groups) == 1:
            return dense(x @ part.a.T, part, share)
        z = x.index_select(0, rows) @ part.a.T
        result.index_copy_(0, rows, dense(z, part, share))
    return result
