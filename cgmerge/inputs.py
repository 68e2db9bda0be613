"""What a command reads is never what it replaces."""

import os
from collections.abc import Iterable
from pathlib import Path

from cgmerge.errors import UsageError


def refuse_inputs(out: Path, inputs: Iterable[Path], *, option: str = "--out") -> None:
    """Refuse an output that is an input, lies inside one, or holds one; links are followed.

    Args:
        out: A file or a folder, whether or not it is there.
        inputs: Files and folders that are read.
        option: What names the output.

    Raises:
        UsageError: `--overwrite` does not help.
    """
    real = real_path(out)
    for given in inputs:
        place = real_path(given)
        kind = "folder" if place.is_dir() else "file"
        if place == real:
            raise UsageError(
                f"{option} {out} is an input of this command; inputs are never replaced",
                code="out_is_input",
                hint=f"choose another {option}",
                path=given,
            )
        if place in real.parents:
            raise UsageError(
                f"{option} {out} lies inside the input {kind} {given}",
                code="out_inside",
                hint=f"choose another {option}",
                path=given,
            )
        if real in place.parents:
            raise UsageError(
                f"{option} {out} holds the input {given}",
                code="out_holds_input",
                hint=f"choose another {option}",
                path=given,
            )


def real_path(path: Path) -> Path:
    """Return where a path leads; `Path.resolve` would raise on a link to itself."""
    return Path(os.path.realpath(path.expanduser() if str(path).startswith("~") else path))
