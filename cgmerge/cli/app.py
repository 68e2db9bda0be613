"""The `cgmerge` command: one Typer app, light to start, exit codes that scripts can rely on.

0 done · 1 ran and the answer is no · 2 usage · 3 input cannot be used · 4 environment ·
70 bug · 130 interrupted · 143 terminated.
"""

import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import FrameType

import typer
from typer.exceptions import TyperException

from cgmerge._version import __version__
from cgmerge.cli import (
    compare,
    compose,
    compress,
    decompress,
    demo,
    doctor,
    evaluate,
    export,
    extract,
    inspect,
    library,
    methods,
    pipeline,
    report,
    route,
    sharing,
    split,
    stats,
    talking,
    tasks,
    train,
)
from cgmerge.cli.command import Command
from cgmerge.cli.output import print_error
from cgmerge.cli.spread import spread
from cgmerge.cli.streams import drop_stdout, prepare_streams
from cgmerge.cli.usage import as_usage_error, refuse_unusable
from cgmerge.errors import CgmergeError, LimitExceeded, StorageError, UsageError
from cgmerge.memory import is_shortage
from cgmerge.oserrors import reason_of

_INTERRUPTED = 130
_NEXT_STEPS = {
    errno.EACCES: "give yourself permission to use it",
    errno.EPERM: "give yourself permission to use it",
    errno.ENOSPC: "free some space, also where TMPDIR points",
    errno.EDQUOT: "free some space, also where TMPDIR points",
    errno.EIO: "the disk or the network drive may be failing: copy the file elsewhere",
    errno.ENOENT: "the file was there or was expected: check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

app = typer.Typer(
    name="cgmerge",
    help="Train, compose and evaluate LoRA experts, exactly, in delta space.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `cgmerge demo`: the whole story on a tiny model, offline.",
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"cgmerge {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _show: bool = typer.Option(
        False,
        "--version",
        callback=_version,
        is_eager=True,
        help="Print the version",
    ),
) -> None:
    pass


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Experts": {
        "train": train.train,
        "inspect": inspect.inspect,
        "compress": compress.compress,
        "decompress": decompress.decompress,
        "stats": stats.stats,
    },
    "Library": {
        "ls": library.ls,
        "add": library.add,
        "rm": library.rm,
        "verify": library.verify,
        "pull": sharing.pull,
        "push": sharing.push,
        "lock": sharing.lock,
    },
    "Compose": {
        "compose": compose.compose,
        "extract": extract.extract,
        "methods": methods.methods,
    },
    "Use": {
        "generate": talking.generate,
        "chat": talking.chat,
        "route": route.route,
        "export": export.export,
    },
    "Measure": {
        "eval": evaluate.evaluate,
        "compare": compare.compare,
        "report": report.report,
        "run": pipeline.run,
        "init": pipeline.init,
        "tasks": tasks.tasks,
        "split": split.split,
    },
    "Help": {
        "demo": demo.demo,
        "doctor": doctor.doctor,
    },
}
"""Panel of the help to commands by name."""

for _panel, _functions in COMMANDS.items():
    for _name, _function in _functions.items():
        app.command(_name, cls=Command, rich_help_panel=_panel)(_function)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code.

    Args:
        arguments: Without the program name; default `sys.argv[1:]`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    problem = prepare_streams()
    if problem is not None:
        sys.exit(_exit_code(problem, words))
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before torch is loaded. Threads that spin while they wait make a busy machine many times
    # slower; on an idle one sleeping costs next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = run(words)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what runs at exit has nobody to report to
    try:
        sys.stdout.flush()
    except OSError as error:  # the disk under a redirected output is full, or the reader went away
        code = _exit_code(error if isinstance(error, BrokenPipeError) else _unheard(error), words)
        drop_stdout()
    sys.exit(code)


_SEVERAL = {
    "--data", "--eval-data", "--validation", "--tune", "--calibrate", "--examples", "--files"
}  # fmt: skip
"""Options that take several words."""


