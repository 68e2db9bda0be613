"""Learn coefficients: the points that must be compared first, then the search."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.learned.coefficients import Coefficients, Groups, group_modules
from cgmerge.modules.learned.objectives import Outcome, Problem
from cgmerge.modules.learned.optimisers import (
    Point,
    best_of,
    descend,
    search_without_gradient,
    within,
)
from cgmerge.modules.learned.presets import Learner

Progress = Callable[[int], None]
EQUAL = (0.4, 0.7, 1.0)
"""Equal coefficients, besides 1/E, among which the gradient's start is chosen."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What coefficients reach on the examples.

    Attributes:
        objective: What is minimised, penalties included.
        loss: Mean negative log-likelihood of an answer token.
        score: Share of answers that are right in every token.
    """

    objective: float
    loss: float
    score: float


@dataclass(frozen=True, eq=False)
class Learned:
    """What was learned from examples.

    Attributes:
        learner: How.
        coefficients: The result.
        mark: What it reaches.
        base: What the base alone reaches.
        singles: What each expert alone reaches, in the order of the experts.
        average: What the equal mix with coefficients 1/E reaches.
        curve: The objective at every point, in the order they were tried.
        passes: Passes over the examples; one with a gradient counts as three.
        notes: What the user should know.
    """

    learner: Learner
    coefficients: Coefficients
    mark: Mark
    base: Mark
    singles: tuple[Mark, ...]
    average: Mark
    curve: tuple[float, ...]
    passes: int
    notes: tuple[str, ...] = ()


def fit(
    problem: Problem,
    learner: Learner,
    *,
    weights: Float[Tensor, " examples"] | None = None,
    progress: Progress | None = None,
) -> Learned:
    """Learn coefficients for the experts of a problem.

    Args:
        problem: From `attach`; its aim must be the learner's objective.
        learner: From `make_learner`.
        weights: Of the examples; 0 leaves one out. Default: `problem.support.weights()`.
        progress: Called with the number of points tried.

    Returns:
        The point of the lowest objective among all that were tried. For `objective=loss` the base
        alone and each expert alone are among them wherever the constraint allows these; for
        `entropy` they are not, since the surest model is often sure of the wrong thing.

    Raises:
        UsageError: Fewer evaluations than experts to compare, or one expert on a simplex.
        Damaged: The loss of the base alone is not finite.
    """
    run = _Run(problem, learner, weights, progress)
    run.check()
    before = problem.passes
    known = run.compare()
    tried = run.search(known)
    chosen = best_of(run.candidates(known, tried))
    return Learned(
        learner=learner,
        coefficients=Coefficients(run.groups, chosen.values),
        mark=run.mark(chosen.values),
        base=run.mark(run.even(0.0)),
        singles=tuple(run.mark(run.unit(i)) for i in range(run.shape[0])),
        average=run.mark(run.even(1 / run.shape[0])),
        curve=tuple(point.objective for point in tried),
        passes=problem.passes - before,
        notes=tuple(run.notes(chosen, tried)),
    )


class _Run:
    """One fit: experts, groups, and the objective over them."""

    def __init__(
        self,
        problem: Problem,
        learner: Learner,
        weights: Tensor | None,
        progress: Progress | None,
    ) -> None:
        self.problem, self.learner, self.progress = problem, learner, progress
        modules = problem.mixture.modules
        self.groups: Groups = group_modules(modules, learner.granularity)
        self.index = self.groups.index(modules)
        self.shape = problem.shape[0], len(self.groups.names)
        self.weights = problem.support.weights() if weights is None else weights
        self.tried = 0

    def check(self) -> None:
        """Refuse settings that cannot work with these experts."""
        experts, groups = self.shape
        if self.learner.constraint == "simplex" and experts < 2:
            raise UsageError(
                "shares that sum to 1 leave nothing to learn with one expert that changes anything",
                code="experts",
                hint="add an expert, or use --method lorahub, which learns its strength",
            )
        needed = experts * groups + 2
        if self.learner.optimiser == "scipy" and self.learner.evaluations < needed:
            raise UsageError(
                f"{self.learner.evaluations} evaluations cannot search {experts * groups}"
                f" coefficients; at least {needed} are needed",
                code="evaluations",
                hint=f"--set evaluations={2 * needed}, or --set optimiser=adam",
                expected=needed,
                found=self.learner.evaluations,
            )

    def compare(self) -> list[Point]:
        """Try the base, each expert alone and equal mixes, where the constraint allows them."""
        base = self.outcome(self.even(0.0))
        if not bool(torch.isfinite(base.loss).all()):
            raise Damaged(
                "the base gives values that are not finite (NaN or infinity) on the examples",
                code="not_finite",
                hint="its weights hold NaN or infinity, or overflow their type",
            )
        experts = self.shape[0]
        wanted = [self.even(0.0), *map(self.unit, range(experts)), self.even(1 / experts)]
        return [self.point(values) for values in wanted if within(values, self.learner)]

    def search(self, known: list[Point]) -> list[Point]:
        """Run the optimiser; returns what it tried, in order."""
        if self.learner.optimiser == "scipy":
            return search_without_gradient(self.objective, known, self.shape, self.learner)
        return descend(self.gradient, self.objective, self.start(), self.learner)

    def candidates(self, known: list[Point], tried: list[Point]) -> list[Point]:
        """Return the points that may be the result."""
        if self.learner.objective == "loss":
            return known + tried
        simple = [point.values for point in known]
        return [p for p in tried if not any(torch.equal(p.values, one) for one in simple)]

    def start(self) -> Tensor:
        """Return equal coefficients: the best of a few, or for entropy the given value."""
        experts = self.shape[0]
        if self.learner.constraint == "simplex":
            return self.even(1 / experts)
        if self.learner.objective == "entropy":
            return self.clamped(self.even(self.learner.start))
        tries = [self.clamped(self.even(value)) for value in (1 / experts, *EQUAL)]
        return best_of([self.point(values) for values in tries]).values

    def clamped(self, values: Tensor) -> Tensor:
        """Move coefficients into their bounds."""
        if self.learner.constraint != "bounded":
            return values
        return values.clamp(self.learner.low, self.learner.high)

    def even(self, value: float) -> Tensor:
        """Return the same coefficient for all."""
        return torch.full(self.shape, value, dtype=torch.float64)

    def unit(self, expert: int) -> Tensor:
        """Return one expert alone."""
        values = self.even(0.0)
        values[expert] = 1.0
        return values

    def outcome(self, values: Tensor) -> Outcome:
        """Measure coefficients of groups."""
        return self.problem.outcome(values[:, self.index])

    def point(self, values: Tensor) -> Point:
        """Measure and keep."""
        return Point(values, self._value(self.outcome(values), values))

    def objective(self, values: Tensor) -> float:
        """Return what is minimised, as one more point that was tried."""
        self._advance()
        return self._value(self.outcome(values), values)

    def gradient(self, values: Tensor) -> tuple[float, Tensor]:
        """Return the objective and its gradient in the groups' coefficients."""
        outcome, slope = self.problem.gradient(values[:, self.index], self.weights)
        self._advance()
        grouped = torch.zeros(self.shape, dtype=torch.float64)
        grouped.index_add_(1, self.index, slope)
        grouped += self.learner.l1 * values.sign() / values.numel()
        grouped += self.learner.l2 * 2 * values / values.numel()
        return self._value(outcome, values), grouped

    def mark(self, values: Tensor) -> Mark:
        """Say what coefficients reach."""
        outcome = self.outcome(values)
        loss, score = (self._mean(part) for part in (outcome.loss, outcome.correct))
        return Mark(self._value(outcome, values), loss, score)

    def notes(self, chosen: Point, tried: list[Point]) -> list[str]:
        """Say what is unusual about the search and its end."""
        found = []
        bad = sum(not math.isfinite(point.objective) for point in tried)
        if bad and self.learner.optimiser == "adam":
            found.append(
                f"step {len(tried)} of {self.learner.steps} gave a loss or gradient that is not"
                " finite; the best point before it is kept (try a smaller --set lr=…)"
            )
        elif bad:
            found.append(f"{bad} of {len(tried)} points gave a loss that is not finite")
        if self.learner.constraint == "simplex" and self.learner.objective == "loss":
            base = self.mark(self.even(0.0))
            if base.objective < chosen.objective:
                found.append(
                    f"the base alone has the lower loss on the examples ({base.objective:.4f}"
                    f" against {chosen.objective:.4f}); shares that sum to 1 cannot reach it"
                )
        return found

    def _value(self, outcome: Outcome, values: Tensor) -> float:
        penalty = self.learner.l1 * values.abs().mean() + self.learner.l2 * values.square().mean()
        return self._mean(outcome.aim) + float(penalty)

    def _mean(self, values: Tensor) -> float:
        """Weigh the examples; those left out must not spoil it with values that are not finite."""
        kept = self.weights > 0
        return float((values[kept] * self.weights[kept]).sum())

    def _advance(self) -> None:
        self.tried += 1
        if self.progress is not None:
            self.progress(self.tried)
