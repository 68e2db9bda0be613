"""Experts unlike honest ones: what makes a delta stand out before anybody merges it.

Backdoors that were planted in LoRA experts tend to show as one direction far above the others, as a
few rows of the output, or as one module that dwarfs the rest. In 77 adapters that were trained for
honest tasks (ranks 2 to 16, models of 0.5 M to 135 M parameters, merges of them among these) the
first singular value was at most 18 times the second, the largest row 7 times the median row, the
largest module 4 times the median module; the bounds here leave twice to four times that. A note is
no proof of anything, and a careful attacker stays below every bound.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cgmerge.merge.deltas import LowRank

DIRECTION = 50.0
"""From so many times the second singular value the first stands out."""
ROWS = 20.0
"""From so many times the median row the largest stands out."""
MODULE = 15.0
"""From so many times the median module the largest stands out."""

_FEW_ROWS = 0.05
_RANK_ONE = 1e-5  # below that the second singular value is rounding
_HEADS = ("lm_head", "embed_out", "output_layer")


@dataclass(frozen=True, slots=True)
class Portrait:
    """What is looked at in one module.

    Attributes:
        norm: ‖ΔW‖.
        direction: First singular value over the second; 1 where there is no second.
        rows: Largest row norm over the median one; infinite where hardly any row is not zero.
    """

    norm: float
    direction: float
    rows: float


def portrait(delta: LowRank) -> Portrait:
    """Measure one delta from its factors."""
    _, r_b = torch.linalg.qr(delta.b.double())
    _, r_a = torch.linalg.qr(delta.a.double().T)
    values = torch.linalg.svdvals(r_b @ r_a.T)
    norm = float(values.norm())
    if not norm:
        return Portrait(0.0, 1.0, 1.0)
    second = float(values[1]) if len(values) > 1 else 0.0
    first = float(values[0])
    rows = (delta.b.double() @ r_a.T).norm(dim=1)
    middle, touched = float(rows.median()), float((rows > 0).double().mean())
    spread = float(rows.max()) / middle if middle else float("inf")
    return Portrait(
        norm,
        first / second if second > _RANK_ONE * first else 1.0,
        spread if middle or touched < _FEW_ROWS else 1.0,
    )


def unusual(expert: Mapping[str, LowRank]) -> list[str]:
    """Say what in an expert is unlike what training leaves.

    Args:
        expert: Module path to its delta; read one after the other.

    Returns:
        One sentence for each finding, the strongest module of each kind named; often none.
    """
    found = {path: portrait(expert[path]) for path in expert}
    live = {path: one for path, one in found.items() if one.norm}
    if not live:
        return []
    notes = []
    path, one = max(live.items(), key=lambda item: item[1].direction)
    if one.direction >= DIRECTION:
        notes.append(f"{path}: one direction is {one.direction:.0f} times the next")
    path, one = max(live.items(), key=lambda item: item[1].rows)
    if one.rows >= ROWS:
        times = f"{one.rows:.0f} times the median row" if one.rows < 1e9 else "nearly all there is"
        notes.append(f"{path}: one row is {times}")
    path, one = max(live.items(), key=lambda item: item[1].norm)
    middle = statistics.median(item.norm for item in live.values())
    if one.norm >= MODULE * middle:
        notes.append(f"{path}: ‖ΔW‖ is {one.norm / middle:.0f} times that of the median module")
    if all(path.rsplit(".", 1)[-1] in _HEADS for path in live):
        notes.append("it changes the output head and nothing else")
    return notes
