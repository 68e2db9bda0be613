"""Whether a model folder is a fine-tune of a base, from configs and headers alone."""

import re
from typing import Any

from cgmerge import strictjson
from cgmerge.errors import CgmergeError, Damaged, Incompatible
from cgmerge.modules.base import Base, config_values, stem_of
from cgmerge.modules.recipe import RECORD, SCHEMA
from cgmerge.shown import some_of
from cgmerge.tensorfile import read_small

_HEAD = "lm_head.weight"
# Tables that some files hold beside the weights; they follow from the architecture.
_TABLES = re.compile(r"(^|\.)(attn\.masked_bias|rotary_emb\.inv_freq|position_ids)$")
_MASK = re.compile(r"(^|\.)attn\.bias$")
# What changes the output but not the shapes, and is taken from the base.
_SETTINGS = (
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "rms_norm_eps",
    "layer_norm_eps", "layer_norm_epsilon", "sliding_window", "hidden_act",
)  # fmt: skip


def check_full(model: Base, base: Base) -> list[str]:
    """Refuse a model that is not a fine-tune of the base, weight by weight.

    Args:
        model: The fine-tune.
        base: What it is compared with.

    Returns:
        Warnings.

    Raises:
        Incompatible: Quantized weights, or another architecture, vocabulary, shape or set of
            weights.
        Damaged: Two names of one weight.
    """
    for one in (model, base):
        _check_plain(one)
    _check_architecture(model, base)
    own, wanted = _by_stem(model), _by_stem(base)
    _check_vocabulary(model, base)
    _check_names(own, wanted, model, base)
    _check_shapes(own, wanted, model, base)
    return _warnings(model, base)


def check_made_from(model: Base, base: Base, *, force: bool) -> str | None:
    """Compare the base that a model's own record names, where it has one, with the one given.

    Args:
        model: A model folder; those that `compose` writes hold a record.
        base: What the model is compared with.
        force: Accept another base.

    Returns:
        The fingerprint of the base that the model was made from, where that is known.

    Raises:
        Incompatible: Another one, with both fingerprints.
        Damaged: A record that is no JSON.
    """
    path = model.folder / RECORD
    if not path.is_file():
        return None
    raw = strictjson.loads_object(read_small(path, follow_links=True), source=str(path))
    named = raw.get("base") if raw.get("schema") == SCHEMA else None
    found = named.get("fingerprint") if isinstance(named, dict) else None
    if not isinstance(found, str):
        return None
    if found != base.fingerprint and not force:
        raise Incompatible(
            f"{model.folder} was made from another base, says its {RECORD}: {found}, but"
            f" {base.ref} is {base.fingerprint}",
            code="base",
            hint="pass the base it was made from, or --force-base to take the difference from"
            " this one",
            path=model.folder,
            expected=found,
            found=base.fingerprint,
        )
    return found


def _by_stem(model: Base) -> dict[str, str]:
    """Return the weights under the names that they have in any file."""
    found: dict[str, str] = {}
    for name in model.infos:
        stem = stem_of(name)
        if stem in found:
            raise Damaged(
                f"{model.folder} holds one weight twice, as {found[stem]!r} and {name!r}",
                code="names",
                path=model.folder,
                tensor=name,
            )
        if not is_table(model, name):
            found[stem] = name
    return found


def is_table(model: Base, name: str) -> bool:
    """Whether an entry of a weight file is a constant of the architecture, which nothing trains."""
    return bool(_TABLES.search(name)) or (
        bool(_MASK.search(name)) and len(model.infos[name].shape) == 4
    )


def _check_plain(model: Base) -> None:
    found = [
        f"{name} ({info.dtype})"
        for name, info in model.infos.items()
        if info.dtype not in ("F64", "F32", "F16", "BF16") and not is_table(model, name)
    ]
    method = model.config.get("quantization_config")
    if found or method:
        raise Incompatible(
            f"{model.folder} holds quantized weights"
            + (f": {some_of(found)}" if found else ", says its config.json"),
            code="quantized",
            hint="use the 16-bit model; differences of quantized weights mean nothing",
            path=model.folder,
            found=found[:5],
        )


