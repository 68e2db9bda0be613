"""Who is told what happens during a run; the command line prints it."""

from typing import Protocol


class Listener(Protocol):
    """Receives the events of one run, on the main process only."""

    def on_resume(self, step: int, total: int, loss: float) -> None:
        """Training goes on after `step`, whose loss was `loss`."""

    def on_step(self, step: int, total: int, loss: float) -> None:
        """A step ended with this loss."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint stands on disk."""

    def on_stop_wish(self) -> None:
        """The user asked to stop; the step is being finished and a checkpoint written."""

    def warn(self, text: str) -> None:
        """Something that the user should know and the record should keep."""


class Silent:
    """Says nothing; for other processes than the main one, and for use as a library."""

    def on_resume(self, step: int, total: int, loss: float) -> None:
        """Ignore it."""

    def on_step(self, step: int, total: int, loss: float) -> None:
        """Ignore it."""

    def on_checkpoint(self, step: int) -> None:
        """Ignore it."""

    def on_stop_wish(self) -> None:
        """Ignore it."""

    def warn(self, text: str) -> None:
        """Ignore it."""
