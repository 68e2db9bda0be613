"""Write a merged adapter: factors at one rank, the error of that measured, read back."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.adapter_out import AdapterForm, missing_siblings, write_adapter
from cgmerge.modules.compose import ModuleReport, Plan, refuse_noop, refuse_rounding
from cgmerge.modules.compose_record import base_name
from cgmerge.modules.expert import check_modules, module_prefix, open_expert
from cgmerge.shown import some_of

if TYPE_CHECKING:
    import torch

    from cgmerge.merge import LowRank


def write_merged_adapter(
    plan: Plan, stage: Path, progress: Callable[[int], None] | None
) -> tuple[dict[str, ModuleReport], float]:
    """Merge module by module and write a PEFT folder into a staged one.

    Args:
        plan: With `form == "adapter"`.
        stage: From `fs.new_folder`.
        progress: Called with the number of finished modules.

    Returns:
        Per-module reports and the share of the delta that rounding lost.

    Raises:
        Incompatible: Overflow, nothing changed, or most of it lost to rounding.
        Damaged: What was written does not read back the same.
    """
    import torch

    from cgmerge.merge import LowRank, pad_rank

    merger = plan.merger()
    dtype = adapter_dtype(plan.recipe.dtype)
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    modules: dict[str, ModuleReport] = {}
    lost = 0.0
    for done, path in enumerate(merger.names, 1):
        try:
            merged = merger.factors(path, plan.rank)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            # What an SVD says of values that are not finite.
            raise _overflow(path, torch.float32) from error
        exact = pad_rank(merged.delta, plan.rank)
        written = LowRank(exact.a.to(dtype), exact.b.to(dtype))
        finite = torch.isfinite(written.a).all() and torch.isfinite(written.b).all()
        norm = math.sqrt(merged.norm_sq) if math.isfinite(merged.norm_sq) else math.inf
        if not finite:
            raise _overflow(path, dtype)
        if norm > torch.finfo(torch.float32).max:  # finite factors, whose product is not
            raise _overflow(path, torch.float32)
        modules[path] = ModuleReport(norm, math.sqrt(merged.error_sq) / norm if norm else 0.0)
        lost += _difference_sq(exact, written) if dtype != exact.a.dtype else 0.0
        factors[path] = written.a, written.b
        if progress:
            progress(done)
    total = math.sqrt(sum(report.norm**2 for report in modules.values()))
    refuse_noop(plan, total)
    for path, (out, into) in _gaps(plan).items():
        zeros = torch.zeros(plan.rank, into, dtype=dtype)
        factors[path] = zeros, zeros.new_zeros(out, plan.rank)
    form = AdapterForm(
        rank=plan.rank,
        alpha=plan.rank,
        base_name=base_name(plan),
        fan_in_fan_out=_fan_in_fan_out(plan),
        task_type=plan.adapters[0].config.task_type,
    )
    write_adapter(stage, factors, form)
    verify_adapter(stage, factors)
    rounding = math.sqrt(lost) / total if total else 0.0
    refuse_rounding(plan, rounding)
    return modules, rounding


def verify_adapter(stage: Path, factors: dict[str, Any]) -> None:
    """Read the written folder back and compare every value with what was meant."""
    import torch

    expert = open_expert(str(stage))
    wrong = set(expert.pairs) ^ set(factors)
    for path, pair in expert.pairs.items():
        a, b = factors[path]
        same = torch.equal(expert.file.read(pair.a), a) and torch.equal(expert.file.read(pair.b), b)
        if not same or pair.scaling != 1.0:
            wrong.add(path)
    expert.file.close()
    if wrong:
        raise Damaged(
            f"what was written does not read back the same: {some_of(sorted(wrong))}",
            code="read_back",
            hint="the storage is not reliable; nothing was committed",
        )


def _difference_sq(exact: "LowRank", written: "LowRank") -> float:
    from cgmerge.merge import LowRank, inner, stack

    rounded = LowRank(written.a.to(exact.a.dtype), written.b.to(exact.b.dtype))
    gap = stack([exact, rounded], [1.0, -1.0])
    return max(inner(gap, gap), 0.0)


def _overflow(path: str, dtype: "torch.dtype") -> Incompatible:
    import torch

    wider = "" if dtype is torch.float32 else ", or --dtype float32"
    return Incompatible(
        f"the merged delta of {path} overflows {str(dtype).removeprefix('torch.')}",
        code="overflow",
        hint=f"use smaller weights or a smaller --scale{wider}",
        tensor=path,
    )


def _fan_in_fan_out(plan: Plan) -> bool:
    if plan.base is None:
        return all(expert.config.fan_in_fan_out for expert in plan.adapters)
    shapes = [check_modules(expert, plan.base) for expert in plan.adapters]
    return all(shape.transposed for found in shapes for shape in found.values())


def _gaps(plan: Plan) -> dict[str, tuple[int, int]]:
    """Modules that a loader would adapt (by their last name) but no expert touches."""
    if plan.base is None:
        return missing_siblings(plan.sizes)
    prefix = module_prefix(plan.sizes, plan.base) or ""
    leaves = {path.rsplit(".", 1)[-1] for path in plan.sizes}
    named = {(n if n == "lm_head" else prefix + n): s for n, s in plan.base.modules.items()}
    return {
        path: (shape.out_features, shape.in_features)
        for path, shape in named.items()
        if path.rsplit(".", 1)[-1] in leaves and path not in plan.sizes
    }


def adapter_dtype(name: str) -> "torch.dtype":
    """Return the float type that a merged adapter is written in: `auto` is float32."""
    import torch

    chosen: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return chosen
