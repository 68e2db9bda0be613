"""Drop entries at random, divide by the share kept, then trim, elect and average as TIES does.

DARE thins every expert; TIES then settles the conflicts that are left. Dropped entries count as
zero in the trim: `density` is a share of all entries, and where it exceeds the share that survives
the drop nothing more is trimmed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.methods.dare import refuse_dropping_all
from cgmerge.merge.randoms import keep_mask
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import disjoint_mean_, elect
from cgmerge.merge.sparsify import Cut, top_k_cuts, trim_
from cgmerge.merge.streams import Changed


@dataclass(frozen=True, kw_only=True)
class DareTiesParams(Params):
    """Parameters of `dare-ties`."""

    drop: float = param(
        0.5,
        "p: share of entries that is dropped, below 1",
        low=0.0,
        high=1.0,
        grid=(0.5, 0.1, 0.3, 0.7, 0.9),
    )
    density: float = param(
        0.2,
        "share of all entries each expert keeps after the drop",
        above=0.0,
        high=1.0,
        grid=(0.2, 0.1, 0.4, 0.7),
    )
    seed: int = param(0, "another seed drops other entries", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_dropping_all(self.drop)


def prepare(blocks: Blocks, _weights: Weights, p: DareTiesParams) -> dict[str, list[Cut]]:
    """Find each expert's cut among what survives the drop, over all its tensors."""

    def change(block: Block) -> None:
        for place, values in enumerate(block.values):
            values.mul_(keep_mask(block, place, p.seed, 1 - p.drop))

    # The common factor 1/(1-p) changes neither order nor signs; the kernel applies it at the end.
    return dict.fromkeys(blocks.names, top_k_cuts(Changed(blocks, change), p.density))


def mean_of_kept(
    block: Block,
    keep: Sequence[Bool[Tensor, "rows columns"]],
    weights: Weights,
    drop: float,
    cuts: Sequence[Cut],
) -> Float[Tensor, "rows columns"]:
    """Apply given masks, trim, elect and average; the part that is not random.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        keep: One mask per expert.
        weights: One per expert.
        drop: p, in [0, 1).
        cuts: One per expert, found on the masked deltas before the division by 1 - p.
    """
    for values, kept, weight, cut in zip(block.values, keep, weights, cuts, strict=True):
        values.mul_(kept)
        trim_(values, block.start, cut)
        values.mul_(weight)
    signs = elect(block.values)
    return disjoint_mean_(block.values, [abs(weight) for weight in weights], signs).div_(1 - drop)


@method(
    "dare-ties",
    "entry",
    params=DareTiesParams,
    about=About(
        formula="ΔW = scale · TIES(m_e⊙ΔW_e/(1-p)),  m_e ~ Bernoulli(1-p)",
        paper="DARE (arXiv:2311.03099) with TIES-Merging (arXiv:2306.01708)",
        differs=(
            "draws as in `dare`; keeps exactly ⌊density·d⌋ entries (the official code one more);"
            " cancelled votes give 0; weights take part in the vote and the mean divides by the"
            " sum of |w| that agree; mergekit's dare_ties does not trim: density=1 here"
        ),
        use_when="as `ties`, with experts that collide in many entries",
    ),
    traits=Traits(scope="model", identity={"drop": 0.0, "density": 1.0}, relative_weights=True),
    prepare=prepare,
)
def dare_ties(block: Block, weights: Weights, p: DareTiesParams, state: list[Cut]) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are relative: a common factor changes nothing.
        p: See `DareTiesParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    keep = [keep_mask(block, place, p.seed, 1 - p.drop) for place in range(len(weights))]
    return mean_of_kept(block, keep, weights, p.drop, state)
