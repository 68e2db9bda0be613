"""`--method auto`: fit each of a few candidates, cross-validate all, compose the best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cgmerge.errors import DataError
from cgmerge.modules.attach import attached
from cgmerge.modules.compose import Plan
from cgmerge.modules.learned.crossval import (
    Candidate,
    Fitted,
    Weights,
    cross_validate,
    folds_of,
    table_record,
)
from cgmerge.modules.learned.fit import fit
from cgmerge.modules.learned.learn import (
    RULE,
    Made,
    Progress,
    learned_record,
    opened,
    static_recipe,
    widened,
)
from cgmerge.modules.learned.objectives import Outcome, Problem, Support
from cgmerge.modules.learned.presets import AUTO, AutoSettings, make_learner
from cgmerge.modules.learned.routed import Routable, routed_candidate
from cgmerge.modules.recipe import Recipe

if TYPE_CHECKING:
    from cgmerge.merge import Merger
    from cgmerge.modules.loading import LoadedBase

SCALES = (0.4, 0.6, 0.8, 1.0, 1.3)
LEARNED = ("lorahub", "atlas")


def choose(
    plan: Plan,
    loaded: "LoadedBase",
    support: Support,
    settings: AutoSettings,
    *,
    routed: Sequence[Routable] = (),
    progress: Progress | None = None,
) -> Made:
    """Choose among candidates by what they reach on examples that they did not see.

    Args:
        plan: That passed `check_learnable`.
        loaded: Its base in memory; not changed.
        support: The examples.
        settings: From `make_auto`.
        routed: Routed methods that may be chosen too.
        progress: Called with the number of finished fits, of `fits(...)` in all.

    Returns:
        The best candidate, fitted to all examples; among equals the first, which is the simplest.
        The recipe of a routed one names its method, and fitting it is left to who composes it.

    Raises:
        DataError: Fewer than two different examples.
        Incompatible: No expert changes anything.
    """
    parts = _parts(support, settings)
    lacking = {one.method.name: why for one in routed if (why := one.lacks(support, parts))}
    with opened(plan, loaded, support, "loss") as (problem, active):
        everything = candidates(plan, problem, loaded, active, len(parts))
        everything += [
            routed_candidate(one, plan, problem, loaded, len(parts))
            for one in routed
            if one.method.name not in lacking
        ]
        kept, left = affordable(everything, settings.passes)
        table = cross_validate(kept, support, parts, progress)
        places = [place for place, one in enumerate(kept) if one.name != "base"]
        best = max(places, key=lambda place: table[place].rank)
        recipe, note, record = _final(kept[best], support)
        passes = problem.passes
    tuning: dict[str, Any] = {
        "method": AUTO,
        "chosen": kept[best].name,
        "note": note,
        "settings": asdict(settings),
        "crossvalidation": table_record(table, parts),
        "left_out": [*[one.name for one in left], *lacking],
        "learned": record or None,
        "passes": passes,
    }
    notes = [f"{one.name} was not tried: it takes about {one.passes:,} passes, more than --set"
             f" passes={settings.passes} leaves" for one in left]  # fmt: skip
    notes += [f"{name} was not tried: {why}" for name, why in lacking.items()]
    if table[0].rank >= table[best].rank:
        notes.append("no candidate is better than the base alone on examples that were left out")
    return Made(replace(recipe, tuning=tuning), tuple(table), tuple(notes))


def _parts(support: Support, settings: AutoSettings) -> list[list[int]]:
    parts = folds_of(support, settings.folds)
    if not parts:
        raise DataError(
            "a choice needs at least two different examples",
            code="too_few",
            hint="add examples, or choose a --method",
            found=len(support),
        )
    return parts


def _final(chosen: Candidate, support: Support) -> tuple[Recipe, str, dict[str, Any]]:
    """Return what composes a candidate that is fitted to all examples, a note and a record."""
    if chosen.recipe is not None:
        return chosen.recipe, "", {}
    fitted = chosen.fit(support.weights())
    assert fitted.recipe is not None
    return fitted.recipe, fitted.note, dict(fitted.record)


def fits(
    plan: Plan, support: Support, settings: AutoSettings, routed: Sequence[Routable] = ()
) -> int:
    """Return what the progress of `choose` counts up to, at most."""
    each = 4 + len(plan.experts) + len(LEARNED) + len(routed)
    return len(folds_of(support, settings.folds)) * each


def affordable(
    everything: Sequence[Candidate], passes: int
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates that a number of passes allows, in order, and those beyond it."""
    kept: list[Candidate] = []
    left: list[Candidate] = []
    for one in everything:
        spent = sum(other.passes for other in kept)
        (kept if spent + one.passes <= passes or len(kept) < 2 else left).append(one)
    return kept, left


