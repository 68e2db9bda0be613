"""Smaller spaces in which merging low-rank experts is exact.

Of all deltas of a module, ΔW_e = Q_b·C_e·Q_aᵀ with orthonormal Q_b [out, R], Q_a [in, R] and small
C_e [R, R], R = Σ ranks: two thin QRs, nothing is lost. Rules that commute with rotations of both
sides (sums, SVD methods) are run on the C_e; rules that commute with rotations of the output side
only run on C_e·Q_aᵀ [R, in]. Entry-wise rules do not commute with rotations, so for them a space
is a choice, spelled `core+ties` or `knots+ties`:

- `knots`: U from the SVD of [ΔW_1 … ΔW_E]; the rule sees Uᵀ·ΔW_e.
- `core`: also V from the SVD of the deltas one below the other; the rule sees Uᵀ·ΔW_e·V.

Both bases come from the deltas, so that the result does not depend on how a delta is factored.

Sources: KnOTS (arXiv:2410.19735), whose code cuts singular values at 1e-5, here relative to the
largest; Core Space (arXiv:2509.17786), whose code takes the bases of the stacked factors B and A.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Delta, LowRank, Rows

Space = Literal["core", "knots"]
SPACES: tuple[Space, ...] = ("core", "knots")
_CUT = 1e-5

_REMEMBERED = 1 << 27
"""Bytes of projections that are kept, so that rules which look at all modules several times do not
compute them anew."""


@dataclass(frozen=True, slots=True)
class Projected:
    """All experts' deltas of one module in a common small space.

    Attributes:
        left: Orthonormal columns, [out, m]; None is the identity.
        right: Orthonormal columns, [in, n]; None is the identity.
        matrices: leftᵀ·ΔW_e·right, float64 [experts, m, n]; absent experts are zero.
    """

    left: Float[Tensor, "out m"] | None
    right: Float[Tensor, "in n"] | None
    matrices: Float[Tensor, "experts m n"]

    @property
    def nbytes(self) -> int:
        """Return what it takes in memory."""
        return sum(t.nbytes for t in (self.left, self.right, self.matrices) if t is not None)

    def lift(self, merged: Float[Tensor, "m n"]) -> Float[Tensor, "out in"]:
        """Return left·merged·rightᵀ."""
        matrix = merged if self.left is None else self.left @ merged.to(self.left.dtype)
        return matrix if self.right is None else matrix @ self.right.T.to(matrix.dtype)

    def factors(self, merged: Float[Tensor, "m n"]) -> LowRank:
        """Return the same as factors of rank m; there must be a left basis."""
        assert self.left is not None
        small = merged.to(self.left.dtype)
        return LowRank(small if self.right is None else small @ self.right.T, self.left)


def project(deltas: Sequence[Delta | None], sides: Literal["both", "left", "none"]) -> Projected:
    """Write the deltas of one module in the space that `sides` allows, without loss.

    Args:
        deltas: One per expert, None where absent; all of one shape, at least one present.
        sides: Which sides may be rotated; plain tensors are never rotated.
    """
    present = [delta for delta in deltas if delta is not None]
    factors = [delta for delta in present if isinstance(delta, LowRank)]
    if sides == "none" or len(factors) < len(present):
        dense = [_whole(delta).flatten(1) for delta in present]
        return Projected(None, None, _fill(deltas, [matrix.double() for matrix in dense]))
    left, r_b = torch.linalg.qr(torch.cat([delta.b for delta in factors], dim=1))
    ranks = [delta.rank for delta in factors]
    if sides == "left":
        parts = zip(r_b.double().split(ranks, dim=1), factors, strict=True)
        return Projected(left, None, _fill(deltas, [r @ d.a.double() for r, d in parts]))
    right, r_a = torch.linalg.qr(torch.cat([delta.a for delta in factors], dim=0).T)
    pairs = zip(r_b.double().split(ranks, 1), r_a.double().split(ranks, 1), strict=True)
    return Projected(left, right, _fill(deltas, [x @ y.T for x, y in pairs]))


def into_space(deltas: Sequence[Delta | None], space: Space) -> Projected:
    """Write the deltas of one module in a named space; see the module."""
    exact = project(deltas, "both")
    matrices = exact.matrices
    left = _basis(torch.cat(list(matrices), dim=1))
    right = _basis(torch.cat(list(matrices), dim=0).T) if space == "core" else None
    coordinates = left.T @ matrices
    joined = _join(exact.left, left)
    if right is None:
        if exact.right is not None:
            coordinates = coordinates @ exact.right.T.double()
        return Projected(joined, None, coordinates)
    return Projected(joined, _join(exact.right, right), coordinates @ right)


class SpaceExperts:
    """Experts seen through a space: one mapping per expert, module to its coordinates.

    Attributes:
        views: As many mappings as experts; all of them hold every module that can be rotated.
    """

    def __init__(self, experts: Sequence[Mapping[str, Delta]], space: Space) -> None:
        self.experts = experts
        self.space = space
        self.names = sorted(set().union(*[set(expert) for expert in experts]))
        self.views = [_View(self, place) for place in range(len(experts))]
        self._newest: tuple[str, Projected] | None = None
        self._kept: dict[str, Projected] = {}
        self._bytes = 0

    def of(self, name: str) -> Projected | None:
        """Return a module's projection, None for tensors with fewer than two dimensions."""
        if self._newest is not None and self._newest[0] == name:
            return self._newest[1]
        if name in self._kept:
            return self._kept[name]
        deltas = [expert.get(name, None) for expert in self.experts]
        if any(isinstance(delta, Tensor | Rows) and delta.ndim < 2 for delta in deltas):
            return None
        projected = into_space(deltas, self.space)
        # Modules are visited in turn, again and again: what is full keeps what it has.
        if self._bytes + projected.nbytes <= _REMEMBERED:
            self._kept[name] = projected
            self._bytes += projected.nbytes
        self._newest = name, projected
        return projected


class _View(Mapping[str, Tensor]):
    """One expert's coordinates, computed when asked for."""

    def __init__(self, owner: SpaceExperts, place: int) -> None:
        self.owner = owner
        self.place = place

    def __getitem__(self, name: str) -> Tensor:
        projected = self.owner.of(name)
        if projected is not None:
            return projected.matrices[self.place]
        plain = self.owner.experts[self.place].get(name, None)
        if isinstance(plain, Tensor | Rows):
            return _whole(plain)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.owner.names)

    def __len__(self) -> int:
        return len(self.owner.names)


def _whole(delta: Delta) -> Tensor:
    return delta if isinstance(delta, Tensor) else delta.dense()


def _basis(matrix: Tensor) -> Tensor:
    """Return the left singular vectors whose values are not negligible, at least one."""
    if matrix.shape[1] > matrix.shape[0]:  # M = Rᵀ·Qᵀ has those of the small Rᵀ: no wide SVD
        matrix = torch.linalg.qr(matrix.T, mode="r").R.T
    u, s, _ = torch.linalg.svd(matrix, full_matrices=False)
    kept = max(1, int((s > _CUT * s[:1]).sum())) if s.numel() else 0
    basis: Tensor = u[:, :kept]
    return basis


def _join(outer: Tensor | None, inner: Tensor) -> Tensor:
    joined: Tensor = inner if outer is None else outer.double() @ inner
    return joined


def _fill(deltas: Sequence[object], matrices: list[Tensor]) -> Tensor:
    """Stack, with zeros for the experts that lack the module."""
    waiting = iter(matrices)
    zero = torch.zeros_like(matrices[0])
    return torch.stack([zero if delta is None else next(waiting) for delta in deltas])
