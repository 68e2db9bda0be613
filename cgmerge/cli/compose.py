"""`cgmerge compose`: merge experts into one adapter or one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import score_text, some_of

if TYPE_CHECKING:
    from cgmerge.cli.learned import Learning
    from cgmerge.evals.suite import SkillSet
    from cgmerge.modules.compose import Plan
    from cgmerge.modules.fullmodel import AnyExpert
    from cgmerge.modules.recipe import Recipe


def compose(
    experts: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERT[=WEIGHT]...",
            help="Adapter folders, full models, or one recipe (.yml, ours or mergekit's, or"
            " cgmerge.json of a result)",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", help="See `cgmerge methods`; ties if not given, one expert as it is"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Method parameter, e.g. density=0.2"),
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="λ, factor on the merged delta  \\[default: 1]")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option("--rank", help="Adapter rank: N, exact, or auto (sum of ranks, at most 64)"),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--as", help="adapter or model  \\[default: adapter]")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model; for --as model, --tune and --examples")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            metavar="[NAME=]FILE...",
            help="Validation data: choose scale and other parameters that are not given",
        ),
    ] = None,
    examples: Annotated[
        list[str] | None,
        typer.Option(
            "--examples",
            metavar="[NAME=]FILE...",
            help="What learned and routed methods learn from",
        ),
    ] = None,
    top_k: Annotated[
        str | None,
        typer.Option("--top-k", help="Routed methods: experts per token or prompt, or auto, all"),
    ] = None,
    subtract: Annotated[
        str | None,
        typer.Option(
            "--subtract",
            metavar="[NAME=]EXPERT",
            help="Routed methods: take a general expert from all others first, in delta space",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of methods that draw  \\[default: 0]", min=0),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option("--budget", help="Most merges that --tune tries  \\[default: 16]", min=1),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Float type written  \\[default: adapter float32, model as base]"
        ),
    ] = None,
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept experts of another base fingerprint")
    ] = False,
    allow_noop: Annotated[
        bool, typer.Option("--allow-noop", help="Accept a result that changes nothing")
    ] = False,
    allow_rounding: Annotated[
        bool, typer.Option("--allow-rounding", help="Accept losing most of the delta to rounding")
    ] = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Merge experts into one adapter or one model, exactly, in delta space.

    Examples:

      cgmerge compose experts/a experts/b=0.5 -m task-arithmetic --scale 0.6 -o merged

      cgmerge compose experts/* -m ties --set density=0.2 --rank 16 -o merged

      cgmerge compose experts/* --base BASE --tune validation/*.jsonl -o merged

      cgmerge compose experts/* --base BASE -m lorahub --examples new-task.jsonl -o merged

      cgmerge compose experts/* --base BASE -m gate --examples few.jsonl -o routed

      cgmerge compose experts/* --base BASE --as model -o merged-model

      cgmerge compose FULL experts/a=0.5 --base BASE --as model -o merged-model

      cgmerge compose merged/cgmerge.json -o again
    """
    from cgmerge.cli.learned import learning_of
    from cgmerge.cli.routed import run_routed_method, write_routed
    from cgmerge.inputs import refuse_inputs
    from cgmerge.modules.compose import check_outputs, make_plan

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    if out is None and not dry_run:
        raise UsageError("no output folder", code="out", hint="add -o OUT (or --dry-run)")
    params = _params(settings or [], scale)
    static = {
        "--scale": scale,
        "--rank": rank,
        "--as": form,
        "--tune": tune,
        "--dtype": dtype,
        "--budget": budget,
    }
    static |= {"--allow-noop": allow_noop, "--allow-rounding": allow_rounding}
    asked: dict[str, Any] = {"params": params, "base": base, "examples": tuple(examples or ())}
    asked |= {"top_k": top_k, "subtract": subtract, "force_base": force_base}
    asked |= {} if seed is None else {"seed": seed}
    files = {"out": out, "overwrite": overwrite, "dry_run": dry_run}
    if run_routed_method(experts, method, asked, static, files, output):
        return
    given: dict[str, Any] = {
        "method": method,
        "base": base,
        "dtype": dtype,
        "rank": rank,
        "form": form,
    }
    given |= {"force_base": force_base or None, "allow_noop": allow_noop or None}
    recipe = _recipe(experts, given | {"allow_rounding": allow_rounding or None}, params)
    recipe = _seeded(recipe, seed, params)
    fixed = {"--as": form, "--rank": rank, "--dtype": dtype}
    learning = learning_of(recipe, examples, tuned=bool(tune), seed=seed or 0, fixed=fixed)
    plan = make_plan(learning.recipe if learning else recipe)
    if learning:
        learning.check(plan)
    skills = _validation(plan, tune)
    if budget is not None and not skills:
        raise UsageError("--budget is how much --tune tries", code="budget", hint="add --tune FILE")
    _show_plan(plan, output, learning.method if learning else None)
    if out is not None:
        refuse_inputs(out, [*_own_recipe(experts), *_files_of(tune), *_files_of(examples)])
        check_outputs(plan, out, overwrite=overwrite)
    if dry_run or out is None:
        _finish_dry_run(plan, learning, output)
        return
    if skills:
        plan = make_plan(_tuned(plan, skills, budget, output))
    if learning:
        learned = learning.learned(plan, output)
        if learned.routed is not None:
            write_routed(learned.routed, out, learned.loaded, output, overwrite=overwrite)
            return
        plan = make_plan(learned.recipe)
    _run(plan, out, overwrite=overwrite, output=output)


