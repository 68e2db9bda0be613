"""Let entries compete within their expert and across experts, drop losers, average by score.

PCB scores every entry twice: by its magnitude within its expert, and by how well it goes along
with the other experts there. Each expert keeps its best-scored entries, and what is kept is
averaged with the scores as weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.mapped import MappedBlocks, magnitudes_at, values_at
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import sum_in_order

Bounds = tuple[float, float]
_LEAST_SCORE = 1e-12


@dataclass(frozen=True, kw_only=True)
class PcbParams(Params):
    """Parameters of `pcb`."""

    ratio: float = param(
        0.1,
        "r: share of best-scored entries that each expert keeps",
        above=0.0,
        high=1.0,
        grid=(0.1, 0.05, 0.2),
    )
    inter: Literal["sum", "pairwise"] = param(
        "sum",
        "score between experts: tanh of the entry times the sum of all, or the sum over experts of"
        " tanh of products of normalised entries (paper script pcb_ES, which clips 0.01)",
    )
    clip: float = param(
        1e-4, "ρ: share of smallest and of largest magnitudes that are clipped", low=0.0, high=0.49
    )


@dataclass(frozen=True, slots=True)
class PcbState:
    """What is known of the whole vectors, one pair per expert.

    Attributes:
        clips: Smallest and largest magnitude after clipping.
        scores: Score from which on entries are kept, and the largest score.
    """

    clips: list[Bounds]
    scores: list[Bounds]


def prepare(blocks: Blocks, _weights: Weights, p: PcbParams) -> dict[str, PcbState]:
    """Find each expert's clip bounds, then the bounds of its scores, by selection."""
    total = blocks.total
    if not total:
        empty = [(0.0, 0.0)] * len(blocks.experts)
        return dict.fromkeys(blocks.names, PcbState(empty, empty))
    # Positions in ascending order, counted as the official code does, in exact arithmetic.
    low = int(Decimal(repr(p.clip)) * total)
    high = max(low, int((1 - Decimal(repr(p.clip))) * total - 1))
    floor = min(total - 1, int((1 - Decimal(repr(p.ratio))) * total))
    clips = [(small, large) for small, large in magnitudes_at(blocks, [total - low, total - high])]
    scored = MappedBlocks(
        blocks,
        partial(score, clips=clips, inter=p.inter),
        streams=len(clips),
        dtype=torch.float64,
    )
    scores = [(least, most) for least, most in values_at(scored, [total - floor, 1])]
    return dict.fromkeys(blocks.names, PcbState(clips, scores))


@method(
    "pcb",
    "entry",
    params=PcbParams,
    about=About(
        formula=(
            "A = clip(|ΔW_e|), C = sign·A;  β_e = exp(T·norm(A)²) · tanh(ΔW_e Σ ΔW);"
            "  S_e = norm(β_e above its (1-r)-quantile);"
            "  ΔW = scale · Σ w_e C_e S_e / max(Σ S_e, 1e-12);  norm is min-max per expert"
        ),
        paper="PCB-Merging (arXiv:2410.02396)",
        differs=(
            "follows the repository's pcb-merging.py, not the paper's text (softmax); its vision"
            " script clips 0.01 and is not offered. Kept from the code: the largest clipped"
            " position is ⌊d(1-ρ)-1⌋, so that below 10⁴ entries the largest is clipped to the"
            " second largest, and the entry at position ⌊d(1-r)⌋ itself scores 0. Min-max over"
            " equal values is 0 here, NaN there. exp(T·norm²) is divided by exp(T), which cancels"
        ),
        use_when="several experts with a validation set to tune ratio, scale and weights on",
    ),
    # tanh(ΔW Σ ΔW) has a scale of its own, and clipping changes even a single expert.
    traits=Traits(scope="model", identity=None, scale_free=False),
    prepare=prepare,
)
def pcb(block: Block, weights: Weights, p: PcbParams, state: PcbState) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert, the paper's λ_t: they multiply the experts in the average only,
            so that a common factor goes through and an expert of weight 0 still competes.
        p: See `PcbParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    scores = score(block.values, clips=state.clips, inter=p.inter)
    total = torch.zeros_like(scores[0])
    mass = torch.zeros_like(total)
    for values, share, weight, clip, bounds in zip(
        block.values, scores, weights, state.clips, state.scores, strict=True
    ):
        kept = min_max(share, bounds)
        mass += kept
        clipped = values.double().abs().clamp_(*clip).mul_(values.sign())
        total += clipped.mul_(kept).mul_(weight)
    return total.div_(mass.clamp_min_(_LEAST_SCORE)).to(block.values.dtype)


def score(
    values: Float[Tensor, "experts *shape"],
    *,
    clips: Sequence[Bounds],
    inter: Literal["sum", "pairwise"],
) -> Float[Tensor, "experts *shape"]:
    """Return β, how well each entry competes, up to a common factor; float64.

    Args:
        values: ΔW_e; not modified.
        clips: Smallest and largest magnitude of each expert after clipping.
        inter: See `PcbParams`.
    """
    values = values.double()
    count = len(values)
    norms = torch.stack([min_max(v.abs(), clip) for v, clip in zip(values, clips, strict=True)])
    if inter == "sum":
        across = (values * sum_in_order(values)).tanh_()
    else:
        signed = norms * values.sign()
        across = torch.zeros_like(signed)
        for other in signed:
            across += (signed * other).tanh_()
    # exp(T·(norm² - 1)) instead of exp(T·norm²): does not overflow with many experts.
    return norms.square_().sub_(1.0).mul_(count).exp_().mul_(across)


def min_max(values: Tensor, bounds: Bounds) -> Tensor:
    """Return values clipped to the bounds and moved to 0…1; 0 where the bounds are equal."""
    low, high = bounds
    if high <= low:
        return torch.zeros_like(values)
    return values.clamp(low, high).sub_(low).div_(high - low)
