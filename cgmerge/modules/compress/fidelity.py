"""How much of ΔW is left after compression: module by module, exactly, without dense matrices."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cgmerge.merge.deltas import LowRank, inner


@dataclass(frozen=True, slots=True)
class Likeness:
    """One module before and after, through inner products in float64.

    Attributes:
        norm_sq: ‖ΔW‖² before.
        coded_sq: ‖ΔŴ‖² after.
        overlap: ⟨ΔW, ΔŴ⟩.
    """

    norm_sq: float
    coded_sq: float
    overlap: float

    @property
    def error(self) -> float:
        """Return ‖ΔW − ΔŴ‖ / ‖ΔW‖; 0 for a module that was zero and stays so."""
        if self.norm_sq <= 0:
            return 0.0 if self.coded_sq <= 0 else math.inf
        lost = self.norm_sq + self.coded_sq - 2.0 * self.overlap
        return math.sqrt(max(lost, 0.0) / self.norm_sq)

    @property
    def cosine(self) -> float:
        """Return the cosine between ΔW and ΔŴ; 0 where just one is zero, 1 where both are."""
        if self.norm_sq <= 0 or self.coded_sq <= 0:
            return float(self.norm_sq <= 0 and self.coded_sq <= 0)
        cosine = self.overlap / math.sqrt(self.norm_sq) / math.sqrt(self.coded_sq)
        return max(-1.0, min(1.0, cosine))

    @property
    def emptied(self) -> bool:
        """Whether the module had an effect and has none any more."""
        return self.norm_sq > 0 and self.coded_sq <= 0

    def scaled(self, factor: float) -> "Likeness":
        """Return the same after multiplying ΔŴ."""
        return Likeness(self.norm_sq, factor**2 * self.coded_sq, factor * self.overlap)


@dataclass(frozen=True)
class Fidelity:
    """All modules of an expert, before and after.

    Attributes:
        modules: Name to likeness.
    """

    modules: Mapping[str, Likeness]

    @property
    def total(self) -> Likeness:
        """Return the likeness of the whole task vector."""
        parts = self.modules.values()
        return Likeness(
            math.fsum(part.norm_sq for part in parts),
            math.fsum(part.coded_sq for part in parts),
            math.fsum(part.overlap for part in parts),
        )

    @property
    def error(self) -> float:
        """Return the relative error of the whole task vector."""
        return self.total.error

    @property
    def cosine(self) -> float:
        """Return the cosine of the whole task vector."""
        return self.total.cosine

    @property
    def cosine_min(self) -> float:
        """Return the lowest cosine of a module that had an effect; 1 where none had."""
        return min(self._cosines(), default=1.0)

    @property
    def cosine_mean(self) -> float:
        """Return the mean cosine over the modules that had an effect; 1 where none had."""
        found = list(self._cosines())
        return math.fsum(found) / len(found) if found else 1.0

    @property
    def emptied(self) -> list[str]:
        """Return the modules that had an effect and have none any more, sorted."""
        return sorted(name for name, part in self.modules.items() if part.emptied)

    def scaled(self, factor: float) -> "Fidelity":
        """Return the same after multiplying every ΔŴ."""
        return Fidelity({name: part.scaled(factor) for name, part in self.modules.items()})

    def _cosines(self) -> Iterable[float]:
        return (part.cosine for part in self.modules.values() if part.norm_sq > 0)


def likeness(before: LowRank, after: LowRank) -> Likeness:
    """Compare two deltas of one module through the Gram matrices of their factors."""
    return Likeness(inner(before, before), inner(after, after), inner(before, after))


def fidelity(before: Mapping[str, LowRank], after: Mapping[str, LowRank]) -> Fidelity:
    """Compare an expert with its compressed form.

    Args:
        before: Module path to factors.
        after: The same modules.
    """
    return Fidelity({name: likeness(before[name], after[name]) for name in sorted(before)})
