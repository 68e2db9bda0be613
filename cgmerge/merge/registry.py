"""Merge methods: how one is written, found and described.

A method is one file in `methods/`: a docstring, a frozen dataclass of parameters, a pure function
and the decorator `@method`. The command line (`--set`), recipes, `cgmerge methods`, the reference
page and the conformance tests are derived from that. Third parties register theirs through the
entry-point group `cgmerge.methods`.

Four kinds of function; the engine multiplies what they return by `params.scale`:

- `linear`: `coefficients(weights, params) -> [experts]`; the merged delta is Σ c_e·ΔW_e.
- `gram`: `coefficients(gram, weights, params) -> [experts]`, for each tensor, from the inner
  products ⟨ΔW_i, ΔW_j⟩, float64 [experts, experts]. Like `linear` it stays in factors.
- `entry`: `kernel(block, weights, params, state) -> [rows, columns]`, entry-wise, called block by
  block. `prepare(blocks, weights, params)` returns, for each tensor name, what the kernel must
  know about the whole (thresholds, majority signs).
- `matrix`: `kernel(matrices, weights, params, stats) -> [m, n]`, on whole matrices, float64
  [experts, m, n]. `sides` says what the rule commutes with: rotations of both sides, of the
  output side only, or none; LoRA experts are merged in the small space that this allows, exactly.
  Tensors with fewer than two dimensions are averaged.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Blocks
from cgmerge.merge.params import Params, build_params, param
from cgmerge.nearest import nearest

__all__ = [
    "About",
    "MethodSpec",
    "Params",
    "Weights",
    "all_methods",
    "get_method",
    "method",
    "param",
]

Weights = Sequence[float]
Kind = Literal["linear", "gram", "entry", "matrix"]
Sides = Literal["both", "left", "none"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class About:
    """The words a method's help page is made of."""

    formula: str
    paper: str
    differs: str = "nothing"
    use_when: str


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the engine and the tests must know about a method.

    Attributes:
        scope: What must be known at once: an entry of all experts, a tensor, or everything.
        sides: For `matrix`: the rotations that the rule commutes with.
        default_weight: Weight of an expert for which the user gave none.
        experts: Fewest and most experts; None for no limit.
        identity: Parameters under which one expert of weight 1 comes back unchanged; None when
            there are none.
        scale_free: A common factor on all experts goes through.
        ordered: The order of the experts matters.
        stats: Statistics that are needed for every expert, one tensor per module.
        relative_weights: A common factor on all weights changes nothing.
        pointwise: For `entry`: whether, with the state that `prepare` found for a tensor, an
            entry's result depends on nothing but that entry's values.
        even: Parameters under which all directions of a merged matrix weigh the same, so that
            no lower rank is better than another; None when there are none.
    """

    scope: Literal["entry", "tensor", "model"] = "entry"
    sides: Sides = "both"
    default_weight: Literal["one", "mean"] = "one"
    experts: tuple[int, int | None] = (1, None)
    identity: Mapping[str, Any] | None = None
    scale_free: bool = True
    ordered: bool = False
    stats: Literal["gram", "fisher", "layerwise"] | None = None
    relative_weights: bool = False
    pointwise: Callable[[Any], bool] | None = None
    even: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One registered method; everything the program knows about it."""

    name: str
    summary: str
    about: About
    kind: Kind
    traits: Traits
    params: type[Params]
    function: Callable[..., Any]
    prepare: Callable[[Blocks, Weights, Any], Any] | None
    aliases: Mapping[str, Mapping[str, Any]]
    module: str

    @property
    def linear(self) -> bool:
        """Whether the merged delta is a fixed combination of the experts."""
        return self.kind == "linear"

    @property
    def low_rank(self) -> bool:
        """Whether merging LoRA experts gives a delta of rank at most the sum of their ranks."""
        return self.kind in ("linear", "gram") or (
            self.kind == "matrix" and self.traits.sides != "none"
        )

    @property
    def runs_in_spaces(self) -> bool:
        """Whether there is a `core+NAME`: statistics are those of the inputs as they are."""
        return self.traits.stats is None

    @property
    def needs(self) -> tuple[str, ...]:
        """Return what is needed beyond the experts."""
        return (f"{self.traits.stats} statistics",) if self.traits.stats else ()

    def make_params(self, values: Mapping[str, Any] | None = None) -> Params:
        """Build the parameters from plain values or from strings as typed on a command line.

        Raises:
            UsageError: Unknown name, wrong type, or out of range.
        """
        return build_params(self.params, values or {}, self.name)

    def resolve_weights(self, weights: Sequence[float | None] | None, experts: int) -> list[float]:
        """Fill in default weights.

        Args:
            weights: One per expert, None for unspecified ones; or None for all defaults.
            experts: How many there are.

        Raises:
            UsageError: Wrong number of weights, or one that is not finite.
        """
        if weights is None or all(weight is None for weight in weights):
            mean = self.traits.default_weight == "mean"
            return [1.0 / experts if mean else 1.0] * experts
        if len(weights) != experts:
            raise UsageError(f"{len(weights)} weights for {experts} experts", code="weights")
        filled = [1.0 if weight is None else float(weight) for weight in weights]
        if not all(math.isfinite(w) for w in filled):
            raise UsageError(f"weights must be finite, found {filled}", code="weights")
        return filled

    def check_count(self, experts: int) -> None:
        """Refuse a number of experts that the method is not defined for.

        Raises:
            UsageError: Too few or too many.
        """
        least, most = self.traits.experts
        if experts >= least and (most is None or experts <= most):
            return
        wanted = f"exactly {least}" if least == most else f"at least {least}"
        if most is not None and least != most:
            wanted = f"{least} to {most}"
        raise UsageError(
            f"method `{self.name}` takes {wanted} experts, found {experts}",
            code="experts",
            expected=wanted,
            found=experts,
        )


_METHODS: dict[str, MethodSpec] = {}


def method(
    name: str,
    kind: Kind,
    *,
    params: type[Params],
    about: About,
    traits: Traits | None = None,
    prepare: Callable[[Blocks, Weights, Any], Any] | None = None,
    aliases: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as a merge method.

    Args:
        name: What users type.
        kind: What the function takes and returns; see the module.
        params: Its parameter dataclass, a subclass of `Params`.
        about: Formula, paper, difference to the official code, when to use it.
        traits: Its properties.
        prepare: For `entry`: computes what the kernel needs from a first look at the stream.
        aliases: Other names, each with the parameters it fixes.
    """

    def register(function: F) -> F:
        summary = (importlib.import_module(function.__module__).__doc__ or "").split("\n")[0]
        spec = MethodSpec(
            name=name,
            summary=summary.rstrip("."),
            about=about,
            kind=kind,
            traits=traits or Traits(identity={}),
            params=params,
            function=function,
            prepare=prepare,
            aliases=aliases or {},
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


def is_method(name: str) -> bool:
    """Whether there is a method of this name or alias."""
    _load_all()
    return name in _METHODS


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
        near = nearest(name, _METHODS)
        known = "`cgmerge methods` lists them all"
        raise UsageError(
            f"unknown method `{name}`",
            code="method",
            hint=f"did you mean `{near[0]}`? {known}" if near else known,
            found=name,
            expected=sorted(_METHODS),
        )
    return spec, spec.aliases.get(name, {})
