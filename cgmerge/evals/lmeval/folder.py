"""A folder of task files, read strictly: data that the harness may see, nothing that runs.

lm-evaluation-harness itself imports whatever a task file names (`!function`, `class`), loads
metrics as scripts and evaluates templates without a sandbox. Here a file may say what to ask, what
to expect and which of the harness's own metrics to use; the rows come from files of the same
folder and are read by our readers, so that neither code nor network is within its reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from cgmerge import fs, strictyaml
from cgmerge.errors import NotFound, Unsafe, UsageError
from cgmerge.modules.data import read_rows
from cgmerge.shown import some_of
from cgmerge.tensorfile import read_small

_SUFFIXES = (".yaml", ".yml")
_LOADERS = ("json", "parquet")  # of a csv file the harness guesses what is a number
_SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
_OUTPUTS = ("generate_until", "multiple_choice", "loglikelihood")
_TEXTS = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix")
_KEYS = {
    "task", "task_alias", "tag", "dataset_path", "dataset_kwargs", *_SPLITS, *_TEXTS,
    "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot", "output_type",
    "generation_kwargs", "repeats", "metric_list", "filter_list", "metadata",
}  # fmt: skip
_RUN = {
    "class": "a class", "custom_dataset": "a function", "process_docs": "a function",
    "process_results": "a function", "unsafe_code": "code", "use_prompt": "a prompt package",
}  # fmt: skip
METRICS = (
    "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "f1", "mcc", "brier_score",
    "perplexity", "bleu", "chrf", "ter",
)  # fmt: skip
"""Metrics that are arithmetic of the harness's own; other names are looked for on the hub."""
_FILTERS = ("take_first", "take_first_k", "majority_vote", "lowercase", "uppercase", "map",
            "remove_whitespace")  # fmt: skip
_MOST_FILES = 1000


@dataclass(frozen=True)
class TaskFile:
    """A task that was read and checked.

    Attributes:
        name: Of the task, and of the skill.
        source: Name of its file.
        sha256: Digest over its files: settings and data.
        config: For the harness, without a dataset.
        splits: The rows of each split.
    """

    name: str
    source: str
    sha256: str
    config: Mapping[str, Any]
    splits: Mapping[str, list[dict[str, Any]]] = field(repr=False)


def read_folder(folder: Path) -> list[TaskFile]:
    """Read the tasks of a folder and check all of them.

    Args:
        folder: With task files (`*.yaml`) and their data, also in folders inside it.

    Returns:
        Tasks in the order of their files' paths.

    Raises:
        NotFound: No folder, or no task in it.
        UsageError: A file that is no task, or two tasks of one name.
        Unsafe: A file that asks for code, a regular expression or a file outside the folder.
        DataError: Data that cannot be read.
    """
    if not folder.is_dir():
        raise NotFound(f"no such folder: {folder}", code="tasks", path=folder)
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if len(paths) > _MOST_FILES:
        raise UsageError(f"{folder} holds {len(paths)} task files; {_MOST_FILES} are read",
                         code="tasks", found=len(paths))  # fmt: skip
    root = folder.resolve()
    contents = {path: _read(path, root, ()) for path in paths}
    tasks = [
        _task(path, *content, root) for path, content in contents.items() if "task" in content[0]
    ]
    if not tasks:
        inside = sorted(entry.name for entry in folder.iterdir())
        raise NotFound(
            f"{folder} holds no task: no .yaml file with a `task:`",
            code="tasks",
            hint=f"it holds {some_of(inside, 8)}" if inside else "it is empty",
            path=folder,
        )
    seen: dict[str, TaskFile] = {}
    for task in tasks:
        if task.name in seen:
            raise UsageError(
                f"two tasks are called {task.name!r}: {seen[task.name].source} and {task.source}",
                code="name",
                hint="rename one of them (`task:`)",
                found=task.name,
            )
        seen[task.name] = task
    return tasks


def _read(path: Path, root: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], list[bytes]]:
    """Read a file and what it includes; return its settings and the bytes of all files."""
    place = _inside(path, root, path)
    if place in seen:
        raise UsageError(f"{path}: the files include each other in a circle", code="include")
    content = read_small(fs.absolute(place), limit=strictyaml.MAX_BYTES)
    _refuse_tags(path, content)
    own = strictyaml.loads_mapping(content, source=str(path))
    asked = own.pop("include", [])
    merged: dict[str, Any] = {}
    read = [content]
    for name in asked if isinstance(asked, list) else [asked]:
        if not isinstance(name, str):
            raise UsageError(f"{path}: `include` must name files, found {name!r}", code="include")
        settings, more = _read(path.parent / name, root, (*seen, place))
        settings.pop("task_list", None)
        merged |= settings
        read += more
    return merged | own, read


def _refuse_tags(path: Path, content: bytes) -> None:
    """Refuse the harness's tag for code in words of its own; YAML's other tags are never read."""
    if b"!function" in content:
        raise _unsafe(path, "`!function` runs code that is beside it", "function")


