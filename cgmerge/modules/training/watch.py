"""Beside the training loop: losses, when to write checkpoints, how to stop, what went wrong."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from cgmerge.errors import LimitExceeded
from cgmerge.memory import is_shortage
from cgmerge.modules.training.checkpoints import WorkFolder
from cgmerge.modules.training.listener import Listener, Silent
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.training.processes import process_count

CHECKPOINT_SECONDS = 60.0


class Notes:
    """What the trainer and its callback share: losses, the work folder, a wish to stop."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.part_loss = 0.0
        self.stop_signal: int | None = None
        self.every: int | None = None
        self.saved_at = time.monotonic()
        self.total = 0
        self.work: WorkFolder | None = None
        self.listener: Listener = Silent()

    def bind(self, plan: Plan, work: WorkFolder, listener: Listener) -> None:
        """Take over what the run decides: where checkpoints go, how often, who is told."""
        self.work, self.listener = work, listener
        self.total = plan.chosen.steps
        self.every = plan.settings.checkpoint_steps
        if self.every is None and process_count() > 1:
            # The clocks of several processes differ; they must agree on when to save.
            self.every = max(1, self.total // 10)

    def wants_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        if self.stop_signal is not None:
            return True
        if self.every is not None:
            return step % self.every == 0
        return time.monotonic() - self.saved_at > CHECKPOINT_SECONDS


class Watch(TrainerCallback):
    """Report every step, ask for checkpoints, stop after the one that a signal asked for."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the loss of the step that just ended."""
        notes = self.notes
        notes.losses.append(notes.part_loss)
        notes.part_loss = 0.0
        step = state.global_step
        notes.listener.on_step(step, notes.total, notes.losses[-1])
        if step < notes.total and notes.wants_checkpoint(step):
            if notes.stop_signal is not None:
                # Not in the signal handler: it may interrupt a write to the same stream.
                notes.listener.on_stop_wish()
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Tell about the checkpoint; end the run if the user wished so."""
        control.should_save = False
        notes = self.notes
        notes.listener.on_checkpoint(state.global_step)
        if notes.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if notes.stop_signal is not None:
            sys.exit(128 + notes.stop_signal)


@contextlib.contextmanager
def stop_signals(notes: Notes) -> Iterator[None]:
    """Let the first Ctrl-C (or a scheduler's SIGTERM) finish the step and write a checkpoint.

    The second one ends at once. Only for single runs: several processes would have to agree on
    the step first.
    """
    chosen = (signal.SIGINT, signal.SIGTERM)
    if process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {int(number): signal.getsignal(number) for number in chosen}

    def note(number: int, _frame: FrameType | None) -> None:
        notes.stop_signal = number
        # Not through a stream: the signal may have interrupted a write to it.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")
        signal.signal(number, before[number])

    for number in chosen:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in chosen:
            signal.signal(number, before[number])


@contextlib.contextmanager
def memory_errors(plan: Plan, *, four_bit: bool = True) -> Iterator[None]:
    """Say what to change when the memory of the device is used up.

    Args:
        plan: What is trained.
        four_bit: Whether the base could be kept in 4 bits.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        rows = -(-plan.step_rows // plan.settings.accumulate)
        raise LimitExceeded(
            f"the memory of {plan.device} is used up by {rows} rows of up to {plan.longest} tokens "
            f"at once: {first_line(error)}",
            code="memory",
            hint=f"--accumulate {2 * plan.settings.accumulate}, a smaller --batch-size or "
            f"--max-length{', or --load-in-4bit' if four_bit else ''}",
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; torch appends pages to it."""
    return next(iter(str(error).splitlines()), type(error).__name__)
