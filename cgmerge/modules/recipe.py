"""Recipes: what to compose, as a request in memory, a YAML file, or the record of a result."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from cgmerge.errors import Incompatible, NotFound, UsageError
from cgmerge.modules import mergekit
from cgmerge.modules.recipefile import is_recipe_name, located_base, located_ref, read_mapping
from cgmerge.nearest import nearest
from cgmerge.refs import parse_weighted

T = TypeVar("T")
RECORD = "cgmerge.json"
SCHEMA = "cgmerge.composition/1"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_KEYS = {
    "base",
    "experts",
    "method",
    "params",
    "output",
    "force_base",
    "allow_noop",
    "tuning",
    "parts",
}
_OUTPUT_KEYS = {"as", "rank", "dtype", "allow_rounding"}
# What a record says about the result; not part of the request.
_RESULT_KEYS = ("result", "versions", "warnings")
_EXPERT_KEYS = {"ref", "weight", "sha256", "name", "stats"}
# The last three tell people what the statistics were computed from.
_STATS_KEYS = {"kind", "sha256", "data", "rows", "tokens"}


@dataclass(frozen=True, slots=True)
class StatsPin:
    """The file of statistics that a method used of an expert: which kind, and its digest."""

    kind: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertRef:
    """One expert of a recipe; `sha256` pins its content, `stats` that of its statistics."""

    ref: str
    weight: float | None = None
    sha256: str | None = None
    stats: StatsPin | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Another rule for some modules: weights in the order of the experts, and all parameters."""

    modules: tuple[str, ...]
    weights: tuple[float, ...]
    params: Mapping[str, Any]