def _recipe(experts: list[str], given: dict[str, Any], params: dict[str, Any]) -> "Recipe":
    """Read the recipe that is named, or make one of the experts; options override."""
    from cgmerge.modules.recipe import (
        ExpertRef,
        Recipe,
        default_method,
        is_recipe,
        parse_form,
        parse_rank,
        read_recipe,
    )
    from cgmerge.modules.routing.methods import find_routed
    from cgmerge.refs import parse_weighted

    changes = {key: value for key, value in given.items() if value is not None}
    for key, parse in (("rank", parse_rank), ("form", parse_form)):
        if key in changes:
            changes[key] = parse(changes[key])
    if not is_recipe(experts):
        refs = tuple(ExpertRef(*parse_weighted(text)) for text in experts)
        changes.setdefault("method", default_method(len(refs)))
        return Recipe(experts=refs, **changes, params=params)
    recipe = read_recipe(Path(experts[0]))
    if recipe.recorded and changes.get("form") == "model":
        changes = {"rank": "auto", **changes}  # the rank of the adapter that the record is of
    if find_routed(recipe.method):
        raise UsageError(
            f"{experts[0]}: `{recipe.method}` chooses between experts; recipes are of merges",
            code="method",
            hint=f"cgmerge compose EXPERTS -m {recipe.method}",
        )
    return _changed(recipe, changes, params)


def _seeded(recipe: "Recipe", seed: int | None, params: dict[str, Any]) -> "Recipe":
    """Give the seed to a rule that draws; the others draw nothing."""
    import dataclasses

    from cgmerge.merge import get_method, rule_of
    from cgmerge.modules.learned.presets import is_learned

    if seed is None or is_learned(recipe.method):
        return recipe
    spec, _ = get_method(rule_of(recipe.method))
    if "seed" not in {item.name for item in dataclasses.fields(spec.params)}:
        return recipe
    if "seed" in params:
        raise UsageError("--seed and --set seed are both given", code="parameter")
    return _changed(recipe, {}, {**params, "seed": seed})


def _own_recipe(experts: list[str]) -> list[Path]:
    """Return the user's own recipe file; the record of a result may be repeated over itself."""
    from cgmerge.modules.recipe import RECORD, is_recipe

    own = is_recipe(experts) and Path(experts[0]).name != RECORD
    return [Path(experts[0])] if own else []