def _task(path: Path, settings: dict[str, Any], read: list[bytes], root: Path) -> TaskFile:
    _check_settings(path, settings)
    name = settings["task"]
    if not isinstance(name, str) or not name.isprintable() or not name.strip() or "/" in name:
        raise UsageError(f"{path}: {name!r} cannot be the name of a task", code="name")
    files = _data_files(path, settings)
    digest = sha256(b"".join(sha256(one).digest() for one in read))
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, places in files.items():
        rows: list[dict[str, Any]] = []
        for place in places:
            own, file_digest = read_rows(_inside(path.parent / place, root, path))
            rows += own
            digest.update(bytes.fromhex(file_digest))
        splits[split] = rows
    missing = [settings[key] for key in _SPLITS if settings.get(key) not in (None, *splits)]
    if missing:
        raise UsageError(
            f"{path}: there is no data for the split {missing[0]!r}",
            code="split",
            hint=f"data_files has {', '.join(splits)}",
            found=missing[0],
        )
    config = {
        k: v for k, v in settings.items() if k not in ("dataset_path", "dataset_kwargs", "tag")
    }
    return TaskFile(name, path.name, digest.hexdigest(), config, splits)


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    for key, what in _RUN.items():
        if settings.get(key) not in (None, False):
            raise _unsafe(path, f"`{key}` names {what} that would be run", "code")
    strange = [key for key in settings if key not in _KEYS and key not in _RUN]
    if strange:
        raise UsageError(
            f"{path}: `{strange[0]}` is not read from task files",
            code="key",
            hint=f"read are {', '.join(sorted(_KEYS))}",
            found=strange[0],
        )
    output = settings.get("output_type", "generate_until")
    if output not in _OUTPUTS:
        raise UsageError(
            f"{path}: output_type {output!r} has no score for each item",
            code="output_type",
            hint=f"{', '.join(_OUTPUTS)}; for the perplexity of texts:"
            " cgmerge eval --metric perplexity --data FILE",
            found=output,
        )
    for key in _TEXTS:
        if isinstance(settings.get(key), dict) and key != "doc_to_choice":
            raise UsageError(f"{path}: `{key}` must be a text", code="type")
    _check_metrics(path, settings.get("metric_list"))
    _check_filters(path, settings.get("filter_list"))
    fewshot = settings.get("fewshot_config") or {}
    known = {"sampler", "split", "samples", "fewshot_indices", *_TEXTS}
    if not isinstance(fewshot, dict) or not known >= set(fewshot):
        raise UsageError(f"{path}: fewshot_config may hold {', '.join(sorted(known))}", code="key")


def _check_metrics(path: Path, metrics: Any) -> None:
    for one in _mappings(path, "metric_list", metrics):
        name = one.get("metric")
        if name not in METRICS or one.get("hf_evaluate"):
            raise _unsafe(
                path,
                f"the metric {name!r} is none of the harness's own and would be loaded as a script",
                "metric",
            )
        if one.get("regexes_to_ignore"):
            raise _unsafe(path, "`regexes_to_ignore` holds regular expressions", "regex")
        if not isinstance(one.get("aggregation", ""), str):
            raise UsageError(f"{path}: `aggregation` must be a name", code="type")


def _check_filters(path: Path, filters: Any) -> None:
    for pipeline in _mappings(path, "filter_list", filters):
        for one in _mappings(path, "filter", pipeline.get("filter")):
            name = one.get("function")
            if name not in _FILTERS:
                what = "a regular expression" if "regex" in str(name) else "code"
                raise _unsafe(path, f"the filter {name!r} takes {what}", "filter")


def _mappings(path: Path, key: str, value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise UsageError(f"{path}: `{key}` must be a list of mappings", code="type")
    return value


def _data_files(path: Path, settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the data files of each split as they are written."""
    loader, options = settings.get("dataset_path"), settings.get("dataset_kwargs") or {}
    wrong = (
        loader not in _LOADERS or not isinstance(options, dict) or set(options) != {"data_files"}
    )
    if wrong:
        raise UsageError(
            f"{path}: data must be files of the folder, found dataset_path {loader!r} with"
            f" {', '.join(options) or 'nothing'}",
            code="dataset",
            hint="dataset_path: json (or parquet), and dataset_kwargs: {data_files:"
            " {test: FILE}}; tasks with data on a hub run by name: --lm-eval NAME",
        )
    named = options["data_files"]
    splits = named if isinstance(named, dict) else {"train": named}
    found = {key: [one] if isinstance(one, str) else one for key, one in splits.items()}
    for key, files in found.items():
        if not isinstance(files, list) or not files or not all(isinstance(f, str) for f in files):
            raise UsageError(f"{path}: data_files: `{key}` must name files", code="dataset")
    return found


def _inside(place: Path, root: Path, path: Path) -> Path:
    """Return where a file is, if that is a file of the folder."""
    if "://" in str(place) or ":/" in str(place):
        raise _unsafe(path, f"{place.name} is an address, not a file of the folder", "path")
    found = place.resolve()
    if not found.is_relative_to(root):
        raise _unsafe(path, f"{place} lies outside of the folder", "path")
    return found


def _unsafe(path: Path, what: str, code: str) -> Unsafe:
    return Unsafe(
        f"{path}: {what}",
        code=code,
        hint="cgmerge runs nothing that a folder brings along; change the task, or run lm_eval"
        " itself on a merged model (cgmerge export) if you trust it",
        path=path,
    )
