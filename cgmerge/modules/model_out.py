"""Write a full model: base plus merged delta, added in float32, rounded once, shard by shard."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.base import Base, ModuleShape
from cgmerge.modules.compose import ModuleReport, Plan, refuse_noop, refuse_rounding
from cgmerge.modules.expert import check_modules
from cgmerge.tensorfile import TensorFile, read_small

if TYPE_CHECKING:
    import torch

    from cgmerge.merge import Merger

_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_NOT_COPIED = {
    "config.json", "model.safetensors.index.json", "adapter_config.json", "cgmerge.json",
    "expert.json", "recipe.json",
}  # fmt: skip
_HEAD = "lm_head.weight"


class _Writer:
    """Adds the merged delta to the base, one file of it at a time."""

    def __init__(
        self, plan: Plan, merger: "Merger", progress: Callable[[int], None] | None
    ) -> None:
        import torch

        assert plan.base is not None
        self.base: Base = plan.base
        self.merger = merger
        self.progress = progress
        name = plan.recipe.dtype
        self.dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
        self.targets = _targets(plan)
        self.modules: dict[str, ModuleReport] = {}
        self.lost_sq = 0.0
        self.trains_head = _HEAD in self.targets
        self.weight_map: dict[str, str] = {}
        self.size = 0

    def write_file(self, source: Path, stage: Path) -> None:
        """Write one shard: every tensor of it, the targeted ones with their delta."""
        tensors: dict[str, torch.Tensor] = {}
        with TensorFile(source, follow_links=True) as file:
            for name in file.infos:
                weight = file.read(name)
                tensors[name] = self._cast(self._with_delta(name, weight))
                if self.trains_head and self.base.ties_head and name == self._head_source():
                    tensors[_HEAD] = self._cast(self._added(_HEAD, weight))
        fs.write_tensors(stage / source.name, tensors)
        _verify(stage / source.name, tensors)
        for name, tensor in tensors.items():
            self.weight_map[name] = source.name
            self.size += tensor.numel() * tensor.element_size()

    def _head_source(self) -> str:
        """Return the weight that a tied head shares."""
        return self.targets[_HEAD][1].weight

    def _with_delta(self, name: str, weight: "torch.Tensor") -> "torch.Tensor":
        return self._added(name, weight) if name in self.targets else weight

    def _added(self, name: str, weight: "torch.Tensor") -> "torch.Tensor":
        import torch

        path, shape = self.targets[name]
        if not weight.is_floating_point():
            raise Incompatible(
                f"{self.base.folder}: weight {name!r} is stored as {weight.dtype}; a delta cannot"
                " be added to quantized weights",
                code="quantized_base",
                hint="use the 16-bit base, or compose --as adapter",
                tensor=name,
            )
        delta = self.merger.dense(path)
        oriented = delta.T if shape.transposed else delta
        before = weight.to(torch.float32)
        if not torch.isfinite(before).all():
            raise Damaged(
                f"{self.base.folder}: weight {name!r} holds values that are NaN or infinite",
                code="not_finite",
                tensor=name,
            )
        exact = before + oriented
        kept = self.dtype or weight.dtype
        rounded = exact.to(kept)
        if not torch.isfinite(rounded).all():
            raise Incompatible(
                f"{name} overflows {str(kept).removeprefix('torch.')} after the merge",
                code="overflow",
                hint="use smaller weights or a smaller --scale, or --dtype float32",
                tensor=name,
            )
        norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
        gap = (rounded.to(torch.float32) - before) - oriented
        lost = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
        self.modules[path] = ModuleReport(norm, 0.0)
        self.lost_sq += lost**2
        if self.progress:
            self.progress(len(self.modules))
        return rounded

    def _cast(self, weight: "torch.Tensor") -> "torch.Tensor":
        if self.dtype is None or not weight.is_floating_point():
            return weight.contiguous()
        return weight.to(self.dtype).contiguous()


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
    from cgmerge.merge import Merger

    base = plan.base
    assert base is not None
    if base.config.get("quantization_config"):
        raise Incompatible(
            f"{base.folder} is quantized; merging into quantized weights loses small deltas",
            code="quantized_base",
            hint="use the 16-bit base the quantized one was made from, or compose --as adapter",
        )
    writer = _Writer(plan, Merger(plan.rule, plan.deltas, ids=plan.ids, stats=plan.stats), progress)
    for source in sorted(set(base.files.values())):
        writer.write_file(source, stage)
    total = math.sqrt(sum(report.norm**2 for report in writer.modules.values()))
    refuse_noop(plan, total)
    rounding = math.sqrt(writer.lost_sq) / total if total else 0.0
    refuse_rounding(plan, rounding)
    _write_index(writer, stage)
    _copy_companions(base, stage)
    fs.write_json(stage / "config.json", _config(base, writer))
    return writer.modules, rounding


def _targets(plan: Plan) -> dict[str, tuple[str, ModuleShape]]:
    """Return weight name in the base's files to (module path in the experts, shape)."""
    assert plan.base is not None
    found: dict[str, tuple[str, ModuleShape]] = {}
    for expert in plan.experts:
        for path, shape in check_modules(expert, plan.base).items():
            tied = path == "lm_head" and plan.base.ties_head
            found[_HEAD if tied else shape.weight] = path, shape
    return found


def _verify(path: Path, tensors: "dict[str, torch.Tensor]") -> None:
    import torch

    with TensorFile(path) as file:
        wrong = set(file.infos) ^ set(tensors)
        for name in set(file.infos) & set(tensors):
            found = file.read(name).reshape(-1).view(torch.uint8)
            if not torch.equal(found, tensors[name].reshape(-1).view(torch.uint8)):
                wrong.add(name)
    if wrong:
        raise Damaged(
            f"what was written to {path.name} does not read back the same:"
            f" {', '.join(sorted(wrong)[:5])}",
            code="read_back",
            hint="the storage is not reliable; nothing was committed",
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
    if writer.trains_head:  # head and embedding differ from now on
        config["tie_word_embeddings"] = False
    if writer.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(writer.dtype).removeprefix("torch.")
    return config
