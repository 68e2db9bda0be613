"""Several rules on one set of experts, each for its own modules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Delta
from cgmerge.merge.engine import Merger, Rule
from cgmerge.merge.lowrank import Truncated


class PartsMerger:
    """What a `Merger` is, with another rule for some modules.

    A rule that looks at the whole of an expert (a global threshold) sees the modules of its part.

    Args:
        parts: Rules with the modules they are for; no module twice.
        experts: As for `Merger`.
        options: The further arguments of `Merger`.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Rule, Sequence[str]]],
        experts: Sequence[Mapping[str, Delta]],
        **options: Any,
    ) -> None:
        self._of: dict[str, Merger] = {}
        for rule, names in parts:
            merger = Merger(rule, experts, names=sorted(names), **options)
            self._of |= dict.fromkeys(names, merger)

    @property
    def names(self) -> list[str]:
        """Return the modules, sorted."""
        return sorted(self._of)

    def dense(self, name: str) -> Float[Tensor, "out in"]:
        """Return one module's merged delta."""
        return self._of[name].dense(name)

    def pieces(self, name: str) -> Iterator[Float[Tensor, "rows in"]]:
        """Yield the rows of `dense`, one block after the other."""
        return self._of[name].pieces(name)

    def factors(self, name: str, rank: int) -> Truncated:
        """Return one module's merged delta at rank at most `rank`, and the error of that."""
        return self._of[name].factors(name, rank)


AnyMerger = Merger | PartsMerger
