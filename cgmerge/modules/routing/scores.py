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

from cgmerge.modules.routing.stack import Stack

_EPS = 1e-5
"""As in LayerNorm."""


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Scores of all experts for one token.

    Attributes:
        rows: What the input is multiplied with, [rows, in], float32; None where nothing is.
        present: Experts that can be chosen here; None for all. Others get -inf.
    """

    form: ClassVar[str]
    needs_z: ClassVar[bool] = False
    """Whether the formula reads A_all·x, which then has to be computed for all experts."""

    rows: Float[Tensor, "rows in"] | None = None
    present: Bool[Tensor, "experts"] | None = None

    def scores(
        self,
        x: Float[Tensor, "tokens in"],
        linear: Float[Tensor, "tokens rows"] | None,
        z: Float[Tensor, "tokens ranks"] | None,
    ) -> Float[Tensor, "tokens experts"]:
        """Return the scores, float32.

        Args:
            x: Inputs of the module.
            linear: rows·x, where there are rows.
            z: A_all·x, where `needs_z`.
        """
        found = self.formula(x, linear, z)
        return found if self.present is None else found.masked_fill(~self.present, -torch.inf)

    @abstractmethod
    def formula(self, x: Tensor, linear: Tensor | None, z: Tensor | None, /) -> Tensor:
        """Return the scores before experts that are not here are left out."""

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
    bias: Float[Tensor, "experts"] | None = None

    def formula(self, _x: Tensor, linear: Tensor | None, _z: Tensor | None, /) -> Tensor:
        """Return the linear scores."""
        assert linear is not None
        return linear if self.bias is None else linear + self.bias


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

    def formula(self, x: Tensor, linear: Tensor | None, _z: Tensor | None, /) -> Tensor:
        """Return the standardised scores."""
        assert linear is not None
        deviation: Tensor = (x.float().var(dim=-1, correction=0, keepdim=True) + _EPS).sqrt()
        return linear / deviation


@dataclass(frozen=True, kw_only=True)
class Subspace(Scorer):
    """‖V_eᵀ·x‖: how much of x lies in the span of each expert's leading input directions.

    With one direction it is |v_e·x| (Arrow). `rows` holds the directions of all experts, `width`
    of each, zeros where an expert has fewer.
    """

    form = "subspace"
    weights: Float[Tensor, "experts"] | None = None
    """Factor on the score of each expert."""
    width: int = 1

    def formula(self, _x: Tensor, linear: Tensor | None, _z: Tensor | None, /) -> Tensor:
        """Return the norms of the projections."""
        assert linear is not None
        parts = linear.unflatten(-1, (-1, self.width))
        found = parts[..., 0].abs() if self.width == 1 else parts.norm(dim=-1)
        return found if self.weights is None else found * self.weights

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Take the width from the number of rows and of experts."""
        experts = tensors["present"].shape[0]
        return cls(**tensors, width=tensors["rows"].shape[0] // experts)


@dataclass(frozen=True, kw_only=True)
class Energy(Scorer):
    """‖ΔW_e·x‖ from A_all·x and the Gram matrices of the factors B: no singular vectors needed.

    ‖ΔW_e·x‖² = zᵀ(BᵀB)z with z = A_e·x. `gram` holds the blocks of all experts on its diagonal.
    """

    form = "energy"
    needs_z = True
    gram: Float[Tensor, "ranks ranks"]
    owner: Float[Tensor, "ranks experts"]
    """1 where a rank belongs to an expert."""
    weights: Float[Tensor, "experts"] | None = None

    @classmethod
    def of(cls, stack: Stack, weights: Tensor | None) -> "Energy":
        """Make the scorer of a stack."""
        b = stack.b.double()
        blocks = [b[:, i:j].T @ b[:, i:j] for i, j in zip(stack.starts, stack.starts[1:])]  # noqa: B905
        owner = torch.nn.functional.one_hot(stack.owner, stack.experts).float()
        return cls(
            gram=torch.block_diag(*[block for block in blocks if block.numel()]).float(),
            owner=owner,
            weights=weights,
            present=torch.tensor(stack.present),
        )

    def formula(self, _x: Tensor, _linear: Tensor | None, z: Tensor | None, /) -> Tensor:
        """Return the norms of the experts' outputs."""
        assert z is not None
        z = z.float()
        squares = ((z @ self.gram) * z) @ self.owner
        found = squares.clamp_min(0.0).sqrt()  # rounding may leave less than zero
        return found if self.weights is None else found * self.weights


SCORERS: dict[str, type[Scorer]] = {
    kind.form: kind for kind in (Gate, Standardised, Subspace, Energy)
}
"""Every kind of scorer by the name in saved files."""
