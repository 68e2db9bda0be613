"""`cgmerge methods`: list merge methods, or explain one."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output

if TYPE_CHECKING:
    from cgmerge.merge import MethodSpec


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List merge methods, or explain one: formula, parameters, paper, when to use it."""
    from cgmerge.merge import all_methods, get_method, rule_of

    output = Output(as_json=as_json, quiet=quiet)
    specs = all_methods() if name is None else [get_method(rule_of(name))[0]]
    described = [_describe(spec) for spec in specs]
    if name is None:
        rows = [[s.name, "yes" if s.low_rank else "no", s.summary] for s in specs]
        output.table(["method", "low rank", "what it does"], rows, words=True)
        output.hint("explain one: cgmerge methods ties")
    else:
        output.text(_page(specs[0]))
    output.result(
        "cgmerge.methods/1", {"methods": described}, short="\n".join(s.name for s in specs)
    )


def _describe(spec: "MethodSpec") -> dict[str, Any]:
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
        "params": [_describe_param(item) for item in dataclasses.fields(spec.params)],
        "paper": spec.about.paper,
        "differs": spec.about.differs,
        "use_when": spec.about.use_when,
    }


def _describe_param(item: "dataclasses.Field[Any]") -> dict[str, Any]:
    meta = item.metadata
    return {
        "name": item.name,
        "default": item.default,
        "choices": list(get_args(item.type)) if get_origin(item.type) is Literal else None,
        "low": meta.get("low") if meta.get("low") is not None else meta.get("above"),
        "high": meta.get("high"),
        "doc": meta.get("doc", ""),
    }


def _page(spec: "MethodSpec") -> str:
    lines = [f"{spec.name}: {spec.summary}", "", f"  {spec.about.formula}", "", "parameters"]
    for item in dataclasses.fields(spec.params):
        described = _describe_param(item)
        allowed = ""
        if described["choices"]:
            allowed = f" ({', '.join(described['choices'])})"
        elif described["high"] is not None:
            allowed = f" ({described['low']} … {described['high']})"
        lines.append(f"  --set {item.name}={item.default}{allowed}: {described['doc']}")
    lines += [
        "",
        f"cost      {_cost(spec)}",
        f"needs     {', '.join(spec.needs) or 'the experts only'}",
    ]
    if spec.aliases:
        names = [
            f"{a} ({', '.join(f'{k}={v}' for k, v in f.items())})" for a, f in spec.aliases.items()
        ]
        lines.append(f"also as   {'; '.join(names)}")
    lines += [
        f"use when  {spec.about.use_when}",
        f"paper     {spec.about.paper}",
        f"differs   {spec.about.differs}",
    ]
    return "\n".join(lines)


def _cost(spec: "MethodSpec") -> str:
    if spec.kind == "matrix" and not spec.low_rank:
        return "whole matrices of all experts; back to rank r by SVD, error reported"
    return _COST[spec.kind]


_COST = {
    "linear": "stays in low-rank factors; exact at --rank exact",
    "gram": "stays in low-rank factors, one coefficient per expert and module",
    "matrix": "small matrices of the experts' common space; exact at --rank exact",
    "entry": "streams the dense deltas in row blocks; back to rank r by SVD, error reported",
}