def run(words: list[str]) -> int:
    """Run one command line in this process and return its exit code; nothing is raised."""
    if words[:1] in (["eval"], ["train"], ["compose"], ["compress"], ["stats"], ["report"]):
        words = spread(words, _SEVERAL)
    try:
        refuse_unusable(words)
        code = app(args=words, prog_name="cgmerge", standalone_mode=False)
    except SystemExit as stop:
        if stop.code == _Terminated.exit_code and "--json" in words:
            print_error(_Terminated("terminated; nothing half-written is left"), as_json=True)
        if isinstance(stop.__context__, BrokenPipeError):  # click makes a 1 of it
            return _exit_code(stop.__context__, words)
        return stop.code if isinstance(stop.code, int) else 1
    except TyperException as error:
        if not words:  # the help was printed instead
            return UsageError.exit_code
        return _exit_code(as_usage_error(error, words), words)
    except BaseException as error:  # noqa: BLE001  (the last line of defence)
        return _exit_code(error, words)
    if code == _INTERRUPTED:  # the parser makes this of a KeyboardInterrupt
        _exit_code(KeyboardInterrupt(), words)
    return code if isinstance(code, int) else 0


def _exit_code(error: BaseException, words: list[str]) -> int:
    """Say what went wrong and return the code for it."""
    if "--debug" in words or os.environ.get("CGMERGE_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, CgmergeError):
        print_error(error, as_json="--json" in words)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; nothing half-written is left"
        if "--json" in words:
            print_error(_Interrupted(text), as_json=True)
        else:
            sys.stderr.write(text + "\n")
        return _INTERRUPTED
    if isinstance(error, BrokenPipeError):
        drop_stdout()  # the reader (`| head`) went away
        return 0
    if is_shortage(error):
        print_error(
            LimitExceeded("out of memory", code="memory", hint="close other programs, or use less"),
            as_json="--json" in words,
        )
        return LimitExceeded.exit_code
    if isinstance(error, OSError):
        print_error(_refusal(error), as_json="--json" in words)
        return StorageError.exit_code
    return _report_bug(error, as_json="--json" in words)


def _refusal(error: OSError) -> StorageError:
    """Describe what the operating system, or a library that reads files, refused."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if _is_path(name)]
    where = " and ".join(names)
    hint = _NEXT_STEPS.get(error.errno or 0, "check that what the message names can be used")
    return StorageError(
        f"{where}: {reason_of(error)}" if where else reason_of(error),
        code="system",
        hint=f"{hint}; CGMERGE_DEBUG=1 shows where it happened",
        path=names[0] if names else None,
        reason=errno.errorcode.get(error.errno or 0, type(error).__name__),
    )


def _unheard(error: OSError) -> StorageError:
    """Say that the work is done and its report is lost."""
    return StorageError(
        f"the standard output cannot be written: {reason_of(error)}",
        code="stdout",
        hint="what the command made is there; only what it had to say is lost",
        reason=errno.errorcode.get(error.errno or 0, type(error).__name__),
    )


def _is_path(name: object) -> bool:
    return isinstance(name, str | bytes)


class _Bug(CgmergeError):
    """Something that this program should have seen coming."""

    family = "bug"


class _Interrupted(CgmergeError):
    """Ctrl-C."""

    family = "interrupted"
    exit_code = _INTERRUPTED


class _Terminated(CgmergeError):
    """SIGTERM."""

    family = "terminated"
    exit_code = 143


def _report_bug(error: BaseException, *, as_json: bool) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="cgmerge-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    bug = _Bug(
        f"a bug in cgmerge: {type(error).__name__}: {error}",
        hint=f"the traceback is in {file.name}; please report it with the command",
        traceback=file.name,
    )
    print_error(bug, as_json=as_json)
    return bug.exit_code


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(_Terminated.exit_code)