def candidates(
    plan: Plan, problem: Problem, loaded: "LoadedBase", active: Sequence[int], folds: int
) -> list[Candidate]:
    """List what is tried, the simplest first; the base only to compare with.

    Anything that can be fitted to weighted examples and says what it reaches on all of them can
    be added here.
    """
    even = torch.ones(problem.shape, dtype=torch.float64)
    singles = [_single(plan, problem, place, number) for number, place in enumerate(active)]
    sums = {s: _sum(plan, problem, even * s, s) for s in SCALES}
    average = Fitted(problem.outcome(even / len(active)), "", _rule(plan, "linear", {}))
    ties = _Ties(plan, problem, loaded)
    return [
        Candidate("base", lambda _: Fitted(problem.outcome(even * 0))),
        *singles,
        Candidate("linear", lambda _: average),
        Candidate(RULE, lambda w: _best(list(sums.values()), w), len(SCALES)),
        Candidate("ties", lambda w: _best(ties.all(), w), len(SCALES)),
        *[_learned(plan, problem, name, active, folds) for name in LEARNED],
    ]


def _single(plan: Plan, problem: Problem, place: int, number: int) -> Candidate:
    values = torch.zeros(problem.shape, dtype=torch.float64)
    values[number] = 1.0
    item = plan.recipe.experts[plan.given.index(place)]
    recipe = replace(_rule(plan, RULE, {}), experts=(item,))
    fitted = Fitted(problem.outcome(values), "alone", recipe)
    return Candidate(plan.experts[place].name, lambda _: fitted)


def _sum(plan: Plan, problem: Problem, values: Tensor, scale: float) -> Fitted:
    return Fitted(problem.outcome(values), f"scale {scale:g}", _rule(plan, RULE, {"scale": scale}))


def _rule(plan: Plan, method: str, params: Mapping[str, Any]) -> Recipe:
    return replace(plan.recipe, method=method, params=params)


def _best(fitted: Sequence[Fitted], weights: Weights) -> Fitted:
    """Return what has the lowest loss on the examples that have a weight."""
    return min(fitted, key=lambda one: float((weights * one.outcome.loss).sum()))


class _Ties:
    """TIES at several scales, as they would be written; measured when first asked for."""

    def __init__(self, plan: Plan, problem: Problem, loaded: "LoadedBase") -> None:
        self.plan, self.problem, self.loaded = plan, problem, loaded
        self.known: list[Fitted] = []

    def all(self) -> list[Fitted]:
        """Return one result for each scale."""
        if not self.known:
            from cgmerge.merge import Merger, make_rule

            plan = self.plan
            merger = Merger(make_rule("ties", len(plan.experts)), plan.deltas, ids=plan.ids)
            self.problem.mixture.set(torch.zeros(self.problem.shape))
            whole = plan.recipe.form == "model"
            self.known = self._as_models(merger) if whole else self._as_adapters(merger)
        return self.known

    def _as_models(self, merger: "Merger") -> list[Fitted]:
        """Measure without a rank: a full model has none."""
        from cgmerge.modules.trialmodel import TrialModel

        trial, found = TrialModel(self.plan, self.loaded), []
        for scale in SCALES:
            with trial.merged(merger, scale):
                found.append(self._measured(scale))
        return found

    def _as_adapters(self, merger: "Merger") -> list[Fitted]:
        """Merge once, at the adapter's rank."""
        from cgmerge.merge import LowRank

        merged = {name: merger.factors(name, self.plan.rank).delta for name in merger.names}
        found = []
        for scale in SCALES:
            scaled = {name: LowRank(delta.a, delta.b * scale) for name, delta in merged.items()}
            with attached(self.problem.model, scaled):
                found.append(self._measured(scale))
        return found

    def _measured(self, scale: float) -> Fitted:
        outcome: Outcome = self.problem.measure()
        return Fitted(outcome, f"scale {scale:g}", _rule(self.plan, "ties", {"scale": scale}))


def _learned(
    plan: Plan, problem: Problem, name: str, active: Sequence[int], folds: int
) -> Candidate:
    learner = make_learner(name)
    if learner.optimiser == "scipy":
        learner = replace(learner, evaluations=max(learner.evaluations, 3 * len(active) + 2))
    once = learner.evaluations if learner.optimiser == "scipy" else 3 * learner.steps

    def fit_it(weights: Weights) -> Fitted:
        learned = fit(problem, learner, weights=weights)
        index = learned.coefficients.groups.index(problem.mixture.modules)
        wide = widened(plan, learned.coefficients, active)
        record = learned_record(plan, learned, wide, name, active)
        recipe = static_recipe(plan, wide)
        outcome = problem.outcome(learned.coefficients.values[:, index])
        return Fitted(outcome, "", recipe, record)

    return Candidate(name, fit_it, once * (folds + 1))
