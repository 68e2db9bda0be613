"""`cgmerge compose` with a method that routes: the result is a folder of experts and a router."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import UsageError
from cgmerge.quoting import quoted

if TYPE_CHECKING:
    from cgmerge.cli.output import Output, Progress
    from cgmerge.evals.routed import Request, RoutedPlan
    from cgmerge.modules.composition import Composition
    from cgmerge.modules.loading import LoadedBase


def run_routed_method(
    experts: list[str],
    method: str | None,
    asked: Mapping[str, Any],
    static: Mapping[str, Any],
    files: Mapping[str, Any],
    output: "Output",
) -> bool:
    """Compose with a router where the method is one.

    Args:
        experts: Words of the command line: experts, or the record of an earlier composition.
        method: As given; None for the default or that of the record.
        asked: Options that routers have.
        static: Options that mean something for merges only, by their names.
        files: `out`, `overwrite` and `dry_run`.
        output: Who is told.

    Returns:
        Whether it was one.

    Raises:
        UsageError: Options of the other kind.
    """
    request = _request(experts, method, dict(asked))
    if request is None:
        routed = {"--top-k": asked["top_k"], "--subtract": asked["subtract"]}
        refuse_routed_options(routed, method or "ties")
        return False
    refuse_static_options(static, request.method)
    compose_routed(
        request,
        files["out"],
        output,
        overwrite=files["overwrite"],
        dry_run=files["dry_run"],
    )
    return True


def _request(experts: list[str], method: str | None, asked: dict[str, Any]) -> "Request | None":
    """Return what is asked of a router, or None where the method merges."""
    from cgmerge.evals.routed import Request, Subtraction, read_request
    from cgmerge.evals.suite import split_name
    from cgmerge.modules.recipe import ExpertRef, is_recipe
    from cgmerge.modules.routing.methods import find_routed
    from cgmerge.refs import parse_weighted

    subtract, top_k = asked.pop("subtract"), asked.pop("top_k")
    taken = None if subtract is None else Subtraction(split_name(subtract)[1])
    if top_k is not None and "top_k" in asked["params"]:
        raise UsageError("--top-k and --set top_k are both given", code="parameter")
    chosen = {} if top_k is None else {"top_k": top_k}
    changes = asked | {"subtraction": taken, "params": {**asked["params"], **chosen}}
    changes["params"].pop("scale", None)  # refused by name where it was given
    if is_recipe(experts):
        record = read_request(Path(experts[0]))
        if record is None:
            return None
        known = None if method is None else find_routed(method)
        if method is not None and (known is None or known.name != record.method):
            raise UsageError(
                f"{experts[0]} is of a composition by `{record.method}`, and can only be repeated"
                f" by that, not by `{method}`",
                code="method",
                hint=f"name the experts: cgmerge compose EXPERTS -m {method}",
                expected=record.method,
                found=method,
            )
        return _with_changes(record, changes)
    if method is None or find_routed(method) is None:
        return None
    refs = tuple(ExpertRef(*parse_weighted(text)) for text in experts)
    return Request(method, refs, **changes)


def compose_routed(
    request: "Request",
    out: Path | None,
    output: "Output",
    *,
    overwrite: bool,
    dry_run: bool,
) -> None:
    """Plan, learn and write a routed composition, and say what came of it."""
    from cgmerge.evals.routed import check_routed_out, plan_routed
    from cgmerge.modules.loading import load_base

    plan = plan_routed(request)
    _show_plan(plan, output)
    if dry_run or out is None:
        output.line("ok", "nothing written (dry run)")
        output.result("cgmerge.compose/1", _fields(plan, None))
        return
    check_routed_out(plan, out, overwrite=overwrite)
    loaded = load_base(plan.base) if plan.base is not None and plan.spec.needs else None
    write_routed(plan, out, loaded, output, overwrite=overwrite)


def write_routed(
    plan: "RoutedPlan",
    out: Path,
    loaded: "LoadedBase | None",
    output: "Output",
    *,
    overwrite: bool,
) -> None:
    """Learn and write a routed composition, and say what came of it."""
    from cgmerge.evals.routed import run_routed
    from cgmerge.modules.usage import base_names, base_word

    with _progress(output) as advance:
        found = run_routed(plan, out, overwrite=overwrite, loaded=loaded, progress=advance)
    for warning in found.record["warnings"][len(plan.warnings) :]:
        output.warn(warning)
    for note in found.record["fit"]["notes"]:
        output.line("learned", note)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    output.line("wrote", f"{out} ({size / 1e6:.2f} MB; {decides(found.kind)})")
    base = base_word(plan.request.base, base_names(member.expert for member in plan.members))
    place = quoted(out)
    task, name = (" --task TASK", "TASK=") if found.tasks else ("", "")
    output.hint(f'see it decide: cgmerge route {place} --base {base}{task} --explain "TEXT"')
    output.hint(f"measure it: cgmerge eval {place} --base {base} --data {name}TEST.jsonl")
    output.result("cgmerge.compose/1", {**_fields(plan, found), "out": str(out)}, short=str(out))


def decides(kind: str) -> str:
    """Say in words what a router of a kind decides on."""
    words = {"token": "every token decides", "retrieval": "the prompt decides once"}
    return words.get(kind, "whoever asks names the task")


@contextmanager
def _progress(output: "Output") -> "Iterator[Callable[[int, int], None]]":
    """Show a bar as soon as somebody says how long it is."""
    with ExitStack() as bars:
        bar: list[Progress] = []

        def advance(done: int, total: int) -> None:
            if not bar:
                bar.append(bars.enter_context(output.progress("learn", total)))
            bar[0](done)

        yield advance


def _show_plan(plan: "RoutedPlan", output: "Output") -> None:
    settings = ", ".join(f"{k}={v}" for k, v in plan.settings.items() if v != "")
    output.line("plan", f"{plan.spec.name}({settings}): {decides(plan.spec.kind)}")
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
        "params": plan.settings,
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
        "tuning": plan.request.tuning,
        "warnings": list(plan.warnings) if found is None else list(found.record["warnings"]),
    }


def refuse_static_options(given: Mapping[str, Any], method: str) -> None:
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


def refuse_routed_options(given: Mapping[str, Any], method: str) -> None:
    """Refuse options that mean something for routers only.

    Raises:
        UsageError: Names the first of them.
    """
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option} means nothing for `{method}`, which does not route",
                code="option",
                hint=f"leave out {option}, or choose arrow, spectral, gate or retrieval",
            )


def _with_changes(request: "Request", changes: dict[str, Any]) -> "Request":
    """Let options on the command line override the request of a record."""
    given = {key: value for key, value in changes.items() if value or key == "seed"}
    if any(getattr(request, key) != value for key, value in given.items()):
        given["tuning"] = None  # it is of what was asked for then
    if "examples" in given:
        given["pinned"] = ()
    if given.get("base", request.base) != request.base:
        given["base_fingerprint"] = None
    if "params" in given:
        given["params"] = {**request.params, **given["params"]}
    return replace(request, **given)
