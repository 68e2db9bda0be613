"""Choose the parameters of a merge on validation data: scale first, then what the method declares.

λ (scale) matters more than the rule, and costs no new merge: the merged delta is kept and only
multiplied. What is scored is what would be written: for a full model every trial is merged in a
stream, thresholds kept, into the base in memory, without a rank; factors of another float type than
float32 are merged anew and rounded. The search is the one people do by hand, spelled out: the scale
on its grid, then each other declared parameter on its grid at the best scale, then finer scales
between the best and its neighbours, until the budget is used up. The score is the mean exact match
over the skills; among equal scores the mean log-likelihood decides, which is smooth where exact
match is not.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cgmerge.errors import UsageError
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import mean_scores
from cgmerge.evals.targets import Target

if TYPE_CHECKING:
    from cgmerge.merge import LowRank, Merger, Rule
    from cgmerge.modules.compose import Plan
    from cgmerge.modules.loading import LoadedBase

DEFAULT_BUDGET = 16
_SAME_SCALE = 1e-3


@dataclass(frozen=True, slots=True)
class Trial:
    """One merge that was tried.

    Attributes:
        params: All parameters, scale included.
        score: Mean over skills of the share of items that are right.
        loglik: Mean over skills of the mean log-likelihood of a target token.
        skills: Score of each skill.
    """

    params: Mapping[str, Any]
    score: float
    loglik: float
    skills: Mapping[str, float]

    @property
    def rank(self) -> tuple[float, float]:
        """Return what trials are ordered by."""
        return self.score, self.loglik


@dataclass(frozen=True, slots=True)
class Tuning:
    """The whole search, as it goes into the record of the composition."""

    data: tuple[dict[str, Any], ...]
    budget: int
    trials: tuple[Trial, ...]
    grids: tuple[str, ...]
    """The parameters that were open."""

    @property
    def best(self) -> Trial:
        """Return the trial with the highest score; the first of equals."""
        return max(self.trials, key=lambda trial: trial.rank)

    def record(self) -> dict[str, Any]:
        """Return plain data: what was tried on what, and what was chosen."""
        return {
            "metric": "exact_match",
            "data": list(self.data),
            "budget": self.budget,
            "tuned": list(self.grids),
            "chosen": dict(self.best.params),
            "score": self.best.score,
            "trials": [asdict(trial) for trial in self.trials],
        }


def tune(
    plan: "Plan",
    loaded: "LoadedBase",
    skills: Sequence[SkillSet],
    *,
    budget: int = DEFAULT_BUDGET,
    progress: Callable[[int], None] | None = None,
) -> Tuning:
    """Search the parameters that the recipe leaves open.

    Args:
        plan: A checked composition; parameters given in its recipe stay as they are.
        loaded: The base in memory; not changed.
        skills: Validation items; never the items that are reported later.
        budget: Most trials, at least 1.
        progress: Called with the number of finished trials.

    Raises:
        UsageError: Nothing is left to choose, or a budget below 1.
    """
    if budget < 1:
        raise UsageError(f"the budget must be at least 1 trial, found {budget}", code="budget")
    check_open(plan)
    search = Search(plan, loaded, skills, budget, progress)
    search.run()
    data = tuple(
        {"name": s.name, "file": s.source, "sha256": s.sha256, "n": len(s.examples)} for s in skills
    )
    return Tuning(data, budget, tuple(search.trials), tuple(search.grids))


def check_open(plan: "Plan") -> None:
    """Refuse a composition that leaves nothing to choose.

    Raises:
        UsageError: Every parameter that could be tuned is given, or they differ by module.
    """
    if plan.parts:
        raise UsageError(
            "tuning chooses one value for all modules, and the recipe has several",
            code="tune",
            hint="give one weight and one value of each parameter, or --scale and no --tune",
        )
    if not grids_of(plan.rule, plan.recipe.params):
        raise UsageError(
            f"every parameter of `{plan.rule.name}` is given; nothing is left to tune",
            code="tune",
            hint="leave out --scale or a --set",
        )


def grids_of(rule: "Rule", given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return what tuning tries for each parameter that is not given, scale first.

    The grid of scales is meant for deltas that are added up; where the default weight is 1/E
    (`linear`) it is multiplied by the number of experts.
    """
    fixed = set(given)
    found = {
        item.name: tuple(item.metadata["grid"])
        for item in dataclasses.fields(rule.params)
        if item.metadata["grid"] and item.name not in fixed
    }
    if "scale" in found and rule.spec.traits.default_weight == "mean":
        factor = 1.0 / (sum(abs(weight) for weight in rule.weights) / len(rule.weights) or 1.0)
        found["scale"] = tuple(round(value * factor, 6) for value in found["scale"])
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "scale", name))}


