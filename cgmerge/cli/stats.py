"""`cgmerge stats`: the statistics that data-aware merge methods need."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError


def stats(
    expert: Annotated[str, typer.Argument(help="Adapter folder")],
    *,
    base: options.BaseRef,
    data: Annotated[
        list[str], typer.Option("--data", metavar="FILE...", help="The expert's own kind of data")
    ],
    kind: Annotated[
        Literal["all", "gram", "fisher"],
        typer.Option("--kind", help="gram: regmean, mats; fisher: fisher (slower)"),
    ] = "all",
    limit: Annotated[int, typer.Option("--limit", help="Use the first N rows", min=1)] = 256,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File  [default: inside the expert's folder]"),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept another base fingerprint")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Compute input Grams and diagonal Fisher information of an expert on its data.

    `compose -m regmean` and the like find them beside the expert.

    For example:

      cgmerge stats experts/sort --base BASE --data sort.jsonl

      cgmerge compose experts/* --base BASE -m regmean -o merged
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.data import read_data
    from cgmerge.modules.encoding import encode_all
    from cgmerge.modules.expert import open_expert
    from cgmerge.modules.loading import load_base
    from cgmerge.modules.stats import KINDS, collect, write_stats
    from cgmerge.refs import expanded

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    opened = open_base(base)
    found = open_expert(expert, base=opened)
    found.deltas(opened, force_base=force_base)
    target = out or found.stats_path
    given = out is None and expanded(expert).is_dir()
    shown = str(Path(expert) / target.name) if given else str(target)
    if target.exists() and not overwrite:
        raise UsageError(
            f"{shown} exists already",
            code="out_exists",
            hint="choose another --out, or --overwrite",
        )
    files = [read_data(Path(name)) for name in data]
    examples = [example for file in files for example in file.examples][:limit]
    kinds = KINDS if kind == "all" else (kind,)
    loaded = load_base(opened, device=device, dtype=dtype)
    rows = encode_all(examples, loaded.tokenizer)
    output.line("expert", f"{found.name}  {len(found.pairs)} modules  {found.digest[:12]}")
    output.line("data", f"{len(rows)} rows, {sum(map(len, rows))} tokens")
    with output.progress("stats", len(rows) * len(kinds)) as advance:
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            advance(done)

        result = collect(loaded, found, rows, kinds, progress=step, force_base=force_base)
    write_stats(target, result, found, loaded, [file.sha256 for file in files])
    size = target.stat().st_size
    output.line("wrote", f"{shown} ({size / 1e6:.2f} MB: {', '.join(kinds)})")
    output.result(
        "cgmerge.stats/1",
        {
            "out": shown,
            "expert": found.digest,
            "base": {"ref": opened.ref, "fingerprint": opened.fingerprint},
            "kinds": list(kinds),
            "rows": result.rows,
            "tokens": result.tokens,
            "modules": len(found.pairs),
            "size_bytes": size,
        },
        short=shown,
    )
