"""Drop each expert's largest and smallest entries, sum the rest.

The largest entries are outliers that disturb the other experts, the smallest are noise. What lies
between is kept: after the top `gamma` share the next `density` share, ranked within each row or
within each tensor. A row is one output of a matrix; a vector is one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.rows import top_of_rows
from cgmerge.merge.sparsify import Cut, count_kept, top_k_cuts, trim_


@dataclass(frozen=True, kw_only=True)
class BreadcrumbsParams(Params):
    """Parameters of `breadcrumbs`."""

    density: float = param(
        0.2,
        "β: share of entries each expert keeps",
        above=0.0,
        high=1.0,
        grid=(0.2, 0.1, 0.4, 0.7),
    )
    gamma: float = param(
        0.1,
        "γ: share of largest entries that is dropped",
        low=0.0,
        high=1.0,
        grid=(0.1, 0.01, 0.03, 0.2),
    )
    scope: Literal["row", "tensor"] = param(
        "row", "rank magnitudes within each row (official code) or within each tensor"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Decimals, as typed: 0.7 + 0.3 is 1.
        total = Decimal(repr(self.density)) + Decimal(repr(self.gamma))
        if total > 1:
            raise UsageError(
                f"density {self.density} and gamma {self.gamma} are shares of the same entries,"
                f" together {total}, more than 1",
                code="parameter",
                hint=f"density can be at most {1 - Decimal(repr(self.gamma))}",
            )


@dataclass(frozen=True, slots=True)
class Band:
    """What is kept of one tensor: what the first cuts keep without what the second ones keep."""

    outer: list[Cut]
    outliers: list[Cut] | None


def band_counts(entries: int, density: float, gamma: float) -> tuple[int, int]:
    """Return how many of the largest entries are dropped, ⌊γn⌋, and how many come next, ⌊βn⌋ ≥ 1.

    Example:
        >>> band_counts(5, 0.4, 0.2)
        (1, 2)
    """
    # Exact decimals, as in `count_kept`, which never returns 0.
    return int(Decimal(repr(gamma)) * entries), count_kept(density, entries)


def prepare(blocks: Blocks, _weights: Weights, p: BreadcrumbsParams) -> dict[str, Band]:
    """Find the two cuts of each expert in each tensor; rows need none."""
    if p.scope == "row":
        return {}
    return {name: _band(blocks.only(name), p) for name in blocks.names}


def _band(tensor: Blocks, p: BreadcrumbsParams) -> Band:
    entries = tensor.total
    largest, kept = band_counts(entries, p.density, p.gamma)

    def cuts(count: int) -> list[Cut]:
        # A half more than wanted: rounding down gives the count whatever the rounding of floats.
        return top_k_cuts(tensor, (count + 0.5) / max(1, entries))

    return Band(cuts(largest + kept), cuts(largest) if largest else None)


@method(
    "breadcrumbs",
    "entry",
    params=BreadcrumbsParams,
    about=About(
        formula="ΔW = scale · Σ w_e m_e⊙ΔW_e,  m_e = magnitude ranks ⌊γn⌋+1 … ⌊γn⌋+⌊βn⌋",
        paper="Model Breadcrumbs (arXiv:2312.06795)",
        differs=(
            "shares that overlap are refused; keeps at least one entry; equal magnitudes by lowest"
            " index first; scope=tensor is mergekit's rule; the official example uses scale 0.4"
        ),
        use_when="many experts in one sum; choose the scale on validation data",
    ),
    traits=Traits(scope="tensor", identity={"density": 1.0, "gamma": 0.0}),
    prepare=prepare,
)
def breadcrumbs(block: Block, weights: Weights, p: BreadcrumbsParams, state: Band | None) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are absolute: a common factor goes through.
        p: See `BreadcrumbsParams`.
        state: From `prepare`; None for rows, which a block holds whole.

    Returns:
        [rows, columns].
    """
    if state is None:
        for values in block.values:
            _keep_band_of_rows_(values, p)
    else:
        _keep_band_(block, state.outer, state.outliers)
    total = torch.zeros_like(block.values[0])
    for values, weight in zip(block.values, weights, strict=True):
        total.add_(values, alpha=weight)
    return total


def _keep_band_of_rows_(values: Float[Tensor, "rows columns"], p: BreadcrumbsParams) -> None:
    columns = values.shape[-1]
    if not columns:
        return
    largest, kept = band_counts(columns, p.density, p.gamma)
    magnitudes = values.abs().cpu().numpy()
    mask = top_of_rows(magnitudes, min(columns, largest + kept))
    if largest:
        mask = np.logical_and(mask, ~top_of_rows(magnitudes, largest))
    values.mul_(torch.from_numpy(mask).to(values.device))


def _keep_band_(block: Block, outer: Sequence[Cut], outliers: Sequence[Cut] | None) -> None:
    for place, values in enumerate(block.values):
        largest = None if outliers is None else values.clone()
        trim_(values, block.start, outer[place])
        if largest is not None and outliers is not None:
            trim_(largest, block.start, outliers[place])
            values.sub_(largest)  # exact: every entry is the same number or zero in both