class Search:
    """The state of one search: trials so far and merges worth keeping."""

    def __init__(
        self,
        plan: "Plan",
        loaded: "LoadedBase",
        skills: Sequence[SkillSet],
        budget: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.plan = plan
        self.loaded = loaded
        self.skills = skills
        self.budget = budget
        self.progress = progress
        self.trials: list[Trial] = []
        self.grids = grids_of(plan.rule, plan.recipe.params)
        self._merged: tuple[dict[str, Any], dict[str, LowRank]] | None = None
        self._whole: tuple[dict[str, Any], Merger] | None = None

    @property
    def best(self) -> Trial:
        """Return the best trial so far; the first of equals."""
        return max(self.trials, key=lambda trial: trial.rank)

    def run(self) -> None:
        """Try the grids, scale first, then finer scales."""
        start = asdict(self.plan.rule.params)
        for scale in self.grids.get("scale", (start["scale"],)):
            self.try_(start | {"scale": scale})
        for name in [name for name in self.grids if name != "scale"]:
            around = dict(self.best.params)
            for value in self.grids[name]:
                self.try_(around | {name: value})
        if "scale" in self.grids:
            self.refine()

    def refine(self) -> None:
        """Halve the gaps on both sides of the best scale while trials are left."""
        while len(self.trials) < self.budget:
            best = dict(self.best.params)
            rest = {key: value for key, value in best.items() if key != "scale"}
            tried = sorted(
                trial.params["scale"]
                for trial in self.trials
                if all(trial.params[key] == value for key, value in rest.items())
            )
            place = tried.index(best["scale"])
            below = tried[place - 1] if place else best["scale"] / 2
            above = tried[place + 1] if place + 1 < len(tried) else best["scale"] * 1.5
            before = len(self.trials)
            for edge in (above, below):
                middle = round((edge + best["scale"]) / 2, 4)
                if abs(edge - best["scale"]) > _SAME_SCALE * abs(best["scale"]):
                    self.try_(best | {"scale": middle})
            if len(self.trials) == before:
                return

    def try_(self, params: dict[str, Any]) -> None:
        """Score one set of parameters, unless it was tried or the budget is used up."""
        if len(self.trials) >= self.budget or any(t.params == params for t in self.trials):
            return
        self.trials.append(self.score(params))
        if self.progress:
            self.progress(len(self.trials))

    def score(self, params: dict[str, Any]) -> Trial:
        """Merge and score one set of parameters."""
        settings = Settings(keeps_base=False, expects_same=True)
        with self.ready(params) as deltas:
            target = Target.of_deltas("trial", deltas, "0" * 64)
            results = evaluate_targets(self.loaded, [target], self.skills, settings).record.results
        score, loglik = mean_scores(results)
        return Trial(
            params=params,
            score=score,
            loglik=loglik,
            skills={r.skill: r.score for r in results},
        )

    @contextmanager
    def ready(self, params: dict[str, Any]) -> "Iterator[dict[str, LowRank]]":
        """Merge; yield what is to be attached, nothing where a model is in the base itself."""
        if self.plan.recipe.form == "adapter":
            yield self.merge(params)
            return
        from cgmerge.merge import Merger
        from cgmerge.modules.trialmodel import TrialModel

        unit = params | {"scale": 1.0}
        if self._whole is None or self._whole[0] != unit:
            rule = replace(self.plan.rule, params=self.plan.rule.spec.make_params(unit))
            merger = Merger(rule, self.plan.deltas, ids=self.plan.ids, stats=self.plan.stats)
            self._whole = unit, merger
        with TrialModel(self.plan, self.loaded).merged(self._whole[1], params["scale"]):
            yield {}

    def merge(self, params: dict[str, Any]) -> "dict[str, LowRank]":
        """Merge at scale 1, or take the last merge when only the scale differs; then scale.

        Rounded factors are no multiples of each other, so that they are merged at every scale.
        """
        import torch

        from cgmerge.merge import LowRank, Merger
        from cgmerge.modules.compose_adapter import adapter_dtype

        kept = adapter_dtype(self.plan.recipe.dtype)
        rounds = kept is not torch.float32
        unit = params if rounds else params | {"scale": 1.0}
        if self._merged is None or self._merged[0] != unit:
            rule = replace(self.plan.rule, params=self.plan.rule.spec.make_params(unit))
            merger = Merger(rule, self.plan.deltas, ids=self.plan.ids, stats=self.plan.stats)
            self._merged = unit, {p: merger.factors(p, self.plan.rank).delta for p in merger.names}
        if rounds:
            return {
                path: LowRank(delta.a.to(kept).float(), delta.b.to(kept).float())
                for path, delta in self._merged[1].items()
            }
        return {
            path: LowRank(delta.a, delta.b * params["scale"])
            for path, delta in self._merged[1].items()
        }
