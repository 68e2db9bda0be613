"""Experts: PEFT LoRA folders, read lazily and strictly, without importing peft.

Opening reads headers, config and card only. `Expert.deltas` checks that tensors and base modules
fit one to one and gives a lazy mapping from module path to ΔW = b @ a with the scaling folded in.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge import strictjson
from cgmerge.errors import Damaged, Incompatible, NotFound, Unsafe, readable
from cgmerge.modules.adapter_config import AdapterConfig, parse_adapter_config
from cgmerge.modules.base import Base, ModuleShape
from cgmerge.modules.card import ExpertCard, read_card
from cgmerge.modules.pairs import CONFIG, PREFIX, Pair, Tensors, pair_up
from cgmerge.modules.vocabulary import check_tokenizer
from cgmerge.refs import label, local_place
from cgmerge.shown import counted, some_of
from cgmerge.tensorfile import TensorFile, read_small

if TYPE_CHECKING:
    import torch

    from cgmerge.merge.deltas import LowRank

WEIGHTS = "adapter_model.safetensors"
COMPRESSED = ".cge"
STATS = "cgmerge-stats"
MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 20_000
# Prefixes by which the same module is known in a checkpoint file and in the loaded model.
_PREFIXES = ("", "transformer.", "model.")


@dataclass(frozen=True)
class Expert:
    """One LoRA adapter: a folder, or a compressed expert.

    Attributes:
        ref: What the user wrote.
        name: The skill from the card, else the folder's name.
        folder: Absolute path of the folder, or of the `.cge` file.
        config: The checked adapter_config.json.
        card: expert.json, or None for an adapter from another tool.
        pairs: Module path (as in the model) to its factors.
        file: Its tensors.
        config_text: The bytes of the config, for the digest.
    """

    ref: str
    name: str
    folder: Path
    config: AdapterConfig
    card: ExpertCard | None
    pairs: dict[str, Pair]
    file: "Tensors" = field(repr=False)
    warnings: tuple[str, ...] = ()
    config_text: bytes = field(default=b"", repr=False)

    @cached_property
    def digest(self) -> str:
        """Return the sha256 over weights and config, which decide what the expert computes."""
        config = hashlib.sha256(self.config_text).hexdigest()
        return hashlib.sha256(f"{self.file.sha256()}\n{config}\n".encode()).hexdigest()

    @property
    def compressed(self) -> bool:
        """Whether it is a `.cge` file."""
        return self.folder == self.file.path

    @property
    def size_bytes(self) -> int:
        """Return the bytes on disk of the file, or of the adapter's own files in its folder."""
        if self.compressed:
            return self.folder.stat().st_size
        files = (entry for entry in self.folder.iterdir() if entry.is_file())
        return sum(file.stat().st_size for file in files if not file.name.startswith(STATS))

    @property
    def stats_path(self) -> Path:
        """Return where its statistics are kept: in its folder, or beside its file."""
        if self.compressed:
            return self.folder.with_name(f"{self.folder.name}.stats.safetensors")
        return self.folder / f"{STATS}.safetensors"

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every module."""
        return {path: (pair.out_features, pair.in_features) for path, pair in self.pairs.items()}

    @property
    def ranks(self) -> list[int]:
        """Return the different ranks that occur, sorted."""
        return sorted({pair.rank for pair in self.pairs.values()})

    @property
    def base_fingerprint(self) -> str | None:
        """Return the fingerprint of the base it was trained on, where the card tells."""
        return self.card.base.fingerprint if self.card else None

    def deltas(self, base: Base | None = None, *, force_base: bool = False) -> "ExpertDeltas":
        """Return the expert's task vector, checked against the base where there is one.

        Args:
            base: The base to check names, shapes and fingerprint against.
            force_base: Accept another fingerprint or tokenizer (the shapes must still fit).

        Raises:
            Incompatible: Another base, or names and shapes that do not fit one to one.
        """
        if base is not None:
            self._check_fingerprint(base, force=force_base)
            check_modules(self, base)
            if not (self.compressed or force_base):
                check_tokenizer(self.folder, base)
        return ExpertDeltas(self)

    def _check_fingerprint(self, base: Base, *, force: bool) -> None:
        expected = self.base_fingerprint
        if expected is None or force or expected == base.fingerprint:
            return
        raise Incompatible(
            f"{self.folder} was trained on another base: {self.card.base.name if self.card else ''}"
            f" {expected}, but {base.ref} is {base.fingerprint}",
            code="base",
            hint="pass the base it was trained on, or --force-base where the command has it",
            path=self.folder,
            expected=expected,
            found=base.fingerprint,
        )


class ExpertDeltas(Mapping[str, "LowRank"]):
    """Module path to ΔW, read from disk each time it is asked for."""

    def __init__(self, expert: Expert) -> None:
        self.expert = expert

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return (out, in, rank) of every module, without reading weights."""
        return {
            path: (pair.out_features, pair.in_features, pair.rank)
            for path, pair in self.expert.pairs.items()
        }

    def __getitem__(self, path: str) -> "LowRank":
        from cgmerge.merge.deltas import LowRank

        scaling, raw = self.expert.pairs[path].scaling, self.raw(path)
        return raw if scaling == 1.0 else LowRank(raw.a, raw.b * scaling)

    def raw(self, path: str) -> "LowRank":
        """Return the factors of a module as they were trained, the scaling left out."""
        from cgmerge.merge.deltas import LowRank

        pair = self.expert.pairs[path]
        return LowRank(self._read(pair.a), self._read(pair.b))

    def __iter__(self) -> Iterator[str]:
        return iter(self.expert.pairs)

    def __len__(self) -> int:
        return len(self.expert.pairs)

    def _read(self, name: str) -> "torch.Tensor":
        import torch

        tensor = self.expert.file.read(name).to(torch.float32)
        low, high = torch.aminmax(tensor)  # one pass; NaN goes through
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = int((~torch.isfinite(tensor)).sum())
            large = bool(torch.isfinite(self.expert.file.read(name)).all())
            what = "too large for float32" if large else "NaN or infinite"
            raise Damaged(
                f"{self.expert.file.path}: tensor {name!r} holds"
                f" {counted(bad, 'value')} that {'is' if bad == 1 else 'are'} {what}",
                code="not_finite",
                hint="the expert is broken (often a diverged training); train it again",
                path=self.expert.file.path,
                tensor=name,
                found=bad,
            )
        return tensor