def _check_architecture(model: Base, base: Base) -> None:
    theirs, ours = config_values(model.config), config_values(base.config)
    wrong = [key for key in ours if key != "vocab" and theirs[key] != ours[key]]
    if wrong:
        raise Incompatible(
            f"{model.folder} is no fine-tune of {base.ref}: "
            + "; ".join(f"{key} is {theirs[key]}, the base has {ours[key]}" for key in wrong),
            code="architecture",
            hint="pass the base that the model was trained from",
            path=model.folder,
            expected=[ours[key] for key in wrong],
            found=[theirs[key] for key in wrong],
        )


def _check_vocabulary(model: Base, base: Base) -> None:
    pairs = [(model.embedding, base.embedding), (_HEAD, _HEAD)]
    for theirs, ours in pairs:
        if theirs not in model.infos or ours not in base.infos:
            continue
        found, wanted = model.infos[theirs].shape, base.infos[ours].shape
        if found[:1] != wanted[:1]:
            raise Incompatible(
                f"{model.folder} was trained with {found[0]} tokens ({theirs}: {list(found)}),"
                f" the base {base.ref} has {wanted[0]}",
                code="vocabulary",
                hint="make the sizes equal: resize_token_embeddings() of transformers on the base,"
                " with the fine-tune's tokenizer",
                path=model.folder,
                tensor=theirs,
                expected=wanted[0],
                found=found[0],
            )


def _check_names(own: dict[str, str], wanted: dict[str, str], model: Base, base: Base) -> None:
    missing = [wanted[stem] for stem in wanted if stem not in own and stem != _HEAD]
    extra = [own[stem] for stem in own if stem not in wanted and stem != _HEAD]
    heads = (_HEAD in own or model.embedding) and (_HEAD in wanted or base.embedding)
    if (_HEAD in own) != (_HEAD in wanted) and not heads:
        (missing if _HEAD in wanted else extra).append(_HEAD)
    if missing or extra:
        parts = [
            f"{len(names)} weights are only in the {where}: {some_of(names)}"
            for where, names in (("base", missing), ("fine-tune", extra))
            if names
        ]
        raise Incompatible(
            f"{model.folder} does not fit {base.ref}; {'; '.join(parts)}",
            code="weights",
            hint="pass the base that the model was trained from",
            path=model.folder,
            expected=missing[:5],
            found=extra[:5],
        )


def _check_shapes(own: dict[str, str], wanted: dict[str, str], model: Base, base: Base) -> None:
    wrong = [
        f"{own[stem]}: fine-tune {list(found)}, base {list(shape)}"
        for stem, name in wanted.items()
        if stem in own
        and (found := model.infos[own[stem]].shape) != (shape := base.infos[name].shape)
    ]
    if wrong:
        raise Incompatible(
            f"{model.folder} does not fit {base.ref}; {len(wrong)} weights have other shapes:\n  "
            + some_of(wrong, between="\n  "),
            code="shape",
            hint="pass the base that the model was trained from",
            path=model.folder,
            found=wrong[:5],
        )


def _warnings(model: Base, base: Base) -> list[str]:
    found = []
    theirs, ours = _settings(model.config), _settings(base.config)
    other = [key for key in _SETTINGS if theirs.get(key) != ours.get(key)]
    if other:
        found.append(
            f"{model.folder.name}: {', '.join(other)} in config.json differ from the base's;"
            " the result has the base's"
        )
    template = _chat_template(model)
    if template is not None and template != _chat_template(base):
        found.append(
            f"{model.folder.name}: its chat template is not the base's; the result has the base's"
        )
    return found


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are compared, RoPE in the one form that new configs have."""
    found = {key: config[key] for key in _SETTINGS if config.get(key) is not None}
    rope = found.pop("rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
        found.setdefault("rope_theta", rope.get("rope_theta"))
    elif rope is not None:
        found["rope_parameters"] = rope
    return found


def _chat_template(model: Base) -> object:
    path = model.folder / "chat_template.jinja"
    try:
        if path.exists():
            return read_small(path, follow_links=True)
        path = model.folder / "tokenizer_config.json"
        if path.exists():
            raw = read_small(path, follow_links=True)
            return strictjson.loads_object(raw, source=str(path)).get("chat_template")
    except CgmergeError:  # only the base's files are copied
        return None
    return None
