"""`cgmerge train`: one LoRA expert per skill, from a data file or from a recipe of skills."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import CgmergeError, UsageError

if TYPE_CHECKING:
    from cgmerge.modules.training.run import RunOptions
    from cgmerge.modules.training.settings import TrainSettings

SCHEMA = "cgmerge.train/1"
_RUN = "The run"
_LORA = "LoRA"


def _option(*names: str, help: str, panel: str = _RUN, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def train(
    *,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[SKILLS.yml]", help="Several skills; options override its keys"),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Base model: folder, hf://user/repo, tiny, smollm2-135m"),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="FILE", help="json, jsonl, csv or parquet; repeatable"),
    ] = None,
    skill: Annotated[
        str | None, typer.Option("--skill", help="Its name; with a recipe: train only this one")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write")] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option("--eval-data", metavar="FILE", help="Score these rows afterwards"),
    ] = None,
    rank: Annotated[int | None, _option("--rank", help="Default 16", panel=_LORA)] = None,
    alpha: Annotated[int | None, _option("--alpha", help="Default 2 x rank", panel=_LORA)] = None,
    target_modules: Annotated[
        str | None,
        _option("--target-modules", help="Default all-linear; or q_proj,v_proj …", panel=_LORA),
    ] = None,
    load_in_4bit: Annotated[
        bool | None,
        _option("--load-in-4bit/--no-load-in-4bit", help="QLoRA, bitsandbytes", panel=_LORA),
    ] = None,
    steps: Annotated[
        int | None, _option("--steps", help="Default 3 epochs, at least 100 steps")
    ] = None,
    epochs: Annotated[float | None, _option("--epochs", help="Passes over the data")] = None,
    lr: Annotated[
        float | None,
        _option("--lr", "--learning-rate", help="Peak; default by width of the base, ≤ 1e-3"),
    ] = None,
    batch_size: Annotated[
        int | None,
        _option("--batch-size", help="Rows a step; default ≤ 64 rows and ≤ 4096 tokens"),
    ] = None,
    accumulate: Annotated[
        int | None, _option("--accumulate", help="Parts a step is computed in (memory)")
    ] = None,
    max_length: Annotated[
        int | None, _option("--max-length", help="Tokens a row; prompts are cut on the left")
    ] = None,
    seed: Annotated[int | None, _option("--seed", help="Default 0")] = None,
    device: Annotated[str | None, _option("--device", help="auto, cpu, cuda, mps …")] = None,
    dtype: Annotated[
        str | None, _option("--dtype", help="Of the base: auto, float32, bfloat16, float16")
    ] = None,
    resume: Annotated[
        bool | None,
        _option("--resume/--no-resume", help="Go on where the same run was stopped (default)"),
    ] = None,
    checkpoint_steps: Annotated[
        int | None, _option("--checkpoint-steps", help="Default: one a minute")
    ] = None,
    modular: Annotated[
        str | None,
        _option(
            "--modular",
            metavar="skills=S[,rank=R,…]",
            help="Train S modules that all tasks share, and who uses which; also granularity=model,"
            " allocation_lr, temperature, ibp",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Train one LoRA expert on one skill, several from a recipe, or modules that tasks share.

    Data: prompt/completion, messages, text, alpaca, sharegpt or multiple-choice rows. The loss
    covers the completion only. A stopped run goes on when the command is repeated, to the same
    bytes.

    For example:

      cgmerge train --base tiny --data reverse.jsonl --skill reverse -o experts/reverse

      cgmerge train --base BASE --data sort.csv --eval-data test.csv --skill sort -o sort --rank 8

      cgmerge train skills.yml --lr 5e-4

      cgmerge train skills.yml --modular skills=4,rank=8 -o shared
    """
    from cgmerge.modules.training.processes import is_main_process
    from cgmerge.modules.training.run import RunOptions

    main = is_main_process()
    output = Output(as_json=as_json and main, quiet=quiet or not main, verbose=verbose and main)
    given = {
        "base": base,
        "eval_data": tuple(eval_data) if eval_data else None,
        "rank": rank,
        "alpha": alpha,
        "target_modules": _names(target_modules),
        "load_in_4bit": load_in_4bit,
        "steps": steps,
        "epochs": epochs,
        "lr": lr,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "max_length": max_length,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "checkpoint_steps": checkpoint_steps,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    out_too = {**chosen, **({"out": out} if out else {})}
    resumes = resume is not False
    try:
        if modular is not None:
            unused: dict[str, Any] = {"--data": data, "--skill": skill, "--resume": resume}
            unused |= {"--load-in-4bit": load_in_4bit, "--checkpoint-steps": checkpoint_steps}
            _modular(recipe, modular, out_too, unused, output, (overwrite, dry_run))
            return
        if recipe is not None:
            many = _from_recipe(recipe, out_too, data, skill)
            handling = RunOptions(resumes, overwrite, keep_finished=True)
        else:
            many = [_single(chosen, data, skill, out)]
            handling = RunOptions(resumes, overwrite)
        _run_all(many, handling, output, dry_run=dry_run, as_list=recipe is not None)
    except CgmergeError as error:
        if not main:  # the main process says it
            raise SystemExit(error.exit_code) from None
        raise


def _modular(
    recipe: Path | None,
    modular: str,
    chosen: dict[str, Any],
    unused: dict[str, Any],
    output: Output,
    flags: tuple[bool, bool],
) -> None:
    from cgmerge.cli.modular import check_options, train_together

    check_options(unused, recipe)
    assert recipe is not None
    overwrite, dry_run = flags
    train_together(recipe, modular, chosen, output, overwrite=overwrite, dry_run=dry_run)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _single(
    chosen: dict[str, Any], data: list[Path] | None, skill: str | None, out: Path | None
) -> "TrainSettings":
    from cgmerge.modules.training.settings import TrainSettings

    needed = {"--base": chosen.get("base"), "--data": data, "--skill": skill, "--out": out}
    missing = [name for name, value in needed.items() if not value]
    if missing or not data or skill is None or out is None:
        raise UsageError(
            f"train needs {', '.join(missing)}",
            code="missing_option",
            hint="cgmerge train --base tiny --data FILE --skill NAME -o FOLDER, or a recipe",
        )
    return TrainSettings(data=tuple(data), skill=skill, out=out, **chosen)


def _from_recipe(
    path: Path, overrides: dict[str, Any], data: list[Path] | None, skill: str | None
) -> "list[TrainSettings]":
    from cgmerge.modules.training.recipe import check_data, read_recipe

    if data:
        raise UsageError(
            "--data and a recipe are both given", code="recipe", hint="the recipe names its data"
        )
    found = read_recipe(path, overrides)
    if skill is None:
        check_data(path, found, overrides)
        return found
    names = [settings.skill for settings in found]
    if skill not in names:
        raise UsageError(
            f"{path} has no skill {skill!r}", code="skill", hint=f"it has {', '.join(names)}"
        )
    chosen = [settings for settings in found if settings.skill == skill]
    check_data(path, chosen, overrides)
    return chosen


def _run_all(
    many: "list[TrainSettings]",
    handling: "RunOptions",
    output: Output,
    *,
    dry_run: bool,
    as_list: bool,
) -> None:
    """Check everything first, then train one skill after the other."""
    from cgmerge.cli.training import dry_fields, run_one, say_next, say_plan
    from cgmerge.modules.training.plan import make_plan
    from cgmerge.modules.training.processes import is_main_process
    from cgmerge.modules.training.run import check_start

    plans = [make_plan(settings) for settings in many]
    starts = [check_start(plan, handling) for plan in plans] if is_main_process() else []
    runs = []
    for number, plan in enumerate(plans):
        if dry_run:
            say_plan(plan, output)
            lost = starts[number].unclaimed if starts else None
            if lost is not None:
                output.warn(lost)
            runs.append(dry_fields(plan, starts[number] if starts else None))
        else:
            runs.append(run_one(plan, handling, output))
    if not is_main_process():
        return
    if dry_run:
        output.line("ok", "nothing trained, nothing written (dry run)")
    else:
        say_next(plans, output)
    fields = {"runs": runs} if as_list else runs[0]
    output.result(SCHEMA, fields, short="\n".join(str(run["out"]) for run in runs))