def open_expert(ref: str, *, base: Base | None = None) -> Expert:
    """Open an adapter: headers, config and card; no weights are read.

    Args:
        ref: A local folder, a `.cge` file, or `hf://user/repo[@revision]`.
        base: Where known; a saved embedding is then refused with both vocabulary sizes.

    Raises:
        NotFound: No such folder, or no adapter in it.
        Unsafe: Pickle weights, links, full weights, patterns or imports in the config.
        Damaged: Truncated or altered files, values out of range, an adapter without tensors.
        Incompatible: Features that a plain LoRA delta cannot hold.
    """
    folder = local_place(ref, what="expert", suffix=COMPRESSED)
    compressed = compressed_file(folder)
    if compressed is not None:
        from cgmerge.modules.compress.opened import open_compressed

        return open_compressed(compressed, ref)
    _check_present(folder)
    text = read_small(folder / CONFIG, limit=1 << 20)
    raw = strictjson.loads_object(text, source=str(folder / CONFIG))
    file = TensorFile(folder / WEIGHTS, max_header=MAX_HEADER_BYTES, max_tensors=MAX_TENSORS)
    try:
        if base is not None:
            _check_vocabulary(file, base)
        config = parse_adapter_config(raw, source=str(folder / CONFIG))
        card = read_card(folder)
        pairs = pair_up(file, config)
    except BaseException:
        file.close()
        raise
    warnings: tuple[str, ...] = ()
    if (folder / "adapter_model.bin").exists():
        warnings = (f"{folder}: adapter_model.bin (pickle) is ignored",)
    name = readable(card.skill if card else label(ref, folder), 200).replace("\n", " ")
    return Expert(ref, name, folder, config, card, pairs, file, warnings, text)


def is_adapter(place: Path) -> bool:
    """Whether a folder or file looks like an adapter, compressed or not."""
    return (place / CONFIG).exists() or compressed_file(place) is not None


def check_modules(expert: Expert, base: Base) -> dict[str, ModuleShape]:
    """Match the expert's modules with the base's, one to one.

    Returns:
        Module path (as in the expert) to the base module.

    Raises:
        Incompatible: Unmatched names (five of each side, with a suggestion) or other shapes.
    """
    matched = _match(expert, base)
    wrong = [
        f"{path}: expert {pair.out_features}×{pair.in_features},"
        f" base {shape.out_features}×{shape.in_features}"
        for path, pair in expert.pairs.items()
        if (shape := matched[path])
        and (pair.out_features, pair.in_features) != (shape.out_features, shape.in_features)
    ]
    if wrong:
        raise Incompatible(
            f"{expert.folder} does not fit {base.ref}; {len(wrong)} of {len(expert.pairs)} modules"
            f" have other shapes (out×in):\n  " + some_of(wrong, between="\n  "),
            code="shape",
            hint="pass the base that the expert was trained on",
            path=expert.folder,
            found=wrong[:5],
        )
    return matched


