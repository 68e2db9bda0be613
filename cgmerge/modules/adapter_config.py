"""adapter_config.json as cgmerge reads it: a strict schema, nothing executed, nothing guessed.

PEFT evaluates regexes from this file, allocates what it says, and rewrites base weights for some
init methods. Here every field is either understood, harmless, or a refusal that names it. Which
modules an expert touches is decided by the tensors in its file, never by a pattern.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from cgmerge.errors import Damaged, Incompatible, LimitExceeded, Unsafe
from cgmerge.modules.module_names import PLAIN, Selection, is_key, key_fits
from cgmerge.plain import exact

_CORRECT = "correct it, or save the adapter again with the program that made it"
MAX_RANK = 1024
MAX_ALPHA = 1e6
MAX_TEXT = 1000

# Fields that change what the adapter computes in ways a plain ΔW = s·B·A cannot hold.
_REFUSED = {
    "use_dora": "DoRA rescales the base weight, which is not a low-rank delta",
    "lora_bias": "a LoRA bias is not part of ΔW",
    "use_qalora": "QALoRA pools its input",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA acts on some tokens only",
    "layer_replication": "it changes the layers of the base",
    "target_parameters": "it targets bare parameters (fused MoE experts), not modules",
    "trainable_token_indices": "it retrains embedding rows",
    "modules_to_save": "it carries fully trained modules",
    "kasa_config": "KaSA changes the base weight",
    "monteclora_config": "MonteCLoRA samples its factors",
    "megatron_config": "it configures another framework",
    "arrow_config": "it is a router, not an expert",
}
# PiSSA and kin are saved relative to a base they have changed themselves.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "alpha_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora", "velora_config",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of adapter_config.json that means something to ΔW."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    base_name: str = ""
    fan_in_fan_out: bool = False
    task_type: str = "CAUSAL_LM"
    selection: Selection = field(default_factory=Selection)

    def rank_of(self, module: str) -> int:
        """Return the rank that this file claims for a module path."""
        return int(_lookup(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str, rank: int) -> float:
        """Return alpha/rank, or alpha/√rank with rsLoRA, for a module path."""
        alpha = float(_lookup(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_adapter_config(raw: dict[str, Any], *, source: str) -> AdapterConfig:
    """Check every field of a parsed adapter_config.json.

    Args:
        raw: The JSON object.
        source: The file, for messages.

    Raises:
        Incompatible: A feature that a plain delta cannot hold, or a field nobody here knows.
        Unsafe: A field that would run code, match by regex, or change the base.
        Damaged: A value of the wrong type or out of range.
        LimitExceeded: A rank beyond `MAX_RANK`.
    """
    if raw.get("peft_type") != "LORA":
        raise Incompatible(
            f"{source}: peft_type is {_shown(raw.get('peft_type'))}; cgmerge reads LORA",
            code="peft_type",
            hint="train a LoRA adapter, or merge this one into a full model with PEFT",
            expected="LORA",
            found=raw.get("peft_type"),
        )
    _refuse_unsafe(raw, source)
    _refuse_features(raw, source)
    _refuse_unknown(raw, source)
    return AdapterConfig(
        rank=_rank(raw.get("r", 8), "r", source),
        alpha=_alpha(raw.get("lora_alpha", 8), "lora_alpha", source),
        rank_pattern={
            _pattern_key(k, "rank_pattern", source): _rank(v, f"rank_pattern.{k}", source)
            for k, v in _mapping(raw, "rank_pattern", source).items()
        },
        alpha_pattern={
            _pattern_key(k, "alpha_pattern", source): _alpha(v, f"alpha_pattern.{k}", source)
            for k, v in _mapping(raw, "alpha_pattern", source).items()
        },
        use_rslora=_flag(raw, "use_rslora", source),
        base_name=_text(raw, "base_model_name_or_path", source),
        fan_in_fan_out=_flag(raw, "fan_in_fan_out", source),
        task_type=_text(raw, "task_type", source) or "CAUSAL_LM",
        selection=_selection(raw, source),
    )


def _refuse_unsafe(raw: dict[str, Any], source: str) -> None:
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = raw.get(name)
        words = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        for word in words:
            if not isinstance(word, str) or not PLAIN.fullmatch(word or "x"):
                raise Unsafe(
                    f"{source}: {name} holds the pattern {str(word)[:60]!r}; patterns from files"
                    " are not evaluated",
                    code="config_pattern",
                    hint=f"replace {name} by the list of module names, e.g. [q_proj, v_proj]",
                    field=name,
                )
    init = str(raw.get("init_lora_weights", "")).lower()
    if init.startswith(_BASE_CHANGING_INITS):
        raise Unsafe(
            f"{source}: init_lora_weights is {init!r}; such an adapter is relative to a base that"
            " its own initialisation has changed",
            code="config_init",
            hint="convert it with PEFT: save_pretrained(path_initial_model_for_weight_conversion=)",
            field="init_lora_weights",
        )
    mapping = raw.get("auto_mapping") or {}
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    if library is not None and not str(library).startswith("transformers."):
        raise Unsafe(
            f"{source}: auto_mapping names the library {str(library)[:60]!r}",
            code="config_import",
            hint="cgmerge imports nothing that a file names; remove the field",
            field="auto_mapping",
        )
    core = raw.get("megatron_core")
    if core not in (None, "megatron.core"):
        raise Unsafe(
            f"{source}: megatron_core names the module {str(core)[:60]!r}",
            code="config_import",
            hint="cgmerge imports nothing that a file names; remove the field",
            field="megatron_core",
        )


def _refuse_features(raw: dict[str, Any], source: str) -> None:
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise Incompatible(
                f"{source}: {name} is set to {_shown(raw[name])}: {reason}",
                code=f"config_{name}",
                hint=_feature_hint(name),
                field=name,
                found=_shown(raw[name]),
            )
    if raw.get("bias") not in (None, "none"):
        raise Incompatible(
            f"{source}: bias is {_shown(raw['bias'])}; trained biases are not part of ΔW",
            code="config_bias",
            hint="train it again with bias none",
            expected="none",
            found=_shown(raw["bias"]),
            field="bias",
        )


def _feature_hint(name: str) -> str:
    if name == "modules_to_save":
        return "train the expert without modules_to_save, or merge it into a full model with PEFT"
    return "train the expert as plain LoRA, or merge it into a full model with PEFT first"


def _refuse_unknown(raw: dict[str, Any], source: str) -> None:
    """A new field without a value is harmless; one with a value may change the mathematics."""
    for name, value in raw.items():
        if (
            name not in _HARMLESS
            and name not in _REFUSED
            and value not in (None, False, [], {}, "")
        ):
            version = raw.get("peft_version")
            writer = version if isinstance(version, str) else "of unknown version"
            raise Incompatible(
                f"{source}: unknown field {_shown(name)} (written by PEFT {writer[:60]}); it may"
                " change what the adapter computes",
                code="config_unknown_field",
                hint="remove the field if it does not, or update cgmerge",
                field=name,
            )


def _rank(value: Any, name: str, source: str) -> int:
    if type(value) is not int or value < 1:
        raise Damaged(
            f"{source}: {name} must be a whole number of at least 1, found {_shown(value)}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    if value > MAX_RANK:
        raise LimitExceeded(
            f"{source}: {name} is {value:,}; the limit is {MAX_RANK:,}",
            code="rank",
            hint=_CORRECT,
            field=name,
        )
    return value


def _alpha(value: Any, name: str, source: str) -> float:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not 0 < value <= MAX_ALPHA:
        raise Damaged(
            f"{source}: {name} must be a number in (0, {exact(MAX_ALPHA)}], found {_shown(value)}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    return float(value)


def _selection(raw: dict[str, Any], source: str) -> Selection:
    """Read which modules are meant; the words themselves were checked in `_refuse_unsafe`."""

    def words(name: str) -> tuple[str, ...] | str | None:
        value = raw.get(name)
        return (
            tuple(value) if isinstance(value, list) else value if isinstance(value, str) else None
        )

    names = words("layers_pattern") or ()
    return Selection(
        words("target_modules"),
        words("exclude_modules"),
        _layers(raw, source),
        (names,) if isinstance(names, str) else names,
    )


def _layers(raw: dict[str, Any], source: str) -> frozenset[int] | None:
    value = raw.get("layers_to_transform")
    if value in (None, []):  # PEFT takes an empty list for all layers
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers):
        raise Damaged(
            f"{source}: layers_to_transform must be a list of layer numbers, found {_shown(value)}",
            code="config_value",
            hint=_CORRECT,
            field="layers_to_transform",
        )
    return frozenset(numbers)


def _mapping(raw: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise Damaged(
            f"{source}: {name} must be an object, found {type(value).__name__}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    return value


def _flag(raw: dict[str, Any], name: str, source: str) -> bool:
    value = raw.get(name) or False
    if not isinstance(value, bool):
        raise Damaged(
            f"{source}: {name} must be true or false, found {_shown(value)}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    return value


def _text(raw: dict[str, Any], name: str, source: str) -> str:
    value = raw.get(name) or ""
    if not isinstance(value, str):
        raise Damaged(
            f"{source}: {name} must be text, found {type(value).__name__}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    # It ends up on terminals, in model cards and in the configs of results.
    if not value.isprintable() or len(value) > MAX_TEXT:
        raise Damaged(
            f"{source}: {name} must be one line of at most {MAX_TEXT:,} printable characters,"
            f" found {_shown(value)}",
            code="config_value",
            hint=_CORRECT,
            field=name,
        )
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _pattern_key(key: str, name: str, source: str) -> str:
    if not is_key(key):
        raise Unsafe(
            f"{source}: {name} has the pattern {key[:60]!r}; patterns from files are not evaluated",
            code="config_pattern",
            hint="use full module names or plain suffixes as keys",
            field=name,
        )
    return key


def _lookup(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key, in file order, that means the module (as in PEFT)."""
    for key, value in patterns.items():
        if key_fits(key, module):
            return value
    return default