def _validation(plan: "Plan", tune: list[str] | None) -> "list[SkillSet]":
    """Read the validation files before any work, and check that there is something to choose."""
    from cgmerge.evals.suite import read_skills
    from cgmerge.evals.tune import check_open

    if not tune:
        return []
    if plan.base is None:
        hint = f"add --base {_base_word(plan)}"
        raise UsageError("--tune scores merges on the base", code="base", hint=hint)
    check_open(plan)
    return read_skills(tune)


def _files_of(tune: list[str] | None) -> list[Path]:
    if not tune:
        return []
    from cgmerge.evals.suite import split_name
    from cgmerge.refs import expanded

    return [expanded(split_name(spec)[1]) for spec in tune]


def _tuned(plan: "Plan", skills: "list[SkillSet]", budget: int | None, output: Output) -> "Recipe":
    """Choose the open parameters on validation data; the recipe then holds them and the curve."""
    from dataclasses import replace

    from cgmerge.evals.tune import DEFAULT_BUDGET, tune
    from cgmerge.modules.loading import load_base

    assert plan.base is not None
    loaded = load_base(plan.base, with_encoder=True)
    budget = budget or DEFAULT_BUDGET
    with output.progress("tune", budget) as advance:
        found = tune(plan, loaded, skills, budget=budget, progress=advance)
    names = list(found.grids)
    rows = [
        [
            *[f"{trial.params[name]:g}" if name == "scale" else str(trial.params[name])
              for name in names],
            score_text(trial.score, 3), f"{trial.loglik:.3f}", "←" if trial is found.best else "",
        ]
        for trial in found.trials
    ]  # fmt: skip
    output.table([*names, "score", "log-lik", ""], rows)
    chosen = ", ".join(f"{name}={found.best.params[name]}" for name in names)
    items = sum(len(skill.examples) for skill in skills)
    output.line("tuned", f"{chosen}: {score_text(found.best.score, 3)} on {items} validation items")
    params = {**plan.recipe.params, **found.best.params}
    return replace(plan.recipe, params=params, tuning=found.record())


def _run(plan: "Plan", out: Path, *, overwrite: bool, output: Output) -> None:
    from cgmerge.modules.compose import describe, run_plan

    shares = plan.shares  # read before anything is written, as everything is
    with output.progress("merge", len(plan.sizes)) as advance:
        composed = run_plan(plan, out, overwrite=overwrite, progress=advance)
    for warning in composed.warnings[len(plan.warnings) :]:
        output.warn(warning)
    size = sum(path.stat().st_size for path in composed.out.iterdir())
    if plan.rank:
        output.line(
            "lost",
            f"{composed.truncation_error:.4%} of ‖ΔW‖ {composed.norm:.4g} to rank {plan.rank}"
            + (f", {composed.rounding_error:.2%} to rounding" if composed.rounding_error else ""),
        )
        worst = max(composed.modules.items(), key=lambda item: item[1].error)
        output.detail("worst", f"{worst[0]}: {worst[1].error:.2%}")
    else:
        output.line("lost", f"{composed.rounding_error:.2%} of ‖ΔW‖ to rounding")
    if shares and len(plan.experts) > 1:
        parts = (f"{plan.experts[i].name} {shares[i]:.0%}" for i in plan.given)
        output.line("shares", f"{some_of(parts, 8)} of Σ |weight|·‖ΔW‖")
    for path, report in composed.modules.items():
        output.detail("module", f"{path}: norm {report.norm:.4g}, error {report.error:.3%}")
    output.line("wrote", f"{out} ({size / 1e6:.2f} MB, ‖ΔW‖ {composed.written_norm:.4g})")
    output.hint(
        f"measure it: cgmerge eval {quoted(out)} --base {_base_word(plan)} --data TEST.jsonl"
    )
    output.result("cgmerge.compose/1", {"out": str(out), **describe(composed)}, short=str(out))


