"""What the user may choose for a training run, checked before anything is read or loaded."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from cgmerge.errors import UsageError
from cgmerge.plain import exact

MAX_RANK = 1024
SCHEDULES = ("linear", "cosine", "constant")
ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one expert; None means: chosen from base and data (see `plan`).

    Attributes:
        base: Reference of the base model.
        data: Data files; several are trained on together.
        skill: Name of the skill.
        out: Folder that the expert is written to.
        eval_data: Data files that are only scored, after training.
        rank: Rank of every LoRA.
        alpha: Numerator of the scaling alpha/rank; default 2 · rank; whole, as some servers
            parse nothing else.
        steps: Optimiser steps.
        epochs: Passes over the data, instead of `steps`.
        lr: Peak learning rate.
        batch_size: Rows per optimiser step, over all processes and accumulated parts.
        accumulate: Parts that a step is computed in, to save memory.
        max_length: Longest row in tokens; longer prompts lose tokens on the left.
        target_modules: Module names or endings of them, or `all-linear`.
        dropout: Share of the LoRA inputs dropped.
        schedule: How the learning rate falls after the warm-up.
        warmup: Steps over which the learning rate rises.
        weight_decay: AdamW's, on A and B.
        load_in_4bit: Keep the frozen base in NF4 (QLoRA).
        gradient_checkpointing: Compute activations twice to save memory.
        checkpoint_steps: Steps between checkpoints; default one a minute.
        seed: Of the LoRA initialisation, the order of the rows and dropout.
        device: As for `load_base`.
        dtype: Float type of the frozen base; A and B are always float32.
    """

    base: str
    data: tuple[Path, ...]
    skill: str
    out: Path
    eval_data: tuple[Path, ...] = ()
    rank: int = 16
    alpha: int | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    batch_size: int | None = None
    accumulate: int = 1
    max_length: int | None = None
    target_modules: tuple[str, ...] = field(default=ALL_LINEAR)
    dropout: float = 0.0
    schedule: str = "linear"
    warmup: int | None = None
    weight_decay: float = 0.0
    load_in_4bit: bool = False
    gradient_checkpointing: bool = False
    checkpoint_steps: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Check ranges and contradictions.

        Raises:
            UsageError: Names the setting, its value and what is allowed.
        """
        _check_skill(self.skill)
        if not self.data:
            raise UsageError("no training data was given", code="data", hint="add --data FILE")
        if self.steps is not None and self.epochs is not None:
            raise UsageError(
                f"steps ({self.steps}) and epochs ({self.epochs}) contradict each other",
                code="steps",
                hint="give one of --steps and --epochs",
            )
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise UsageError(
                    f"{name} must lie in [{exact(low)}, {exact(high)}], found {exact(value)}",
                    code=name,
                    expected=[low, high],
                    found=value,
                )
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"unknown schedule {self.schedule!r}; one of {', '.join(SCHEDULES)}",
                code="schedule",
            )
        if not self.target_modules or not all(name.strip() for name in self.target_modules):
            raise UsageError("target_modules holds an empty name", code="target_modules")

    def with_changes(self, changes: dict[str, Any]) -> Self:
        """Return a checked copy with some settings replaced."""
        return replace(self, **changes)


SETTING_NAMES = tuple(item.name for item in fields(TrainSettings))

_TINY = 1e-12
_RANGES: dict[str, tuple[float, float]] = {
    "rank": (1, MAX_RANK),
    "alpha": (1, 1e6),
    "steps": (1, 1e8),
    "epochs": (_TINY, 1e6),
    "lr": (_TINY, 1e3),
    "batch_size": (1, 1e6),
    "accumulate": (1, 1e4),
    "max_length": (2, 1e7),
    "dropout": (0, 0.95),
    "warmup": (0, 1e8),
    "weight_decay": (0, 10),
    "checkpoint_steps": (1, 1e8),
    "seed": (0, 2**32 - 1),
}


def _check_skill(skill: str) -> None:
    """A skill names a folder and a card entry: printable, no path parts."""
    plain = skill.strip() == skill and skill.isprintable() and len(skill.encode()) <= 100
    if not skill or not plain or "/" in skill or "\\" in skill or skill.startswith((".", "-")):
        raise UsageError(
            f"{skill[:100]!r} cannot name a skill: 1 to 100 bytes (found {len(skill.encode())}) of"
            " printable characters without slashes, not starting with a dot or dash",
            code="skill",
        )
