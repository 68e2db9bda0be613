"""Merge methods: how one is written, found, described and given its parameters.

A method is one file in `methods/`: a docstring, a frozen dataclass of parameters, a pure function
and the decorator `@method`. The command line (`--set`), recipes, `cgmerge methods`, the reference
page and the conformance tests are derived from that. Third parties register theirs through the
entry-point group `cgmerge.methods`.

Two kinds of function:

- `linear=True`: `coefficients(weights, params) -> [experts]`; the merged delta is Σ c_e·ΔW_e. The
  engine keeps it in factors, exactly.
- otherwise: `kernel(values, weights, params, state) -> merged`, with `values`
  [experts, rows, columns] and the result [rows, columns]; entry-wise, called block by block.
  `prepare(blocks, weights, params)` returns, for each tensor name, what the kernel must know
  about the whole (thresholds, majority signs).
"""

import dataclasses
import difflib
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin

from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks

Weights = Sequence[float]
F = TypeVar("F", bound=Callable[..., Any])


def param(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    hint: str | None = None,
) -> Any:
    """Declare one parameter of a method.

    Args:
        default: The value when nothing is said.
        doc: One line for the help page.
        low: Smallest allowed value.
        high: Largest allowed value.
        above: The value must be larger than this.
        hint: What to suggest when the value is out of range.
    """
    limits = {"low": low, "high": high, "above": above}
    return field(default=default, metadata={"doc": doc, "hint": hint, **limits})


@dataclass(frozen=True, kw_only=True)
class Params:
    """What every method has; subclasses add their own fields with `param`."""

    scale: float = param(1.0, "λ: factor on the merged delta")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_range(item, getattr(self, item.name))


class Kernel(Protocol):
    """An entry-wise merge rule on one block."""

    def __call__(self, block: Block, weights: Weights, params: Any, state: Any) -> Tensor:
        """Return the merged block, [rows, columns]; `block.values` may be overwritten."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One registered method; everything the program knows about it."""

    name: str
    summary: str
    formula: str
    paper: str
    differs: str
    use_when: str
    params: type[Params]
    scope: Literal["entry", "tensor", "model"]
    linear: bool
    coefficients: Callable[[Weights, Any], list[float]] | None
    kernel: Kernel | None
    prepare: Callable[[Blocks, Weights, Any], Any] | None
    default_weight: Literal["one", "mean"]
    identity: Mapping[str, Any]
    aliases: Mapping[str, Mapping[str, Any]]
    needs: tuple[str, ...]
    module: str

    def make_params(self, values: Mapping[str, Any] | None = None) -> Params:
        """Build the parameters from plain values or from strings as typed on a command line.

        Raises:
            UsageError: Unknown name, wrong type, or out of range.
        """
        fields = {item.name: item for item in dataclasses.fields(self.params)}
        given = dict(values or {})
        for key in given:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
                raise UsageError(
                    f"method `{self.name}` has no parameter `{key}`",
                    code="parameter",
                    hint=f"did you mean `{near[0]}`?" if near else f"it has {', '.join(fields)}",
                    expected=sorted(fields),
                    found=key,
                )
        return self.params(**{k: _coerce(fields[k], v, self.name) for k, v in given.items()})

    def resolve_weights(self, weights: Sequence[float | None] | None, experts: int) -> list[float]:
        """Fill in default weights.

        Args:
            weights: One per expert, None for unspecified ones; or None for all defaults.
            experts: How many there are.

        Raises:
            UsageError: Wrong number of weights, or one that is not finite.
        """
        if weights is None or all(weight is None for weight in weights):
            return [1.0 / experts if self.default_weight == "mean" else 1.0] * experts
        if len(weights) != experts:
            raise UsageError(f"{len(weights)} weights for {experts} experts", code="weights")
        filled = [1.0 if weight is None else float(weight) for weight in weights]
        if not all(math.isfinite(w) for w in filled):
            raise UsageError(f"weights must be finite, found {filled}", code="weights")
        return filled


_METHODS: dict[str, MethodSpec] = {}


