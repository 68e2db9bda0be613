"""A full fine-tune as a LoRA adapter: the best one of a rank, and what it cannot hold.

Each linear weight's delta is cut to its largest singular directions. Norms, biases and embeddings
have no LoRA factors; where they changed they are named and counted in the error, so that the
error is the distance between the two models, not only that of the matrices.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.adapter_config import MAX_RANK
from cgmerge.modules.adapter_out import AdapterForm, write_adapter
from cgmerge.modules.base import Base, ModuleShape
from cgmerge.modules.card import BaseId, ExpertCard, package_versions, write_card
from cgmerge.modules.compose import ModuleReport
from cgmerge.modules.compose_adapter import verify_adapter
from cgmerge.modules.compose_out import check_out
from cgmerge.modules.fullmodel import HEAD, FullDeltas, FullExpert, task_vectors
from cgmerge.shown import some_of

if TYPE_CHECKING:
    import torch

    from cgmerge.merge import LowRank

RECORD = "extract.json"
SCHEMA = "cgmerge.extraction/1"
_EMBEDDINGS = ("emb", "wte", "wpe")
_ROUTERS = ("gate", "router")
_NAMED = 5


@dataclass(frozen=True)
class Extraction:
    """What to extract: checked, nothing computed.

    Attributes:
        expert: The full fine-tune.
        base: What its delta is relative to.
        rank: Of every module; no larger than any of them can have.
        dtype: Float type of the factors.
        linear: Weight name to (module path in the model, its shape), those LoRA can hold.
        deltas: Weight name to delta.
        warnings: What is known before anything is computed.
    """

    expert: FullExpert
    base: Base
    rank: int
    dtype: str
    linear: dict[str, tuple[str, ModuleShape]] = field(repr=False)
    deltas: FullDeltas = field(repr=False)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extracted:
    """The result of `run_extraction`.

    Attributes:
        modules: Module path to norm of the delta and relative error of the adapter.
        dropped: Weights that changed and that LoRA cannot hold, with the norm of their delta.
        warnings: What the user should know.
    """

    plan: Extraction
    modules: dict[str, ModuleReport]
    dropped: dict[str, float]
    warnings: list[str]

    @property
    def norm(self) -> float:
        """Return the norm of the whole delta, what was dropped included."""
        return math.hypot(
            *(report.norm for report in self.modules.values()), *self.dropped.values()
        )

    @property
    def error(self) -> float:
        """Return ‖full − (base + adapter)‖ / ‖full − base‖ over all weights."""
        lost = [report.norm * report.error for report in self.modules.values()]
        return math.hypot(*lost, *self.dropped.values()) / self.norm if self.norm else 0.0

    def facts(self) -> dict[str, Any]:
        """Return the documented keys of `extract --json` (without `out`)."""
        plan = self.plan
        return {
            "full": {"ref": plan.expert.ref, "sha256": plan.expert.digest},
            "base": {"ref": plan.base.ref, "fingerprint": plan.base.fingerprint},
            "rank": plan.rank,
            "dtype": plan.dtype,
            "error": self.error,
            "norm": self.norm,
            "modules": {path: asdict(report) for path, report in self.modules.items()},
            "dropped": self.dropped,
            "warnings": self.warnings,
        }


def plan_extraction(expert: FullExpert, base: Base, rank: int, dtype: str = "auto") -> Extraction:
    """Decide which weights become LoRA modules.

    Args:
        expert: From `open_full` with the same base.
        base: The base.
        rank: Of every module, at least 1; beyond what any matrix has, it becomes that.
        dtype: `auto` is float32.

    Raises:
        UsageError: A rank out of range, or an unknown float type.
    """
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(
            f"the rank must be 1 to {MAX_RANK:,}, found {rank:,}",
            code="rank",
            expected=MAX_RANK,
            found=rank,
        )
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UsageError(
            f"unknown dtype {dtype!r}; one of auto, float32, bfloat16, float16", code="dtype"
        )
    (deltas,) = task_vectors([expert], base)
    assert isinstance(deltas, FullDeltas)
    prefix = _prefix(base)
    linear = {
        shape.weight: (path if path == "lm_head" else prefix + path, shape)
        for path, shape in base.modules.items()
        if _is_linear(path) and shape.weight in deltas and path + ".weight" == shape.weight
    }
    if HEAD in deltas and HEAD not in base.infos:  # split off from a tied embedding
        linear[HEAD] = "lm_head", base.modules["lm_head"]
    name = "float32" if dtype == "auto" else dtype
    warnings = list(expert.warnings)
    sizes = [min(shape.out_features, shape.in_features) for _, shape in linear.values()]
    full = max(sizes, default=rank)
    if rank > full:
        warnings.append(f"no matrix has a rank above {full}: written at rank {full}, not {rank}")
    return Extraction(expert, base, min(rank, full), name, linear, deltas, tuple(warnings))


def run_extraction(
    plan: Extraction,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Extracted:
    """Compute, write and read back an adapter folder.

    Args:
        plan: From `plan_extraction`.
        out: Result folder; appears complete or not at all.
        overwrite: Replace an existing folder.
        progress: Called with the number of finished weights.

    Raises:
        UsageError: `out` exists, or lies inside an input.
        Incompatible: No linear weight changed, or the factors overflow.
        Damaged: A weight is not finite, or what was written does not read back the same.
        StorageError: Disk full and the like; nothing is left behind.
    """
    out = fs.absolute(out)
    check_extraction_out(plan, out, overwrite=overwrite)
    with fs.new_folder(out, overwrite=overwrite) as stage:
        factors, modules, dropped = _compute(plan, progress)
        form = AdapterForm(
            rank=plan.rank,
            alpha=plan.rank,
            base_name=plan.base.ref,
            fan_in_fan_out=any(s.transposed for p, s in plan.linear.values() if p in factors),
            task_type="SEQ_2_SEQ_LM" if plan.base.has_encoder else "CAUSAL_LM",
        )
        write_adapter(stage, factors, form)
        verify_adapter(stage, factors)
        found = Extracted(plan, modules, dropped, _warnings(plan, dropped))
        _write_records(found, stage)
    return found


def check_extraction_out(plan: Extraction, out: Path, *, overwrite: bool) -> None:
    """Refuse an unusable result folder before any work is done.

    Raises:
        UsageError: It exists, or lies inside the full model or the base.
        StorageError: It cannot be written.
    """
    out = fs.absolute(out)
    check_out(out, [plan.expert.folder], plan.base)
    fs.check_target(out, overwrite=overwrite)


def _compute(
    plan: Extraction, progress: Callable[[int], None] | None
) -> (
    "tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, ModuleReport], dict[str, float]]"
):
    """Return factors, a report for each module, and the norms of what is left out."""
    import torch

    from cgmerge.merge import LowRank, best_dense, pad_rank
    from cgmerge.merge.engine import one_thread

    dtype: torch.dtype = getattr(torch, plan.dtype)
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    modules: dict[str, ModuleReport] = {}
    dropped: dict[str, float] = {}
    with one_thread():
        for done, name in enumerate(sorted(plan.deltas), 1):
            if name in plan.linear:
                path = plan.linear[name][0]
                matrix = plan.deltas[name].dense()
                exact = pad_rank(best_dense(matrix, plan.rank).delta, plan.rank)
                written = LowRank(exact.a.to(dtype), exact.b.to(dtype))
                _check_finite(path, written)
                modules[path] = _report(matrix, written)
                factors[path] = written.a, written.b
            else:
                norm = _norm(plan.deltas, name)
                if norm:
                    dropped[name] = norm
            if progress:
                progress(done)
    _only_changed(factors, modules, plan)
    return factors, modules, dropped


def _only_changed(
    factors: dict[str, Any], modules: dict[str, ModuleReport], plan: Extraction
) -> None:
    """Leave out kinds of modules (`k_proj`) that change in no layer."""
    moving = {_leaf(path) for path, report in modules.items() if report.norm}
    if not moving:
        raise Incompatible(
            f"{plan.expert.folder} has the linear weights of {plan.base.ref}: there is nothing to"
            " extract",
            code="no_effect",
            hint="check that the full model is the trained one",
            found=0.0,
        )
    for path in [path for path in modules if _leaf(path) not in moving]:
        del factors[path], modules[path]


def _report(matrix: "torch.Tensor", written: "LowRank") -> ModuleReport:
    """Measure the error of the factors as they are stored."""
    import torch

    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
    gap = matrix - written.b.float() @ written.a.float()
    lost = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
    return ModuleReport(norm, lost / norm if norm else 0.0)


def _check_finite(path: str, written: "LowRank") -> None:
    import torch

    if not (torch.isfinite(written.a).all() and torch.isfinite(written.b).all()):
        raise Incompatible(
            f"the factors of {path} overflow {str(written.a.dtype).removeprefix('torch.')}",
            code="overflow",
            hint="use --dtype float32 or bfloat16",
            tensor=path,
        )


def _norm(deltas: FullDeltas, name: str) -> float:
    import torch

    from cgmerge.merge.deltas import Blocks

    squares = [
        float(torch.linalg.vector_norm(block.values, dtype=torch.float64)) ** 2
        for block in Blocks([deltas], names=[name])
    ]
    return math.sqrt(math.fsum(squares))


def _is_linear(path: str) -> bool:
    """Whether a 2-D weight is a linear layer's; embeddings and routers look the same in a file."""
    leaf = _leaf(path)
    return leaf not in _ROUTERS and not any(word in leaf for word in _EMBEDDINGS)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _prefix(base: Base) -> str:
    """Return what modules have before the names in the file (GPT-2 as published has none)."""
    return "transformer." if any(name.startswith("h.0.") for name in base.infos) else ""


