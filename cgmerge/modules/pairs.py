"""The tensors of an adapter: which names and shapes are factors, and which pairs they form."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cgmerge.errors import Damaged, Incompatible, LimitExceeded, Unsafe
from cgmerge.modules.adapter_config import MAX_RANK, AdapterConfig
from cgmerge.shown import counted, some_of
from cgmerge.tensorfile import TensorInfo

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
MAX_NAME = 512
_LORA = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
_TABLE = re.compile(r"\b(embed_tokens|wte|wpe|word_embeddings|tok_embeddings)\.lora_[AB]\.")
_PATH = re.compile(r"[\w\-]+(?:\.[\w\-]+)*")
_FLOATS = {"F64", "F32", "F16", "BF16"}


class Tensors(Protocol):
    """Where an expert's tensors come from: a weights file, or a compressed one."""

    path: Path

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Return type and shape of every tensor."""

    @property
    def size(self) -> int:
        """Return the bytes of the file."""

    def read(self, name: str) -> "torch.Tensor":
        """Read one tensor."""

    def sha256(self) -> str:
        """Return the digest of the file."""

    def close(self) -> None:
        """Close the file."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of one module as the file holds them."""

    a: str
    b: str
    rank: int
    out_features: int
    in_features: int
    scaling: float


def pair_up(file: Tensors, config: AdapterConfig) -> dict[str, Pair]:
    """Check every tensor name and shape of a weights file and form the pairs.

    Raises:
        Damaged: No tensors, odd names, a factor without its other.
        Incompatible: Features that a plain LoRA delta cannot hold, other types or ranks.
        Unsafe: Full weights.
    """
    if not file.infos:
        raise Damaged(f"{file.path} contains no tensors", code="empty", path=file.path)
    _check_names(file)
    found: dict[str, dict[str, tuple[str, TensorInfo]]] = {}
    for name, info in file.infos.items():
        match = _LORA.fullmatch(name.removeprefix(PREFIX))
        assert match is not None
        if info.dtype not in _FLOATS or len(info.shape) != 2 or 0 in info.shape:
            raise Incompatible(
                f"{file.path}: tensor {name!r} is {info.dtype} {list(info.shape)}; a float matrix"
                " is wanted",
                code="dtype",
                path=file.path,
                tensor=name,
            )
        found.setdefault(match["path"], {})[match["factor"]] = name, info
    _check_listed(file, config, found)
    return {path: _pair(path, factors, config, file) for path, factors in sorted(found.items())}


def _check_listed(file: Tensors, config: AdapterConfig, paths: Iterable[str]) -> None:
    """Refuse tensors that the config rules out: PEFT would compute without them, and say nothing.

    Raises:
        Incompatible: The first five such modules.
    """
    stray = sorted(path for path in paths if not config.selection.has(path))
    if stray:
        raise Incompatible(
            f"{file.path} has weights for {len(stray)} modules that {CONFIG} rules out"
            f" (target_modules, exclude_modules or layers_to_transform): {some_of(stray)}",
            code="config_targets",
            hint=f"PEFT leaves them out as well; correct {CONFIG} if they belong to the expert",
            path=file.path,
            found=stray[:5],
        )


def _pair(
    path: str, factors: dict[str, tuple[str, TensorInfo]], config: AdapterConfig, file: Tensors
) -> Pair:
    if set(factors) != {"A", "B"}:
        raise Damaged(
            f"{file.path}: module {path} has lora_{next(iter(factors))} only",
            code="pair",
            hint="the file is incomplete; fetch or train the expert again",
            path=file.path,
            tensor=path,
        )
    (a_name, a), (b_name, b) = factors["A"], factors["B"]
    rank, claimed = a.shape[0], config.rank_of(path)
    if b.shape[1] != rank or rank != claimed:
        raise Incompatible(
            f"{file.path}: module {path} has A {list(a.shape)} and B {list(b.shape)}, but"
            f" {CONFIG} says rank {claimed}",
            code="rank",
            path=file.path,
            tensor=path,
            expected=claimed,
            found=rank,
        )
    check_rank(file.path, path, rank)
    return Pair(a_name, b_name, rank, b.shape[0], a.shape[1], config.scaling_of(path, rank))


def check_rank(file: Path, path: str, rank: int) -> None:
    """Refuse a rank that no adapter has.

    Raises:
        LimitExceeded: Beyond `MAX_RANK`.
    """
    if rank > MAX_RANK:
        raise LimitExceeded(
            f"{file}: module {path} has rank {rank}; the limit is {MAX_RANK}", code="rank"
        )


def _check_names(file: Tensors) -> None:
    names = list(file.infos)
    odd = [name for name in names if len(name) > MAX_NAME or not name.isprintable()]
    if odd:
        raise Damaged(
            f"{file.path} holds {len(odd)} tensor names with control characters or of more than"
            f" {MAX_NAME} characters, e.g. {odd[0][:80]!r}",
            code="names",
            path=file.path,
        )
    kinds = {
        "lora_magnitude_vector": ("dora", "DoRA magnitudes rescale the base weight"),
        "lora_embedding_": ("embedding_lora", "LoRA on embeddings is not supported"),
        "lora_B.bias": ("lora_bias", "LoRA biases are not part of ΔW"),
        "trainable_tokens_delta": ("tokens", "retrained token rows are not part of ΔW"),
    }
    # PEFT calls the factors of an embedding otherwise, and would ignore these.
    tables = {"lora_embedding_": [name for name in names if _TABLE.search(name)]}
    for word, (code, reason) in kinds.items():
        holders = [name for name in names if word in name] + tables.get(word, [])
        if holders:
            raise Incompatible(
                f"{file.path}: {reason}: {some_of(holders)}",
                code=code,
                hint="train the expert as plain LoRA on linear layers",
                path=file.path,
                found=holders[:5],
            )
    lora = {name for name in names if _LORA.fullmatch(name)}
    full = [name for name in names if name not in lora]
    if (full and lora) or (full and not any("lora_" in name for name in names)):
        shapes = [f"{name} {list(file.infos[name].shape)}" for name in full]
        raise Unsafe(
            f"{file.path} holds {counted(len(full), 'tensor')} that"
            f" {'is' if len(full) == 1 else 'are'} not LoRA factors: {some_of(shapes)}",
            code="full_weights",
            hint="an expert may change the base through low-rank deltas only; remove them",
            path=file.path,
            found=full[:5],
        )
    stray = [name for name in names if not _is_factor(name)]
    if stray:
        raise Incompatible(
            f"{file.path}: {len(stray)} tensor names are not of the form"
            f" {PREFIX}<module>.lora_A.weight: {some_of(stray)}",
            code="names",
            hint=_suggest_names(stray[0]),
            path=file.path,
            expected=f"{PREFIX}<module>.lora_A.weight",
            found=stray[:5],
        )


def _is_factor(name: str) -> bool:
    match = _LORA.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    return match is not None and _PATH.fullmatch(match["path"]) is not None


def _suggest_names(name: str) -> str:
    if name.startswith(PREFIX) and _LORA.fullmatch(name):
        return "a module path is letters, digits, `_` and `-`, joined by dots"
    adapter = re.fullmatch(r"(.+\.lora_[AB])\.([^.]+)\.weight", name)
    if adapter:
        return f"remove the adapter name: `{adapter[1]}.weight`"
    if name.startswith("model.model."):
        return f"replace the leading `model.` by `{PREFIX}`"
    return f"rename the tensors: put `{PREFIX}` before the module path, e.g. `{PREFIX}{name}`"
