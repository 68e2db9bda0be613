"""Routed methods as candidates of `--method auto`: fitted anew without each part, as all are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from cgmerge.merge.params import Checked
from cgmerge.modules.compose import Plan
from cgmerge.modules.learned.crossval import Candidate, Fitted, Weights
from cgmerge.modules.learned.objectives import Problem, Support
from cgmerge.modules.routing.attach import routed
from cgmerge.modules.routing.fitting import FitInput, Labelled
from cgmerge.modules.routing.gate import GateParams
from cgmerge.modules.routing.methods import RoutedMethod
from cgmerge.modules.routing.stack import Stack

if TYPE_CHECKING:
    from cgmerge.modules.loading import LoadedBase


@dataclass(frozen=True, eq=False)
class Routable:
    """A routed method with everything that it is made from, but for the examples.

    Attributes:
        method: The method.
        params: Its parameters.
        names: The experts, in the order of the router's weights.
        stacks: Their deltas by module.
        seed: For methods that draw.
    """

    method: RoutedMethod
    params: Checked
    names: tuple[str, ...]
    stacks: Mapping[str, Stack]
    seed: int = 0

    def passes(self, examples: int) -> int:
        """Return about how many passes over the examples it takes to fit and measure it once.

        A step with a gradient counts as three, and as the part of the examples that is in it.
        """
        if not isinstance(self.params, GateParams):
            return 3  # prompts are embedded, embedded to be routed, and answered
        share = min(1.0, self.params.batch / examples)
        looks = share if share < 1 else 0.0  # all examples are looked at once each time through
        descent = self.params.steps * (3 * share + looks) if len(self.names) > 1 else 0
        return math.ceil(descent) + len(self.names) + 3  # start, end, all experts, fewer, result

    def lacks(self, support: Support, parts: Sequence[Sequence[int]]) -> str | None:
        """Say why it cannot be fitted without each of the parts in turn; None where it can."""
        if not self.method.named:
            return None
        for part in parts:
            left = {skill for i, skill in enumerate(support.skills) if i not in part}
            for name in self.names:
                if name not in left:
                    return f"{name} has no second example that differs from its first"
        return None


def routed_candidate(
    one: Routable, plan: Plan, problem: Problem, loaded: "LoadedBase", folds: int
) -> Candidate:
    """Make a candidate of a routed method.

    Args:
        one: The method.
        plan: Whose experts are composed.
        problem: With the experts' mixture attached to the base; it is silent meanwhile.
        loaded: The base.
        folds: Parts of the cross-validation.
    """
    cost = one.passes(len(problem.support))

    def fit_it(weights: Weights) -> Fitted:
        with problem.mixture.without():
            made = one.method.make(
                FitInput(
                    names=one.names,
                    stacks=one.stacks,
                    loaded=loaded,
                    examples=counted(problem.support, weights),
                    params=one.params,
                    seed=one.seed,
                )
            )
            with routed(loaded, one.stacks, made.router) as routing:
                outcome = problem.measure(routing.route)
        problem.passes += cost - 1
        return Fitted(outcome)

    recipe = replace(plan.recipe, method=one.method.name, params={})
    return Candidate(one.method.name, fit_it, cost * (folds + 1), recipe)


def counted(support: Support, weights: Weights) -> list[Labelled]:
    """Return the examples that have a weight, in order, under the names of their skills."""
    kept = [(support.skills[i], support.rows[i]) for i, w in enumerate(weights.tolist()) if w > 0]
    return [Labelled(name, [row for _, row in part])
            for name, part in groupby(kept, key=lambda one: one[0])]  # fmt: skip
