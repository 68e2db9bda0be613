"""The three streams of a process as they may be: closed, full, or unable to write our letters."""

import contextlib
import io
import os
import sys
from typing import TextIO

from cgmerge.errors import StorageError


def prepare_streams() -> StorageError | None:
    """Make the streams of this process usable.

    What they cannot encode is written as escapes. A closed error output or input is replaced by
    nothing, so that no file that is opened later gets its number.

    Returns:
        What to say where there is no standard output: results would be lost.
    """
    missing = [place for place in ("stdin", "stdout", "stderr") if _is_closed(getattr(sys, place))]
    for place in missing:
        mode = "r" if place == "stdin" else "w"
        setattr(sys, place, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "stdout" not in missing:
        return None
    return StorageError(
        "the standard output is closed, so that results would be lost",
        code="stdout",
        hint="to see none of them, write > /dev/null",
    )


def drop_stdout() -> None:
    """Let what is still to be written go nowhere; else the interpreter complains at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _is_closed(stream: TextIO | None) -> bool:
    return stream is None or stream.closed
