"""ΔW as a sum of singular directions, each rounded to whole numbers of one common step.

Idea: σ·u and σ·v are rounded with the same step Δ for every direction of every module. A rounding
error of u costs ‖v‖² and the other way round, so that one step means one slope of error against
bits everywhere: strong directions get many levels, weak ones few, and those below Δ vanish
(reverse water-filling). Levels are chosen by their error plus the price of their bits under the
entropy of their own vector, which leaves more zeros than plain rounding does. Directions are
taken one after the other from what the earlier ones left, so that a later direction makes up for
rounding errors: about 11 % fewer bits at the same error than rounding one SVD (measured on four
trained experts at 0.5 to 1 bit per parameter).

Source: entropy-constrained scalar quantisation (Chou, Lookabaugh & Gray 1989) of balanced
singular directions; successive refinement of the rest is our own addition.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.rate import SCALE_BITS
from cgmerge.modules.compress.terms import Rest, Terms, solve_weights

PRICE = 0.15
"""Price of a bit in units of Δ². Theory gives (ln 2)/6 = 0.116 for fine steps; a little more was
better for coarse ones (0.1, 0.15, 0.2 and 0.3 were tried)."""

MOST_LEVELS = 1 << 14
"""Largest level: steps so fine that float32 factors would be smaller anyway are not used."""

_ROUNDS = 2
"""Times that both sides are rounded in turn; it matters for flat spectra only."""

_COUNTS = 3
_UNSEEN = 0.3


def quantised_terms(delta: LowRank, step: float) -> Terms:
    """Round the directions of one module.

    Args:
        delta: Factors, finite; not modified.
        step: Δ in units of a singular value, above 0; raised where levels would pass
            `MOST_LEVELS`.

    Returns:
        At most as many terms as `delta.rank`, none where the whole module is below the step.
    """
    rest = Rest(delta)
    found: list[tuple[Tensor, Tensor]] = []
    while rest.worth_a_term():
        image = rest.leading()
        if not found:
            step = max(step, float(torch.linalg.vector_norm(image)) / MOST_LEVELS)
        term = _best_term(rest, image, step)
        if term is None:
            break
        found.append(term[:2])
        rest.subtract(*term)
    return solve_weights(delta, found)


def _best_term(rest: Rest, image: Tensor, step: float) -> tuple[Tensor, Tensor, float] | None:
    """Round the leading direction of the rest, or None where that does not pay for its bits."""
    x, _ = entropy_rounded(image / step, PRICE)
    if not x.any():
        return None
    for _ in range(_ROUNDS):
        # For a fixed x the best y is the image below; rounding it with d = Δ/‖x‖ keeps both
        # sides' errors at the same slope.
        y, y_bits = entropy_rounded(rest.times_transposed(x) / (step * x.norm()), PRICE)
        if not y.any():
            return None
        x, x_bits = entropy_rounded(rest.times(y) / (step * y.norm()), PRICE)
        if not x.any():
            return None
    size = float(x.square().sum() * y.square().sum())
    overlap = float(torch.dot(x, rest.times(y)))
    if overlap**2 / size <= PRICE * step**2 * (x_bits + y_bits + SCALE_BITS):
        return None
    return x, y, overlap / size


def entropy_rounded(
    values: Float[Tensor, "entries"], price: float
) -> tuple[Float[Tensor, "entries"], float]:
    """Round to whole numbers at the lowest (error² + price · bits).

    Args:
        values: float64, in steps.
        price: Of a bit, in squared steps.

    Returns:
        Whole numbers as float64 (never larger than rounding up, and of the values' sign), and the
        bits of the vector: its empirical entropy, one bit for each sign.
    """
    size = values.abs()
    low = size.floor().long()
    level = (size + 0.4).floor().long()
    top = int(low.max()) + 1
    zero, down, up = size.square(), (size - low).square(), (low + 1 - size).square()
    up[size == low] = torch.inf  # a whole number is rounded up by nobody
    for _ in range(_COUNTS):
        counts = torch.bincount(level, minlength=top + 1).double() + _UNSEEN
        cost = -price * torch.log2(counts / counts.sum())
        cost[1:] += price  # the sign
        lower, upper = down + cost[low], up + cost[low + 1]
        level = torch.where(upper < lower, low + 1, low)
        level[zero + cost[0] <= torch.minimum(lower, upper)] = 0
    counts = torch.bincount(level).double()
    counts = counts[counts > 0]
    entropy = float(-(counts * torch.log2(counts / counts.sum())).sum())
    return level * torch.sign(values), entropy + float((level > 0).sum())
