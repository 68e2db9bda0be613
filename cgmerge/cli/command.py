"""What all commands share: `~` in paths, and numbers as they are written everywhere else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from cgmerge import plain
from cgmerge.errors import UsageError
from cgmerge.refs import expanded


class Command(TyperCommand):
    """A command whose values are looked at before it runs."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the command line; the parser alone would also take `1_0` for ten.

        Raises:
            UsageError: A number that is not written plainly.
        """
        words = list(args)
        rest = super().parse_args(ctx, args)
        written, _, _ = self.make_parser(ctx).parse_args(args=words)
        options = [param for param in self.params if param.param_type_name == "option"]
        known = {name for one in options for name in (*one.opts, *one.secondary_opts)}
        for param in self.params:
            _check_word(param, written, known)
            _check_number(param, written, ctx.params.get(param.name or ""))
        return rest

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run it; shells expand `~` only at the beginning of a word, not in `--out=~/x`."""
        ctx.params = {name: _at_home(value) for name, value in ctx.params.items()}
        return super().invoke(ctx)


def _check_word(param: Any, written: Mapping[str, Any], known: set[str]) -> None:
    """Refuse an option that took the next one for its value, as in `-o --overwrite`."""
    value = written.get(param.name)
    for word in value if isinstance(value, list | tuple) else [value]:
        if isinstance(word, str) and word in known and param.param_type_name == "option":
            name = next((name for name in param.opts if name.startswith("--")), param.name)
            raise UsageError(
                f"{name} needs a value, and the next word is the option {word}",
                code="option",
                hint=f"for a path that is called so, write ./{word}",
                option=name,
                found=word,
            )


def _check_number(param: Any, written: Mapping[str, Any], value: Any) -> None:
    text = written.get(param.name)
    if not isinstance(text, str) or type(value) not in (int, float):
        return
    try:
        plain.number(text)
    except ValueError:
        name = next((name for name in param.opts if name.startswith("--")), param.name)
        raise UsageError(
            f"{name} must be a number in plain digits, found {text[:60]!r}",
            code="option",
            option=name,
            found=text,
        ) from None


def _at_home(value: Any) -> Any:
    if isinstance(value, Path):
        return expanded(str(value)) if str(value).startswith("~") else value
    if isinstance(value, list | tuple):
        return type(value)(map(_at_home, value))
    return value
