"""What is wrong with a command line, in our words: the option, what it takes and what was found."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import typer
from typer.exceptions import TyperException

from cgmerge.errors import UsageError

_MAX_SHOWN = 60


_PATHS = {"--out", "--data", "--eval-data", "--tune", "--calibrate", "--examples"}


def refuse_unusable(words: Sequence[str]) -> None:
    """Refuse what no path can be: an empty one (the parser would make `.` of it), a NUL.

    Args:
        words: The command line.

    Raises:
        UsageError: Naming the option or the word.
    """
    for word, after in zip_longest(words, words[1:]):
        if word == "--":
            return
        option, joined, value = word.partition("=")
        given = value if joined else after
        if given == "" and (option in _PATHS or re.fullmatch(r"-[a-z]*o", option)):
            raise UsageError(
                f"{option} is empty", code="option", hint="name a file or a folder", option=option
            )
        if "\0" in word:
            raise UsageError(
                f"the command line holds a NUL character: {_shown(word)}",
                code="nul",
                hint="no path may hold one",
                found=word,
            )


def as_usage_error(error: TyperException, words: Sequence[str]) -> UsageError:
    """Turn what the argument parser says into an error of ours.

    Args:
        error: From the parser.
        words: The command line.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "cgmerge"
    hint = f"see {command} --help"
    problems = getattr(error.__cause__, "errors", None)
    param = getattr(error, "param", None)
    if isinstance(error, typer.BadParameter) and problems is not None and param is not None:
        problem: dict[str, Any] = problems()[0]
        found = problem["input"]
        name = _name(param, words)
        return UsageError(
            f"{name} {_wanted(problem['msg'])}, found {_shown(found)}",
            code="option",
            hint=hint,
            option=name,
            found=found,
        )
    text = error.format_message().rstrip(".")
    return UsageError(text[:1].lower() + text[1:], code="usage", hint=hint)


def _name(param: Any, words: Sequence[str]) -> str:
    """Return the option as it was written."""
    names = [name for name in param.opts if name.startswith("-")]
    written = [n for n in names if any(w == n or w.startswith(f"{n}=") for w in words)]
    return str((written or names or [param.metavar or param.name])[0])


def _wanted(message: str) -> str:
    """Return `must be …` from the sentences of pydantic."""
    text = message.removeprefix("Value error, ").rstrip(".")
    if text.startswith("Input should be "):
        wanted = text.removeprefix("Input should be ").split(", unable")[0]
        return (
            f"must be {wanted.replace('a valid integer', 'a whole number').replace('valid ', '')}"
        )
    _, is_choice, choices = text.partition(" is not one of ")
    return f"must be one of {choices}" if is_choice else f"cannot be used: {text}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
