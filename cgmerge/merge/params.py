"""Parameters of methods: declared once, checked, and read from text as typed by users."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin

from cgmerge import plain
from cgmerge.errors import UsageError
from cgmerge.nearest import nearest

P = TypeVar("P", bound="Checked")


def param(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    hint: str | None = None,
    grid: tuple[float | str, ...] = (),
) -> Any:
    """Declare one parameter of a method.

    Args:
        default: The value when nothing is said.
        doc: One line for the help page.
        low: Smallest allowed value.
        high: Largest allowed value.
        above: The value must be larger than this.
        hint: What to suggest when the value is out of range.
        grid: What tuning tries, in this order; empty leaves the parameter alone.
    """
    limits = {"low": low, "high": high, "above": above}
    return field(default=default, metadata={"doc": doc, "hint": hint, "grid": grid, **limits})


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings whose ranges are checked; subclasses declare their fields with `param`."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_range(item, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class Params(Checked):
    """What every method has; subclasses add their own fields with `param`."""

    scale: float = param(
        1.0, "λ: factor on the merged delta", grid=(1.0, 0.6, 0.4, 0.8, 1.3, 0.25, 1.7)
    )

    def check(self, weights: Sequence[float]) -> None:
        """Refuse values that make no sense for these experts; methods override it.

        Args:
            weights: One per expert.

        Raises:
            UsageError: Such a value.
        """


def build_params(kind: type[P], values: Mapping[str, Any], owner: str) -> P:
    """Build parameters from plain values or from strings as typed on a command line.

    Args:
        kind: The dataclass.
        values: Name to value; what is missing keeps its default.
        owner: The method, for messages.

    Raises:
        UsageError: Unknown name, wrong type, or out of range.
    """
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            near = nearest(key, fields)
            raise UsageError(
                f"method `{owner}` has no parameter `{key}`",
                code="parameter",
                hint=f"did you mean `{near[0]}`?" if near else f"it has {', '.join(fields)}",
                expected=sorted(fields),
                found=key,
            )
    return kind(**{key: _coerce(fields[key], value, owner) for key, value in values.items()})


class _Wrong(Exception):
    """A string that is not of the wanted type."""


_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def _coerce(item: "dataclasses.Field[Any]", value: Any, owner: str) -> Any:
    try:
        return _as_type(item.type, value)
    except (_Wrong, ValueError, TypeError):
        wanted = _type_name(item.type)
        raise UsageError(
            f"parameter `{item.name}` of `{owner}` takes {wanted}, found {value!r}",
            code="parameter",
            expected=wanted,
            found=value,
        ) from None


def _as_type(kind: Any, value: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _Wrong
        return value
    if kind is bool:
        word = str(value).lower()
        if word not in _TRUE | _FALSE:
            raise _Wrong
        return word in _TRUE
    if isinstance(value, bool):
        raise _Wrong
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise _Wrong
    if isinstance(value, str) and kind in (int, float):
        return plain.whole(value) if kind is int else plain.number(value)
    return kind(value)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    names: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}
    return names.get(kind) or str(getattr(kind, "WANTED", kind))


def _check_range(item: "dataclasses.Field[Any]", value: Any) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool):
        return
    low, high, above = (item.metadata.get(key) for key in ("low", "high", "above"))
    finite = math.isfinite(value)
    fits = (
        finite
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if fits:
        return
    allowed = range_of(item)
    raise UsageError(
        f"parameter `{item.name}` must be in {allowed}, found {value}",
        code="parameter",
        hint=_range_hint(item, value, high),
        expected=allowed,
        found=value,
    )


def range_of(item: "dataclasses.Field[Any]") -> str:
    """Return the allowed values of a parameter that is a number, as `(0.0, 1.0]`."""
    low, high, above = (item.metadata.get(key) for key in ("low", "high", "above"))
    lower = f"[{low}" if low is not None else f"({'-∞' if above is None else above}"
    return f"{lower}, {'∞)' if high is None else f'{high}]'}"


def _range_hint(item: "dataclasses.Field[Any]", value: float, high: float | None) -> str | None:
    if high == 1 and 2 <= value <= 100:  # a little above 1 is no percentage
        return f"did you mean {value / 100:g}? `{item.name}` is a share, not a percentage"
    hint = item.metadata.get("hint")
    return str(hint) if hint else None
