"""Where a result may go: never over the base or a folder of inputs."""

import os
from collections.abc import Sequence
from pathlib import Path

from cgmerge.errors import UsageError
from cgmerge.inputs import real_path, refuse_inputs
from cgmerge.modules.base import Base

MAX_NAME = 255
"""Bytes that the usual file systems take for one name."""


def check_out(out: Path, experts: Sequence[Path], base: Base | None) -> None:
    """Refuse an output folder that would harm inputs.

    No input is ever replaced, also with `--overwrite`.

    Args:
        out: Absolute path.
        experts: Folders or files of the experts, and other inputs.
        base: The base, where there is one.

    Raises:
        UsageError: It is an input, lies inside one or holds one, or has a name that no file
            system takes.
    """
    _check_name(out)
    if base is not None and real_path(base.folder) == real_path(out):
        raise UsageError(f"--out {out} is the base; bases are never changed", code="out_is_base")
    refuse_inputs(out, [*experts, *([base.folder] if base else [])])


def _check_name(out: Path) -> None:
    for part in out.parts:
        if len(os.fsencode(part)) > MAX_NAME:
            raise UsageError(
                f"--out has a name of {len(os.fsencode(part))} bytes; file systems take {MAX_NAME}",
                code="out_name",
            )
        if any("\ud800" <= char <= "\udfff" for char in part):
            raise UsageError(f"the name {part!r} in --out is not valid Unicode", code="out_name")
