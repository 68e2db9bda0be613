"""What statistics of inputs and gradients must be, whoever computed them."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.shown import counted

_ASYMMETRY = 1e-3
"""Of √(G_ii·G_jj): products of thousands of float32 numbers, added up in two orders, are nearer."""
_NOTHING = 1e-12
"""Of the largest entry: for rows so small that float32 has no squares of them."""
_BLOCK_ENTRIES = 1 << 22


def flaw_of(values: Float[Tensor, "..."], *, gram: bool) -> str | None:
    """Say what is wrong with the values of a statistic.

    Args:
        values: A Gram matrix XᵀX/N, [n, n], or Fisher information of any shape; not modified.
        gram: Which of the two.

    Returns:
        None where they can be right, else what was found and what is expected, to follow the name.

    Example:
        >>> flaw_of(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), gram=True)
        >>> flaw_of(torch.tensor([1.0, -0.5]), gram=False)
        'holds -0.5; a mean of squares is never below 0'
    """
    if not values.numel():
        return None
    low, high = map(float, torch.aminmax(values))  # one pass; NaN goes through
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(values)).sum())
        return (
            f"holds {counted(bad, 'NaN or infinity', 'NaN or infinite values')}; all must be finite"
        )
    low = float(values.diagonal().min()) if gram else low
    if low < 0:
        where = " on its diagonal" if gram else ""
        return f"holds {low:g}{where}; a mean of squares is never below 0"
    return _asymmetry(values) if gram else None


def _asymmetry(gram: Float[Tensor, "n n"]) -> str | None:
    """Compare a matrix with its transpose, some rows at a time."""
    wide = torch.promote_types(gram.dtype, torch.float32)
    size = gram.diagonal().to(wide).sqrt()
    least = _NOTHING * float(size.max()) ** 2
    step = max(1, _BLOCK_ENTRIES // len(gram))
    for first in range(0, len(gram), step):
        rows = slice(first, first + step)
        gap = (gram[rows].to(wide) - gram[:, rows].T.to(wide)).abs_()
        gap -= (size[rows, None] * size).mul_(_ASYMMETRY).add_(least)
        if float(gap.max()) > 0:
            i, j = divmod(int(gap.argmax()), len(gram))
            i += first
            return (
                f"is not symmetric: {float(gram[i, j]):g} at [{i}, {j}],"
                f" {float(gram[j, i]):g} at [{j}, {i}]"
            )
    return None
