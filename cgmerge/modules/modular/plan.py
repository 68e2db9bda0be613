"""Everything that is known before the first step, of several tasks that are trained together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cgmerge import fs
from cgmerge.errors import UsageError
from cgmerge.modules.compose_out import check_out
from cgmerge.modules.modular.inventory import Frame
from cgmerge.modules.modular.settings import ModularParams
from cgmerge.modules.routing.attach import place_of
from cgmerge.modules.routing.files import is_routed
from cgmerge.modules.training.defaults import choose
from cgmerge.modules.training.plan import Plan, make_plan
from cgmerge.modules.training.processes import process_count
from cgmerge.modules.training.settings import TrainSettings

MAX_ALLOCATION = 200_000
"""Most numbers in the allocation; it is stored as JSON too."""
_OWN = {"data", "eval_data", "skill", "out"}
_UNUSED: dict[str, Any] = {
    "load_in_4bit": False,
    "gradient_checkpointing": False,
    "dropout": 0.0,
    "checkpoint_steps": None,
}


@dataclass(frozen=True)
class ModularPlan:
    """A run that can start.

    Attributes:
        params: What is particular to shared modules.
        tasks: The plan of each task, as if it were trained alone.
        joint: The same base with the rows of all tasks, and what was chosen for them.
        out: The folder that the composition is written to.
    """

    params: ModularParams
    tasks: tuple[Plan, ...]
    joint: Plan
    out: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tasks."""
        return tuple(plan.settings.skill for plan in self.tasks)

    @property
    def trainable(self) -> int:
        """Return the number of parameters, allocation included."""
        frame = self.frame
        return frame.skills * (self.joint.trainable + frame.tasks * len(frame.places))

    @cached_property
    def frame(self) -> Frame:
        """Return the sizes of what is learned."""
        layers = tuple(dict.fromkeys(map(place_of, self.joint.targets)))
        rank = self.joint.settings.rank
        return Frame(
            targets=self.joint.targets,
            places=layers if self.params.granularity == "layer" else ("",),
            tasks=len(self.tasks),
            skills=self.params.skills,
            rank=rank,
            scaling=self.joint.chosen.alpha / rank,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what the result's bytes follow from, package versions and thread count aside."""
        known = self.joint.identity
        del known["skill"], known["eval_data"]
        tasks = {plan.settings.skill: [file.sha256 for file in plan.data] for plan in self.tasks}
        return {**known, "tasks": tasks, "modular": asdict(self.params)}


def make_modular_plan(many: Sequence[TrainSettings], params: ModularParams) -> ModularPlan:
    """Read base headers and data of all tasks, tokenize, choose what the user left open.

    Args:
        many: Settings of each task; only data and names may differ.
        params: What is particular to shared modules.

    Raises:
        UsageError: Fewer than two tasks, settings that differ, or that mean nothing here.
        CgmergeError: As `make_plan`.
    """
    out = _common_out(many)
    _refuse(many)
    tasks = tuple(make_plan(settings.with_changes({"out": out})) for settings in many)
    rows = tuple(row for plan in tasks for row in plan.rows)
    first = tasks[0]
    joint = replace(
        first,
        chosen=choose(first.settings, first.base, rows, first.chosen.max_length),
        data=tuple(file for plan in tasks for file in plan.data),
        eval_data=tuple(file for plan in tasks for file in plan.eval_data),
        rows=rows,
        eval_rows=tuple(row for plan in tasks for row in plan.eval_rows),
        warnings=tuple(dict.fromkeys(text for plan in tasks for text in plan.warnings)),
    )
    if joint.dtype == "float16":
        raise UsageError(
            "--modular does not scale losses, without which slopes vanish in float16",
            code="dtype",
            hint="--dtype bfloat16 or float32",
        )
    plan = ModularPlan(params, tasks, joint, out)
    frame = plan.frame
    count = frame.tasks * len(frame.places) * frame.skills
    if count > MAX_ALLOCATION:
        raise UsageError(
            f"{frame.tasks} tasks, {len(frame.places)} layers and {frame.skills} modules make an"
            f" allocation of {count:,} numbers; at most {MAX_ALLOCATION:,} are stored",
            code="allocation",
            hint="--modular …,granularity=model",
            expected=MAX_ALLOCATION,
            found=count,
        )
    return plan


def check_modular_out(plan: ModularPlan, *, overwrite: bool) -> None:
    """Refuse an unusable result folder before any work is done.

    Raises:
        UsageError: It exists and may not be replaced, or holds something else.
        StorageError: It cannot be written.
    """
    out = fs.absolute(plan.out)
    files = [file.path for file in (*plan.joint.data, *plan.joint.eval_data)]
    check_out(out, files, plan.joint.base)
    if overwrite and out.is_dir() and any(out.iterdir()) and not is_routed(out):
        raise UsageError(
            f"{out} exists and holds no routed composition, so it is not replaced",
            code="out_exists",
            hint="choose another --out",
        )
    fs.check_target(out, overwrite=overwrite)


def _common_out(many: Sequence[TrainSettings]) -> Path:
    out = many[0].out.parent
    own = next((item for item in many if item.out != out / item.skill), None)
    if own is not None:
        raise UsageError(
            f"task {own.skill!r} names a folder of its own, {own.out}; tasks that share modules"
            " have one result",
            code="out",
            hint="give one --out",
        )
    return out


def _refuse(many: Sequence[TrainSettings]) -> None:
    if process_count() > 1:
        raise UsageError(
            f"--modular trains in one process; {process_count()} were started",
            code="processes",
            hint="start it without accelerate launch",
            found=process_count(),
        )
    if len(many) < 2:
        raise UsageError(
            "one task has nothing to share",
            code="tasks",
            hint="list two or more under `skills:`, or train without --modular",
            found=len(many),
        )
    for name, value in _UNUSED.items():
        found = getattr(many[0], name)
        if found != value:
            raise UsageError(
                f"{name} means nothing for --modular, found {found!r}",
                code=name,
                hint=f"leave out {name}",
                found=found,
            )
    for name in (item.name for item in fields(TrainSettings) if item.name not in _OWN):
        for item in many[1:]:
            there, here = getattr(many[0], name), getattr(item, name)
            if there != here:
                raise UsageError(
                    f"tasks that share modules share their settings: {name} is {there!r} for"
                    f" {many[0].skill} and {here!r} for {item.skill}",
                    code=name,
                    hint=f"give {name} once, for all tasks",
                    expected=str(there),
                    found=str(here),
                )
