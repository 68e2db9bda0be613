"""What is chosen where the user leaves a setting open, from the base and the length of the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cgmerge.errors import UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.data import Encoded
from cgmerge.modules.training.processes import process_count
from cgmerge.modules.training.settings import TrainSettings

MIN_STEPS = 100
"""A small file is repeated until LoRA has had this many steps."""
DEFAULT_EPOCHS = 3
MAX_ROWS = 64
"""In a step, unless somebody asks for more."""

_STEP_TOKENS = 4096
_LONGEST_STEP = 4 * _STEP_TOKENS
_WIDTHS = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The settings that may be left open, filled in; named and meant as in `TrainSettings`.

    Attributes:
        reasons: Setting name to why its default was chosen.
    """

    alpha: int
    steps: int
    lr: float
    batch_size: int
    warmup: int
    max_length: int | None
    reasons: dict[str, str]


def choose(
    settings: TrainSettings, base: Base, rows: Sequence[Encoded], limit: int | None
) -> Chosen:
    """Choose what the user left open; say why.

    Args:
        settings: What the user asked for.
        base: Its width decides the learning rate.
        rows: Training rows; their length decides the batch size.
        limit: Most tokens of a row, or None.

    Raises:
        UsageError: A batch that cannot be divided among processes and parts.
    """
    reasons = {}
    parts = settings.accumulate * process_count()
    batch = settings.batch_size
    if batch is None:
        batch = _batch_size(rows, parts)
        if batch > MAX_ROWS:
            raise UsageError(
                f"a step of {parts} parts has at least {parts:,} rows, more than the default of"
                f" at most {MAX_ROWS}",
                code="batch_size",
                hint=f"--batch-size {batch} if so many are meant, or a smaller --accumulate",
                expected=MAX_ROWS,
                found=batch,
            )
        reasons["batch_size"] = f"at most {MAX_ROWS} rows or {_STEP_TOKENS} tokens a step"
    if batch % parts:
        raise UsageError(
            f"batch_size {batch} is not a multiple of {parts} "
            f"({settings.accumulate} parts × {process_count()} processes)",
            code="batch_size",
            expected=parts,
            found=batch,
        )
    steps = settings.steps
    if steps is None:
        epochs = DEFAULT_EPOCHS if settings.epochs is None else settings.epochs
        steps = math.ceil(epochs * math.ceil(len(rows) / batch))
        if settings.epochs is None:
            reasons["steps"] = f"{DEFAULT_EPOCHS} epochs, at least {MIN_STEPS} steps"
            steps = max(steps, MIN_STEPS)
    lr = settings.lr
    if lr is None:
        width = next((base.config[key] for key in _WIDTHS if key in base.config), 2048)
        lr = default_lr(int(width))
        reasons["lr"] = f"for a base of width {width}"
    return Chosen(
        alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
        steps=steps,
        lr=lr,
        batch_size=batch,
        warmup=_warmup(steps) if settings.warmup is None else settings.warmup,
        max_length=limit,
        reasons=reasons,
    )


def _warmup(steps: int) -> int:
    """5 % of the steps, at most 100; none for very short runs, whose first step it would waste."""
    return 0 if steps < 20 else min(100, math.ceil(0.05 * steps))


def default_lr(width: int) -> float:
    """Choose a peak learning rate for LoRA by the width of the base: wider needs less.

    1e-3 up to a width of about 800, 5e-4 at 2000, 2.9e-4 at 4096 (8 B), 1.7e-4 at 8192 (70 B).

    Source:
        Schulman et al. 2025, "LoRA Without Regret": lr = 5e-5 · 10 · (2000/width)^0.781, fitted
        on Llama models; capped here, as the fit does not reach below a width of 2000.
    """
    value = min(1e-3, 5e-4 * (2000 / max(width, 1)) ** 0.781)
    return float(f"{value:.1e}")


def _batch_size(rows: Sequence[Encoded], parts: int) -> int:
    """Rows per step: a power of two of about the same work whatever the length of the rows."""
    mean = sum(map(len, rows)) / len(rows)
    longest = max(map(len, rows))
    batch = MAX_ROWS
    while batch > 1 and (batch * mean > _STEP_TOKENS or batch * longest > _LONGEST_STEP):
        batch //= 2
    return math.ceil(max(batch, 1) / parts) * parts
