"""Recipes: what to compose, as a request in memory, a YAML file, or the record of a result."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from cgmerge import strictjson
from cgmerge.errors import UsageError
from cgmerge.refs import parse_weighted
from cgmerge.tensorfile import read_small

RECORD = "cgmerge.json"
SCHEMA = "cgmerge.composition/1"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_KEYS = {"base", "experts", "method", "params", "output", "force_base", "allow_noop"}
_OUTPUT_KEYS = {"as", "rank", "dtype", "allow_rounding"}
_EXPERT_KEYS = {"ref", "weight", "sha256", "name"}


@dataclass(frozen=True, slots=True)
class ExpertRef:
    """One expert of a recipe; `sha256` pins its content."""

    ref: str
    weight: float | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of `compose`, before any file is opened.

    Attributes:
        experts: At least one.
        method: Name or alias.
        params: Method parameters by name, scale included.
        base: Base reference, or None (adapters can be composed without one).
        form: `adapter` or `model`.
        rank: A number, `exact` or `auto`; adapters only.
        dtype: `auto` is float32 for adapters and the base's own type for models.
        force_base: Accept experts of another base fingerprint.
        allow_noop: Accept a result that changes nothing.
        allow_rounding: Accept a model whose float type swallows most of the delta.
        folder: Where relative references may also be looked up (the recipe's own folder).
    """

    experts: tuple[ExpertRef, ...]
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    form: Literal["adapter", "model"] = "adapter"
    rank: int | Literal["exact", "auto"] = "auto"
    dtype: str = "auto"
    force_base: bool = False
    allow_noop: bool = False
    allow_rounding: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(
                f"unknown dtype {self.dtype!r}; one of {', '.join(DTYPES)}", code="dtype"
            )
        if self.form == "model" and self.base is None:
            raise UsageError(
                "a full model needs the base's weights", code="base", hint="add --base BASE"
            )


def is_recipe(words: list[str]) -> bool:
    """Whether the arguments of `compose` are one recipe file rather than experts."""
    return len(words) == 1 and Path(words[0]).suffix.lower() in (".yml", ".yaml", ".json")


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe, or the `cgmerge.json` of an earlier result.

    Raises:
        UsageError: Not a recipe, unknown keys, wrong types.
    """
    raw = _parse(path)
    if raw.get("schema") == SCHEMA:
        raw = {key: raw[key] for key in raw if key in _KEYS}
    _only_known(raw, _KEYS, str(path))
    output = raw.get("output") or {}
    if not isinstance(output, dict):
        raise UsageError(f"{path}: output must be a mapping, found {output!r}", code="recipe")
    _only_known(output, _OUTPUT_KEYS, f"{path}: output")
    experts = raw.get("experts")
    if not isinstance(experts, list) or not experts:
        raise UsageError(f"{path}: experts must be a list of at least one", code="recipe")
    params = raw.get("params") or {}
    if not isinstance(params, dict):
        raise UsageError(f"{path}: params must be a mapping, found {params!r}", code="recipe")
    base = raw.get("base")
    if isinstance(base, dict):
        base = base.get("ref")
    return Recipe(
        experts=tuple(_expert(entry, path) for entry in experts),
        method=str(raw.get("method", "ties")),
        params={str(key): value for key, value in params.items()},
        base=None if base is None else str(base),
        form=parse_form(str(output.get("as", "adapter"))),
        rank=parse_rank(str(output.get("rank") or "auto")),
        dtype=str(output.get("dtype", "auto")),
        force_base=bool(raw.get("force_base", False)),
        allow_noop=bool(raw.get("allow_noop", False)),
        allow_rounding=bool(output.get("allow_rounding", False)),
        folder=path.parent,
    )


def parse_rank(text: str) -> int | Literal["exact", "auto"]:
    """Read `--rank`.

    Raises:
        UsageError: Not a number, `exact` or `auto`.
    """
    if text in ("exact", "auto"):
        return cast("Literal['exact', 'auto']", text)
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise UsageError(
        f"the rank must be a whole number of at least 1, `exact` or `auto`, found {text!r}",
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


def _expert(entry: Any, path: Path) -> ExpertRef:
    if isinstance(entry, str):
        ref, weight = parse_weighted(entry)
        return ExpertRef(ref, weight)
    if not isinstance(entry, dict) or not isinstance(entry.get("ref"), str):
        raise UsageError(
            f"{path}: an expert is a reference or a mapping with `ref`, found {entry!r}",
            code="recipe",
        )
    _only_known(entry, _EXPERT_KEYS, f"{path}: expert")
    weight = entry.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise UsageError(f"{path}: weight must be a number, found {weight!r}", code="weight")
    digest = entry.get("sha256")
    return ExpertRef(entry["ref"], None if weight is None else float(weight), digest)


def _parse(path: Path) -> dict[str, Any]:
    data = read_small(path, limit=4 << 20, follow_links=True)
    if path.suffix.lower() == ".json":
        return strictjson.loads_object(data, source=str(path))
    import yaml

    try:
        value = yaml.safe_load(data.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}", code="recipe") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a mapping", code="recipe")
    return {str(key): item for key, item in value.items()}


def _only_known(raw: Mapping[str, Any], known: set[str], source: str) -> None:
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            raise UsageError(
                f"{source}: unknown key `{key}`",
                code="recipe",
                hint=f"did you mean `{near[0]}`?" if near else f"known: {', '.join(sorted(known))}",
            )
