"""`cgmerge export`: write an adapter or a composition in the form that a server reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgmerge import fs
from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError

if TYPE_CHECKING:
    from cgmerge.modules.export import Exported


def export(
    composition: Annotated[
        str, typer.Argument(help="Adapter, composition or .cge", metavar="COMPOSITION")
    ],
    to: Annotated[str, typer.Option("--to", help="peft, vllm or ollama")] = "peft",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write")] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Of a composition by task: only this one")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Cut adapters to this rank; the loss is measured")
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write what servers read: one adapter, or adapters with a table that says which.

    Examples:

      cgmerge export merged.cge --to peft -o adapter

      cgmerge export composed --to vllm --dry-run

      cgmerge export composed --to vllm --rank 16 -o served
    """
    from cgmerge.modules.compose_out import check_out
    from cgmerge.modules.expert import COMPRESSED, is_adapter
    from cgmerge.modules.export import export as write
    from cgmerge.modules.export import plan_export, servers
    from cgmerge.modules.routing.files import find_composition, open_composition
    from cgmerge.refs import local_place

    output = Output(as_json=as_json, quiet=quiet)
    if to not in servers():
        raise UsageError(
            f"--to takes {', '.join(servers())}, found {to!r}", code="server", found=to
        )
    if out is None and not dry_run:
        raise UsageError("no output folder", code="out", hint="add -o OUT (or --dry-run)")
    place = local_place(composition, what="composition", suffix=COMPRESSED)
    if not is_adapter(place):
        find_composition(place)
    found = open_composition(place)
    found.refuse_task(task)
    if out is not None:
        check_out(out.absolute(), [place], None)
        fs.check_target(out, overwrite=overwrite)
    if dry_run or out is None:
        done = plan_export(found, to, task=task, rank=rank)  # type: ignore[arg-type]
    else:
        done = write(found, out, to, task=task, rank=rank, overwrite=overwrite)  # type: ignore[arg-type]
    warnings = _warnings(to, done)
    for name, path in done.adapters.items():
        output.line("adapter", f"{name}  rank {done.rank}  {path}")
    if done.error:
        output.line("lost", f"{done.error:.2%} of ‖ΔW‖ to rank {done.rank}")
    for warning in warnings:
        output.warn(warning)
    output.line(*(("ok", "nothing written (dry run)") if dry_run else ("wrote", str(out))))
    if done.command:
        output.hint(f"in {out or 'the folder'}: {done.command}")
    output.result(
        "cgmerge.export/1",
        {
            "out": None if dry_run else str(out),
            "to": to,
            "adapters": dict(done.adapters),
            "rank": done.rank,
            "truncation_error": done.error,
            "command": done.command,
            "warnings": warnings,
        },
        short=str(out),
    )


def _warnings(to: str, done: "Exported") -> list[str]:
    """Say what a server with its default settings would refuse."""
    from cgmerge.modules.export import VLLM_DEFAULT_RANK

    if to != "vllm" or done.rank <= VLLM_DEFAULT_RANK:
        return []
    text = (
        f"rank {done.rank} is more than {VLLM_DEFAULT_RANK}, which vLLM takes unless"
        f" --max-lora-rank says more; --rank {VLLM_DEFAULT_RANK} cuts to it and measures the loss"
    )
    return [text]
