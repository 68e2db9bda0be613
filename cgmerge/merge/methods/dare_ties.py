"""Drop entries at random, divide by the share kept, then trim, elect and average as TIES does.

DARE thins every expert; TIES then settles the conflicts that are left. Dropped entries count as
zero in the trim: `density` is a share of all entries, and where it exceeds the share that survives
the drop nothing more is trimmed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from cgmerge.merge.deltas import Block, Blocks
from cgmerge.merge.methods.dare import RESCALE, norm_shares, refuse_dropping_all
from cgmerge.merge.randoms import keep_mask
from cgmerge.merge.registry import About, Params, Traits, Weights, method, param
from cgmerge.merge.signs import break_ties, disjoint_mean_, disjoint_sum_, elect
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
    rescale: Literal["share", "norm", "none"] = param("share", RESCALE)
    normalize: bool = param(True, "divide by the sum of |w| that agree; false: the plain sum")
    tie: Literal["zero", "positive"] = param("zero", "the sign where the votes cancel: 0 or +")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_dropping_all(self.drop)


@dataclass(frozen=True, slots=True)
class DareTiesState:
    """What one tensor needs to know: each expert's cut, and what its survivors are divided by.

    Attributes:
        cuts: Found on the masked deltas before any division.
        shares: None when all are 1 - p, which the kernel divides by at the end.
    """

    cuts: list[Cut]
    shares: list[float] | None


def prepare(blocks: Blocks, _weights: Weights, p: DareTiesParams) -> dict[str, DareTiesState]:
    """Find each expert's cut among what survives the drop, over all its tensors."""

    def change(block: Block) -> None:
        for place, values in enumerate(block.values):
            values.mul_(keep_mask(block, place, p.seed, 1 - p.drop))

    cuts = top_k_cuts(Changed(blocks, change), p.density)
    if p.rescale == "norm":
        shares = norm_shares(blocks, p.drop, p.seed)
        return {name: DareTiesState(cuts, shares[name]) for name in blocks.names}
    none = [1.0] * len(cuts) if p.rescale == "none" else None
    return dict.fromkeys(blocks.names, DareTiesState(cuts, none))


def mean_of_kept(
    block: Block,
    keep: Sequence[Bool[Tensor, "rows columns"]],
    weights: Weights,
    p: DareTiesParams,
    state: DareTiesState,
) -> Float[Tensor, "rows columns"]:
    """Apply given masks, trim, elect and average; the part that is not random.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        keep: One mask per expert.
        weights: One per expert.
        p: See `DareTiesParams`.
        state: From `prepare`.
    """
    # The common factor 1/(1-p) changes neither order nor signs; it is applied at the end.
    shares, rest = (state.shares, 1.0) if state.shares else ([1.0] * len(keep), 1 - p.drop)
    parts = zip(block.values, keep, weights, state.cuts, shares, strict=True)
    for values, kept, weight, cut, share in parts:
        values.mul_(kept)
        trim_(values, block.start, cut)
        values.mul_(weight / share)
    signs = break_ties(elect(block.values), block.values, 1.0 if p.tie == "positive" else 0.0)
    if p.normalize:
        merged = disjoint_mean_(block.values, [abs(weight) for weight in weights], signs)
    else:
        merged = disjoint_sum_(block.values, signs)
    return merged.div_(rest)


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
            " sum of |w| that agree; mergekit's dare_ties does not trim and adds up: density=1,"
            " rescale=norm, normalize=false, tie=positive here"
        ),
        use_when="as `ties`, with experts that collide in many entries",
    ),
    traits=Traits(scope="model", identity={"drop": 0.0, "density": 1.0}, relative_weights=True),
    prepare=prepare,
)
def dare_ties(block: Block, weights: Weights, p: DareTiesParams, state: DareTiesState) -> Tensor:
    """Merge one block.

    Args:
        block: Values [experts, rows, columns]; overwritten.
        weights: One per expert. They are relative: a common factor changes nothing, unless
            `normalize` is false.
        p: See `DareTiesParams`.
        state: From `prepare`.

    Returns:
        [rows, columns].
    """
    keep = [keep_mask(block, place, p.seed, 1 - p.drop) for place in range(len(weights))]
    return mean_of_kept(block, keep, weights, p, state)
