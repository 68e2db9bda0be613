"""mergekit's YAML files, read as the composition they mean here.

`read` is a pure function from the parsed file to a method with its parameters, weights and
references, for one tensor where they differ between tensors; no file is opened. Where defaults
differ (trim within tensors, weighted sums, rescaling of DARE) mergekit's meaning is kept: in
float32 the numbers are those of mergekit 0.1.5. Whatever cannot be honoured is refused by its
name, and so is what mergekit itself would silently ignore.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from cgmerge.errors import UsageError
from cgmerge.modules.mergekit_table import (
    DTYPES,
    IGNORED,
    METHODS,
    REFUSED_KEYS,
    REFUSED_METHODS,
    Entry,
)
from cgmerge.nearest import nearest
from cgmerge.plain import exact
from cgmerge.shown import some_of

KEY = "merge_method"
"""What tells a mergekit file from a recipe of ours."""

_TOP = {KEY, "models", "base_model", "parameters", "dtype", "out_dtype", *REFUSED_KEYS}
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a mergekit file asks for, in our words.

    Attributes:
        method: Name of a method.
        params: Its parameters; `scale` only where the file gives lambda.
        experts: Reference and weight of each, as written, in the order of the file.
        base: Reference of the base, or None where the file does not tell.
        dtype: Float type of what is written; `auto` where the file does not tell.
        notes: What is done otherwise than in mergekit, without effect on what is asked for.
        varies: Whether weights or parameters are others for other tensors.
    """

    method: str
    params: dict[str, Any]
    experts: tuple[tuple[str, float], ...]
    base: str | None
    dtype: str
    notes: tuple[str, ...]
    varies: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a value is asked for.

    Attributes:
        name: Of the weight, in the base; "" for no tensor in particular.
        place: Of its layer, from 0 for the first to 1 for the last; 0 outside the layers.
    """

    name: str = ""
    place: float = 0.0


_ANYWHERE = Tensor()


@dataclass
class _File:
    """The parts of a file, checked one by one.

    Attributes:
        source: What to call the file in messages.
        method: mergekit's name of the method.
        entry: What is known about that method.
        models: Reference of each model that is not the base, with its own parameters.
        base: Reference of the base.
        base_values: Parameters of the base where it is listed as a model; empty where only
            `base_model` names it; None where neither does.
        shared: Parameters at the top level.
        notes: Collected on the way.
        tensor: For which tensor it is read.
        varies: Whether some value is another one for other tensors.
    """

    source: str
    method: str
    entry: Entry
    models: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    base: str | None = None
    base_values: Mapping[str, Any] | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensor: Tensor = _ANYWHERE
    varies: bool = False

    def refuse(self, what: str, reason: str, hint: str | None = None) -> NoReturn:
        """Raise the error that names what cannot be honoured."""
        raise UsageError(f"{self.source}: {what}: {reason}", code="mergekit", hint=hint, found=what)

    def number(self, name: str, own: Mapping[str, Any], owner: str) -> float | None:
        """Return a parameter of one model, its own or the shared one; None when absent."""
        value = self.find(name, (own, self.shared), owner)
        return None if value is None else self._finite(name, value)

    def flag(self, name: str) -> bool:
        """Return a shared parameter that is true or false, or its default."""
        value = self.find(name, (self.shared,), "parameters")
        if value is None:
            return bool(self.entry.params[name])
        # Numbers and the words of YAML 1.1, as mergekit's own reader takes them.
        word = str(value).lower()
        if word in (*_TRUE, "1", "1.0"):
            return True
        if word not in (*_FALSE, "0", "0.0"):
            self.refuse(f"`{name}`", f"must be true or false, found {_shown(value)}")
        return False

    def find(self, name: str, scopes: Sequence[Mapping[str, Any]], owner: str) -> Any:
        """Return what the first scope with a value for this tensor says; None when none has."""
        for scope in scopes:
            found = None if scope.get(name) is None else self.resolve(name, scope[name], owner)
            if found is not None:
                return found
        return None

    def resolve(self, name: str, value: Any, owner: str) -> Any:
        """Return the value of a setting for this tensor, None where no filter matches it."""
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return value
        if not value or any(isinstance(item, list) for item in value):
            self.refuse(f"`{name}` of {owner}", f"must be a number, found {_shown(value)}")
        if isinstance(value[0], dict):
            return self._filtered(name, value, owner)
        return self._blended(name, value)

    def _blended(self, name: str, values: Sequence[Any]) -> Any:
        """Read a gradient: values at even distances, from the first layer to the last."""
        if all(value == values[0] for value in values):
            return values[0]
        self.varies = True
        position = self.tensor.place * (len(values) - 1)
        low = int(position)
        if all(isinstance(value, bool | str) for value in values):
            return values[low]
        share = position - low
        numbers = [self._finite(name, value) for value in values]
        return (1 - share) * numbers[low] + share * numbers[min(low + 1, len(values) - 1)]

    def _filtered(self, name: str, value: Sequence[Any], owner: str) -> Any:
        """Read a list of filters: the first whose words are in the tensor's name counts."""
        for item in value:
            if not isinstance(item, dict) or "value" not in item:
                self.refuse(f"`{name}` of {owner}", "every entry of a list of filters has `value`")
            self.only_known(item, {"filter", "value"}, f"{name} of {owner}")
        for item in value:
            words = item.get("filter")
            if words in (None, "*") or (self.tensor.name and str(words) in self.tensor.name):
                return self.resolve(name, item["value"], owner)
            self.varies = True
        # Outside of any tensor the last one stands for those that none matches.
        return None if self.tensor.name else self.resolve(name, value[-1]["value"], owner)

    def _finite(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"`{name}`", f"must be a number, found {_shown(value)}")
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond what a float holds
            number = math.inf
        if not math.isfinite(number):
            self.refuse(f"`{name}`", f"must be finite, found {_shown(value)}")
        return number

    def only_known(self, raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
        """Refuse unknown keys, which mergekit ignores; suggest the nearest known one."""
        for key in raw:
            if key not in known:
                near = nearest(str(key), known)
                hint = f"did you mean `{near[0]}`?" if near else f"known: {_listed(known)}"
                self.refuse(
                    f"unknown key `{str(key)[:60]}` in {where}", "mergekit ignores it", hint
                )


def read(raw: Mapping[str, Any], source: str, tensor: Tensor = _ANYWHERE) -> Reading:
    """Read a mergekit file.

    Args:
        raw: The parsed file; it has the key `merge_method`.
        source: What to call it in messages.
        tensor: For which tensor: gradients run over the layers, filters look at names.

    Returns:
        What to compose. References are as written: paths are not resolved.

    Raises:
        UsageError: Something in it cannot be honoured, is unknown or malformed; the message names
            it.
    """
    file = _opened(raw, source, tensor)
    _read_models(file, raw)
    least = file.entry.experts[0]
    most = file.entry.experts[1]
    if len(file.models) < least or (most is not None and len(file.models) > most):
        wanted = f"{least}" if least == most else f"at least {least}"
        file.refuse(
            f"`{file.method}`", f"needs {wanted} models besides the base, found {len(file.models)}"
        )
    if file.entry.base and file.base is None:
        file.refuse(f"`{file.method}`", "needs `base_model` here", file.entry.base)
    params = _params(file)
    weights = _weights(file)
    dtype = _dtype(file, raw)
    if file.entry.note:
        file.notes.append(file.entry.note)
    experts = tuple((ref, w) for (ref, _), w in zip(file.models, weights, strict=True))
    notes = tuple(file.notes)
    return Reading(file.entry.name, params, experts, file.base, dtype, notes, file.varies)


def _opened(raw: Mapping[str, Any], source: str, tensor: Tensor) -> _File:
    """Check the top level and find the method."""
    method = raw[KEY]
    file = _File(source, str(method), Entry(""), tensor=tensor)
    if isinstance(method, str) and method in REFUSED_METHODS:
        reason, hint = REFUSED_METHODS[method]
        file.refuse(f"merge_method `{method}`", reason, hint)
    if not isinstance(method, str) or method not in METHODS:
        known = [*METHODS, *REFUSED_METHODS]
        near = nearest(str(method), known)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {_listed(METHODS)}"
        file.refuse(f"merge_method {_shown(method)}", "mergekit has no such method", hint)
    file.entry = METHODS[method]
    file.only_known(raw, _TOP, "the file")
    for key, (reason, hint) in REFUSED_KEYS.items():
        if raw.get(key) is not None and not _takes_from_base(key, raw[key]):
            file.refuse(f"`{key}`", reason, hint)
    shared = raw.get("parameters")
    file.shared = _parameters(file, shared, "parameters")
    return file


def _takes_from_base(key: str, value: Any) -> bool:
    """Whether a setting of the tokenizer asks for what is done anyway: the base's own."""
    if key == "tokenizer" and isinstance(value, dict):
        return value == {"source": "base"}
    return bool(key == "tokenizer_source" and value == "base")


def _parameters(file: _File, raw: Any, where: str) -> Mapping[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        file.refuse(where, f"must be a mapping, found {_shown(raw)}")
    file.only_known(raw, {*file.entry.params, *IGNORED}, f"{where} of `{file.method}`")
    return raw


def _read_models(file: _File, raw: Mapping[str, Any]) -> None:
    """Read `models` and `base_model`; the base is what every delta is relative to."""
    entries = raw.get("models")
    if not isinstance(entries, list) or not entries:
        file.refuse("`models`", f"must be a list of at least one, found {_shown(entries)}")
    file.base = _base(file, raw.get("base_model"))
    file.base_values = None if file.base is None else {}
    found = [_listed_model(file, entry) for entry in entries]
    for under, ref, own in found:
        if under is not None and under != file.base:
            file.refuse(
                f"model {_shown(ref)}",
                f"is an adapter on {_shown(under)}, and the base is {_shown(file.base)}",
                "deltas must be relative to one base",
            )
        if under is None and ref == file.base:
            file.base_values = own
        else:
            file.models.append((ref, own))


def _base(file: _File, given: Any) -> str | None:
    if given is None:
        return None
    under, ref = _model(file, given, "base_model")
    if under is not None:
        file.refuse(
            "`base_model`",
            f"a model with an adapter ({_shown(given)}) cannot be the base",
            "write it as a model first: cgmerge compose ADAPTER --base BASE --as model -o OUT",
        )
    return ref


def _listed_model(file: _File, entry: Any) -> tuple[str | None, str, Mapping[str, Any]]:
    """Return base, reference and parameters of an entry; the first base named becomes the base."""
    if not isinstance(entry, dict) or "model" not in entry:
        file.refuse("`models`", f"every entry has the key `model`, found {_shown(entry)}")
    file.only_known(entry, {"model", "parameters"}, "an entry of models")
    under, ref = _model(file, entry["model"], "model")
    own = _parameters(file, entry.get("parameters"), f"parameters of {_shown(ref)}")
    for name in own:
        if name not in file.entry.per_model and name not in IGNORED:
            file.refuse(
                f"`{name}` of {_shown(ref)}",
                "mergekit reads it only at the top level",
                "move it to the `parameters` of the file",
            )
    file.base = file.base or under
    return under, ref, own


def _model(file: _File, value: Any, where: str) -> tuple[str | None, str]:
    """Return (base, adapter) of `base+adapter`, else (None, reference)."""
    if isinstance(value, dict):
        file.only_known(value, {"model", "lora"}, f"`{where}`")
        path = _path(file, value.get("model"), where)
        return (path, _path(file, value["lora"], where)) if value.get("lora") else (None, path)
    if not isinstance(value, str) or not value.strip():
        file.refuse(f"`{where}`", f"must be a reference, found {_shown(value)}")
    parts = value.split("+")
    explicit = "write {model: {path: …}, lora: {path: …}}"
    if len(parts) > 2 or not all(parts):
        file.refuse(f"`{where}`", f"{_shown(value)} is not BASE+ADAPTER", explicit)
    for part in parts:
        if "@" in part and not part.startswith("hf://"):
            file.refuse(
                f"`{where}`",
                f"{_shown(value)}: `@` names a revision on the hub",
                f"write hf://user/repo@revision, or for a path with `@` {explicit}",
            )
    return (parts[0], parts[1]) if len(parts) == 2 else (None, value)


def _path(file: _File, value: Any, where: str) -> str:
    """Read the explicit form of a reference, which has no special characters."""
    if isinstance(value, dict):
        file.only_known(value, {"path", "revision"}, f"`{where}`")
        if value.get("revision") is not None:
            file.refuse(
                f"`revision` of `{where}`", "not supported", "write hf://user/repo@revision"
            )
        value = value.get("path")
    if not isinstance(value, str) or not value.strip():
        file.refuse(f"`{where}`", f"must be a reference, found {_shown(value)}")
    return value


def _params(file: _File) -> dict[str, Any]:
    """Return our parameters."""
    params = dict(file.entry.fixed)
    for name, value in file.entry.only.items():
        found = file.flag(name) if isinstance(value, bool) else file.number(name, {}, "parameters")
        if found is not None and found != value:
            file.refuse(f"`{name}: {_shown(file.shared[name])}`", *file.entry.reasons[name])
    if any(name in own for own in _all_values(file) for name in IGNORED):
        file.notes.append("int8_mask is ignored: it saves memory in mergekit and is not needed")
    shares = {
        name: _common(file, name) for name in ("density", "gamma") if name in file.entry.params
    }
    if "density" in shares and not 0 < shares["density"] <= 1:
        file.refuse("`density`", f"must be in (0, 1], found {exact(shares['density'])}")
    if "gamma" in shares and not 0 <= shares["gamma"] < 1:
        file.refuse("`gamma`", f"must be in [0, 1), found {exact(shares['gamma'])}")
    if file.entry.name in ("dare", "dare-ties"):
        # Decimals as written: 1 - 0.3 is 0.7.
        params["drop"] = float(1 - Decimal(repr(shares["density"])))
        params["rescale"] = "norm" if file.flag("rescale") else "none"
    elif "gamma" in shares:
        # Where both do not fit into the whole, mergekit drops fewer of the largest.
        rest = float(1 - Decimal(repr(shares["density"])))
        params |= {"density": shares["density"], "gamma": min(shares["gamma"], rest)}
    else:
        params |= shares
    if file.entry.votes:
        params["normalize"] = file.flag("normalize")
    scale = file.number("lambda", {}, "parameters") if "lambda" in file.entry.params else None
    return params if scale is None else {**params, "scale": scale}


def _all_values(file: _File) -> list[Mapping[str, Any]]:
    return [file.shared, file.base_values or {}, *(own for _, own in file.models)]


def _common(file: _File, name: str) -> float:
    """Return a parameter that mergekit takes for every model and we for all of them together."""
    found = {}
    for ref, own in file.models:
        value = file.number(name, own, _shown(ref))
        found[ref] = float(file.entry.params[name]) if value is None else value
    if len(set(found.values())) > 1:
        shown = some_of(f"{_shown(ref)} {value:g}" for ref, value in found.items())
        file.refuse(
            f"`{name}`",
            f"must be the same for every model here, found {shown}",
            f"give one {name} under the `parameters` of the file",
        )
    return next(iter(found.values()))


def _weights(file: _File) -> list[float]:
    """Return one weight per expert, with what mergekit's `normalize` does to sums."""
    if "weight" not in file.entry.params:
        return [1.0] * len(file.models)
    weights = [_weight(file, ref, own) for ref, own in file.models]
    if file.method == "linear":
        return _averaged(file, weights)
    if file.base_values:
        file.notes.append("parameters of the base have no effect: it has no delta")
    if file.entry.votes:
        if file.flag("normalize") and min(weights) < 0:
            file.refuse(
                "`weight`",
                f"negative weights ({min(weights):g}) have no effect with `normalize: true`:"
                " mergekit divides the sign away again",
                "set `normalize: false` under `parameters`",
            )
        return weights
    if "normalize" in file.entry.params and file.flag("normalize"):
        return _divided(file, weights, sum(weights))
    return weights


def _weight(file: _File, ref: str, own: Mapping[str, Any]) -> float:
    weight = file.number("weight", own, _shown(ref))
    if weight is None:
        where = f" for {file.tensor.name}" if file.tensor.name else ""
        file.refuse(
            f"`weight` of {_shown(ref)}",
            f"is missing{where}",
            "mergekit requires one for every model and tensor",
        )
    return weight


def _averaged(file: _File, weights: list[float]) -> list[float]:
    """Weights of whole models as weights of deltas: both agree when they sum to 1."""
    # mergekit counts the base as a model where the file names it, listed or not.
    own = None if file.base_values is None else file.number("weight", file.base_values, "the base")
    if own is None and file.base_values is not None:
        where = f" for {file.tensor.name}" if file.tensor.name else ""
        file.refuse(
            "`weight` of the base",
            f"is missing{where}: mergekit averages `base_model` as one of the models",
            f"list it with one: {{model: {_shown(file.base)}, parameters: {{weight: 0}}}} leaves it"
            " out of the average; or write the models as BASE+ADAPTER, without `base_model`",
        )
    total = sum(weights) + (own or 0.0)
    if file.flag("normalize"):
        return _divided(file, weights, total)
    if abs(total - 1) > 1e-6:
        file.refuse(
            "`normalize: false`",
            f"the weights sum to {total:g}, which would multiply the base's own weights",
            "use merge_method task_arithmetic, which adds weighted deltas to the base",
        )
    return weights


def _divided(file: _File, weights: list[float], total: float) -> list[float]:
    if abs(total) < 1e-12:
        file.refuse("`weight`", "the weights sum to 0 and cannot be normalized")
    return [weight / total for weight in weights]


def _dtype(file: _File, raw: Mapping[str, Any]) -> str:
    """Return what is written; what is computed in is always float32."""
    for key in ("dtype", "out_dtype"):
        if raw.get(key) is not None and raw[key] not in DTYPES:
            file.refuse(f"`{key}: {_shown(raw[key])}`", f"must be one of {', '.join(DTYPES)}")
    if raw.get("dtype") not in (None, "float32"):
        file.notes.append(f"computed in float32; `dtype: {raw['dtype']}` is what is written")
    return str(raw.get("out_dtype") or raw.get("dtype") or "auto")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