@dataclass(frozen=True, kw_only=True)
class About:
    """The words a method's help page is made of."""

    formula: str
    paper: str
    differs: str = "nothing"
    use_when: str


def method(  # noqa: PLR0913  (a declaration: each argument is one property of the method)
    name: str,
    *,
    params: type[Params],
    about: About,
    scope: Literal["entry", "tensor", "model"] = "entry",
    linear: bool = False,
    prepare: Callable[[Blocks, Weights, Any], Any] | None = None,
    default_weight: Literal["one", "mean"] = "one",
    identity: Mapping[str, Any] | None = None,
    aliases: Mapping[str, Mapping[str, Any]] | None = None,
    needs: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Register the decorated function as a merge method.

    Args:
        name: What users type.
        params: Its parameter dataclass, a subclass of `Params`.
        about: Formula, paper, difference to the official code, when to use it.
        scope: What must be known at once: an entry of all experts, a tensor, or everything.
        linear: The function returns coefficients instead of merged blocks.
        prepare: Computes what the kernel needs from a first look at the whole stream.
        default_weight: Weight of an expert for which the user gave none.
        identity: Parameters under which one expert of weight 1 comes back unchanged.
        aliases: Other names, each with the parameters it fixes.
        needs: Inputs beyond the experts, e.g. `data`.
    """

    def register(function: F) -> F:
        summary = (importlib.import_module(function.__module__).__doc__ or "").split("\n")[0]
        spec = MethodSpec(
            name=name,
            summary=summary.rstrip("."),
            formula=about.formula,
            paper=about.paper,
            differs=about.differs,
            use_when=about.use_when,
            params=params,
            scope=scope,
            linear=linear,
            coefficients=function if linear else None,
            kernel=None if linear else function,
            prepare=prepare,
            default_weight=default_weight,
            identity=identity or {},
            aliases=aliases or {},
            needs=needs,
            module=function.__module__,
        )
        for key in (name, *spec.aliases):
            if key in _METHODS and _METHODS[key].module != spec.module:
                raise ValueError(f"two methods are called {key!r}")
            _METHODS[key] = spec
        return function

    return register


@cache
def _load_all() -> None:
    from cgmerge.merge import methods

    for module in sorted(item.name for item in pkgutil.iter_modules(methods.__path__)):
        importlib.import_module(f"{methods.__name__}.{module}")
    for plugin in entry_points(group="cgmerge.methods"):
        plugin.load()


def all_methods() -> list[MethodSpec]:
    """Return every registered method once, sorted by name."""
    _load_all()
    return [spec for key, spec in sorted(_METHODS.items()) if key == spec.name]


def get_method(name: str) -> tuple[MethodSpec, Mapping[str, Any]]:
    """Find a method by name or alias.

    Returns:
        The method and the parameters that the alias fixes (empty for a plain name).

    Raises:
        UsageError: No such method; suggests the nearest name.
    """
    _load_all()
    spec = _METHODS.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, _METHODS, n=1, cutoff=0.5)
        known = f"`cgmerge methods` lists all {len(all_methods())}"
        raise UsageError(
            f"unknown method `{name}`",
            code="method",
            hint=f"did you mean `{near[0]}`? {known}" if near else known,
            found=name,
            expected=sorted(_METHODS),
        )
    return spec, spec.aliases.get(name, {})


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
    return kind(value)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    names: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}
    return names.get(kind, str(kind))


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
    lower = f"[{low}" if low is not None else f"({'-∞' if above is None else above}"
    upper = f"{high}]" if high is not None else "∞)"
    raise UsageError(
        f"parameter `{item.name}` must be in {lower}, {upper}, found {value}",
        code="parameter",
        hint=_range_hint(item, value, high),
        expected=f"{lower}, {upper}",
        found=value,
    )


def _range_hint(item: "dataclasses.Field[Any]", value: float, high: float | None) -> str | None:
    if high == 1 and 1 < value <= 100:
        return f"did you mean {value / 100:g}? `{item.name}` is a share, not a percentage"
    hint = item.metadata.get("hint")
    return str(hint) if hint else None
