"""`cgmerge train SKILLS.yml --modular …`: what it says, and its JSON object."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output
from cgmerge.cli.training import Voice, score_rows
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import counted, score_text

if TYPE_CHECKING:
    from cgmerge.modules.modular.plan import ModularPlan
    from cgmerge.modules.modular.run import ModularResult

SCHEMA = "cgmerge.modular/1"


def check_options(given: dict[str, Any], recipe: Path | None) -> None:
    """Refuse options of `train` that mean nothing for shared modules.

    Raises:
        UsageError: Names the first of them, or there is no recipe.
    """
    for option, value in given.items():
        if value is not None and value is not False:
            raise UsageError(
                f"{option} means nothing for --modular, which trains all tasks of a recipe at once"
                " and from the start",
                code="option",
                hint=f"leave out {option}",
            )
    if recipe is None:
        raise UsageError(
            "--modular shares modules among the tasks of a recipe, and none is given",
            code="recipe",
            hint="cgmerge train SKILLS.yml --modular skills=4 -o OUT",
        )


def train_together(
    recipe: Path, modular: str, chosen: dict[str, Any], output: Output, *,
    overwrite: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Plan, train and write, and say what came of it.

    Args:
        recipe: The tasks.
        modular: As typed.
        chosen: Settings of the command line by name.
        output: Where everything is said.
        overwrite: Replace an earlier result.
        dry_run: Plan only.
    """
    from cgmerge.modules.modular.plan import check_modular_out, make_modular_plan
    from cgmerge.modules.modular.run import train_modular
    from cgmerge.modules.modular.settings import read_modular
    from cgmerge.modules.training.recipe import check_data, read_recipe

    params, rank = read_modular(modular)
    if rank is not None and chosen.get("rank", rank) != rank:
        raise UsageError(
            f"--rank {chosen['rank']} and --modular rank={rank} contradict each other", code="rank"
        )
    changes = chosen if rank is None else {**chosen, "rank": rank}
    settings = read_recipe(recipe, changes)
    check_data(recipe, settings, changes)
    plan = make_modular_plan(settings, params)
    check_modular_out(plan, overwrite=overwrite)
    _say_plan(plan, output)
    if dry_run:
        output.line("ok", "nothing trained, nothing written (dry run)")
        output.result(SCHEMA, {**_common(plan), "dry_run": True, "loss": None, "fit": None})
        return
    started = time.monotonic()
    scorer = score_rows if plan.joint.eval_rows else None
    with Voice(plan.joint, output) as voice:
        result = train_modular(plan, overwrite=overwrite, listener=voice, scorer=scorer)
    _say_result(plan, result, output)
    fields = {
        **_common(plan),
        "loss": result.fit["loss"],
        "fit": result.fit,
        "seconds": round(time.monotonic() - started, 3),
    }
    output.result(SCHEMA, fields, short=str(plan.out))


def _say_plan(plan: "ModularPlan", output: Output) -> None:
    joint, frame = plan.joint, plan.frame
    for name, task in zip(plan.names, plan.tasks, strict=True):
        files = ", ".join(f"{file.path.name} ({counted(file.rows, 'row')})" for file in task.data)
        output.line("task", f"{name}: {files}")
    output.line("example", joint.example.rstrip("\n").replace("\n", "\n" + " " * 9))
    where = f"{len(frame.places)} layers" if len(frame.places) > 1 else "the whole model"
    output.line(
        "plan",
        f"{counted(frame.skills, 'module')} of rank {frame.rank}, alpha {joint.chosen.alpha} on"
        f" {len(frame.targets)} layers, {plan.trainable:,} trainable; an allocation of"
        f" {counted(frame.tasks, 'task')} for {where}",
    )
    output.line(
        "plan",
        f"{counted(joint.chosen.steps, 'step')} of {counted(joint.chosen.batch_size, 'row')}"
        f" of all tasks in turn,"
        f" learning rate {joint.chosen.lr:g}, of the allocation {plan.params.allocation_lr:g},"
        f" {joint.device}, {joint.dtype}",
    )
    for name, reason in joint.chosen.reasons.items():
        output.detail("default", f"{name} {getattr(joint.chosen, name):g}: {reason}")
    for warning in joint.warnings:
        output.warn(warning)


def _say_result(plan: "ModularPlan", result: "ModularResult", output: Output) -> None:
    fit = result.fit
    output.line("loss", f"{fit['first_loss']:.4f} at first, {fit['loss']:.4f} at last")
    for name, task in fit["tasks"].items():
        scores = task["eval"]
        if scores is not None:
            output.line(
                "eval",
                f"{name}: exact match {score_text(scores['exact_match'], 3)} (base"
                f" {score_text(scores['base_exact_match'], 3)}), loss {scores['loss']:.4f} (base"
                f" {scores['base_loss']:.4f}) on {counted(scores['n'], 'row')}",
            )
    names = result.composition.names
    rows = [[name, *(f"{value:.2f}" for value in _means(fit, name))] for name in plan.names]
    output.table(["task", *names], rows)
    output.line(
        "table",
        f"mean over layers of σ(logit); entropy {fit['discreteness']:.2f} (1: a coin, 0: yes or"
        f" no), in use {fit['sparsity']:.2f}, evenness of use {fit['usage']:.2f}",
    )
    size = sum(path.stat().st_size for path in plan.out.rglob("*") if path.is_file())
    output.line("wrote", f"{plan.out} ({size / 1e6:.2f} MB; the task decides)")
    out, base = quoted(plan.out), quoted(plan.joint.settings.base)
    words = f"--base {base} --task {quoted(plan.names[0])} --explain"
    output.hint(f'see it decide: cgmerge route {out} {words} "TEXT"')
    output.hint(
        f"a new task: cgmerge compose {out}/experts/* -m atlas --set granularity=layer"
        f" --base {base} --examples NEW.jsonl -o NEW"
    )


def _means(fit: Any, task: str) -> list[float]:
    rows = [places[task] for places in fit["allocation"].values()]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _common(plan: "ModularPlan") -> dict[str, Any]:
    joint = plan.joint
    return {
        "out": str(plan.out),
        "tasks": list(plan.names),
        "skills": plan.params.skills,
        "granularity": plan.params.granularity,
        "steps": joint.chosen.steps,
        "base": {"ref": joint.settings.base, "fingerprint": joint.base.fingerprint},
        "rank": joint.settings.rank,
        "alpha": joint.chosen.alpha,
        "lr": joint.chosen.lr,
        "batch_size": joint.chosen.batch_size,
        "trainable": plan.trainable,
        "longest": joint.longest,
        "seed": joint.settings.seed,
    }
