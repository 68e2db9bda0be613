"""`cgmerge eval --lm-eval`: the same command on tasks of lm-evaluation-harness."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import NotFound, UsageError

if TYPE_CHECKING:
    from cgmerge.cli.evaluate import Call
    from cgmerge.evals.lmeval.folder import TaskFile
    from cgmerge.evals.record import Evaluation


@dataclass(frozen=True)
class Options:
    """What the user wrote.

    Attributes:
        tasks: A folder or names of tasks; None for data of one's own.
        metric: Which metric of the tasks is the score.
    """

    tasks: str | None
    metric: str | None


@dataclass(frozen=True)
class HarnessRequest:
    """Checked tasks.

    Attributes:
        files: Of a folder; empty where tasks are named.
        names: Of tasks that the harness brings along.
        metric: As in `Options`.
    """

    files: "tuple[TaskFile, ...]"
    names: tuple[str, ...]
    metric: str | None

    def evaluate(self, call: "Call", *, oracle: bool) -> "Evaluation | None":
        """Score targets; None after a dry run.

        Raises:
            MissingExtra: lm_eval is not installed.
            CgmergeError: As for `evaluate_tasks`.
        """
        from cgmerge.evals.baselines import check_picks, with_baselines
        from cgmerge.evals.lmeval.harness import check_installed, open_folder, open_named
        from cgmerge.evals.lmeval.run import count_requests, evaluate_tasks
        from cgmerge.evals.targets import check_tasks

        check_installed()
        targets = call.open()
        if oracle:
            check_picks(targets, [], [])
        known: list[tuple[str, int | None, str]] = [
            (one.name, None, one.source) for one in self.files
        ] or [(name, None, "lm-eval") for name in self.names]
        call.say(targets, known)
        if self.files:
            check_tasks(targets, [one.name for one in self.files])
        if call.dry_run:
            call.finish_dry_run(targets, known)
            return None
        harness = open_folder(self.files) if self.files else open_named(self.names)
        loaded = call.load()
        total = count_requests(targets, harness, call.settings)
        with call.output.progress("eval", total) as advance:
            found = evaluate_tasks(
                loaded, targets, harness, call.settings, measure=self.metric, progress=advance
            )
        return with_baselines(found, oracle=True) if oracle else found


def harness_request(asked: Options, others: Mapping[str, Any]) -> HarnessRequest | None:
    """Read what `--lm-eval` names, before anything else is done.

    Args:
        asked: What the user wrote.
        others: Options that tasks leave no room for, those that were given being true.

    Returns:
        The tasks; None without `--lm-eval`.

    Raises:
        UsageError: Options that do not go together, or no name.
        NotFound, Unsafe, DataError: As `read_folder`.
    """
    if asked.tasks is None:
        if asked.metric is not None:
            raise UsageError("--lm-eval-metric needs --lm-eval", code="lm_eval")
        return None
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"{given[0]} does not go with --lm-eval: tasks say what is asked and what a score is",
            code="lm_eval",
            hint="leave it out, or evaluate twice; --lm-eval-metric chooses among a task's metrics",
            found=given[0],
        )
    folder = Path(asked.tasks).expanduser()
    if folder.is_dir():
        from cgmerge.evals.lmeval.folder import read_folder

        return HarnessRequest(tuple(read_folder(folder)), (), asked.metric)
    names = tuple(name.strip() for name in asked.tasks.split(",") if name.strip())
    if os.sep in asked.tasks or folder.suffix in (".yaml", ".yml") or not names:
        raise NotFound(
            f"no such folder of tasks: {asked.tasks!r}",
            code="tasks",
            hint="--lm-eval takes a folder of task files, or names of tasks: --lm-eval a,b",
            path=folder,
        )
    return HarnessRequest((), names, asked.metric)
