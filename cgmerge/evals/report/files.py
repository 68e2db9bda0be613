"""What the files of a target add to a report: size on disk, how it was made, tuning curves."""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cgmerge import strictjson
from cgmerge.errors import Incompatible, NotFound
from cgmerge.evals.chosen import data_of, tuned_warning
from cgmerge.evals.record import TargetInfo
from cgmerge.evals.report.sections import Column, Section
from cgmerge.nearest import nearest
from cgmerge.refs import local_place
from cgmerge.tensorfile import read_small

_MOST_POINTS = 500
_MOST_FILES = 40
_LARGEST_SCALE = 1e6
_RECORD = "cgmerge.json"


@dataclass(frozen=True, slots=True)
class Point:
    """One merge that tuning tried."""

    scale: float
    score: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Scores over scales, all other parameters fixed; the points in the order of scales."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Tuned:
    """How the parameters of a target were chosen.

    Attributes:
        data: (file, sha256) of each data file that was used for it.
        curves: Scores over scales; empty where the choice was made another way.
        chosen: The scale that was taken, if any.
    """

    data: tuple[tuple[str, str], ...]
    curves: tuple[Curve, ...] = ()
    chosen: float | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """What is known of a target's files.

    Attributes:
        size: Bytes of all of them.
        made_by: Method and parameters in words; empty for what was trained.
        tuned: How parameters were chosen, if they were.
        digest: Of the adapter that they hold; None where that was not looked at.
    """

    size: int
    made_by: str = ""
    tuned: Tuned | None = None
    digest: str | None = None


def files_of(column: Column, known: Mapping[str, Files]) -> Files | None:
    """Return what is known of a column's files; another part may have another model of its name."""
    found = known.get(column.name)
    return found if found is None or found.digest in (None, column.target.digest) else None


def read_files(given: Mapping[str, str], sections: Sequence[Section]) -> dict[str, Files]:
    """Look at the files of targets.

    Args:
        given: Target to its folder or `.cge` file.
        sections: Where the targets stand.

    Raises:
        NotFound: No such target or path.
        Incompatible: An adapter that is not the one that was scored.
        Damaged: Its `cgmerge.json` is not one.
    """
    from cgmerge.modules.expert import COMPRESSED, is_adapter, open_expert

    columns: dict[str, list[TargetInfo]] = {}
    for column in (one for section in sections for one in section.columns):
        columns.setdefault(column.name, []).append(column.target)
    found = {}
    for name, ref in given.items():
        if name not in columns:
            near = nearest(name, columns)
            raise NotFound(
                f"--files {name}: no record has such a target",
                code="target",
                hint=f"{f'did you mean {near[0]}? ' if near else ''}there are {', '.join(columns)}",
                found=name,
            )
        place = local_place(ref, what="target", suffix=COMPRESSED)
        files = _look_at(place)
        adapters = [one for one in columns[name] if one.kind in ("expert", "merged")]
        if adapters and is_adapter(place):
            files = replace(files, digest=open_expert(ref).digest)
            if files.digest not in {one.digest for one in adapters}:
                raise _another(name, ref, files.digest or "", adapters[0].digest)
        found[name] = files
    return found


def _another(name: str, ref: str, found: str, expected: str) -> Incompatible:
    return Incompatible(
        f"--files {name}: {ref} is not the adapter that was scored: sha256 {found[:16]}…,"
        f" recorded {expected[:16]}…",
        code="digest",
        hint="name the folder that was evaluated, or evaluate again",
        expected=expected,
        found=found,
    )


def _look_at(place: Path) -> Files:
    if place.is_file():
        return Files(place.stat().st_size)
    record = place / _RECORD
    if not record.is_file():
        return Files(_size(place))
    content = strictjson.loads_object(read_small(record), source=str(record))
    return Files(_size(place), _made_by(content), _tuned(content))


def _size(folder: Path) -> int:
    """Add up the regular files of a folder; links lead elsewhere and are not counted."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            status = Path(parent, name).lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _made_by(content: Mapping[str, Any]) -> str:
    params = content.get("params")
    words = params.items() if isinstance(params, dict) else ()
    plain = [f"{key} {value}" for key, value in words if isinstance(value, int | float | str)]
    return ", ".join([str(content.get("method", "")), *plain])


def _tuned(content: Mapping[str, Any]) -> Tuned | None:
    """Read what tuning left; other searches leave other keys, of which only the data is taken."""
    data, tuning = data_of(content)[:_MOST_FILES], content.get("tuning")
    if not isinstance(tuning, dict):
        return Tuned(data) if data else None
    chosen = tuning.get("chosen")
    scale = chosen.get("scale") if isinstance(chosen, dict) else None
    return Tuned(data, _curves(tuning.get("trials")), scale if _is_number(scale) else None)


def _curves(trials: object) -> tuple[Curve, ...]:
    """Sort trials into one curve for each setting of the other parameters."""
    found: dict[str, list[Point]] = {}
    for trial in (trials if isinstance(trials, list) else [])[:_MOST_POINTS]:
        params = trial.get("params") if isinstance(trial, dict) else None
        if not isinstance(params, dict) or not _is_number(params.get("scale")):
            continue
        if abs(params["scale"]) <= _LARGEST_SCALE and _is_number(trial.get("score")):
            rest = ", ".join(f"{key} {value}" for key, value in params.items() if key != "scale")
            point = Point(float(params["scale"]), float(trial["score"]))
            found.setdefault(rest, []).append(point)
    return tuple(
        Curve(name, tuple(sorted(points, key=lambda point: point.scale)))
        for name, points in found.items()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def tuned_on_reported(section: Section, known: Mapping[str, Files]) -> list[str]:
    """Name data files that a target was tuned on and is scored on: such scores are too good."""
    scored = {
        skill.sha256: skill.source
        for source in section.sources
        for skill in source.record.skills
        if skill.sha256
    }
    return [
        tuned_warning(column.name, scored[digest])
        for column in section.columns
        if (files := files_of(column, known)) is not None and files.tuned is not None
        for _, digest in files.tuned.data
        if digest in scored
    ]
