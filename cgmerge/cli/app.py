"""The `cgmerge` command: one Typer app, light to start, exit codes that scripts can rely on.

0 done · 1 ran and the answer is no · 2 usage · 3 input cannot be used · 4 environment ·
70 bug · 130 interrupted · 143 terminated.
"""

import os
import signal
import sys
import tempfile
import traceback
from types import FrameType

import typer

from cgmerge._version import __version__
from cgmerge.cli import compose, demo, doctor, evaluate, inspect, methods, train
from cgmerge.cli.output import print_error
from cgmerge.errors import CgmergeError, UsageError

app = typer.Typer(
    name="cgmerge",
    help="Train, compose and evaluate LoRA experts, exactly, in delta space.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `cgmerge demo`: the whole story on a tiny model, offline.",
)


def _version(value: bool) -> None:  # noqa: FBT001  (typer passes it so)
    if value:
        sys.stdout.write(f"cgmerge {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _show: bool = typer.Option(  # noqa: FBT001
        False, "--version", callback=_version, is_eager=True, help="Print the version"  # noqa: FBT003
    ),
) -> None:
    pass


app.command("train", rich_help_panel="Experts")(train.train)
app.command("inspect", rich_help_panel="Experts")(inspect.inspect)
app.command("compose", rich_help_panel="Compose")(compose.compose)
app.command("methods", rich_help_panel="Compose")(methods.methods)
app.command("eval", rich_help_panel="Measure")(evaluate.evaluate)
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
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    as_json = "--json" in words
    try:
        app(args=words, prog_name="cgmerge")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        if code == 2 and as_json:
            print_error(UsageError("the command line is wrong; see above"), as_json=True)
        return code
    except CgmergeError as error:
        if "--debug" in words or os.environ.get("CGMERGE_DEBUG"):
            traceback.print_exc()
        print_error(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing half-written is left\n")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        sys.stderr.write("error: out of memory\n")
        return 4
    except Exception as error:  # noqa: BLE001  (the last line of defence: no traceback on screen)
        return _report_bug(error)
    return 0


def _report_bug(error: Exception) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="cgmerge-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exc(file=file)
    sys.stderr.write(
        f"error: a bug in cgmerge: {type(error).__name__}: {error}\n\n"
        f"hint: the traceback is in {file.name}; please report it with the command\n"
    )
    return 70


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)
