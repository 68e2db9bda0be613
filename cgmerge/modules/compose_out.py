"""Where a result may go: never over the base, a folder of inputs, or what is no result."""

import os
from collections.abc import Sequence
from pathlib import Path

from cgmerge.errors import UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.pairs import CONFIG
from cgmerge.modules.recipe import RECORD

MAX_NAME = 255
"""Bytes that the usual file systems take for one name."""

_RESULT_FILES = (RECORD, CONFIG, "config.json")


def check_out(out: Path, experts: Sequence[Path], base: Base | None) -> None:
    """Refuse an output folder that would harm inputs or what is not a result.

    An expert itself may be replaced, with `--overwrite`.

    Args:
        out: Absolute path.
        experts: Folders of the experts.
        base: The base, where there is one.

    Raises:
        UsageError: It lies inside an expert, holds an input, is the base, has a name that no file
            system takes, or is somebody's folder.
    """
    _check_name(out)
    real = Path(os.path.realpath(out))  # Path.resolve raises on a link to itself
    for folder in experts:
        if folder.resolve() in real.parents:
            raise UsageError(f"--out {out} lies inside the expert {folder}", code="out_inside")
    if base is not None and base.folder.resolve() == real:
        raise UsageError(f"--out {out} is the base; bases are never changed", code="out_is_base")
    for folder in [*experts, *([base.folder] if base else [])]:
        if real in folder.resolve().parents:
            raise UsageError(f"--out {out} holds the input {folder}", code="out_holds_input")
    ours = any((out / name).exists() for name in _RESULT_FILES)
    if out.is_dir() and not ours and any(out.iterdir()):
        raise UsageError(
            f"{out} exists already and holds no adapter or model, so it is never replaced",
            code="out_exists",
            hint="choose another --out",
        )


def _check_name(out: Path) -> None:
    for part in out.parts:
        if len(os.fsencode(part)) > MAX_NAME:
            raise UsageError(
                f"--out has a name of {len(os.fsencode(part))} bytes; file systems take {MAX_NAME}",
                code="out_name",
            )
        if any("\ud800" <= char <= "\udfff" for char in part):
            raise UsageError(f"the name {part!r} in --out is not valid Unicode", code="out_name")
