"""The base model as files: what it is, what its modules look like, and its fingerprint.

Nothing here instantiates a model: names and shapes come from safetensors headers, so that
composing needs neither the memory of the base nor transformers.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cgmerge import strictjson
from cgmerge.errors import Damaged, Incompatible, NotFound, Unsafe
from cgmerge.shown import some_of
from cgmerge.tensorfile import TensorFile, TensorInfo, read_small

if TYPE_CHECKING:
    import torch

SAMPLES = 32
"""How many entries of each weight go into the fingerprint."""

# Families whose projections are transformers' Conv1D, stored [in, out] instead of [out, in].
_CONV1D_FAMILIES = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_CONV1D_LEAVES = {"c_attn", "c_proj", "c_fc", "q_attn"}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_STEM = re.compile(r"^(model|transformer)\.")
_CONFIG_KEYS = {
    "model_type": ("model_type",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
}


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """One linear module: features in and out, and whether the file stores it transposed."""

    weight: str
    out_features: int
    in_features: int
    transposed: bool


@dataclass(frozen=True)
class Base:
    """A local base model folder, opened by its headers only.

    Attributes:
        ref: What the user wrote (`tiny`, a path).
        folder: Where its files are.
        config: The parsed config.json.
        files: Weight name to the file that holds it.
        infos: Weight name to dtype, shape and place.
    """

    ref: str
    folder: Path
    config: dict[str, Any]
    files: dict[str, Path] = field(repr=False)
    infos: dict[str, TensorInfo] = field(repr=False)

    @property
    def model_type(self) -> str:
        """Return the architecture family as config.json names it."""
        return str(self.config.get("model_type", ""))

    @property
    def vocab_size(self) -> int | None:
        """Return the number of rows of the input embedding, where config.json tells."""
        value = self.config.get("vocab_size")
        return value if isinstance(value, int) else None

    @property
    def has_encoder(self) -> bool:
        """Return whether an encoder reads the prompt and a decoder writes the answer (T5, BART)."""
        return self.config.get("is_encoder_decoder") is True

    @cached_property
    def fingerprint(self) -> str:
        """Digest over architecture, names, shapes and sampled weights, as `fp1:<32 hex>`.

        It does not depend on sharding, on a `model.` prefix, or on the float type as long as the
        values are the same; it differs for any two bases that were trained differently.
        """
        digest = hashlib.sha256()
        for name, value in config_values(self.config).items():
            digest.update(f"{name}={value}\n".encode())
        samples = dict(self._samples())
        if samples.get("lm_head.weight") in {samples.get(n) for n in samples if "embed" in n}:
            del samples["lm_head.weight"]  # a tied head may or may not be written out
        for name in sorted(samples):
            digest.update(f"{name} ".encode() + samples[name] + b"\n")
        return f"fp1:{digest.hexdigest()[:32]}"

    @cached_property
    def modules(self) -> dict[str, ModuleShape]:
        """Return every 2-D weight as a module: path without `.weight` to its shape."""
        found = {}
        for name, info in self.infos.items():
            if name.endswith(".weight") and len(info.shape) == 2:
                path = name.removesuffix(".weight")
                leaf = path.rsplit(".", 1)[-1]
                transposed = self.model_type in _CONV1D_FAMILIES and leaf in _CONV1D_LEAVES
                rows, columns = info.shape
                sizes = (columns, rows) if transposed else (rows, columns)
                found[path] = ModuleShape(name, *sizes, transposed)
        if "lm_head" not in found and self.embedding is not None:
            # A tied head has no tensor in the file.
            found["lm_head"] = found[self.embedding.removesuffix(".weight")]
        return found

    @cached_property
    def embedding(self) -> str | None:
        """Return the weight of the input embedding, where there is one that a head could share."""
        return next(
            (
                name
                for name, info in self.infos.items()
                if name.endswith(_EMBEDDINGS) and name.count(".") <= 2 and len(info.shape) == 2
            ),
            None,
        )

    @property
    def ties_head(self) -> bool:
        """Whether the output head shares the input embedding (no weight of its own in the file)."""
        return "lm_head.weight" not in self.infos and "lm_head" in self.modules

    def read(self, name: str) -> "torch.Tensor":
        """Read one weight in its stored dtype."""
        with TensorFile(self.files[name], follow_links=True) as file:
            return file.read(name)

    def _samples(self) -> Iterable[tuple[str, bytes]]:
        by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            with TensorFile(path, follow_links=True) as file:
                for name in names:
                    yield stem_of(name), _sample(file, name)


def stem_of(name: str) -> str:
    """Return a weight's name without what only some files have before it (`model.`)."""
    return _STEM.sub("", name)


