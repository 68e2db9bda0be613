"""What every routed method is given and what it gives back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge.params import Checked
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.routing.router import Router
from cgmerge.modules.routing.stack import Stack
from cgmerge.shown import counted

Progress = Callable[[int, int], None]
"""Called with the number of steps done and of all steps."""


class TopK(str):
    """How many experts a token or sequence may use: a whole number, or `all`."""

    __slots__ = ()
    WANTED: ClassVar[str] = "a whole number of at least 1, or `all`"
    words: ClassVar[tuple[str, ...]] = ("all",)

    def __new__(cls, value: object) -> Self:
        """Read a number or a word.

        Raises:
            ValueError: Neither.
        """
        text = str(value).strip().lower()
        if text not in cls.words and not (text.isascii() and text.isdecimal() and int(text) >= 1):
            raise ValueError(text)
        return super().__new__(cls, text)

    def of(self, experts: int, warnings: list[str], *, default: str) -> int | None:
        """Return the number for so many experts; None for all of them.

        Args:
            experts: How many there are.
            warnings: Gets a line where the user asked for more.
            default: The method's own number, which nobody asked for.
        """
        if not self.isdecimal():
            return None
        if int(self) > experts and self != default:
            warnings.append(f"top_k={self} is more than {counted(experts, 'expert')}: all are used")
        return int(self) if int(self) < experts else None


class AutoTopK(TopK):
    """`TopK`, or `auto`: as few as the examples allow."""

    __slots__ = ()
    WANTED: ClassVar[str] = "a whole number of at least 1, `all` or `auto`"
    words: ClassVar[tuple[str, ...]] = ("all", "auto")


@dataclass(frozen=True)
class Labelled:
    """Examples of one file.

    Attributes:
        name: Whose they are: an expert, where a method needs to know, else any skill.
        rows: Their tokens.
    """

    name: str
    rows: Sequence[Encoded]


@dataclass(frozen=True, kw_only=True)
class FitInput:
    """What a router is made from.

    Attributes:
        names: The experts, in order.
        stacks: Their deltas by module.
        loaded: The base, for methods that need it.
        examples: For methods that learn.
        params: The method's own parameters.
        seed: For methods that draw.
        progress: Told about every step.
    """

    names: Sequence[str]
    stacks: Mapping[str, Stack]
    loaded: LoadedBase | None = None
    examples: Sequence[Labelled] | None = None
    params: Checked
    seed: int = 0
    progress: Progress | None = None

    @property
    def base(self) -> LoadedBase:
        """Return the base.

        Raises:
            UsageError: There is none.
        """
        if self.loaded is None:
            raise UsageError(
                "this router is learned from what the base makes of the examples",
                code="base",
                hint="add --base BASE",
            )
        return self.loaded

    @property
    def given(self) -> Sequence[Labelled]:
        """Return the examples.

        Raises:
            UsageError: There are none.
        """
        if not self.examples or not any(item.rows for item in self.examples):
            raise UsageError(
                "this router is learned from examples, and there are none",
                code="examples",
                hint="add --examples NAME=FILE for every expert; five rows each are a start",
            )
        return self.examples

    def report(self, done: int, total: int) -> None:
        """Tell about a step."""
        if self.progress is not None:
            self.progress(done, total)


@dataclass(frozen=True)
class Fitted:
    """A router and how it came about.

    Attributes:
        router: What decides.
        record: JSON values: examples used, losses, tables.
        warnings: What the user should know.
        notes: What went as it should, in a line each.
    """

    router: Router
    record: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def of_experts(names: Sequence[str], examples: Sequence[Labelled]) -> list[list[Encoded]]:
    """Return the examples of each expert, in the experts' order; files of one name go together.

    Raises:
        Incompatible: Names on either side that the other lacks.
    """
    found: dict[str, list[Encoded]] = {name: [] for name in names}
    strangers = []
    for item in examples:
        if item.name in found:
            found[item.name] += item.rows
        else:
            strangers.append(item.name)
    missing = [name for name, rows in found.items() if not rows]
    if missing or strangers:
        raise Incompatible(
            "every expert needs examples under its own name\n"
            f"  experts without examples: {', '.join(missing) or '(none)'}\n"
            f"  examples of no expert:    {', '.join(strangers) or '(none)'}",
            code="examples",
            hint=f"name them: --examples {(missing or list(names))[0]}=FILE",
            expected=missing,
            found=strangers,
        )
    return list(found.values())


def counts(examples: Sequence[Labelled]) -> list[dict[str, Any]]:
    """Return how many rows each file gave, for the record."""
    return [{"name": item.name, "rows": len(item.rows)} for item in examples]
