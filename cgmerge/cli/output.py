"""How commands speak: data on stdout, everything else on stderr, one JSON object on demand."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from cgmerge.errors import CgmergeError


class Progress(Protocol):
    """What a long job calls after each step."""

    def __call__(self, done: int, *, note: str = "") -> None:
        """Report that `done` steps are finished; `note` is shown beside the bar."""


class Output:
    """The voice of one command run.

    Args:
        as_json: Print exactly one JSON object on stdout at the end.
        quiet: Only the result line on stdout; warnings and errors still on stderr.
        verbose: Also details that are normally left out.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.warnings: list[str] = []

    def line(self, label: str, text: str) -> None:
        """Say one fact on stderr: a short label, then the text."""
        if not self.quiet:
            _to_stderr(f"{label:<8} {text}")

    def detail(self, label: str, text: str) -> None:
        """Say a fact only with `--verbose`."""
        if self.verbose:
            self.line(label, text)

    def warn(self, text: str) -> None:
        """Warn on stderr and keep the warning for the result record."""
        self.warnings.append(text)
        _to_stderr(f"warning: {text}")

    def hint(self, text: str) -> None:
        """Suggest the next command."""
        if not self.quiet:
            _to_stderr(f"hint: {text}")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False
    ) -> None:
        """Print a table of results on stdout (left out with `--json` and `--quiet`).

        Args:
            columns: The header.
            rows: The cells.
            words: The cells are words, which begin where their column begins; numbers end there.
        """
        if self.as_json or self.quiet:
            return
        cells = [columns, *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        form = "  ".join(
            f"{{:{'<' if words or not place else '>'}{width}}}"
            for place, width in enumerate(widths)
        )
        sys.stdout.write("".join(f"{form.format(*row).rstrip()}\n" for row in cells))

    def text(self, text: str) -> None:
        """Print result text on stdout (left out with `--json` and `--quiet`)."""
        if not (self.as_json or self.quiet):
            sys.stdout.write(text + "\n")

    def result(self, schema: str, fields: dict[str, Any], *, short: str | None = None) -> None:
        """End the command.

        Args:
            schema: Name and version of the object, e.g. `cgmerge.compose/1`.
            fields: The documented keys; numbers that are not finite become null.
            short: What `--quiet` prints (usually the output path).
        """
        if self.as_json:
            content = {"schema": schema, "ok": True, **fields}
            content.setdefault("warnings", self.warnings)
            sys.stdout.write(_one_line(content, sys.stdout) + "\n")
        elif self.quiet and short is not None:
            sys.stdout.write(short + "\n")

    @contextmanager
    def progress(self, label: str, total: int, *, start: int = 0) -> Iterator[Progress]:
        """Show a bar on a terminal, a plain line every few seconds elsewhere, on stderr.

        Args:
            label: What is being done, in one word.
            total: How many steps there are.
            start: Steps that were done before; they count as done, not as speed.
        """
        if self.quiet:
            yield _silent
        elif sys.stderr.isatty():
            with _bar(label, total, start) as advance:
                yield advance
        else:
            yield _PlainProgress(label, total, start)


def print_error(error: CgmergeError, *, as_json: bool) -> None:
    """Print an error for people, or as the last stderr line for scripts."""
    if as_json:
        content = {"schema": "cgmerge.error/1", "ok": False, **error.as_dict()}
        content["exit"] = error.exit_code
        _to_stderr(_one_line(content, sys.stderr))
        return
    _to_stderr(f"error: {error.message}")
    if error.hint:
        _to_stderr(f"\nhint: {error.hint}")


def _silent(done: int, *, note: str = "") -> None:
    """Show nothing."""


class _PlainProgress:
    """One line every ten seconds, and one at the end."""

    def __init__(self, label: str, total: int, start: int) -> None:
        self.label, self.total, self.start = label, total, start
        self.started = self.last = time.monotonic()
        self.first: tuple[int, float] | None = None

    def __call__(self, done: int, *, note: str = "") -> None:
        now = time.monotonic()
        if self.first is None and done > self.start:
            self.first = done, now
        if done < self.total and now - self.last < 10:
            return
        self.last = now
        parts = [f"{self.label:<8} {done}/{self.total}", *self._left(done, now), note]
        _to_stderr(", ".join(part for part in parts if part))

    def _left(self, done: int, now: float) -> list[str]:
        """Say how long it takes yet; not before there is something to tell it from.

        The first step warms up (memory, thresholds of the whole model) and is no measure.
        """
        if done >= self.total:
            return [f"{now - self.started:.0f} s"]
        if self.first is None or done <= self.first[0]:
            return []
        counted, since = done - self.first[0], now - self.first[1]
        return [f"{since / counted * (self.total - done):.0f} s left"]


@contextmanager
def _bar(label: str, total: int, start: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=start, note="")

        def advance(done: int, *, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield advance


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _one_line(content: dict[str, Any], stream: TextIO) -> str:
    """Write an object as JSON; with JSON's own escapes where the stream has not all letters."""
    text = json.dumps(_finite(content), ensure_ascii=False)
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(_finite(content))
    return text


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
