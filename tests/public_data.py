"""Published benchmark files to check against; they are no part of the repository."""

import gzip
import os
from pathlib import Path

import pytest

FOLDER = Path(
    os.environ.get("CGMERGE_PUBLIC_DATA") or Path(__file__).parents[2] / "shared" / "data"
)


def folder(name):
    """Return a folder of published files, or skip the test."""
    found = FOLDER / name
    if not found.is_dir():
        pytest.skip(f"no published files in {found}")
    return found


def lines(*parts):
    """Return the lines of a packed text file, or skip the test."""
    path = folder(parts[0]).joinpath(*parts[1:])
    with gzip.open(path, "rt") as file:
        return [line.rstrip("\n") for line in file]


def scan_pairs(name):
    """Return (command, actions) of a SCAN file, repeated rows included."""
    return [tuple(line[4:].split(" OUT: ")) for line in lines("scan", f"{name}.txt.gz")]
