"""What a killed run needs to go on, in a hidden folder beside the result.

    .NAME.training/
      run.json            what is being trained (see `Plan.identity`)
      step-00000120/      one checkpoint: files, and manifest.json with their digests
      step-00000180/

A checkpoint is staged and renamed as a whole, its manifest written last, so a crash cannot leave
half of one under its name. What damages files later (a torn disk, a careless hand) is found by
the digests: a damaged checkpoint is skipped and the one before it is used.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, InputError, UsageError
from cgmerge.outputs import SHOWN
from cgmerge.shown import some_of
from cgmerge.tensorfile import file_sha256, read_small

KEEP = 2
_RUN = "run.json"
_MANIFEST = "manifest.json"
_SCHEMA = "cgmerge.run/1"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One sound checkpoint."""

    step: int
    folder: Path


class WorkFolder:
    """The checkpoints of one run.

    Args:
        out: Where the result will be.
    """

    def __init__(self, out: Path) -> None:
        self.out = out = fs.absolute(out)
        self.path = out.parent / f".{fs.cut_name(out.name, 240)}.training"
        self._handle = -1

    def recorded(self) -> dict[str, Any] | None:
        """Return the identity of the run whose checkpoints stand here, or None.

        A folder without a readable run.json is the rest of a run that was being discarded, or
        damaged: see `unclaimed`.

        Raises:
            UsageError: What stands here is not ours.
        """
        self._refuse_foreign()
        path = self.path / _RUN
        if not path.exists():
            return None
        try:
            content = strictjson.loads_object(read_small(path), source=str(path))
        except InputError:
            return None
        identity = content.get("identity")
        same_schema = content.get("schema") == _SCHEMA
        return identity if same_schema and isinstance(identity, dict) else None

    def unclaimed(self) -> str | None:
        """Say which checkpoints cannot be used because nothing tells what run they are of."""
        folders = self._folders()
        if not folders or self.recorded() is not None:
            return None
        names = ", ".join(folder.name for folder in folders)
        why = "is damaged" if (self.path / _RUN).exists() else "is missing"
        return (
            f"checkpoints are discarded ({names} in {self.path}): {_RUN} {why}, so that nothing"
            " tells whether they are of this run"
        )

    def _refuse_foreign(self) -> None:
        """Refuse a file of this name, and a folder with what no run writes there."""
        if not os.path.lexists(self.path):
            return
        if self.path.is_symlink() or not self.path.is_dir():
            names = [self.path.name]
        else:
            names = sorted(e.name for e in self.path.iterdir() if not _is_ours(e.name))
        if names:
            raise UsageError(
                f"{self.path} is where checkpoints go while training, but it holds what no run"
                f" wrote there: {some_of(names)}",
                code="work_foreign",
                hint="move it away, or choose another --out",
                path=self.path,
                found=names[:SHOWN],
            )

    def open(self, identity: dict[str, Any]) -> None:
        """Create the folder for a run, or take it over, and lock it.

        Raises:
            UsageError: Another process is training into it right now.
            StorageError: It cannot be written.
        """
        if not self.path.exists():
            with fs.new_folder(self.path) as stage:
                fs.write_json(stage / _RUN, {"schema": _SCHEMA, "identity": identity})
        self._lock()

    def close(self) -> None:
        """Give up the lock; the checkpoints stay."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def discard(self) -> None:
        """Remove the folder, run.json last, so that a half-removed folder is recognised."""
        for entry in sorted(self.path.glob("*")):
            if entry.name != _RUN:
                fs.remove(entry)
        fs.remove(self.path)

    @contextlib.contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """Stage a checkpoint; on success it is sealed, put in place, and old ones are removed.

        Yields:
            A private folder to be filled.
        """
        place = self.path / f"step-{step:08d}"
        if not place.is_dir():
            fs.remove(place)  # a file of that name, which was skipped as damaged
        with fs.new_folder(place, overwrite=True, own=True) as stage:
            yield stage
            seal_checkpoint(stage, step)
        for old in self._folders()[KEEP:]:
            fs.remove(old)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Find the newest sound checkpoint.

        Returns:
            The checkpoint, or None; and for each newer one why it was skipped.
        """
        skipped: list[str] = []
        for folder in self._folders():
            try:
                return Checkpoint(verify_checkpoint(folder), folder), skipped
            except InputError as error:
                skipped.append(error.message)
        return None, skipped

    def _folders(self) -> list[Path]:
        """List what is named like a checkpoint folder, newest first."""
        found = [
            (int(match.group(1)), entry)
            for entry in self.path.glob("step-*")
            if (match := _STEP.fullmatch(entry.name))
        ]
        return [entry for _, entry in sorted(found, reverse=True)]

    def _lock(self) -> None:
        # On the folder itself: the lock goes with the process, however it ends, and leaves no file.
        if sys.platform == "win32":
            return  # no locks on folders there; the renames still keep every file whole
        import fcntl

        self._handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise UsageError(
                f"another process is training into {self.out} right now "
                f"(it holds {self.path.name})",
                code="busy",
                hint="wait for it, or choose another --out",
                path=self.path,
            ) from error
        except OSError:
            # Some network file systems have no locks; the renames still keep every file whole.
            pass


def _is_ours(name: str) -> bool:
    return name == _RUN or _STEP.fullmatch(name) is not None or ".cgmerge-tmp-" in name


def seal_checkpoint(folder: Path, step: int) -> None:
    """Write the manifest of a staged checkpoint: sizes and digests of all its files."""
    files = {
        path.name: {"sha256": file_sha256(path), "size": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    fs.write_json(folder / _MANIFEST, {"schema": _SCHEMA, "step": step, "files": files})


def verify_checkpoint(folder: Path) -> int:
    """Check a checkpoint's files against its manifest.

    Returns:
        The step it was taken at.

    Raises:
        InputError: Says which file is missing, short or altered.
    """
    path = folder / _MANIFEST
    if not folder.is_dir():
        raise Damaged(f"{folder.name} is a file, not a checkpoint", code="checkpoint")
    if not path.exists():
        raise Damaged(f"{folder.name} has no {_MANIFEST}", code="checkpoint")
    content = strictjson.loads_object(read_small(path), source=f"{folder.name}/{_MANIFEST}")
    files, step = content.get("files"), content.get("step")
    if (
        content.get("schema") != _SCHEMA
        or type(step) is not int
        or not isinstance(files, dict)
        or not files
        or not all(isinstance(entry, dict) for entry in files.values())
    ):
        raise Damaged(f"{folder.name}/{_MANIFEST} is not a manifest", code="checkpoint")
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{folder.name} lacks {name}", code="checkpoint")
        size = file.stat().st_size
        if size != entry.get("size"):
            raise Damaged(
                f"{folder.name}/{name} has {size} bytes, expected {entry.get('size')}",
                code="checkpoint",
            )
        if file_sha256(file) != entry.get("sha256"):
            raise Damaged(f"{folder.name}/{name} was altered (sha256)", code="checkpoint")
    return step
