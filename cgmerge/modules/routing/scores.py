"""How well each expert fits a token, from the input of a module.

Every scorer is a few tensors and a formula. What it multiplies the input with (`rows`) is kept
apart from the formula, so that a layer can compute it in one product with the experts' factors,
and for all modules that read the same input.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_EPS = 1e-5
"""As in LayerNorm."""
_PLAIN = {"present": True, "bias": 0.0, "weights": 1.0}
"""What a field that is not there stands for."""


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Scores of all experts for one token.

    Attributes:
        rows: What the input is multiplied with, [rows, in], float32; None for scorers that read
            the norms ‖ΔW_e·x‖ instead.
        present: Experts that can be chosen here; None for all. Others get -inf.
    """

    form: ClassVar[str]
    of_rows: ClassVar[bool] = True
    """Whether the formula reads rows·x; otherwise the norms of what the experts would add."""
    per_expert: ClassVar[tuple[str, ...]] = ("present",)
    """Fields with one entry per expert."""

    rows: Float[Tensor, "rows in"] | None = None
    present: Bool[Tensor, "experts"] | None = None

    def scores(
        self, x: Float[Tensor, "*batch in"], read: Float[Tensor, "*batch read"]
    ) -> Float[Tensor, "*batch experts"]:
        """Return the scores, float32.

        Args:
            x: Inputs of the module.
            read: rows·x, or the norms ‖ΔW_e·x‖.
        """
        found = self.formula(x, read)
        return found if self.present is None else found.masked_fill(~self.present, -torch.inf)

    @abstractmethod
    def formula(self, x: Tensor, read: Tensor, /) -> Tensor:
        """Return the scores before experts that are not here are left out."""

    def joined(self, others: "Sequence[Scorer]") -> "Scorer":
        """Return one scorer for several modules that read the same input.

        Args:
            others: See `joins`; their scores come behind this one's.
        """
        members = [self, *others]
        changes: dict[str, Tensor] = {}
        if self.rows is not None:
            changes["rows"] = torch.cat([m.rows for m in members if m.rows is not None])
        for name in self.per_expert:
            values = [getattr(member, name) for member in members]
            known = next((value for value in values if value is not None), None)
            if known is not None:
                plain = torch.full_like(known, _PLAIN[name])
                changes[name] = torch.cat([plain if v is None else v for v in values])
        return replace(self, **changes)

    def joins(self, other: "Scorer") -> bool:
        """Whether `joined` can put another one behind this one."""
        return type(self) is type(other)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that decides the scores, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Make a scorer from what `tensors` gave."""
        return cls(**tensors)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the scorer with every tensor changed, e.g. moved to a device."""
        return replace(self, **{name: change(value) for name, value in self.tensors().items()})


@dataclass(frozen=True, kw_only=True)
class Gate(Scorer):
    """W·x + bias: a learned linear gate."""

    form = "gate"
    per_expert = ("present", "bias")
    bias: Float[Tensor, "experts"] | None = None

    def formula(self, _x: Tensor, read: Tensor, /) -> Tensor:
        """Return the linear scores."""
        return read if self.bias is None else read + self.bias


@dataclass(frozen=True, kw_only=True)
class Standardised(Scorer):
    """LN(x)·LN(v)/√in, both LayerNorms without scale and shift (PHATGOOSE).

    `rows` holds LN(v)/√in, whose entries sum to zero; the mean of x then drops out and one
    division by its deviation is left.
    """

    form = "standardised"

    @classmethod
    def of(cls, gates: Float[Tensor, "experts in"], present: Sequence[bool]) -> "Standardised":
        """Make the scorer of trained gate vectors v."""
        width = gates.shape[-1]
        rows = torch.nn.functional.layer_norm(gates.float(), (width,), eps=_EPS) / math.sqrt(width)
        return cls(rows=rows, present=torch.tensor(list(present)))

    def formula(self, x: Tensor, read: Tensor, /) -> Tensor:
        """Return the standardised scores."""
        deviation: Tensor = (x.float().var(dim=-1, correction=0, keepdim=True) + _EPS).sqrt()
        return read / deviation


@dataclass(frozen=True, kw_only=True)
class Subspace(Scorer):
    """‖V_eᵀ·x‖: how much of x lies in the span of each expert's leading input directions.

    With one direction it is |v_e·x| (Arrow). `rows` holds the directions of all experts, `width`
    of each, zeros where an expert has fewer.
    """

    form = "subspace"
    per_expert = ("present", "weights")
    weights: Float[Tensor, "experts"] | None = None
    """Factor on the score of each expert."""
    width: int = 1

    def formula(self, _x: Tensor, read: Tensor, /) -> Tensor:
        """Return the norms of the projections."""
        if self.width == 1:
            found = read.abs()
        else:
            found = torch.linalg.vector_norm(read.unflatten(-1, (-1, self.width)), dim=-1)
        return found if self.weights is None else found * self.weights

    def joins(self, other: Scorer) -> bool:
        """Whether both have as many directions per expert."""
        return isinstance(other, Subspace) and self.width == other.width

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Take the width from the number of rows and of experts."""
        present, rows = tensors["present"], tensors["rows"]
        if present.dim() != 1 or rows.dim() != 2 or not 0 < len(present) <= len(rows):
            raise TypeError(f"rows {list(rows.shape)} for experts {list(present.shape)}")
        return cls(**tensors, width=len(rows) // len(present))


@dataclass(frozen=True, kw_only=True)
class Energy(Scorer):
    """‖ΔW_e·x‖: how much an expert would add (SpectR).

    No singular vectors are needed: with orthonormal columns in B (`Stack.orthonormal`) it is the
    norm of A_e·x, which mixing needs anyway.
    """

    form = "energy"
    of_rows = False
    per_expert = ("present", "weights")
    weights: Float[Tensor, "experts"] | None = None

    def formula(self, _x: Tensor, read: Tensor, /) -> Tensor:
        """Return the norms of the experts' outputs."""
        return read if self.weights is None else read * self.weights


SCORERS: dict[str, type[Scorer]] = {
    kind.form: kind for kind in (Gate, Standardised, Subspace, Energy)
}
"""Every kind of scorer by the name in saved files."""
