"""`cgmerge run` and `cgmerge init`: what to train, compose and measure, in one file."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import counted, score_text, some_of

if TYPE_CHECKING:
    from cgmerge.evals.pipeline.run import Executor, State
    from cgmerge.evals.pipeline.steps import Step

_TEMPLATE = """\
# A pipeline of cgmerge: `cgmerge run pipeline.yml` does what is not done yet.
# Paths are relative to this file. Lists of values are tried one by one (a grid).

base: tiny                      # a folder, hf://user/repo, tiny, smollm2-135m
out: study                      # everything that is made

train:                          # options of `cgmerge train`, for all skills …
  steps: 160
  seed: 0
  # launcher: accelerate launch --num_processes 2
  skills:                       # … and per skill
    reverse: reverse.jsonl
    sort: {data: sort.jsonl, rank: 8}

# experts:                      # experts that exist already
#   count: experts/count

# compress:                     # every expert as a small file, measured like the others
#   - {mode: ternary, target-ratio: [8, 16]}

compose:                        # options of `cgmerge compose`
  - {method: task-arithmetic, scale: [0.5, 0.7, 1.0]}
  - {method: ties, set: {density: [0.1, 0.2]}, scale: [1.0, 1.3]}
  # - {name: tuned, method: core+ties, tune: [sort.val.jsonl, reverse.val.jsonl]}
  # - {method: gate, examples: {sort: sort.few.jsonl, reverse: reverse.few.jsonl}}

eval:                           # options of `cgmerge eval`
  data: {reverse: reverse.test.jsonl, sort: sort.test.jsonl, pairs: pairs.test.jsonl}

report: true                    # study/report.html
"""


def run(
    file: Annotated[Path, typer.Argument(metavar="PIPELINE", help="YAML or JSON")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="STEP", help="Only these steps; patterns as `train-*`"),
    ] = None,
    executor: Annotated[
        Literal["inline", "processes", "ray"],
        typer.Option("--executor", help="Where commands run; inline is this process"),
    ] = "inline",
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=1024, help="Steps at a time (not inline)")
    ] = 2,
    address: Annotated[
        str | None, typer.Option("--address", help="Of a Ray cluster that shares this folder")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train, compress, compose, measure and report what a file says; what is done is not repeated.

    A stopped run goes on when the command is repeated, to the same results.

    For example:

      cgmerge init pipeline.yml

      cgmerge run pipeline.yml --dry-run

      cgmerge run pipeline.yml --executor processes --workers 4

      cgmerge run pipeline.yml --only 'train-*'
    """
    from cgmerge.evals.pipeline.config import check_there, read_pipeline
    from cgmerge.evals.pipeline.run import State, command_of, run_steps, table_of
    from cgmerge.evals.pipeline.steps import identities, plan_steps
    from cgmerge.modules.base import open_base

    output = Output(as_json=as_json, quiet=quiet)
    if address and executor != "ray":
        raise UsageError("--address is for --executor ray", code="option")
    pipeline = read_pipeline(file)
    steps = plan_steps(pipeline, _options())
    check_there(pipeline)
    base = open_base(pipeline.base)
    state = State(pipeline.out, identities(steps, (pipeline.base, base.fingerprint)))
    chosen = _chosen(steps, only or [], file)
    if dry_run:
        _show_plan(chosen, state, output)
        return
    runner = _executor(executor, workers, address)
    try:
        progress = run_steps(
            chosen, state, runner, workers=1 if executor == "inline" else workers, say=output.line
        )
    finally:
        runner.close()
    rows = table_of(steps, state)
    _write_results(pipeline.out, rows)
    commands = {step.name: command_of(step) for step in steps}
    output.result(
        "cgmerge.run/1",
        {
            "ok": not progress.failed,
            "out": str(pipeline.out),
            "cached": sorted(progress.cached),
            "done": sorted(progress.done),
            "failed": {n: {"code": o.code, "command": commands[n]}
                       for n, o in sorted(progress.failed.items())},
            "left": progress.left,
            "results": rows,
        },
        short=str(pipeline.out / "results.json"),
    )  # fmt: skip
    _show_results(rows, output)
    if progress.failed:
        first = next(iter(progress.failed))
        output.hint(f"repeat it by hand to see more: {commands[first]}")
        raise typer.Exit(progress.failed[first].code or 3)


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write")] = Path(
        "pipeline.yml"
    ),
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a commented pipeline to start from.

    For example:

      cgmerge init pipeline.yml
    """
    from cgmerge import fs

    output = Output(as_json=as_json, quiet=quiet)
    fs.replace_file(file, _TEMPLATE.encode(), overwrite=overwrite)
    output.line("wrote", str(file))
    output.hint(f"name your data in it, then: cgmerge run {quoted(file)} --dry-run")
    output.result("cgmerge.init/1", {"out": str(file)}, short=str(file))


def _options() -> dict[str, Mapping[str, bool]]:
    """Return the options of every command that a pipeline can run, and whether each is a flag."""
    from cgmerge.cli.app import app
    from cgmerge.evals.pipeline.steps import KINDS

    group: Any = typer.main.get_command(app)
    return {
        name: {
            word: bool(param.is_flag)
            for param in group.commands[name].params
            if param.param_type_name == "option"
            for word in param.opts
        }
        for name in KINDS
        if name in group.commands
    }


def _chosen(steps: "list[Step]", patterns: list[str], file: Path) -> "list[Step]":
    for pattern in patterns:
        if not any(fnmatchcase(step.name, pattern) for step in steps):
            raise UsageError(
                f"{file} has no step {pattern!r}",
                code="pipeline",
                hint=f"there are {some_of((step.name for step in steps), 10)}",
            )
    return [s for s in steps if not patterns or any(fnmatchcase(s.name, p) for p in patterns)]


def _executor(kind: str, workers: int, address: str | None) -> "Executor":
    from cgmerge.cli.app import run as call
    from cgmerge.evals.pipeline.run import Inline, Processes

    if kind == "ray":
        from cgmerge.evals.pipeline.cluster import Ray

        return Ray(address, workers)
    return Processes(workers) if kind == "processes" else Inline(call)


def _show_plan(steps: "list[Step]", state: "State", output: Output) -> None:
    from cgmerge.evals.pipeline.run import command_of

    done = [state.result(step) is not None for step in steps]
    for step, finished in zip(steps, done, strict=True):
        output.text(f"{'done' if finished else 'run ':<5} {command_of(step)}")
    output.line("plan", f"{counted(len(steps), 'step')}, {sum(done)} of them done (dry run)")
    output.result(
        "cgmerge.run/1",
        {
            "dry_run": True,
            "steps": [
                {"name": step.name, "done": finished, "command": command_of(step)}
                for step, finished in zip(steps, done, strict=True)
            ],
        },
    )


def _write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    import json

    from cgmerge import fs

    content = {"schema": "cgmerge.results/1", "results": rows}
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    fs.replace_file(out / "results.json", text.encode())


def _show_results(rows: list[dict[str, Any]], output: Output) -> None:
    skills = list(dict.fromkeys(str(row["skill"]) for row in rows))
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        table.setdefault(str(row["target"]), {})[str(row["skill"])] = score_text(row["score"])
    if table:
        output.table(
            ["target", *skills],
            [[name, *(cells.get(skill, "") for skill in skills)] for name, cells in table.items()],
        )