def _show_plan(plan: "Plan", output: Output, learns: str | None) -> None:
    from dataclasses import asdict

    rule = plan.rule
    settings = ", ".join(f"{key}={value}" for key, value in asdict(rule.params).items())
    name = learns or f"{rule.name}({settings})"
    output.line("plan", f"{name} on {len(plan.sizes)} modules")
    for expert, weight in ((plan.experts[i], rule.weights[i]) for i in plan.given):
        known = "" if learns else f"  weight {weight:g}"
        output.line("expert", f"{expert.name}{known}  {_kind(expert, plan)}  {expert.digest[:12]}")
    if plan.parts:
        output.line("parts", f"{len(plan.parts)} groups of modules have values of their own")
    for one, names in plan.parts:
        weights = ", ".join(f"{one.weights[i]:g}" for i in plan.given)
        output.detail("part", f"weights {weights}  {one.params}  {names[0]} … {names[-1]}")
    for name, value in asdict(rule.params).items():
        output.detail("means", f"{name}={value}: {_doc(rule.spec.params, name)}")
    output.detail("formula", rule.spec.about.formula)
    output.detail("memory", f"about {plan.peak_bytes / 1e6:.0f} MB above start")
    for warning in [*plan.recipe.notes, *plan.warnings]:
        output.warn(warning)


def _kind(expert: "AnyExpert", plan: "Plan") -> str:
    """Say how much of a model an expert changes."""
    from cgmerge.modules.expert import Expert

    if not isinstance(expert, Expert):
        return "full model"
    ranks = "/".join(map(str, expert.ranks))
    return f"rank {ranks}  {len(expert.pairs)} of {len(plan.sizes)} modules"


def _doc(params: type, name: str) -> str:
    import dataclasses

    item = next(item for item in dataclasses.fields(params) if item.name == name)
    return str(item.metadata.get("doc", ""))


def _finish_dry_run(plan: "Plan", learning: "Learning | None", output: Output) -> None:
    kind = f"adapter of rank {plan.rank}" if plan.rank else "full model"
    if learning and learning.may_route:
        kind += ", or a routed composition if that does better on the examples"
    output.line("output", f"{kind}; about {plan.peak_bytes / 1e6:.0f} MB of memory")
    output.line("ok", "nothing written (dry run)")
    output.result(
        "cgmerge.compose/1",
        {
            "out": None,
            "method": learning.method if learning else plan.rule.name,
            "rank": plan.rank or None,
            "modules": len(plan.sizes),
            "entries": plan.entries,
            "peak_bytes": plan.peak_bytes,
            "warnings": [*plan.recipe.notes, *plan.warnings],
        },
    )


def _params(settings: list[str], scale: float | None) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, found {text!r}", code="parameter")
        if key in params:
            raise UsageError(f"--set {key} is given twice", code="parameter")
        params[key] = value
    if scale is not None:
        if "scale" in params:
            raise UsageError("--scale and --set scale are both given", code="parameter")
        params["scale"] = scale
    return params


def _changed(recipe: "Recipe", changes: dict[str, Any], params: dict[str, Any]) -> "Recipe":
    """Let options on the command line override a recipe."""
    from dataclasses import replace

    if changes.get("base", recipe.base) != recipe.base:
        changes = {**changes, "base_fingerprint": None}
    same = changes.get("method", recipe.method) == recipe.method
    if not same and (recipe.parts or recipe.by_tensor):
        raise UsageError(
            "the recipe's weights or parameters differ between modules, for its own method only",
            code="method",
            hint="leave out --method, or write another recipe",
        )
    parts = tuple(replace(part, params={**part.params, **params}) for part in recipe.parts)
    kept = dict(recipe.params) if same else {}
    tuning = recipe.tuning if same and not params else None
    changes |= {"parts": parts, "overrides": params}
    return replace(recipe, **changes, params={**kept, **params}, tuning=tuning)


def _base_word(plan: "Plan") -> str:
    from cgmerge.modules.usage import base_names, base_word

    return base_word(plan.base.ref if plan.base else None, base_names(plan.experts))
