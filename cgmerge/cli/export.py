"""`cgmerge export`: write an adapter or a composition in the form that a server reads."""

from pathlib import Path
from typing import Annotated

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError


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
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write what servers read: one adapter, or adapters with a table that says which.

    Examples:

      cgmerge export merged.cge --to peft -o adapter

      cgmerge export composed --to vllm -o served
    """
    from cgmerge.modules.compose_out import check_out
    from cgmerge.modules.expert import COMPRESSED, is_adapter
    from cgmerge.modules.export import export as write
    from cgmerge.modules.export import servers
    from cgmerge.modules.routing.files import find_composition, open_composition
    from cgmerge.refs import local_place

    output = Output(as_json=as_json, quiet=quiet)
    if to not in servers():
        raise UsageError(
            f"--to takes {', '.join(servers())}, found {to!r}", code="server", found=to
        )
    if out is None:
        raise UsageError("no output folder", code="out", hint="add -o OUT")
    place = local_place(composition, what="composition", suffix=COMPRESSED)
    if not is_adapter(place):
        find_composition(place)
    found = open_composition(place)
    found.refuse_task(task)
    check_out(out.absolute(), [place], None)
    done = write(found, out, to, task=task, rank=rank, overwrite=overwrite)  # type: ignore[arg-type]
    for name, path in done.adapters.items():
        output.line("adapter", f"{name}  {path}")
    if done.error:
        output.line("lost", f"{done.error:.2%} of ‖ΔW‖ to rank {done.rank}")
    output.line("wrote", str(out))
    if done.command:
        output.hint(f"in {out}: {done.command}")
    output.result(
        "cgmerge.export/1",
        {
            "out": str(out),
            "to": to,
            "adapters": dict(done.adapters),
            "rank": done.rank,
            "truncation_error": done.error,
            "command": done.command,
        },
        short=str(out),
    )
