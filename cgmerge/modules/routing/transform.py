"""Take out of an expert what a general expert knows too (GenKnowSub).

ΔW − s·ΔW_general is a delta of rank r + r_general, exactly, by putting the factors side by side.
The published code and PEFT subtract the factors A and B from each other instead, which gives
another matrix: with independent beginnings of A it has nothing to do with the difference. That
form is here by name, for comparison.

Source: GenKnowSub (arXiv:2505.10939), `cross_lingual_expert_organiser.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge.deltas import LowRank, inner, stack
from cgmerge.merge.lowrank import truncate
from cgmerge.shown import some_of


@dataclass(frozen=True)
class Subtracted:
    """An expert without what another knows.

    Attributes:
        deltas: The result; the sources are untouched.
        lost: ‖what truncation cut‖ / ‖exact difference‖; 0 where nothing was cut.
        removed: ‖s·ΔW_general‖ / ‖ΔW‖: how large the part that was taken out is.
    """

    deltas: dict[str, LowRank]
    lost: float
    removed: float


def subtract(
    expert: Mapping[str, LowRank],
    general: Mapping[str, LowRank],
    *,
    strength: float = 1.0,
    space: Literal["delta", "factors"] = "delta",
    rank: int | None = None,
) -> Subtracted:
    """Return ΔW − strength·ΔW_general for all modules of either.

    Args:
        expert: A task vector.
        general: The one to take out.
        strength: Factor on it.
        space: `delta` is the difference; `factors` is (B − s·B_g)·(A − s·A_g), as published.
        rank: Delta form only: cut back to this rank; None keeps the difference exact.

    Raises:
        Incompatible: Shapes that differ; for `factors` also ranks or modules.
        UsageError: A rank below 1, or one for `factors`.
    """
    if rank is not None and (rank < 1 or space == "factors"):
        raise UsageError(
            f"rank {rank} for space={space}: a difference is cut to a rank of at least 1, the"
            " factor form has the rank of its experts",
            code="rank",
            found=rank,
        )
    removed = _ratio(_squares(general) * strength**2, _squares(expert))
    if space == "factors":
        return Subtracted(_factors(expert, general, strength), 0.0, removed)
    deltas, cut, whole = {}, 0.0, 0.0
    for path in dict.fromkeys([*expert, *general]):
        delta = _difference(path, expert.get(path), general.get(path), strength)
        if rank is not None:
            short = truncate(delta, rank)
            cut, whole, delta = cut + short.error_sq, whole + short.norm_sq, short.delta
        deltas[path] = delta
    return Subtracted(deltas, _ratio(cut, whole), removed)


def _difference(path: str, x: LowRank | None, y: LowRank | None, strength: float) -> LowRank:
    if x is None or y is None:
        alone = stack([y], [-strength]) if y is not None else x
        assert alone is not None
        return alone
    _same(path, "shapes (out, in)", x.shape, y.shape)
    return stack([x, y], [1.0, -strength])


def _factors(
    expert: Mapping[str, LowRank], general: Mapping[str, LowRank], strength: float
) -> dict[str, LowRank]:
    if set(expert) != set(general):
        odd = sorted(set(expert) ^ set(general))
        raise Incompatible(
            f"factors can only be subtracted in the same modules; {len(odd)} are in one expert"
            f" alone: {some_of(odd)}",
            code="modules",
            hint="use the delta form, which needs nothing of the kind",
            found=odd[:5],
        )
    deltas = {}
    for path, x in expert.items():
        y = general[path]
        _same(path, "shapes (out, in)", x.shape, y.shape)
        _same(path, "ranks", x.rank, y.rank)
        deltas[path] = LowRank(x.a - strength * y.a, x.b - strength * y.b)
    return deltas


def _same(path: str, what: str, x: object, y: object) -> None:
    if x != y:
        raise Incompatible(
            f"module {path}: expert and general expert have different {what}: {x} and {y}",
            code="shape",
            expected=x,
            found=y,
        )


def _squares(deltas: Mapping[str, LowRank]) -> float:
    return sum(max(inner(delta, delta), 0.0) for delta in deltas.values())


def _ratio(part: float, whole: float) -> float:
    """Return √(part/whole), 0 for 0/0."""
    if part <= 0.0:
        return 0.0
    return math.sqrt(part / whole) if whole > 0.0 else math.inf
