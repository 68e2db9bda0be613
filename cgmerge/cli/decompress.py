"""`cgmerge decompress`: a compressed expert as an ordinary PEFT folder."""

from pathlib import Path
from typing import Annotated

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output


def decompress(
    file: Annotated[Path, typer.Argument(metavar="FILE.cge", help="Compressed expert")],
    out: options.Out,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a compressed expert as a PEFT folder that every loader reads, the same bytes each time.

    For example:

      cgmerge decompress a.cge -o a
    """
    from cgmerge.modules.compress.expand import decompress as expand

    output = Output(as_json=as_json, quiet=quiet)
    found = expand(file, out, overwrite=overwrite)
    size = sum(path.stat().st_size for path in found.out.iterdir())
    mode = found.manifest["method"]["mode"]
    output.line("read", f"{file} ({found.size:,} bytes, mode {mode}), every digest verified")
    output.line("wrote", f"{out} ({size / 1e6:.2f} MB, rank {found.rank}, {found.modules} modules)")
    base = found.manifest["base"]["id"]
    output.hint(f"measure it: cgmerge eval {out} --base {base} --data TEST.jsonl")
    output.result(
        "cgmerge.decompress/1",
        {
            "out": str(out),
            "file": str(file),
            "mode": mode,
            "size_bytes": found.size,
            "modules": found.modules,
            "rank": found.rank,
            "base": found.manifest["base"],
        },
        short=str(out),
    )
