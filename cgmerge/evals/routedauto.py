"""Routed methods that `compose --method auto` may choose, opened and checked before any work."""

from collections.abc import Sequence
from dataclasses import replace

from cgmerge.errors import UsageError
from cgmerge.evals.routed import Request, RoutedPlan, plan_routed
from cgmerge.modules.learned.routed import Routable
from cgmerge.modules.recipe import Recipe
from cgmerge.modules.routing.methods import find_routed
from cgmerge.modules.routing.stack import stacks

TRIED = ("retrieval", "gate")
"""The simpler first."""


def open_routed(
    recipe: Recipe, examples: Sequence[str], seed: int
) -> tuple[list[RoutedPlan], dict[str, str]]:
    """Plan what `--method NAME` with the same words would compose, for each routed method.

    Args:
        recipe: Experts and base.
        examples: Data files, `[NAME=]FILE`.
        seed: Of everything random.

    Returns:
        The plans, and why there is none, by method.
    """
    request = Request(
        "gate",
        recipe.experts,
        {},
        base=recipe.base,
        examples=tuple(examples),
        seed=seed,
        force_base=recipe.force_base,
        base_fingerprint=recipe.base_fingerprint,
        folder=recipe.folder,
    )
    try:
        opened = plan_routed(request)
    except UsageError as error:  # what is wrong with the experts themselves was refused before
        return [], dict.fromkeys(TRIED, error.message)
    plans, aside = [], {}
    for name in TRIED:
        plan = _by(opened, name)
        if plan.spec.named and {skill.name for skill in plan.skills} != set(plan.names):
            aside[name] = "the examples do not name the experts, each of them and nothing else"
        else:
            plans.append(plan)
    return plans, aside


def _by(plan: RoutedPlan, name: str) -> RoutedPlan:
    spec = find_routed(name)
    assert spec is not None
    request = replace(plan.request, method=name)
    return replace(plan, request=request, spec=spec, params=spec.make_params({}))


def routable(plan: RoutedPlan) -> Routable:
    """Return what the cross-validation fits: experts and settings of a plan, without examples."""
    return Routable(plan.spec, plan.params, plan.names, stacks(plan.deltas()), plan.request.seed)
