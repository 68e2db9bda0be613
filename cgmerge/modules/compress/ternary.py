"""ΔW as a sum of few sparse sign patterns: Σ d·x·yᵀ with every entry of x and y in {−1, 0, 1}.

Idea: signs taken from A and B as they happen to be stored lose most of ΔW, because both factors
shrink and because the factors of one ΔW can be written in endless ways. Here the signs are chosen
for the product itself. One term after the other takes the pair (x, y) that lowers
‖ΔW − Σ d·x·yᵀ‖² + slope · bits most: for a fixed y the best x is found exactly by one sort, then
the same for y, twice over. A term that does not pay for its own bits ends the module. With
the same slope for all modules the bits go where they lower the error most (equal slope is the
condition for the best allocation), so the density of each tensor follows by itself.

The result depends on ΔW only, never on how it was split into A and B.

Source: the semidiscrete decomposition (O'Leary & Peleg 1983; Kolda & O'Leary, ACM TOMS 1998) with
two changes: the price of a term in bits decides how many signs it keeps and when to stop, and ΔW
stays in factors throughout. The weights d are solved for together at the end.
"""

import torch
from torch import Tensor

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.rate import SCALE_BITS, sign_bits
from cgmerge.modules.compress.terms import Rest, Terms, solve_weights

_ROUNDS = 2
"""Times that x and y are chosen in turn; eight rounds gained 0.05 dB at three times the work."""


def ternary_terms(delta: LowRank, slope: float) -> Terms:
    """Choose sign patterns for one module.

    Args:
        delta: Factors, finite; not modified.
        slope: Price of a bit in units of ‖ΔW‖², above 0; larger means fewer bits.

    Returns:
        At most as many terms as `delta.rank`, none where no term pays for its bits.
    """
    rest = Rest(delta)
    found: list[tuple[Tensor, Tensor, float]] = []
    while rest.worth_a_term():
        term = _best_term(rest, slope)
        if term is None:
            break
        found.append(term)
        rest.subtract(*term)
    return solve_weights(delta, [(x, y) for x, y, _ in found])


def _best_term(rest: Rest, slope: float) -> tuple[Tensor, Tensor, float] | None:
    """Find the term that pays best, or None where none pays."""
    chosen = _choose(rest.leading(), 1.0, slope)
    if chosen is None:
        return None
    x, x_bits = chosen
    for _ in range(_ROUNDS):
        chosen = _choose(rest.times_transposed(x), float(x.abs().sum()), slope)
        if chosen is None:
            return None
        y, y_bits = chosen
        chosen = _choose(rest.times(y), float(y.abs().sum()), slope)
        if chosen is None:
            return None
        x, x_bits = chosen
    size = float(x.abs().sum() * y.abs().sum())
    overlap = float(torch.dot(x, rest.times(y)))
    if overlap**2 / size <= slope * (x_bits + y_bits + SCALE_BITS):
        return None
    return x, y, overlap / size


def _choose(image: Tensor, energy: float, slope: float) -> tuple[Tensor, float] | None:
    """Choose signs of one side for a fixed other side, exactly.

    With J signs the error falls by (Σ of the J largest |image|)² / (J·energy), and they cost
    `sign_bits[J]`; the best J is read off a sorted list.

    Args:
        image: rest @ y, the fixed side's image.
        energy: ‖y‖².
        slope: Price of a bit.

    Returns:
        Signs as float64 and their bits, or None where no J pays.
    """
    bits = sign_bits(image.numel())
    size, order = torch.sort(image.abs(), descending=True, stable=True)
    count = torch.arange(1, image.numel() + 1, dtype=torch.float64)
    profit = size.cumsum(0).square() / (count * energy) - slope * bits
    best = int(torch.argmax(profit))
    if not float(profit[best]) > 0:
        return None
    signs = torch.zeros_like(image)
    kept = order[: best + 1]
    signs[kept] = torch.sign(image[kept])
    return signs, float(bits[best])