def config_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says of architecture and sizes, under names of our own."""
    return {
        name: next((config[key] for key in keys if key in config), None)
        for name, keys in _CONFIG_KEYS.items()
    }


def open_base(ref: str) -> Base:
    """Open a base model: a local folder, or a built-in name such as `tiny`.

    Args:
        ref: Folder with config.json and safetensors weights, or a built-in name.

    Raises:
        NotFound: No such folder.
        Unsafe: The folder holds pickle weights only.
        Damaged: A header or the index is wrong.
        Incompatible: Not a causal language model folder.
    """
    from cgmerge.modules.builtin import builtin_base
    from cgmerge.refs import local_folder

    folder = builtin_base(ref) or local_folder(ref, what="base model")
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise Incompatible(
                f"{folder} is a LoRA adapter, not a base model", code="base_is_adapter"
            )
        raise NotFound(
            f"{folder} holds no config.json, so it is no base model",
            code="base",
            found=sorted(entry.name for entry in folder.iterdir())[:8],
        )
    config = strictjson.loads_object(
        read_small(folder / "config.json", follow_links=True), source=str(folder / "config.json")
    )
    files = _weight_files(folder)
    infos = {}
    owner = {}
    for path in files:
        with TensorFile(path, follow_links=True) as file:
            for name, info in file.infos.items():
                if name in owner:
                    raise Damaged(f"{folder}: weight {name!r} stands in two files", code="index")
                owner[name], infos[name] = path, info
    return Base(ref, folder, config, owner, infos)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        content = strictjson.loads_object(read_small(index, follow_links=True), source=str(index))
        names = content.get("weight_map")
        if not isinstance(names, dict) or not names:
            raise Damaged(f"{index} has no weight_map", code="index")
        shards = sorted({str(name) for name in names.values()})
        if any("/" in name or name.startswith(".") for name in shards):
            raise Unsafe(f"{index} names files outside its folder", code="path")
        missing = [name for name in shards if not (folder / name).exists()]
        if missing:
            raise Damaged(f"{folder} lacks {some_of(missing)}", code="shard_missing")
        return [folder / name for name in shards]
    if single.exists():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise Unsafe(
            f"{folder} holds pickle weights only; cgmerge reads safetensors",
            code="pickle",
            hint="convert it once: load it with transformers and save_pretrained()",
        )
    raise NotFound(f"{folder} holds no model.safetensors", code="base")


def _sample(file: TensorFile, name: str) -> bytes:
    """Shape and evenly spaced entries as float32 (other types: as they are)."""
    info = file.infos[name]
    count = int(np.prod(info.shape, dtype=np.int64))
    width = (info.end - info.start) // count if count else 0
    places = sorted({count * i // SAMPLES for i in range(SAMPLES)}) if count else []
    raw = b"".join(file.read_rows(name, p * width, (p + 1) * width) for p in places)
    return f"{list(info.shape)}".encode() + _as_float32(raw, info.dtype)


def _as_float32(raw: bytes, dtype: str) -> bytes:
    if dtype == "BF16":
        values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    elif dtype in ("F16", "F32", "F64"):
        values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype])
    else:
        return raw
    return values.astype("<f4").tobytes()
