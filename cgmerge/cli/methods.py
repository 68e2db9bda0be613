"""`cgmerge methods`: list merge methods, or explain one."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output

if TYPE_CHECKING:
    from cgmerge.merge import MethodSpec
    from cgmerge.modules.learned.presets import Preset
    from cgmerge.modules.routing.methods import RoutedMethod

    AnyMethod = MethodSpec | Preset | RoutedMethod


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List methods, or explain one: formula, parameters, paper, when to use it.

    Rules that merge come first, then coefficients learned from examples, then routers.
    """
    from cgmerge.merge import all_methods, get_method, rule_of, space_of
    from cgmerge.modules.learned.presets import PRESETS
    from cgmerge.modules.routing.methods import find_routed, routed_methods

    output = Output(as_json=as_json, quiet=quiet)
    shown: list[AnyMethod] = [*all_methods(), *PRESETS.values(), *routed_methods()]
    if name is not None:
        shown = [PRESETS.get(name) or find_routed(name) or get_method(rule_of(name))[0]]
    described = [_describe(method) for method in shown]
    if name is None:
        rows = [[d["name"], _kind(d), d["summary"]] for d in described]
        output.table(["method", "gives", "what it does"], rows, words=True)
        output.hint("explain one: cgmerge methods ties")
    else:
        output.text(_page(shown[0], described[0], space_of(name or "")))
    output.result(
        "cgmerge.methods/1", {"methods": described}, short="\n".join(d["name"] for d in described)
    )


def _kind(described: dict[str, Any]) -> str:
    """Say what a method gives: a delta of low rank, any delta, or experts with a router."""
    if described["kind"] == "routed":
        return "router"
    return "low rank" if described["low_rank"] else "delta"


def _describe(method: "AnyMethod") -> dict[str, Any]:
    from cgmerge.modules.learned.presets import Preset
    from cgmerge.modules.routing.methods import RoutedMethod

    if isinstance(method, Preset):
        return _describe_preset(method)
    if isinstance(method, RoutedMethod):
        return _describe_routed(method)
    spec = method
    return {
        "name": spec.name,
        "aliases": sorted(spec.aliases),
        "summary": spec.summary,
        "formula": spec.about.formula,
        "linear": spec.linear,
        "kind": spec.kind,
        "low_rank": spec.low_rank,
        "scope": spec.traits.scope,
        "needs": list(spec.needs),
        "params": [_describe_param(item, item.default) for item in dataclasses.fields(spec.params)],
        "paper": spec.about.paper,
        "differs": spec.about.differs,
        "use_when": spec.about.use_when,
    }


def _describe_preset(preset: "Preset") -> dict[str, Any]:
    chooses = preset.name == "auto"
    return {
        "name": preset.name,
        "aliases": [],
        "summary": preset.summary,
        "formula": preset.about.formula,
        "linear": not chooses,
        "kind": "learned",
        "low_rank": not chooses,
        "scope": "model",
        "needs": list(preset.needs),
        "params": [_describe_param(item, preset.default(item)) for item in preset.params],
        "paper": preset.about.paper,
        "differs": preset.about.differs,
        "use_when": preset.about.use_when,
    }


def _describe_routed(method: "RoutedMethod") -> dict[str, Any]:
    return {
        "name": method.name,
        "aliases": sorted(method.aliases),
        "summary": method.summary,
        "formula": method.about.formula,
        "linear": False,
        "kind": "routed",
        "low_rank": False,
        "scope": method.granularity,
        "needs": sorted(method.needs),
        "params": [
            _describe_param(item, item.default) for item in dataclasses.fields(method.params)
        ],
        "paper": method.about.paper,
        "differs": method.about.differs,
        "use_when": method.about.use_when,
    }


def _describe_param(item: "dataclasses.Field[Any]", default: Any) -> dict[str, Any]:
    from cgmerge.merge.params import range_of

    meta = item.metadata
    return {
        "name": item.name,
        "default": default,
        "choices": list(get_args(item.type)) if get_origin(item.type) is Literal else None,
        "low": meta.get("low") if meta.get("low") is not None else meta.get("above"),
        "high": meta.get("high"),
        "range": range_of(item) if any(meta.get(k) is not None for k in _LIMITS) else None,
        "doc": meta.get("doc", ""),
    }


def _page(method: "AnyMethod", described: dict[str, Any], space: str | None) -> str:
    name, summary = described["name"], described["summary"]
    title = f"{space}+{name}" if space else name
    lines = [f"{title}: {summary}", "", f"  {described['formula']}", ""]
    lines += [*_SPACES[space], ""] if space else []
    lines.append("parameters")
    for param in described["params"]:
        allowed = ""
        if param["choices"]:
            allowed = f" ({', '.join(param['choices'])})"
        elif param["range"]:
            allowed = f", in {param['range']}"
        lines.append(f"  --set {param['name']}={param['default']}{allowed}: {param['doc']}")
    lines += [
        "",
        f"cost      {_SPACE_COST if space else _cost(method)}",
        f"needs     {', '.join(described['needs']) or 'the experts only'}",
    ]
    if described["aliases"]:
        lines.append(f"also as   {'; '.join(_aliases(method))}")
    lines += [
        f"use when  {described['use_when']}",
        f"paper     {described['paper']}",
        f"differs   {described['differs']}",
    ]
    return "\n".join(lines)


def _aliases(method: Any) -> list[str]:
    if isinstance(method.aliases, tuple):
        return list(method.aliases)
    return [
        f"{name} ({', '.join(f'{k}={v}' for k, v in fixed.items())})"
        for name, fixed in method.aliases.items()
    ]


def _cost(method: "AnyMethod") -> str:
    from cgmerge.modules.learned.presets import Preset
    from cgmerge.modules.routing.methods import RoutedMethod

    if isinstance(method, Preset):
        return method.cost
    if isinstance(method, RoutedMethod):
        return _ROUTED_COST[method.granularity]
    if method.kind == "matrix" and not method.low_rank:
        return "whole matrices of all experts; back to rank r by SVD, error reported"
    return _COST[method.kind]


_LIMITS = ("low", "high", "above")
_SPACES = {
    "knots": (
        "  here ΔW_e stands for Uᵀ·ΔW_e, U the output directions of all experts together (KnOTS,",
        "  arXiv:2410.19735); densities and trims count those coordinates",
    ),
    "core": (
        "  here ΔW_e stands for Uᵀ·ΔW_e·V, U and V the output and input directions of all experts",
        "  together (Core Space, arXiv:2509.17786); densities and trims count those coordinates",
    ),
}
_SPACE_COST = "small matrices of the experts' common space; exact at the sum of their ranks"
_ROUTED_COST = {
    "token": "nothing to merge; every forward pass also scores experts and runs those chosen",
    "sequence": "nothing to merge; a prompt is looked at once, then costs what its experts cost",
}
_COST = {
    "linear": "stays in low-rank factors; exact at --rank exact",
    "gram": "stays in low-rank factors, one coefficient per expert and module",
    "matrix": "small matrices of the experts' common space; exact at --rank exact",
    "entry": "streams the dense deltas in row blocks; back to rank r by SVD, error reported",
}
