"""`cgmerge compose` with a method that routes: the result is a folder of experts and a router."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import UsageError

if TYPE_CHECKING:
    from cgmerge.cli.output import Output
    from cgmerge.evals.routed import Request, RoutedPlan, Subtraction
    from cgmerge.modules.composition import Composition


def is_routed_method(name: str | None) -> bool:
    """Whether a method routes instead of merging."""
    from cgmerge.modules.routing.methods import find_routed

    return name is not None and find_routed(name) is not None


def parse_subtraction(text: str, space: str = "delta") -> "Subtraction":
    """Read `--subtract [NAME=]EXPERT[@RANK]`.

    Raises:
        UsageError: A rank that is no number.
    """
    from cgmerge.evals.routed import Subtraction
    from cgmerge.evals.suite import split_name

    _, ref = split_name(text)
    return Subtraction(ref, space=space)


def compose_routed(
    request: "Request",
    out: Path | None,
    output: "Output",
    *,
    overwrite: bool,
    dry_run: bool,
) -> None:
    """Plan, learn and write a routed composition, and say what came of it."""
    from cgmerge.evals.routed import check_routed_out, plan_routed, run_routed
    from cgmerge.modules.loading import load_base

    plan = plan_routed(request)
    _show_plan(plan, output)
    if dry_run or out is None:
        output.line("ok", "nothing written (dry run)")
        output.result("cgmerge.compose/1", _fields(plan, None))
        return
    check_routed_out(plan, out, overwrite=overwrite)
    loaded = load_base(plan.base) if plan.base is not None and plan.spec.needs else None
    steps = plan.spec.steps(plan.params, len(plan.members))
    with output.progress("learn", steps) as advance:
        found = run_routed(plan, out, overwrite=overwrite, loaded=loaded, progress=advance)
    for warning in found.record["warnings"][len(plan.warnings) :]:
        output.warn(warning)
    for label, text in plan.spec.said(found.record["fit"]):
        output.line(label, text)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    output.line("wrote", f"{out} ({size / 1e6:.2f} MB; every {found.granularity} decides)")
    base = request.base or "BASE"
    output.hint(f'see it decide: cgmerge route {out} --base {base} --explain "TEXT"')
    output.hint(f"measure it: cgmerge eval {out} --base {base} --data TEST.jsonl")
    output.result("cgmerge.compose/1", {"out": str(out), **_fields(plan, found)}, short=str(out))


def _show_plan(plan: "RoutedPlan", output: "Output") -> None:
    settings = ", ".join(f"{k}={v}" for k, v in plan.spec.plain_params(plan.params).items())
    output.line("plan", f"{plan.spec.name}({settings}): every {plan.spec.granularity} decides")
    for member in plan.members:
        ranks = "/".join(map(str, member.expert.ranks))
        output.line("expert", f"{member.name}  rank {ranks}  {member.expert.digest[:12]}")
    for skill in plan.skills:
        output.line("examples", f"{skill.name}: {len(skill.examples)} from {skill.source}")
    for transform in plan.transforms:
        worst = max(transform["truncation_error"].values())
        output.line(
            "subtract",
            f"{transform['general']['name']} in {transform['space']} space"
            + (f", at most {worst:.2%} of an expert lost to the rank" if worst else ", exactly"),
        )
    for warning in plan.warnings:
        output.warn(warning)


def _fields(plan: "RoutedPlan", found: "Composition | None") -> dict[str, Any]:
    return {
        "out": None,
        "method": plan.spec.name,
        "params": plan.spec.plain_params(plan.params),
        "scale": None,
        "granularity": plan.spec.granularity,
        "experts": [
            {
                "ref": member.expert.ref,
                "name": member.name,
                "sha256": member.expert.digest,
                "weight": None,
            }
            for member in plan.members
        ],
        "base": None
        if plan.base is None
        else {"ref": plan.base.ref, "fingerprint": plan.base.fingerprint},
        "as": "composition",
        "rank": None,
        "truncation_error": 0.0,
        "transforms": [dict(item) for item in plan.transforms],
        "fit": None if found is None else found.record["fit"],
        "warnings": list(plan.warnings) if found is None else list(found.record["warnings"]),
    }


def refuse_static_options(given: dict[str, Any], method: str) -> None:
    """Refuse options of `compose` that mean nothing for a router.

    Raises:
        UsageError: Names the first of them.
    """
    for option, value in given.items():
        if value is not None and value is not False:
            raise UsageError(
                f"{option} means nothing for `{method}`, which writes experts and a router",
                code="option",
                hint=f"leave out {option}",
            )


def with_changes(request: "Request", **changes: Any) -> "Request":
    """Let options on the command line override the request of a record."""
    given = {key: value for key, value in changes.items() if value}
    if "examples" in given:
        given["pinned"] = ()
    if given.get("base", request.base) != request.base:
        given["base_fingerprint"] = None
    if "params" in given:
        given["params"] = {**request.params, **given["params"]}
    return replace(request, **given)
