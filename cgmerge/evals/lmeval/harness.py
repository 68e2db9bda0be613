"""The only file that imports lm-evaluation-harness: tasks made ready, and asked."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from cgmerge.errors import (
    CgmergeError,
    DataError,
    EnvironmentProblem,
    MissingExtra,
    NotFound,
    Unsafe,
    UsageError,
)
from cgmerge.evals.lmeval.folder import TaskFile
from cgmerge.evals.lmeval.model import Asked, HarnessModel
from cgmerge.nearest import nearest

FEWSHOT_SEED = 1234
"""Of the examples in a prompt; the harness's own default, so that prompts are those of others."""
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What is known about a task.

    Attributes:
        name: The skill.
        source: Where it is from.
        sha256: Over its files; empty where they came from a hub.
    """

    name: str
    source: str
    sha256: str = ""


class Harness(Protocol):
    """Tasks that can be asked of one model after the other."""

    @property
    def tasks(self) -> Sequence[TaskInfo]:
        """Return what is known of the tasks, in order."""

    @property
    def version(self) -> str:
        """Return the version of the harness."""

    def requests(self, limit: int | None) -> Sequence[Asked]:
        """Return everything that is asked of each model."""

    def ask(self, model: HarnessModel, limit: int | None) -> Mapping[str, Any]:
        """Ask a model; return `results`, `samples` and `higher_is_better` by task."""


class Installed:
    """The installed harness with its tasks in memory.

    Args:
        tasks: The harness's own tasks, by name.
        infos: What to say of them.
    """

    def __init__(self, tasks: Mapping[str, Any], infos: Sequence[TaskInfo]) -> None:
        self._tasks = dict(tasks)
        self.tasks: Sequence[TaskInfo] = tuple(infos)
        self.version: str = _package().__version__
        for task in self._tasks.values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def requests(self, limit: int | None) -> Sequence[Asked]:
        """Return everything that is asked of each model."""
        found: list[Asked] = []
        with _calm():
            for name, task in self._tasks.items():
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
                with _as_input_error(name):
                    task.build_all_requests(limit=limit)
                found += task.instances
        return found

    def ask(self, model: HarnessModel, limit: int | None) -> Mapping[str, Any]:
        """Ask a model; return `results`, `samples` and `higher_is_better` by task."""
        evaluator = _module("lm_eval.evaluator")
        for task in self._tasks.values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with _calm(), _as_input_error(", ".join(self._tasks)):
            found: Mapping[str, Any] = evaluator.evaluate(
                lm=model, task_dict={"tasks": self._tasks}, limit=limit, bootstrap_iters=0
            )
        return found


def open_folder(files: Sequence[TaskFile]) -> Installed:
    """Make the tasks of a folder ready, without a network.

    Raises:
        MissingExtra: lm_eval is not installed.
        UsageError: Settings that the harness refuses.
        Unsafe: A template that reaches for what it may not have.
    """
    with _offline():
        make = _module("lm_eval.api.task").ConfigurableTask
        tasks = {}
        with _calm():
            for one in files:
                with _as_input_error(one.source):
                    tasks[one.name] = make(config={**one.config, "custom_dataset": _rows(one)})
    return Installed(tasks, [TaskInfo(one.name, one.source, one.sha256) for one in files])


def open_named(names: Sequence[str]) -> Installed:
    """Make tasks that the harness brings along ready; groups and tags give all their tasks.

    Args:
        names: Of tasks, groups or tags; their data is fetched from the hub.

    Raises:
        MissingExtra: lm_eval is not installed.
        NotFound: A name that it does not know.
        EnvironmentProblem: Data that cannot be fetched.
    """
    manager = _module("lm_eval.tasks").TaskManager()
    for name in names:
        if name not in manager.all_tasks:
            near = nearest(name, manager.all_tasks, count=3)
            raise NotFound(
                f"lm-evaluation-harness has no task {name!r}",
                code="task",
                hint=f"did you mean {', '.join(near)}?" if near else "see: lm_eval ls tasks",
                found=name,
            )
    with _calm(), _as_input_error(", ".join(names)):
        tasks = manager.load(list(names))["tasks"]
    infos = [
        TaskInfo(name, f"lm-eval {name} (version {task.VERSION})") for name, task in tasks.items()
    ]
    return Installed(tasks, infos)


def check_installed() -> None:
    """Refuse to begin without the harness.

    Raises:
        MissingExtra: lm_eval is not installed.
    """
    _package()


def _rows(task: TaskFile) -> Callable[..., Any]:
    """Return what gives the harness a task's rows; settings that it passes along say nothing."""

    def load(**_settings: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(rows) for split, rows in task.splits.items()}

    return load


def _package() -> Any:
    return _module("lm_eval")


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"--lm-eval needs the package lm_eval: {error}",
            code="lm_eval",
            hint='pip install "cgmerge[lm-eval]"',
        ) from error


@contextmanager
def _calm() -> Iterator[None]:
    """Have the harness quiet, and its templates in a sandbox, for the length of a `with` block."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    utils, tasks = _module("lm_eval.utils"), _module("lm_eval.api.task")
    logger = logging.getLogger("lm_eval")
    box = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    with ExitStack() as undo:
        for owner, name, value in (
            (utils, "env", box),
            (tasks, "tqdm", lambda items, **_options: items),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield


@contextmanager
def _offline() -> Iterator[None]:
    """Say to everything that reads it while it is imported that there is no network."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    """Give what the harness raises about a task a name."""
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError

    try:
        yield
    except CgmergeError:
        raise
    except SecurityError as error:
        raise Unsafe(f"{what}: a template {error}", code="template") from error
    except TemplateError as error:
        raise UsageError(f"{what}: a template is wrong: {error}", code="template") from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{what}: the data cannot be had: {error}",
            code="task_data",
            hint="tasks of a local folder need no network: --lm-eval FOLDER",
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AssertionError, SyntaxError) as error:
        kind = type(error).__name__
        raise DataError(
            f"{what}: lm-evaluation-harness refuses it: {kind}: {error}", code="task"
        ) from error
