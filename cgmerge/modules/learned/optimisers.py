"""Two ways to search: a trust region without gradients, and Adam. Both return all they saw.

Neither draws random numbers, so that equal inputs give equal results.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.learned.presets import Learner

Values = Float[Tensor, "experts groups"]
_BAD = 1e6  # what a value that is not finite counts as: COBYQA fits quadratics through its points


@dataclass(frozen=True, eq=False)
class Point:
    """Coefficients that were tried, [experts, groups], and the objective there."""

    values: Values
    objective: float


def best_of(points: list[Point]) -> Point:
    """Return the point of the lowest finite objective, the first of equals."""
    return min(points, key=lambda p: p.objective if math.isfinite(p.objective) else math.inf)


def within(values: Values, learner: Learner) -> bool:
    """Whether coefficients satisfy the constraint."""
    if learner.constraint == "bounded":
        return bool(((values >= learner.low) & (values <= learner.high)).all())
    if learner.constraint == "simplex":
        return bool((values >= 0).all() and ((values.sum(0) - 1).abs() < 1e-9).all())
    return True


class _Enough(Exception):
    """The evaluations are used up."""


def search_without_gradient(
    evaluate: Callable[[Values], float],
    known: list[Point],
    shape: tuple[int, int],
    learner: Learner,
) -> list[Point]:
    """Search with COBYQA, from 0 with a first radius of 1.

    Its first points are then 0 and every unit vector, which are known already and cost nothing.

    Args:
        evaluate: The objective at a point.
        known: Points that were evaluated before; they count as evaluations.
        shape: (experts, groups).
        learner: Constraint and number of evaluations.

    Returns:
        The known points and the new ones, `learner.evaluations` at most.

    Source:
        Ragonneau & Zhang 2024 (COBYQA), in scipy.
    """
    from scipy.optimize import minimize

    points = list(known)
    seen = {point.values.numpy().tobytes(): point.objective for point in known}

    def function(flat: "list[float]") -> float:
        raw = torch.tensor(flat, dtype=torch.float64).reshape(shape)
        values = raw.softmax(0) if learner.constraint == "simplex" else raw + 0.0  # -0 is 0
        key = values.numpy().tobytes()
        if key not in seen:
            if len(points) >= learner.evaluations:
                raise _Enough
            seen[key] = evaluate(values)
            points.append(Point(values, seen[key]))
        return seen[key] if math.isfinite(seen[key]) else _BAD

    size = shape[0] * shape[1]
    bounds = [(learner.low, learner.high)] * size if learner.constraint == "bounded" else None
    options = {"initial_tr_radius": 1.0, "final_tr_radius": 1e-3}
    try:
        minimize(function, [0.0] * size, method="COBYQA", bounds=bounds, options=options)
    except _Enough:
        return points
    return points


def descend(
    gradient: Callable[[Values], tuple[float, Values]],
    evaluate: Callable[[Values], float],
    start: Values,
    learner: Learner,
) -> list[Point]:
    """Follow the gradient with Adam, the step size falling to 0 along a cosine.

    Bounds are kept by projection, the simplex by a softmax.

    Args:
        gradient: Objective and gradient at a point.
        evaluate: The objective alone, for the last point.
        start: Where to begin; on the simplex positive.
        learner: Constraint, steps and step size.

    Returns:
        The points on the way, the start first; a point whose objective or gradient is not finite
        is the last.
    """
    simplex = learner.constraint == "simplex"
    raw = (start.log() if simplex else start.clone()).requires_grad_()
    optimiser = torch.optim.Adam([raw], lr=learner.lr)
    points: list[Point] = []
    for step in range(learner.steps):
        values = raw.softmax(0) if simplex else raw
        objective, slope = gradient(values.detach().clone())
        points.append(Point(values.detach().clone(), objective))
        if not (math.isfinite(objective) and bool(torch.isfinite(slope).all())):
            return points
        optimiser.param_groups[0]["lr"] = learner.lr * (
            0.5 + 0.5 * math.cos(math.pi * step / learner.steps)
        )
        optimiser.zero_grad()
        values.backward(slope)
        optimiser.step()
        if learner.constraint == "bounded":
            with torch.no_grad():
                raw.clamp_(learner.low, learner.high)
    last = (raw.softmax(0) if simplex else raw).detach().clone()
    points.append(Point(last, evaluate(last)))
    return points