def _warnings(plan: Extraction, dropped: dict[str, float]) -> list[str]:
    warnings = list(plan.warnings)
    if dropped:
        largest = sorted(dropped, key=lambda name: -dropped[name])
        shown = some_of((f"{name} (norm {dropped[name]:.4g})" for name in largest), _NAMED)
        warnings.append(
            f"{len(dropped)} weights changed that LoRA on linear layers cannot hold: {shown}"
        )
    return warnings


def _write_records(found: Extracted, stage: Path) -> None:
    plan = found.plan
    fs.write_json(
        stage / RECORD, {"schema": SCHEMA, **found.facts(), "versions": package_versions()}
    )
    text = (
        "---\nlibrary_name: peft\ntags: [lora, cgmerge]\n---\n\n"
        f"Extracted with cgmerge from the full model `{plan.expert.name}` at rank {plan.rank}.\n"
        f"The adapter misses {found.error:.2%} of its delta (Frobenius, all weights);"
        f" module by module in `{RECORD}`.\n"
    )
    fs.write_bytes(stage / "README.md", text.encode())
    write_card(
        stage,
        ExpertCard(
            skill=plan.expert.name,
            base=BaseId(name=plan.base.ref, fingerprint=plan.base.fingerprint),
            training={"extracted": plan.expert.name, "sha256": plan.expert.digest},
            metrics={"extraction_error": found.error},
            versions=package_versions(),
        ),
    )