def module_prefix(paths: Iterable[str], base: Base) -> str | None:
    """Find what model paths have before the names in the base's files (GPT-2: `transformer.`).

    Returns:
        The prefix, often empty, or None when some path is not a module of the base.
    """
    names = list(paths)
    for prefix in _PREFIXES:
        if all(name.removeprefix(prefix) in base.modules for name in names):
            return prefix
    return None


def _match(expert: Expert, base: Base) -> dict[str, ModuleShape]:
    modules = base.modules
    prefix = module_prefix(expert.pairs, base)
    if prefix is not None:
        return {path: modules[path.removeprefix(prefix)] for path in expert.pairs}
    unmatched = [path for path in expert.pairs if path not in modules]
    leaves = {path.rsplit(".", 1)[-1] for path in expert.pairs}
    free = [p for p in modules if p not in expert.pairs and p.rsplit(".", 1)[-1] in leaves]
    raise Incompatible(
        f"{expert.folder}: {len(unmatched)} of {len(expert.pairs)} modules are not in {base.ref}"
        f"\n  only in the expert: {some_of(unmatched)}"
        f"\n  only in the base:   {some_of(free) or '(nothing of that kind)'}",
        code="modules",
        hint=_suggest_prefix(unmatched[0], modules),
        path=expert.folder,
        expected=free[:5],
        found=unmatched[:5],
    )


def _suggest_prefix(path: str, modules: Mapping[str, ModuleShape]) -> str:
    """Find a base module that differs from `path` only in how the name begins."""
    for name in modules:
        if name.endswith("." + path):
            return f"the tensor names lack `{name[: -len(path)]}` after `{PREFIX}`"
        if path.endswith("." + name):
            return f"the tensor names have `{path[: -len(name)]}` too much after `{PREFIX}`"
    return "pass the base that the expert was trained on"


def _check_present(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        below = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        inside = sorted(entry.name for entry in folder.iterdir())
        raise NotFound(
            f"{folder} holds no {CONFIG}, so it is no expert",
            code="expert",
            hint=f"there are experts in {some_of(below, 8)}"
            if below
            else f"it holds {some_of(inside, 8) or 'nothing'}",
            path=folder,
            found=inside[:8],
        )
    if not (folder / WEIGHTS).exists() and not (folder / WEIGHTS).is_symlink():
        pickles = [*folder.glob("adapter_model.*"), *folder.glob("*.bin"), *folder.glob("*.pt")]
        if pickles:
            raise Unsafe(
                f"{folder} holds its weights as {pickles[0].name}, a format that can run code",
                code="pickle",
                hint="convert it where you trust it: load it with PEFT and save_pretrained()",
                path=pickles[0],
            )
        raise NotFound(f"{folder} holds no {WEIGHTS}", code="expert", path=folder)


def compressed_file(place: Path) -> Path | None:
    """Return the compressed file that a local folder or file stands for, if it does."""
    if place.is_file():
        return place
    inside = place / f"expert{COMPRESSED}"  # as in a repository on the hub, beside its card
    return inside if inside.exists() and not (place / WEIGHTS).exists() else None


def _check_vocabulary(file: TensorFile, base: Base) -> None:
    """Refuse a saved embedding or head whose number of tokens is not the base's."""
    for name, info in file.infos.items():
        path = name.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".modules_to_save")
        known = [base.modules.get(path.removeprefix(prefix)) for prefix in _PREFIXES]
        shape = next((module for module in known if module is not None), None)
        if shape is None or len(info.shape) != 2:
            continue
        if info.shape[0] != shape.out_features and info.shape[1] == shape.in_features:
            raise Incompatible(
                f"{file.path}: the expert was trained with {info.shape[0]} tokens"
                f" ({name}: {info.shape[0]}×{info.shape[1]}), the base {base.ref} has"
                f" {shape.out_features}",
                code="vocabulary",
                hint="resize the base to the expert's tokenizer, or remove the saved embeddings"
                " from the expert if the new tokens are not needed",
                path=file.path,
                tensor=name,
                expected=shape.out_features,
                found=info.shape[0],
            )
