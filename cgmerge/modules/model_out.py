"""Write a full model: base plus merged delta, added in float32, rounded once.

Everything streams: a file's layout is known before its data, weights of the base are read and
deltas are merged in rows, and what was added goes to the new file at once. Memory does not depend
on the model, its files or its largest tensor (matrix rules need one weight of every expert).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.base import Base
from cgmerge.modules.compose import ModuleReport, Plan, refuse_noop, refuse_rounding
from cgmerge.modules.expert import check_modules
from cgmerge.modules.fullmodel import HEAD, shares_head
from cgmerge.modules.weights import CHUNK_ENTRIES, WeightReader, raw
from cgmerge.tensorfile import (
    TensorFile,
    dtype_name,
    file_sha256,
    plan_file,
    read_small,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

    from cgmerge.merge import AnyMerger

_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_NOT_COPIED = {
    "config.json", "model.safetensors.index.json", "adapter_config.json", "cgmerge.json",
    "expert.json", "recipe.json",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileWeight:
    """One tensor of the result.

    Attributes:
        source: The base's weight that it starts from.
        key: What the merger calls its delta; "" where there is none.
        transposed: The file holds it [in, out].
    """

    source: str
    key: str = ""
    transposed: bool = False


class _Writer:
    """Adds the merged delta to the base, one file of it at a time."""

    def __init__(
        self, plan: Plan, merger: "AnyMerger", progress: Callable[[int], None] | None
    ) -> None:
        import torch

        assert plan.base is not None
        self.plan = plan
        self.base: Base = plan.base
        self.reader = WeightReader(plan.base)
        self.merger = merger
        self.progress = progress
        name = plan.recipe.dtype
        self.dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
        keys = delta_keys(plan)
        self.splits_head = HEAD in keys
        self.files = layout(plan, keys, self.reader)
        self.modules: dict[str, ModuleReport] = {}
        self.lost_sq: list[float] = []
        self.weight_map: dict[str, str] = {}
        self.size = 0

    def write_file(self, source: Path, stage: Path) -> None:
        """Write one file: every tensor of it, the targeted ones with their delta."""
        weights = self.files[source]
        shapes = {
            name: (dtype_name(self._kept(weight)), self.base.infos[weight.source].shape)
            for name, weight in weights.items()
        }
        header, order, size = plan_file(shapes)
        target = stage / source.name
        meant = fs.write_chunks(target, self._chunks(header, [weights[n] for n in order]), size)
        _verify(target, meant, shapes)
        for name in order:
            self.weight_map[name] = source.name
        self.size += size - len(header)

    def _kept(self, weight: FileWeight) -> "torch.dtype":
        return kept_dtype(self.plan, self.base, weight)

    def _chunks(self, header: bytes, weights: list[FileWeight]) -> Iterator[bytes | memoryview]:
        yield header
        for weight in weights:
            parts = self._added(weight) if weight.key else self._copied(weight)
            for part in parts:
                yield raw(part)

    def _copied(self, weight: FileWeight) -> "Iterator[torch.Tensor]":
        total = self.reader.count(weight.source)
        for first in range(0, total, CHUNK_ENTRIES):
            last = min(first + CHUNK_ENTRIES, total)
            yield self.reader.entries(weight.source, first, last).to(self._kept(weight))

    def _added(self, weight: FileWeight) -> "Iterator[torch.Tensor]":
        """Yield base plus delta in the order of the file, and report on the module."""
        stored = torch_dtype(self.base.infos[weight.source].dtype)
        if not stored.is_floating_point:
            raise Incompatible(
                f"{self.base.folder}: weight {weight.source!r} is stored as {stored}; a delta"
                " cannot be added to quantized weights",
                code="quantized_base",
                hint="use the 16-bit base, or compose --as adapter",
                tensor=weight.source,
            )
        norms: list[float] = []
        lost: list[float] = []
        place = 0
        for delta in pieces_of(self.merger, weight):
            yield self._sum(weight, place, delta, (norms, lost))
            place += delta.numel()
        if weight.key not in self.modules:  # a tied head that is stored again counts once
            self.modules[weight.key] = ModuleReport(math.sqrt(math.fsum(norms)), 0.0)
            self.lost_sq += lost
        if self.progress:
            self.progress(len(self.modules))

    def _sum(
        self, weight: FileWeight, place: int, delta: "torch.Tensor", sums: tuple[list[float], ...]
    ) -> "torch.Tensor":
        """Add in float32 and round once; squares of the delta and of what was lost go to `sums`."""
        import torch

        from cgmerge.merge.engine import one_thread

        before = self.reader.shared_floats(weight.source, place, place + delta.numel())
        kept = self._kept(weight)
        rounded = torch.add(before, delta).to(kept)
        gap = torch.sub(rounded.to(torch.float32), before).sub_(delta)
        with one_thread():  # sums in parts have other last digits, and the record is kept
            found = [float(torch.linalg.vector_norm(values)) ** 2 for values in (delta, gap)]
        if not all(map(math.isfinite, found)):  # the squares alone may be too large for float32
            wide = torch.float64
            found = [float(torch.linalg.vector_norm(v, dtype=wide)) ** 2 for v in (delta, gap)]
        if not math.isfinite(found[1]):
            self.reader.floats(weight.source, place, place + delta.numel())  # the base's fault?
            raise Incompatible(
                f"{weight.source} overflows {str(kept).removeprefix('torch.')} after the merge",
                code="overflow",
                hint="use smaller weights or a smaller --scale, or --dtype float32",
                tensor=weight.source,
            )
        for squares, value in zip(sums, found, strict=True):
            squares.append(value)
        return rounded


def pieces_of(merger: "AnyMerger", weight: FileWeight) -> "Iterator[torch.Tensor]":
    """Yield the merged delta of a weight, flattened as the file has it, in parts.

    Args:
        merger: Knows the delta by the weight's key.
        weight: From `layout`, with a key.
    """
    if weight.transposed:
        yield from merger.dense(weight.key).T.reshape(-1).split(CHUNK_ENTRIES)
        return
    for piece in merger.pieces(weight.key):
        yield from piece.reshape(-1).split(CHUNK_ENTRIES)


def write_model(
    plan: Plan, stage: Path, progress: Callable[[int], None] | None
) -> tuple[dict[str, ModuleReport], float]:
    """Write weights, config, tokenizer and templates of the merged model into a staged folder.

    Args:
        plan: With a base and `form == "model"`.
        stage: From `fs.new_folder`.
        progress: Called with the number of finished modules.

    Returns:
        Per-module reports and the share of the delta that rounding lost.

    Raises:
        Incompatible: Quantized base, overflow, nothing changed, or most of it lost to rounding.
        Damaged: What was written does not read back the same.
    """
    base = plan.base
    assert base is not None
    refuse_quantized(base)
    writer = _Writer(plan, plan.merger(), progress)
    for source in sorted(writer.files):
        writer.write_file(source, stage)
    total = math.sqrt(sum(report.norm**2 for report in writer.modules.values()))
    refuse_noop(plan, total)
    rounding = math.sqrt(math.fsum(writer.lost_sq)) / total if total else 0.0
    refuse_rounding(plan, rounding)
    _write_index(writer, stage)
    _copy_companions(base, stage)
    fs.write_json(stage / "config.json", _config(base, writer))
    return writer.modules, rounding


def kept_dtype(plan: Plan, base: Base, weight: FileWeight) -> "torch.dtype":
    """Return the type that a tensor of the result has: `auto` is the base's own."""
    import torch

    stored, name = torch_dtype(base.infos[weight.source].dtype), plan.recipe.dtype
    if name == "auto" or not stored.is_floating_point:
        return stored
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def merged_dtypes(plan: Plan) -> "set[torch.dtype]":
    """Return the types of those tensors of a written model that have a delta."""
    assert plan.base is not None
    files = layout(plan, delta_keys(plan), WeightReader(plan.base))
    weights = [one for part in files.values() for one in part.values() if one.key]
    return {kept_dtype(plan, plan.base, one) for one in weights}


