"""Options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on stdout; an error is the last line of stderr"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result, no comments")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More details")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random", min=0)]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check inputs and settings, compute and write nothing")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps …")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16")]
BaseRef = Annotated[
    str, typer.Option("--base", help="Base model: folder, hf://user/repo, tiny, smollm2-135m")
]
