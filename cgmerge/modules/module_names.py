"""Which modules a name in an adapter_config.json means: as PEFT reads it, without its regexes.

PEFT treats keys of patterns, and `target_modules` that are one string, as regular expressions. Only
the part of that language is read here in which a name is a name: letters, digits, `_`, `-`, a dot
for any one character, `\\.` for a dot, and `^` and `$` for the ends. All else is refused by whoever
reads the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
PLAIN = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\^?(?:[\w.\-]|\\\.)+\$?")
_HEADS = ("lm_head", "embed_out", "output_layer")
"""Output layers, which `all-linear` leaves out."""


def is_key(key: str) -> bool:
    """Whether a key of a pattern is understood."""
    return _KEY.fullmatch(key) is not None


def key_fits(key: str, module: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` means a module.

    Args:
        key: For which `is_key` holds.
        module: Its path.

    Example:
        >>> key_fits("v_proj", "layers.0.v_proj"), key_fits("^v_proj", "layers.0.v_proj")
        (True, False)
    """
    whole = key.startswith("^")
    plain = key.removeprefix("^").removesuffix("$").replace(r"\.", "\0")
    end = module[-len(plain) :]
    if not _alike(plain, end):
        return False
    before = module[: -len(plain)]
    return not before or (not whole and before.endswith("."))


def _alike(word: str, text: str) -> bool:
    return len(word) == len(text) and all(
        own in (".", other) or (own == "\0" and other == ".")
        for own, other in zip(word, text, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules that a config puts LoRAs on; PEFT drops the tensors of others in silence.

    Attributes:
        targets: A list of names, one string, or None where the file says nothing.
        excluded: The same.
        layers: Numbers of layers, where only some have a LoRA.
        layer_names: What the list of layers is called; empty for anything.
    """

    targets: Sequence[str] | str | None = None
    excluded: Sequence[str] | str | None = None
    layers: frozenset[int] | None = None
    layer_names: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Whether a module is one of them."""
        if self.excluded and _named(module, self.excluded):
            return False
        if not self.targets:
            return True
        if isinstance(self.targets, str) or module in self.targets:
            return _named(module, self.targets)  # named in full: layers are not looked at
        return _named(module, self.targets) and (
            self.layers is None or self._layer_of(module) in self.layers
        )

    def _layer_of(self, module: str) -> int | None:
        """Return the number after the first list of layers in a path."""
        parts = module.split(".")
        for place in range(1, len(parts) - 1):
            if not parts[place].isdecimal():
                continue
            before = ".".join(parts[:place])
            if any(key_fits(name, before) for name in self.layer_names):
                return int(parts[place])
            if not self.layer_names and place > 1:  # PEFT wants something before the list's name
                return int(parts[place])
        return None


def _named(module: str, names: Sequence[str] | str) -> bool:
    if isinstance(names, str):
        if names.lower() == ALL_LINEAR:
            return module.rsplit(".", 1)[-1] not in _HEADS
        return _alike(names, module)
    return any(module == name or module.endswith("." + name) for name in names)