ByTensor = Callable[[mergekit.Tensor], tuple[tuple[float, ...], Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of `compose`, before any file is opened.

    Attributes:
        experts: At least one.
        method: Name or alias.
        params: Method parameters by name, scale included.
        base: Base reference, or None (adapters can be composed without one).
        base_fingerprint: What the base must be; a record pins it.
        form: `adapter` or `model`.
        rank: A number, `exact` or `auto`; adapters only.
        dtype: `auto` is float32 for adapters and the base's own type for models.
        force_base: Accept experts of another base fingerprint.
        allow_noop: Accept a result that changes nothing.
        allow_rounding: Accept a model whose float type swallows most of the delta.
        tuning: Of a record: how its parameters were chosen; passed on, never acted upon.
        folder: Of a record: where its references are looked up when the current folder has none.
        notes: What the user should know about how a file of another program was read.
        parts: Modules with weights and parameters of their own.
        by_tensor: What gives weights and parameters of a tensor, where they differ.
        overrides: Parameters that hold for all tensors, whatever `by_tensor` says.
    """

    experts: tuple[ExpertRef, ...]
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    base_fingerprint: str | None = None
    form: Literal["adapter", "model"] = "adapter"
    rank: int | Literal["exact", "auto"] = "auto"
    dtype: str = "auto"
    force_base: bool = False
    allow_noop: bool = False
    allow_rounding: bool = False
    tuning: Mapping[str, Any] | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    by_tensor: ByTensor | None = field(default=None, compare=False)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recorded(self) -> bool:
        """Whether it is the record of a result."""
        return self.folder is not None

    def beside(self, ref: str) -> Path | None:
        """Return where a reference of a record lies, seen from the record's folder or above it.

        The record does not say where it was made; digests tell whether it is the same thing.
        """
        if self.folder is None or not ref or "\0" in ref:
            return None
        above = Path(os.path.abspath(self.folder))  # noqa: PTH100  (links are not followed)
        places = (place / ref for place in (above, *above.parents))
        return next((place for place in places if place.exists()), None)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}", code="dtype"
            )
        if self.form == "model" and isinstance(self.rank, int):
            raise UsageError(
                f"rank {self.rank} is for adapters; a full model holds the whole sum",
                code="rank",
                hint="leave the rank away, or write an adapter",
            )
        if self.form == "model" and self.base is None:
            raise UsageError(
                "a full model needs the base's weights", code="base", hint="add --base BASE"
            )


def is_recipe(words: list[str]) -> bool:
    """Whether the arguments of `compose` are one recipe file rather than experts."""
    if len(words) != 1:
        return False
    path = Path(words[0])
    return is_recipe_name(path) and not path.is_dir()


def read_recipe(path: Path) -> Recipe:
    """Read a YAML or JSON recipe, a file of mergekit, or the `cgmerge.json` of an earlier result.

    References in a recipe are relative to it. Those of a record are what was given then, from
    the folder where that was.

    Raises:
        UsageError: Not a recipe, unknown keys, wrong types.
    """
    raw = read_mapping(path)
    if mergekit.KEY in raw:
        return _from_mergekit(raw, path)
    schema = raw.pop("schema", None)
    if schema not in (None, SCHEMA):
        raise Incompatible(
            f"{path} has schema {str(schema)[:60]!r}; this version reads {SCHEMA!r}",
            code="recipe_schema",
            hint="update cgmerge",
            expected=SCHEMA,
            found=schema,
        )
    recorded = schema is not None
    if recorded:
        raw = {key: value for key, value in raw.items() if key not in _RESULT_KEYS}
    _only_known(raw, _KEYS, str(path))
    experts = _take(raw, "experts", list, path, default=[])
    if not experts:
        raise UsageError(f"{path}: experts must be a list of at least one", code="recipe")
    output = _take(raw, "output", dict, path, default={})
    _only_known(output, _OUTPUT_KEYS, f"{path}: output")
    base, fingerprint = _base(raw, path)
    refs = [_expert(entry, path, recorded=recorded) for entry in experts]
    rank = output.get("rank")
    return Recipe(
        experts=tuple(refs),
        method=_take(raw, "method", str, path, default=default_method(len(refs))),
        params=_take(raw, "params", dict, path, default={}),
        base=base if recorded or base is None else located_base(base, path),
        base_fingerprint=fingerprint,
        form=parse_form(_take(output, "as", str, path, default="adapter")),
        rank=parse_rank("auto" if rank is None else str(rank)),
        dtype=_take(output, "dtype", str, path, default="auto"),
        force_base=_take(raw, "force_base", bool, path, default=False),
        allow_noop=_take(raw, "allow_noop", bool, path, default=False),
        allow_rounding=_take(output, "allow_rounding", bool, path, default=False),
        tuning=_take(raw, "tuning", dict, path),
        folder=path.parent if recorded else None,
        parts=tuple(
            _part(item, len(refs), path) for item in _take(raw, "parts", list, path, default=[])
        ),
    )


def default_method(experts: int) -> str:
    """Return the method where none is named.

    TIES settles conflicts between experts; a single one has none and is taken as it is.

    Args:
        experts: How many there are.
    """
    return "ties" if experts > 1 else "task-arithmetic"


def parse_rank(text: str) -> int | Literal["exact", "auto"]:
    """Read `--rank`.

    Raises:
        UsageError: Not a number, `exact` or `auto`.
    """
    if text in ("exact", "auto"):
        return cast("Literal['exact', 'auto']", text)
    if re.fullmatch("0*[1-9][0-9]{0,17}", text):
        return int(text)
    raise UsageError(
        f"the rank must be a whole number of at least 1, `exact` or `auto`, found {text[:60]!r}",
        code="rank",
    )


def parse_form(text: str) -> Literal["adapter", "model"]:
    """Read `--as`.

    Raises:
        UsageError: Not `adapter` or `model`.
    """
    if text not in ("adapter", "model"):
        raise UsageError(f"--as takes adapter or model, found {text!r}", code="form")
    return cast("Literal['adapter', 'model']", text)


def _from_mergekit(raw: Mapping[str, Any], path: Path) -> Recipe:
    """Return the recipe of a mergekit file: a full model, as there, where the base is known."""
    found = mergekit.read(raw, str(path))
    notes = found.notes
    first = found.experts[0][0]
    if found.base is None and all(_is_model(ref, path) for ref, _ in found.experts):
        # A weighted average of whole models is the same relative to any of them.
        raw = {**raw, "base_model": first}
        found = mergekit.read(raw, str(path))
        notes = (*found.notes, f"the file names no base: deltas are relative to {first}")

    def by_tensor(tensor: mergekit.Tensor) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        at = mergekit.read(raw, str(path), tensor)
        return tuple(weight for _, weight in at.experts), at.params

    if found.base is None:
        notes = (*notes, "the file names no base: an adapter is written, not a full model")
    return Recipe(
        experts=tuple(ExpertRef(located_ref(ref, path), w) for ref, w in found.experts),
        method=found.method,
        params=found.params,
        base=None if found.base is None else located_base(found.base, path),
        form="adapter" if found.base is None else "model",
        dtype=found.dtype,
        notes=notes,
        by_tensor=by_tensor if found.varies else None,
    )


def _is_model(ref: str, recipe: Path) -> bool:
    folder = Path(located_ref(ref, recipe))
    return (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists()


def _part(entry: Any, experts: int, path: Path) -> Part:
    if not isinstance(entry, dict):
        raise UsageError(f"{path}: a part is a mapping, found {_shown(entry)}", code="recipe")
    _only_known(entry, {"modules", "weights", "params"}, f"{path}: parts")
    modules = _take(entry, "modules", list, path, default=[])
    weights = _take(entry, "weights", list, path, default=[])
    if not modules or not all(isinstance(name, str) for name in modules):
        raise UsageError(f"{path}: a part names its modules", code="recipe")
    if len(weights) != experts or not all(_is_finite(weight) for weight in weights):
        raise UsageError(
            f"{path}: a part has one finite weight for each of {experts} experts,"
            f" found {_shown(weights)}",
            code="weights",
        )
    params = _take(entry, "params", dict, path, default={})
    return Part(tuple(modules), tuple(float(weight) for weight in weights), params)


def _expert(entry: Any, path: Path, *, recorded: bool) -> ExpertRef:
    if isinstance(entry, str):
        ref, weight = parse_weighted(entry if recorded else located_ref(entry, path))
        _check_place(ref, parse_weighted(entry)[0], path)
        return ExpertRef(ref, weight)
    if not isinstance(entry, dict) or not isinstance(entry.get("ref"), str):
        raise UsageError(
            f"{path}: an expert is a reference or a mapping with `ref`, found {_shown(entry)}",
            code="recipe",
        )
    _only_known(entry, _EXPERT_KEYS, f"{path}: expert")
    weight = entry.get("weight")
    if weight is not None and not _is_finite(weight):
        raise UsageError(
            f"{path}: weight must be a finite number, found {_shown(weight)}", code="weight"
        )
    digest = _take(entry, "sha256", str, path)
    ref = entry["ref"] if recorded else located_ref(entry["ref"], path)
    _check_place(ref, entry["ref"], path)
    return ExpertRef(ref, None if weight is None else float(weight), digest, _stats(entry, path))


def _stats(entry: Mapping[str, Any], path: Path) -> StatsPin | None:
    raw = _take(entry, "stats", dict, path)
    if raw is None:
        return None
    _only_known(raw, _STATS_KEYS, f"{path}: stats")
    kind, digest = _take(raw, "kind", str, path), _take(raw, "sha256", str, path)
    if kind not in ("gram", "fisher", "layerwise") or digest is None:
        raise UsageError(
            f"{path}: stats have a `kind` (gram, fisher or layerwise) and a `sha256`,"
            f" found {_shown(raw)}",
            code="recipe",
        )
    return StatsPin(kind, digest)


def _check_place(ref: str, written: str, recipe: Path) -> None:
    """Refuse a reference that would lead somewhere from here, but is relative to its recipe."""
    if ref != written and not os.path.lexists(ref) and os.path.lexists(written):
        there = os.path.relpath(written, recipe.parent)
        raise NotFound(
            f"no such expert: {ref}",
            code="expert",
            hint=f"references are relative to the folder of {recipe}: write {there}",
            path=ref,
        )


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def _base(raw: Mapping[str, Any], path: Path) -> tuple[str | None, str | None]:
    """Read `base: REF`, or `base: {ref, fingerprint}` as records have it."""
    if not isinstance(raw.get("base"), dict):
        return _take(raw, "base", str, path), None
    base = raw["base"]
    _only_known(base, {"ref", "fingerprint"}, f"{path}: base")
    return _take(base, "ref", str, path), _take(base, "fingerprint", str, path)


def _take(
    raw: Mapping[str, Any], key: str, kind: type[T], path: Path, *, default: Any = None
) -> T | Any:
    """Return a value of the right type; an absent or empty one gives the default."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        wanted = {bool: "true or false", str: "text", dict: "a mapping", list: "a list"}[kind]
        raise UsageError(f"{path}: {key} must be {wanted}, found {_shown(value)}", code="recipe")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _only_known(raw: Mapping[str, Any], known: set[str], source: str) -> None:
    if "peft_type" in raw:
        raise UsageError(
            f"{source} belongs to an expert and is no recipe", code="recipe", hint="pass its folder"
        )
    for key in raw:
        if key not in known:
            near = nearest(str(key), known)
            raise UsageError(
                f"{source}: unknown key `{str(key)[:60]}`",
                code="recipe",
                hint=f"did you mean `{near[0]}`?" if near else f"known: {', '.join(sorted(known))}",
            )
