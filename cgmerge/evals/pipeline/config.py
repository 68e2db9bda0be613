"""The pipeline file: read strictly, paths relative to it, grids spelled as lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgmerge.errors import UsageError
from cgmerge.modules.builtin import NAMES
from cgmerge.modules.recipefile import located, located_base, read_mapping, refuse_missing
from cgmerge.nearest import nearest

Options = Mapping[str, Any]
"""Options of one command as the file has them: name without dashes in front, to value."""

_KEYS = ("base", "out", "train", "experts", "compress", "compose", "eval", "report")
_PATHS = frozenset(("data", "eval-data", "tune", "examples", "calibrate"))
"""Options that name files to read."""

_LABELLED = frozenset(("data", "examples"))
"""Those of them that may be a mapping from a name to a file (`NAME=FILE` on the command line)."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline as its file says it.

    Attributes:
        path: The file.
        base: What everything stands on.
        out: The folder for everything that is made.
        train: Skill to options of `train`.
        launcher: Words in front of training commands, such as `accelerate launch`.
        experts: Name to an expert that exists already.
        compress: Options of `compress`, each applied to every expert.
        compose: Options of `compose`, lists still unexpanded.
        evaluation: Options of `eval`; empty where nothing is measured.
        report: Whether to end with a page.
    """

    path: Path
    base: str
    out: Path
    train: Mapping[str, Options]
    launcher: Sequence[str]
    experts: Mapping[str, str]
    compress: Sequence[Options]
    compose: Sequence[Options]
    evaluation: Options
    report: bool


@dataclass(frozen=True, slots=True)
class Files:
    """The value of an option that names files, by label where there are labels.

    Attributes:
        items: Label and file.
        place: The key in the pipeline's file.
    """

    items: tuple[tuple[str | None, Path], ...]
    place: str


def read_pipeline(path: Path) -> Pipeline:
    """Read a pipeline file.

    Args:
        path: YAML or JSON.

    Raises:
        UsageError: Unknown keys, wrong kinds of values, nothing to do; names the place.
        NotFound, Damaged: No such file, or not JSON.
    """
    content = read_mapping(path)
    _check_keys(content, _KEYS, str(path))
    for key in ("base", "out"):
        if not isinstance(content.get(key), str):
            raise _wrong(path, key, "a text", content.get(key))
    train, launcher = _training(content.get("train"), path)
    experts = {
        name: str(located(ref, path)) if "://" not in ref else ref
        for name, ref in _texts(content.get("experts"), "experts", path).items()
    }
    twice = sorted(set(train) & set(experts))
    if twice:
        raise UsageError(
            f"{path}: {twice[0]!r} is both a skill to train and an expert that exists",
            code="pipeline",
            hint="rename one of them",
        )
    if not train and not experts:
        raise UsageError(
            f"{path} names no experts", code="pipeline", hint="add `train:` or `experts:`"
        )
    found = Pipeline(
        path,
        located_base(content["base"], path),
        located(content["out"], path),
        train,
        launcher,
        experts,
        _entries(content.get("compress"), "compress", path),
        _entries(content.get("compose"), "compose", path),
        _options(content.get("eval") or {}, "eval", path),
        bool(content.get("report", bool(content.get("eval")))),
    )
    if content.get("report") not in (None, True, False):
        raise _wrong(path, "report", "true or false", content["report"])
    if found.report and not found.evaluation:
        raise UsageError(f"{path}: a report needs `eval:`", code="pipeline", hint="add `eval:`")
    if found.evaluation and "data" not in found.evaluation:
        raise UsageError(f"{path}: `eval:` names no data", code="pipeline", hint="add `data:`")
    return found


def check_there(pipeline: Pipeline) -> None:
    """Refuse a pipeline that names files or folders which are not there, before any work.

    Raises:
        NotFound: Says the key and the absolute path of each.
    """
    named: list[tuple[str, Path]] = []
    if pipeline.base not in NAMES and "://" not in pipeline.base:
        named.append(("base", Path(pipeline.base)))
    named += [
        (f"experts.{name}", Path(ref)) for name, ref in pipeline.experts.items() if "://" not in ref
    ]
    entries = (*pipeline.train.values(), *pipeline.compress, *pipeline.compose, pipeline.evaluation)
    for value in (value for entry in entries for value in entry.values()):
        if isinstance(value, Files):
            named += [
                (f"{value.place}.{label}" if label else value.place, path)
                for label, path in value.items
            ]
    refuse_missing(pipeline.path, dict.fromkeys(named))


def _training(value: Any, path: Path) -> tuple[dict[str, Options], list[str]]:
    if value is None:
        return {}, []
    if not isinstance(value, dict):
        raise _wrong(path, "train", "a mapping with `skills`", value)
    shared = dict(value)
    skills, launcher = shared.pop("skills", None), shared.pop("launcher", "")
    if not isinstance(skills, dict) or not skills:
        raise _wrong(path, "train.skills", "a mapping from skill to data or options", skills)
    if not isinstance(launcher, str):
        raise _wrong(path, "train.launcher", "a text", launcher)
    found: dict[str, Options] = {}
    common = _options(shared, "train", path)
    for skill, own in skills.items():
        place = f"train.skills.{skill}"
        alone = {} if isinstance(own, dict) else {"data": _files(own, "data", place, path)}
        entry = alone or _options(own, place, path)
        found[_name(skill, "train.skills", path)] = {**common, **entry}
    return found, launcher.split()


def _entries(value: Any, place: str, path: Path) -> list[Options]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _wrong(path, place, "a list of mappings", value)
    return [_options(entry, f"{place}[{i}]", path) for i, entry in enumerate(value)]


def _options(entry: Any, place: str, path: Path) -> Options:
    """Locate files and check that values are of a kind that a command line can hold."""
    if not isinstance(entry, dict):
        raise _wrong(path, place, "a mapping", entry)
    found: dict[str, Any] = {}
    for name, value in entry.items():
        key = str(name).replace("_", "-")
        where = f"{place}.{name}"
        if key in _PATHS:
            found[key] = _files(value, key, where, path)
        elif key == "set":
            found[key] = {str(k): _scalars(v, where, path) for k, v in _pairs(value, where, path)}
        else:
            found[key] = _scalars(value, where, path)
    return found


def _files(value: Any, key: str, where: str, path: Path) -> Files:
    if isinstance(value, dict) and key in _LABELLED:
        return Files(
            tuple((str(k), located(_text(v, where, path), path)) for k, v in value.items()), where
        )
    many = value if isinstance(value, list) else [value]
    return Files(tuple((None, located(_text(item, where, path), path)) for item in many), where)


def _scalars(value: Any, where: str, path: Path) -> Any:
    many = value if isinstance(value, list) else [value]
    if not many or not all(isinstance(item, str | int | float | bool) for item in many):
        raise _wrong(path, where, "a value or a list of values", value)
    return value


def _pairs(value: Any, where: str, path: Path) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise _wrong(path, where, "a mapping", value)
    return list(value.items())


def _texts(value: Any, place: str, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(path, place, "a mapping from name to folder", value)
    return {
        _name(name, place, path): _text(ref, f"{place}.{name}", path) for name, ref in value.items()
    }


def _text(value: Any, where: str, path: Path) -> str:
    if not isinstance(value, str):
        raise _wrong(path, where, "a text", value)
    return value


def _name(value: Any, place: str, path: Path) -> str:
    """Return a name that can be a folder's, and stand before `=`."""
    text = str(value)
    plain = text and not text.startswith(".") and all(c.isalnum() or c in "._+-" for c in text)
    if not plain:
        raise _wrong(path, place, "names of letters, digits and . _ + -", value)
    return text


def _check_keys(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = [str(key) for key in content if key not in known]
    if unknown:
        close = nearest(unknown[0], known)
        raise UsageError(
            f"{where}: unknown key {unknown[0]!r}",
            code="pipeline",
            hint=f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}",
            found=unknown,
        )


def _wrong(path: Path, place: str, wanted: str, found: Any) -> UsageError:
    shown = "nothing" if found is None else repr(found)[:60]
    return UsageError(f"{path}: `{place}` must be {wanted}, found {shown}", code="pipeline")
