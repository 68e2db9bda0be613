"""Sum of task vectors times a scale: add, negate (forget) and relate skills.

Add skills with positive weights; forget one with a negative weight; "A is to B as C is to D" with
weights C=1, B=1, A=-1. The scale matters more than anything else: 1 is right for one expert, for
several experts 0.3 to 0.8 usually is; choose it on validation data.
"""

from dataclasses import dataclass

from cgmerge.merge.registry import About, Params, Weights, method


@dataclass(frozen=True, kw_only=True)
class TaskArithmeticParams(Params):
    """Parameters of `task-arithmetic`: only the scale."""


@method(
    "task-arithmetic",
    "linear",
    params=TaskArithmeticParams,
    about=About(
        formula="ΔW = scale · Σ w_e ΔW_e   (no weights given: w_e = 1)",
        paper="Editing Models with Task Arithmetic (arXiv:2212.04089)",
        use_when="always try it first, with the scale tuned; to forget a skill; for analogies",
    ),
)
def coefficients(weights: Weights, _p: TaskArithmeticParams) -> list[float]:
    """Return the weights; the engine applies the scale.

    Args:
        weights: One per expert; negative ones forget.
        _p: See `TaskArithmeticParams`.

    Example:
        >>> coefficients([1.0, -1.0], TaskArithmeticParams())
        [1.0, -1.0]
    """
    return list(weights)
