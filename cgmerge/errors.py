"""One exception tree; the command line turns it into exit codes and one readable message.

    CgmergeError
    ├── UsageError        exit 2   the command line, a recipe or a parameter is wrong
    │   └── NotFound               a path or name that does not exist (with what is near it)
    ├── InputError        exit 3   an input cannot be used
    │   ├── Damaged                truncated, altered, not finite, not decodable
    │   ├── Incompatible           sound, but does not fit the base, the other experts, or a method
    │   ├── Unsafe                 asks for something no file may ask for (pickle, code, regexes)
    │   └── DataError              a data file or row
    └── EnvironmentProblem exit 4  the machine cannot do it
        ├── MissingExtra           a package that is not installed
        ├── StorageError           disk full, no permission, I/O error
        └── LimitExceeded          a size limit known before the body is read

Every error carries a stable dotted `code`; the first word tells the families apart in scripts.
A message says what is wrong with both values; `hint` says what to do next, a command if possible.
"""

from typing import Any, ClassVar


class CgmergeError(Exception):
    """Base of everything this package raises on purpose.

    Args:
        message: What is wrong, with the expected and the found value.
        code: Last part of the dotted code, e.g. `base` gives `incompatible.base`.
        hint: The next step, on its own line in the output.
        details: Extra fields for `--json` (path, tensor, expected, found …).
    """

    family: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 70

    def __init__(
        self, message: str, *, code: str | None = None, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = readable(message)
        self.code = f"{self.family}.{code}" if code else self.family
        self.hint = None if hint is None else readable(hint)
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        shown = {key: _plain(value) for key, value in self.details.items()}
        return {"code": self.code, "message": self.message, "hint": self.hint, **shown}


class UsageError(CgmergeError):
    """The command line, a recipe or a parameter is wrong."""

    family = "usage"
    exit_code = 2


class NotFound(UsageError):
    """A path or a name does not exist."""

    family = "not_found"


class InputError(CgmergeError):
    """An input file cannot be used."""

    family = "input"
    exit_code = 3


class Damaged(InputError):
    """A file is truncated, altered, or holds values that are not numbers."""

    family = "damaged"


class Incompatible(InputError):
    """A sound input does not fit the base, the other experts, or the method."""

    family = "incompatible"


class Unsafe(InputError):
    """A file asks for something that no file may ask for."""

    family = "unsafe"


class DataError(InputError):
    """A data file or one of its rows cannot be used."""

    family = "data"


class EnvironmentProblem(CgmergeError):
    """The machine cannot do what was asked."""

    family = "environment"
    exit_code = 4


class MissingExtra(EnvironmentProblem):
    """A package that this command needs is not installed."""

    family = "missing"


class StorageError(EnvironmentProblem):
    """The operating system refused a read or a write: disk full, no permission, I/O error."""

    family = "storage"


class LimitExceeded(EnvironmentProblem):
    """A limit that is known before the body is read would be passed."""

    family = "limit"


def readable(text: str, limit: int = 4000) -> str:
    """Make text from a file fit for a terminal: no control characters, bounded length.

    Line ends stay, as messages have several lines; everything else that is not printable
    (escape sequences, direction marks, lone surrogates) becomes its escape.
    """
    cut = text if len(text) <= limit else text[:limit] + "…"
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in cut
    )


def _plain(value: Any) -> Any:
    """Make a detail printable as JSON."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, int | float | bool) or value is None:
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