def refuse_quantized(base: Base) -> None:
    """Refuse a base whose weights no delta can be added to.

    Raises:
        Incompatible: It is quantized.
    """
    if base.config.get("quantization_config"):
        raise Incompatible(
            f"{base.folder} is quantized; merging into quantized weights loses small deltas",
            code="quantized_base",
            hint="use the 16-bit base the quantized one was made from, or compose --as adapter",
        )


def delta_keys(plan: Plan) -> dict[str, tuple[str, bool]]:
    """Return weight name to (what the deltas call it, whether the file has it transposed)."""
    base = plan.base
    assert base is not None
    if plan.has_full:
        transposed = {shape.weight for shape in base.modules.values() if shape.transposed}
        return {name: (name, name in transposed) for deltas in plan.deltas for name in deltas}
    found: dict[str, tuple[str, bool]] = {}
    for expert in plan.adapters:
        for path, shape in check_modules(expert, base).items():
            tied = path == "lm_head" and base.ties_head
            found[HEAD if tied else shape.weight] = path, shape.transposed
    return found


def layout(
    plan: Plan, keys: dict[str, tuple[str, bool]], reader: WeightReader
) -> dict[Path, dict[str, FileWeight]]:
    """Return every file of the base with the tensors that it holds in the result."""
    base = reader.model
    weights = {name: FileWeight(name, *keys.get(name, ())) for name in base.infos}
    files = dict(base.files)
    if base.embedding is not None:
        if HEAD in keys and HEAD not in weights:  # it has been split off
            weights[HEAD] = FileWeight(base.embedding, *keys[HEAD])
            files[HEAD] = files[base.embedding]
        elif plan.has_full and HEAD not in keys and HEAD in weights and shares_head(reader):
            weights[HEAD] = weights[base.embedding]  # it is stored again, and stays the same
    found: dict[Path, dict[str, FileWeight]] = {}
    for name, path in files.items():
        found.setdefault(path, {})[name] = weights[name]
    return found


def _verify(path: Path, meant: str, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Read a written file back, its header as any reader would."""
    with TensorFile(path) as file:
        same = {name: (info.dtype, info.shape) for name, info in file.infos.items()} == shapes
    if not same or file_sha256(path) != meant:
        raise Damaged(
            f"what was written to {path.name} does not read back the same",
            code="read_back",
            hint="the storage is not reliable; nothing was committed",
            path=path,
        )


def _write_index(writer: _Writer, stage: Path) -> None:
    if set(writer.weight_map.values()) == {"model.safetensors"}:
        return
    fs.write_json(
        stage / "model.safetensors.index.json",
        {"metadata": {"total_size": writer.size}, "weight_map": writer.weight_map},
    )


def _copy_companions(base: Base, stage: Path) -> None:
    """Copy tokenizer, chat template, generation config and licence; no code, no weights."""
    for pattern in _COPIED:
        for path in sorted(base.folder.glob(pattern)):
            if path.is_file() and path.name not in _NOT_COPIED:
                fs.copy_file(path, stage / path.name)


def _config(base: Base, writer: _Writer) -> dict[str, object]:
    config: dict[str, object] = strictjson.loads_object(
        read_small(base.folder / "config.json", follow_links=True), source="config.json"
    )
    if writer.splits_head:  # head and embedding differ from now on
        config["tie_word_embeddings"] = False
    if writer.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(writer.dtype).removeprefix("torch.")
    return config
