"""Select entries that vary between experts, weigh experts by energy, erase minority signs.

Per tensor: keep the entries in which the experts differ most, give each expert the share of the
squared entries that it holds, and average the experts that have the majority's sign.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.mapped import MappedBlocks, cuts_at, tensor_sums
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import disjoint_mean_, elect
from cgmerge.merge.sparsify import Cut, count_kept, trim_


@dataclass(frozen=True, kw_only=True)
class SceParams(Params):
    """Parameters of `sce`."""

    density: float = param(
        1.0,
        "share of the varying entries of each tensor that is kept",
        above=0.0,
        high=1.0,
        grid=(1.0, 0.1, 0.3),
    )
    tie: Literal["positive", "zero"] = param(
        "positive", "the sign where the votes cancel: + (mergekit) or 0"
    )


@dataclass(frozen=True, slots=True)
class SceState:
    """What the kernel must know about one tensor.

    Attributes:
        cut: Where the variance is cut; None keeps every entry.
        energies: Each expert's share of the squared selected entries; they sum to 1, or to 0.
    """

    cut: Cut | None
    energies: list[float]


def prepare(blocks: Blocks, weights: Weights, p: SceParams) -> dict[str, SceState]:
    """Find, for each tensor, the cut of the variance and the experts' energies."""
    cuts: dict[str, Cut | None] = dict.fromkeys(blocks.names)
    if p.density < 1:
        for name in blocks.names:
            cuts[name] = _variance_cut(blocks.only(name), weights, p.density)
    found = tensor_sums(
        blocks,
        lambda block: _selected(block, weights, cuts[block.name]).square_(),
        streams=len(weights),
    )
    states = {}
    for name, energies in found.items():
        total = sum(energies)
        shares = [energy / total if total else 0.0 for energy in energies]
        states[name] = SceState(cuts[name], shares)
    return states


@method(
    "sce",
    "entry",
    params=SceParams,
    about=About(
        formula=(
            "keep the top entries by variance over e of w_e ΔW_e;  c_e = mean(ΔW_e²) / Σ mean(ΔW²);"
            "  γ = sign(Σ w_e ΔW_e);  ΔW = scale · Σ_agree c_e w_e ΔW_e / Σ_agree c_e |w_e|"
        ),
        paper="SCE, from FuseChat (arXiv:2408.07990)",
        differs=(
            "from mergekit: energies are used however small they are (mergekit takes equal weights"
            " where the mean squares sum to less than 1e-6, which LoRA deltas do, and floors the"
            " denominator at 1e-6); a tensor that varies keeps at least one entry; exact ties go"
            " to the lowest index; weights are an addition. Like mergekit, a density below 1 also"
            " drops every entry on which all experts agree"
        ),
        use_when="experts of very different strength; the strongest leads in every tensor",
    ),
    traits=Traits(scope="tensor", identity={}, relative_weights=True),
    prepare=prepare,
)
def sce(block: Block, weights: Weights, p: SceParams, state: SceState) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert; they multiply the experts in variance and vote, and the mean
            divides by them. They are relative: a common positive factor changes nothing.
        p: See `SceParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    values = _selected(block, weights, state.cut)
    for value, weight in zip(values, weights, strict=True):
        value.mul_(weight)
    signs = elect(values)
    if p.tie == "positive":
        signs[signs == 0] = 1.0
    for value, energy in zip(values, state.energies, strict=True):
        value.mul_(energy)
    shares = [e * abs(weight) for e, weight in zip(state.energies, weights, strict=True)]
    return disjoint_mean_(values, shares, signs).to(block.values.dtype)


def spread(values: Tensor, weights: Weights) -> Tensor:
    """Return the variance of w_e·ΔW_e over the experts, times their number.

    Args:
        values: [experts, rows, columns]; not modified.
        weights: One per expert.

    Returns:
        Float64 [1, rows, columns]; exactly 0 where all experts are equal.
    """
    # Seen from the first expert, equal experts are 0 before anything is rounded.
    first = values[0].double() * weights[0]
    gaps = [(v.double() * w).sub_(first) for v, w in zip(values, weights, strict=True)]
    mean = torch.zeros_like(first)
    for gap in gaps:
        mean += gap
    mean /= len(gaps)
    total = torch.zeros_like(first)
    for gap in gaps:
        total += gap.sub_(mean).square_()
    return total.unsqueeze(0)


def _variance_cut(blocks: Blocks, weights: Weights, density: float) -> Cut | None:
    """Return the cut that keeps a share of the entries whose variance is not 0."""
    mapped = MappedBlocks(blocks, partial(spread, weights=weights), streams=1, dtype=torch.float64)
    varying = sum(int(torch.count_nonzero(block.values)) for block in mapped)
    if not varying:
        return Cut(0.0, 0.0, None)
    return cuts_at(mapped, [count_kept(density, varying)])[0]


def _selected(block: Block, weights: Weights, cut: Cut | None) -> Tensor:
    """Return ΔW_e in float64 (energies span many orders), 0 where the variance is cut."""
    values = block.values.double()
    if cut is not None:
        variance = spread(values, weights)[0]
        trim_(variance, block.start, cut)
        values = values.mul_(variance > 0)
    return values
