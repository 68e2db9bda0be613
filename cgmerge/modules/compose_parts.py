"""Weights and parameters that differ between modules: which rule is for which of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cgmerge.errors import UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.expert import Expert, check_modules
from cgmerge.modules.mergekit import Tensor
from cgmerge.modules.recipe import Part, Recipe
from cgmerge.shown import some_of

if TYPE_CHECKING:
    from cgmerge.merge import Rule

Rules = list[tuple["Rule", tuple[str, ...]]]
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"\.(\d+)\.")


def rules_by_module(
    recipe: Recipe,
    rule: "Rule",
    modules: Iterable[str],
    weights: Mapping[str, str],
    base: Base | None,
) -> Rules:
    """Return the rules of a composition whose weights or parameters differ between modules.

    Args:
        recipe: With `parts`, or with `by_tensor` which gives them.
        rule: For what is in no part; weights in the order of the recipe.
        modules: Everything that is merged.
        weights: Module to its weight in the base, where they are called differently.
        base: Tells how many layers there are.

    Returns:
        Rules with their modules, each module once; empty where there is one rule for all.

    Raises:
        UsageError: A part names a module that is not there, or twice; a value out of range.
    """
    from cgmerge.merge import make_rule

    names = sorted(set(modules))
    parts = recipe.parts
    if recipe.by_tensor is not None:
        parts = _grouped(recipe, names, weights, base)
    _check(parts, names)
    rest = set(names).difference(*[part.modules for part in parts])
    made = [
        (
            make_rule(recipe.method, len(rule.weights), weights=part.weights, params=part.params),
            part.modules,
        )
        for part in parts
    ]
    if rest:
        made.append((rule, tuple(sorted(rest))))
    return [] if all(one == rule for one, _ in made) else made


def weight_names(experts: Sequence[Any], base: Base | None) -> dict[str, str]:
    """Return module to the base's weight, for experts that call it otherwise."""
    found: dict[str, str] = {}
    for expert in experts:
        if isinstance(expert, Expert) and base is not None:
            for path, shape in check_modules(expert, base).items():
                tied = path == "lm_head" and base.ties_head
                found[path] = _HEAD if tied else shape.weight
    return found


def tensor_of(weight: str, layers: int) -> Tensor:
    """Return where a weight is: its layer is the first number in its name."""
    layer = layer_of(weight)
    if layer is None:
        return Tensor(weight, 0.0)
    return Tensor(weight, layer / (layers - 1) if layers > 1 else 1.0)


def layer_of(name: str) -> int | None:
    """Return the layer of a weight or module: the first number in its name."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def count_layers(names: Iterable[str]) -> int:
    """Return how many layers weights belong to."""
    return max((layer + 1 for name in names if (layer := layer_of(name)) is not None), default=0)


def _grouped(
    recipe: Recipe, names: Sequence[str], weights: Mapping[str, str], base: Base | None
) -> tuple[Part, ...]:
    """Ask for every module, and put those with the same answer together."""
    if base is None:
        raise UsageError(
            "values that differ between tensors need the base, which tells the layers",
            code="mergekit",
            hint="add `base_model` to the file, or --base BASE",
        )
    assert recipe.by_tensor is not None
    layers = count_layers(base.infos)
    groups: dict[Any, list[str]] = {}
    for name in names:
        found = recipe.by_tensor(tensor_of(weights.get(name, name), layers))
        groups.setdefault((found[0], tuple(sorted(found[1].items()))), []).append(name)
    return tuple(
        Part(tuple(modules), key[0], {**dict(key[1]), **recipe.overrides})
        for key, modules in groups.items()
    )


def _check(parts: Sequence[Part], names: Sequence[str]) -> None:
    seen: set[str] = set()
    for part in parts:
        wrong = [m for m in part.modules if m not in names or m in seen]
        wrong += [m for m in part.modules if part.modules.count(m) > 1]
        if wrong:
            raise UsageError(
                f"`parts` name modules that are not merged here or named twice: {some_of(wrong)}",
                code="recipe",
                found=wrong[:5],
            )
        seen.update(part.modules)
