"""All experts' deltas of one module as one pair of factors, one expert below the other.

With A_all [Σr, in] and B_all [out, Σr] any weighted sum Σ_e w_e·ΔW_e·x is one pair of products:
((A_all·x) ⊙ w repeated per rank) through B_all. Different ranks and experts that leave a module
alone need nothing special.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Incompatible
from cgmerge.merge.deltas import LowRank


@dataclass(frozen=True)
class Stack:
    """The deltas of several experts for one module.

    Attributes:
        a: Factors A one below the other, [Σr, in].
        b: Factors B side by side, scalings folded in, [out, Σr].
        ranks: Rank of each expert here; 0 where an expert leaves the module alone.
    """

    a: Float[Tensor, "ranks in"]
    b: Float[Tensor, "out ranks"]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, deltas: Sequence[LowRank | None]) -> "Stack":
        """Stack the experts' deltas of one module, in order.

        Args:
            deltas: One per expert, at least one of them present, all of the same (out, in).

        Raises:
            Incompatible: Different shapes.
        """
        present = [delta for delta in deltas if delta is not None]
        shapes = sorted({delta.shape for delta in present})
        if len(shapes) != 1:
            raise Incompatible(
                f"experts change a module with different shapes (out, in): {shapes}",
                code="shape",
                hint="these experts belong to different bases",
                found=[list(shape) for shape in shapes],
            )
        return cls(
            torch.cat([delta.a for delta in present], dim=0),
            # In memory B_allᵀ: what one expert's columns hold lies together (see `blocks`).
            torch.cat([delta.b.T for delta in present], dim=0).T,
            tuple(0 if delta is None else delta.rank for delta in deltas),
        )

    @property
    def experts(self) -> int:
        """Return the number of experts, those without a delta here included."""
        return len(self.ranks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return where each expert begins in the stack, and where the last one ends."""
        return (0, *accumulate(self.ranks))

    @property
    def present(self) -> list[bool]:
        """Return which experts change the module."""
        return [rank > 0 for rank in self.ranks]

    @cached_property
    def owner(self) -> Tensor:
        """Return the expert of each row of `a`, [Σr]."""
        ranks = torch.tensor(self.ranks, device=self.a.device)
        return torch.repeat_interleave(torch.arange(self.experts, device=self.a.device), ranks)

    @cached_property
    def uniform(self) -> int | None:
        """Return the rank that all experts have here; None where they differ."""
        return self.ranks[0] if len(set(self.ranks)) == 1 else None

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return A and Bᵀ by expert, [experts, rank, in] and [experts, rank, out].

        Only where all experts have one rank.
        """
        return self.a.unflatten(0, (self.experts, -1)), self.b.T.unflatten(0, (self.experts, -1))

    def delta(self, expert: int) -> LowRank:
        """Return one expert's delta; of rank 0 where it leaves the module alone."""
        first, last = self.starts[expert], self.starts[expert + 1]
        return LowRank(self.a[first:last], self.b[:, first:last])

    def only(self, experts: Sequence[int]) -> "Stack":
        """Return the stack of some experts; a view where there is one, itself where all are."""
        if list(experts) == list(range(self.experts)):
            return self
        if len(experts) == 1:
            delta = self.delta(experts[0])
            return Stack(delta.a, delta.b, (delta.rank,))
        return Stack.of([self.delta(expert) for expert in experts])

    def mixed(self, weights: Float[Tensor, "experts"]) -> LowRank:
        """Return Σ w_e·ΔW_e exactly, of rank Σr."""
        return LowRank(self.a, self.b * weights.to(self.b)[self.owner])

    def orthonormal(self) -> "Stack":
        """Return the same deltas with orthonormal columns in every expert's B.

        ‖ΔW_e·x‖ is then ‖A_e·x‖: the norm of what an expert adds is known before it is added.
        """
        turned: list[LowRank | None] = []
        for expert in range(self.experts):
            delta = self.delta(expert)
            q, r = torch.linalg.qr(delta.b.double())
            a = (r @ delta.a.double()).to(delta.a.dtype)
            turned.append(LowRank(a, q.to(delta.b.dtype)) if delta.rank else None)
        return Stack.of(turned)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Stack":
        """Return the stack on a device in a float type; itself where nothing changes."""
        if self.a.device == device and self.a.dtype == dtype:
            return self
        return Stack(self.a.to(device, dtype), self.b.to(device, dtype), self.ranks)


def stacks(deltas: Sequence[Mapping[str, LowRank]]) -> dict[str, Stack]:
    """Stack every module that any expert touches.

    Args:
        deltas: Task vectors of the experts, in order.

    Returns:
        Module path to its stack, in the order of the first expert that has it.
    """
    paths = dict.fromkeys(path for expert in deltas for path in expert)
    return {path: Stack.of([expert.get(path) for expert in deltas]) for path in paths}
