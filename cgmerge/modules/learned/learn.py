"""From a checked composition and examples to a recipe: coefficients become ordinary weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.compose import Plan
from cgmerge.modules.learned.coefficients import Coefficients
from cgmerge.modules.learned.crossval import (
    Candidate,
    Fitted,
    Row,
    Weights,
    cross_validate,
    folds_of,
    table_record,
)
from cgmerge.modules.learned.fit import Learned, fit
from cgmerge.modules.learned.mixture import Mixture
from cgmerge.modules.learned.objectives import Aim, Problem, Support, attach
from cgmerge.modules.learned.presets import Learner
from cgmerge.modules.recipe import Part, Recipe
from cgmerge.modules.usage import base_names, base_word
from cgmerge.quoting import quoted
from cgmerge.shown import score_text

if TYPE_CHECKING:
    from cgmerge.modules.loading import LoadedBase

RULE = "task-arithmetic"
"""The method of the recipe that coefficients become."""

Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Made:
    """What was learned, ready to be composed.

    Attributes:
        recipe: An ordinary one, which says in `tuning` where it comes from.
        table: What the result and simpler ones reach on examples that they did not see.
        notes: What the user should know.
        learned: The coefficients, where there are some.
    """

    recipe: Recipe
    table: tuple[Row, ...]
    notes: tuple[str, ...]
    learned: Learned | None = None


def check_learnable(plan: Plan) -> None:
    """Refuse what coefficients cannot be learned for.

    Raises:
        UsageError: No base, weights or parts that are given, or full models among the experts.
    """
    if plan.base is None:
        word = base_word(None, base_names(plan.experts))
        raise UsageError(
            "learning from examples runs the base", code="base", hint=f"add --base {word}"
        )
    if plan.recipe.parts or any(item.weight is not None for item in plan.recipe.experts):
        raise UsageError(
            "the weights are what is learned, and the recipe gives some",
            code="weights",
            hint="name the experts without =WEIGHT",
        )
    if plan.has_full:
        raise UsageError(
            "coefficients are learned for adapters; some of these experts are full models",
            code="full_model",
            hint="make adapters of them: cgmerge extract MODEL --base"
            f" {quoted(plan.base.ref)} --rank 32 -o OUT",
        )


def learn(
    plan: Plan,
    loaded: "LoadedBase",
    support: Support,
    method: str,
    learner: Learner,
    *,
    progress: Progress | None = None,
) -> Made:
    """Learn coefficients, and measure by cross-validation what they are worth.

    Args:
        plan: That passed `check_learnable`.
        loaded: Its base in memory; not changed.
        support: The examples.
        method: What the user called it, for the record.
        learner: From `make_learner`.
        progress: Called with the number of points tried, of `points(...)` in all.

    Raises:
        UsageError: See `fit`.
        Incompatible: No expert changes anything, or the base alone is the best.
        Damaged: A loss that is not finite.
    """
    aim: Aim = "loss" if learner.objective == "loss" else learner.reads
    with opened(plan, loaded, support, aim) as (problem, active):
        counted = _Counter(progress)
        learned = fit(problem, learner, progress=counted.begin())
        parts = folds_of(support, learner.folds) if _can_check(learner, support) else []
        candidates = [
            *_simple(problem),
            Candidate(method, lambda w: _refit(problem, learner, w, counted.begin())),
        ]
        table = cross_validate(candidates, support, parts) if parts else []
        coefficients = widened(plan, learned.coefficients, active)
        tuning = learned_record(plan, learned, coefficients, method, active)
        tuning["crossvalidation"] = table_record(table, parts) if parts else None
        tuning["passes"] = problem.passes
        notes = [*_idle_notes(plan, active), *learned.notes, *_doubts(table)]
    _refuse_nothing(plan, coefficients)
    recipe = static_recipe(plan, coefficients)
    return Made(replace(recipe, tuning=tuning), tuple(table), tuple(notes), learned)


def points(support: Support, learner: Learner) -> int:
    """Return what the progress of `learn` counts up to, at most."""
    per_fit = learner.steps + 1 if learner.optimiser == "adam" else learner.evaluations
    parts = folds_of(support, learner.folds) if _can_check(learner, support) else []
    return per_fit * (1 + len(parts))


@contextmanager
def opened(
    plan: Plan, loaded: "LoadedBase", support: Support, aim: Aim
) -> Iterator[tuple[Problem, list[int]]]:
    """Attach the experts that change anything.

    Yields:
        The problem, and the positions of these experts in the plan.

    Raises:
        Incompatible: There are none.
    """
    active = [
        place
        for place, deltas in enumerate(plan.deltas)
        if any(delta.norm() > 0 for delta in deltas.values())
    ]
    if not active:
        raise Incompatible(
            "no expert changes anything: every delta is zero",
            code="no_effect",
            hint="an untrained expert has B = 0",
        )
    mixture = Mixture([plan.deltas[place] for place in active])
    with attach(loaded.model, mixture, support, aim) as problem:
        yield problem, active


def widened(plan: Plan, coefficients: Coefficients, active: Sequence[int]) -> Coefficients:
    """Give the experts that change nothing the coefficient 0."""
    values = torch.zeros(len(plan.experts), coefficients.values.shape[1], dtype=torch.float64)
    values[list(active)] = coefficients.values
    return replace(coefficients, values=values)


def static_recipe(plan: Plan, coefficients: Coefficients) -> Recipe:
    """Turn coefficients into a weighted sum, with parts where they differ between modules.

    Args:
        plan: Whose experts they are for.
        coefficients: One row per expert, in the order of the plan.
    """
    order = plan.given  # of the recipe: first, second … as the user named them
    means = coefficients.means()
    experts = tuple(
        replace(item, weight=means[place])
        for item, place in zip(plan.recipe.experts, order, strict=True)
    )
    parts: tuple[Part, ...] = ()
    if len(coefficients.groups.names) > 1:
        rows = zip(coefficients.groups.members, coefficients.rows(), strict=True)
        parts = tuple(Part(group, tuple(row[i] for i in order), {}) for group, row in rows)
    return replace(plan.recipe, method=RULE, params={}, experts=experts, parts=parts)


def learned_record(
    plan: Plan, learned: Learned, coefficients: Coefficients, method: str, active: Sequence[int]
) -> dict[str, Any]:
    """Return plain data: how coefficients were learned, and what they reach on the examples."""
    names = [expert.name for expert in plan.experts]
    singles = zip(active, learned.singles, strict=True)
    return {
        "method": method,
        "settings": asdict(learned.learner),
        "learned": asdict(learned.mark),
        "base": asdict(learned.base),
        "experts": [{"name": names[i], **asdict(mark)} for i, mark in singles],
        "average": asdict(learned.average),
        "coefficients": {"experts": names, "groups": coefficients.record()},
        "curve": list(learned.curve),
    }


def _simple(problem: Problem) -> list[Candidate]:
    """Return what learned coefficients must beat."""
    experts = problem.shape[0]
    units = torch.eye(experts, dtype=torch.float64)[:, :, None].expand(-1, -1, problem.shape[1])

    def measured(values: torch.Tensor) -> Fitted:
        return Fitted(problem.outcome(values.contiguous()))

    def best_single(weights: Weights) -> Fitted:
        return min(map(measured, units), key=lambda f: float((weights * f.outcome.loss).sum()))

    even = torch.ones(problem.shape, dtype=torch.float64)
    return [
        Candidate("base", lambda _: measured(even * 0)),
        Candidate("best expert", best_single),
        Candidate("average", lambda _: measured(even / experts)),
    ]


def _refit(problem: Problem, learner: Learner, weights: Weights, progress: Progress) -> Fitted:
    learned = fit(problem, learner, weights=weights, progress=progress)
    index = learned.coefficients.groups.index(problem.mixture.modules)
    return Fitted(problem.outcome(learned.coefficients.values[:, index]))


def _can_check(learner: Learner, support: Support) -> bool:
    """Whether there are answers to check with; those of an unlabelled fit are used for no more."""
    return learner.folds > 0 and (learner.objective == "loss" or all(support.answered))


def _doubts(table: Sequence[Row]) -> list[str]:
    """Say so where something simpler is better on examples that were not seen."""
    if not table:
        return []
    *simple, own = table
    best = max(simple, key=lambda row: row.rank)
    if best.rank <= own.rank:
        return []
    doubt = (
        f"on examples that were left out, {best.name} is better than what {own.name} learned"
        f" (right {score_text(best.score)} against {score_text(own.score)}, loss"
        f" {best.loss:.3f} against {own.loss:.3f}); more examples may help"
    )
    return [doubt]


def _idle_notes(plan: Plan, active: Sequence[int]) -> list[str]:
    idle = sorted(e.name for i, e in enumerate(plan.experts) if i not in active)
    if not idle:
        return []
    return [f"{', '.join(idle)}: changes nothing (its delta is zero), so its coefficient is 0"]


def _refuse_nothing(plan: Plan, coefficients: Coefficients) -> None:
    if bool(coefficients.values.any()) or plan.recipe.allow_noop:
        return
    raise Incompatible(
        "none of the experts helps on these examples: the base alone has the lowest objective",
        code="no_effect",
        hint="check that the examples are of the experts' skills; --allow-noop accepts it",
        found=0.0,
    )


class _Counter:
    """One count over several fits."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.done, self.before = progress, 0, 0

    def begin(self) -> Progress:
        """Return what the next fit calls."""
        self.before = self.done

        def advance(tried: int) -> None:
            self.done = self.before + tried
            if self.progress:
                self.progress(self.done)

        return advance
