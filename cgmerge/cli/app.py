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
from types import FrameType

import typer
from typer.exceptions import TyperException

from cgmerge._version import __version__
from cgmerge.cli import (
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
    route,
    sharing,
    split,
    stats,
    talking,
    tasks,
    train,
)
from cgmerge.cli.output import print_error
from cgmerge.cli.spread import spread
from cgmerge.cli.usage import as_usage_error
from cgmerge.errors import CgmergeError, LimitExceeded, StorageError, UsageError
from cgmerge.oserrors import reason_of

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


app.command("train", rich_help_panel="Experts")(train.train)
app.command("inspect", rich_help_panel="Experts")(inspect.inspect)
app.command("compress", rich_help_panel="Experts")(compress.compress)
app.command("decompress", rich_help_panel="Experts")(decompress.decompress)
app.command("stats", rich_help_panel="Experts")(stats.stats)
app.command("ls", rich_help_panel="Library")(library.ls)
app.command("add", rich_help_panel="Library")(library.add)
app.command("rm", rich_help_panel="Library")(library.rm)
app.command("verify", rich_help_panel="Library")(library.verify)
app.command("pull", rich_help_panel="Library")(sharing.pull)
app.command("push", rich_help_panel="Library")(sharing.push)
app.command("lock", rich_help_panel="Library")(sharing.lock)
app.command("compose", rich_help_panel="Compose")(compose.compose)
app.command("extract", rich_help_panel="Compose")(extract.extract)
app.command("methods", rich_help_panel="Compose")(methods.methods)
app.command("generate", rich_help_panel="Use")(talking.generate)
app.command("chat", rich_help_panel="Use")(talking.chat)
app.command("route", rich_help_panel="Use")(route.route)
app.command("export", rich_help_panel="Use")(export.export)
app.command("eval", rich_help_panel="Measure")(evaluate.evaluate)
app.command("tasks", rich_help_panel="Measure")(tasks.tasks)
app.command("split", rich_help_panel="Measure")(split.split)
app.command("demo", rich_help_panel="Help")(demo.demo)
app.command("doctor", rich_help_panel="Help")(doctor.doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code.

    Args:
        arguments: Without the program name; default `sys.argv[1:]`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before torch is loaded. Threads that spin while they wait make a busy machine many times
    # slower; on an idle one sleeping costs next to nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(run(words))


def run(words: list[str]) -> int:
    """Run one command line in this process and return its exit code; nothing is raised."""
    if words[:1] in (["eval"], ["train"], ["compose"], ["compress"], ["stats"]):
        words = spread(words, {"--data", "--eval-data", "--tune", "--calibrate", "--examples"})
    try:
        code = app(args=words, prog_name="cgmerge", standalone_mode=False)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # click makes a 1 of it
            return _exit_code(stop.__context__, words)
        return stop.code if isinstance(stop.code, int) else 1
    except TyperException as error:
        if not words:  # the help was printed instead
            return UsageError.exit_code
        return _exit_code(as_usage_error(error, words), words)
    except BaseException as error:  # noqa: BLE001  (the last line of defence)
        return _exit_code(error, words)
    return code if isinstance(code, int) else 0


def _exit_code(error: BaseException, words: list[str]) -> int:
    """Say what went wrong and return the code for it."""
    if "--debug" in words or os.environ.get("CGMERGE_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, CgmergeError):
        print_error(error, as_json="--json" in words)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted; nothing half-written is left\n")
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, MemoryError):
        print_error(
            LimitExceeded("out of memory", code="memory", hint="close other programs, or use less"),
            as_json="--json" in words,
        )
        return LimitExceeded.exit_code
    if isinstance(error, OSError):
        print_error(_refusal(error), as_json="--json" in words)
        return StorageError.exit_code
    return _report_bug(error)


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


def _is_path(name: object) -> bool:
    return isinstance(name, str | bytes)


def _report_bug(error: BaseException) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="cgmerge-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    sys.stderr.write(
        f"error: a bug in cgmerge: {type(error).__name__}: {error}\n\n"
        f"hint: the traceback is in {file.name}; please report it with the command\n"
    )
    return 70


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)
