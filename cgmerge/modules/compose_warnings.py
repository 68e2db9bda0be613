"""What a composition warns of: before it is computed, and of what was lost in writing it."""

import math
from typing import TYPE_CHECKING

from cgmerge.shown import some_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgmerge.modules.compose import ModuleReport, Plan

LARGE_LOSS = {True: 0.1, False: 0.5}
"""Share of ‖ΔW‖ that a rank may lose before it is warned of, by whether the rule's result has low
rank. Those of entry-wise rules never have: what is lost is always printed, and rarely harmful."""

NEXT_TO_NOTHING = 1e-6
"""‖ΔW‖ below which no output changes in float32."""

EVEN_LOSS = 1e-3
"""Share of a delta from which on it matters which directions a lower rank leaves out."""


def truncation_error(modules: "Mapping[str, ModuleReport]") -> float:
    """Return ‖ΔW − written‖ / ‖ΔW‖ over all modules."""
    lost = sum((report.norm * report.error) ** 2 for report in modules.values())
    total = math.sqrt(sum(report.norm**2 for report in modules.values()))
    return math.sqrt(lost) / total if total else 0.0


def plan_warnings(plan: "Plan") -> list[str]:
    """Say what is unusual about experts, weights and base before anything is computed."""
    warnings = [text for expert in plan.experts for text in expert.warnings]
    # Sorted: warnings are part of the record, which must not depend on the order of the experts.
    unknown = sorted({e.name for e in plan.adapters if e.base_fingerprint is None})
    if unknown:
        checked = "shapes fit" if plan.base else "not checked: no --base"
        warnings.append(f"{some_of(unknown)}: no base fingerprint in the expert ({checked})")
        warnings.extend(_other_bases(plan))
    digests = [expert.digest for expert in plan.experts]
    twice = sorted({e.name for e in plan.experts if digests.count(e.digest) > 1})
    if twice:
        warnings.append(f"the same expert is given more than once: {some_of(twice)}")
    warnings.extend(_uneven(plan))
    if plan.recipe.force_base:
        warnings.append("--force-base: base fingerprints were not enforced")
    unit = set(plan.rule.weights)
    traits, params = plan.rule.spec.traits, plan.rule.params
    relative = traits.relative_weights and getattr(params, "normalize", True)
    if relative and len(plan.experts) == 1 and unit != {1.0}:
        warnings.append(
            f"weights of `{plan.rule.spec.name}` are relative: for one expert they change nothing;"
            " use --scale"
        )
    return warnings


def _uneven(plan: "Plan") -> list[str]:
    """Say which modules only some experts change: their delta is a part of the whole alone."""
    first, *others = ({str(path) for path in delta} for delta in plan.deltas)
    union = first.union(*others)
    partial = sorted(union - first.intersection(*others))
    if not partial:
        return []
    count = f"{len(partial)} of {len(union)} modules"
    return [f"{count} are changed by some experts only, e.g. {partial[0]}"]


def _other_bases(plan: "Plan") -> list[str]:
    """Name the bases that experts without a fingerprint say they are for, where they differ."""
    named: dict[str, list[str]] = {}
    for expert in plan.adapters:
        if expert.base_fingerprint is None and expert.config.base_name:
            named.setdefault(expert.config.base_name, []).append(expert.name)
    # Where a base lies says little: a repository and a local copy of it end alike.
    if len({name.rstrip("/").rsplit("/", 1)[-1] for name in named}) < 2:
        return []
    said = some_of(
        (f"{some_of(sorted(e), 3)}: {name}" for name, e in sorted(named.items())), between="; "
    )
    return [f"the experts name their bases differently ({said})"]


def written_types(plan: "Plan") -> str:
    """Name the float types that merged weights are written in, also where `auto` chose them."""
    from cgmerge.modules.model_out import merged_dtypes

    if plan.recipe.form == "model":
        found = merged_dtypes(plan)
    else:
        from cgmerge.modules.compose_adapter import adapter_dtype

        found = {adapter_dtype(plan.recipe.dtype)}
    return " and ".join(sorted(str(one).removeprefix("torch.") for one in found))


def result_warnings(
    plan: "Plan", modules: "Mapping[str, ModuleReport]", rounding: float
) -> list[str]:
    """Say what was lost on the way to the written result."""
    warnings = []
    idle = [path for path, report in modules.items() if report.norm == 0.0]
    if idle and len(idle) < len(modules):
        warnings.append(f"{len(idle)} of {len(modules)} modules do not change: {some_of(idle)}")
    if plan.rule.even and any(report.error > EVEN_LOSS for report in modules.values()):
        known = ", ".join(f"{k}={v}" for k, v in (plan.rule.spec.traits.even or {}).items())
        warnings.append(
            f"with {known} all directions weigh the same, and rank {plan.rank} keeps arbitrary"
            " ones; use --rank exact, or a slightly smaller value to keep the leading ones"
        )
    total = math.sqrt(sum(report.norm**2 for report in modules.values()))
    if total < NEXT_TO_NOTHING:
        warnings.append(
            f"‖ΔW‖ is {total:.1e}: next to nothing changes; look at weights and --scale"
        )
    truncated = truncation_error(modules)
    if truncated > LARGE_LOSS[plan.rule.low_rank]:
        better = "--rank exact loses nothing" if plan.rule.low_rank else "--as model has no rank"
        warnings.append(
            f"rank {plan.rank} loses {truncated:.0%} of ‖ΔW‖: a larger --rank keeps more, {better}"
        )
    if rounding > 0.01:
        warnings.append(
            f"rounding to {written_types(plan)} loses {rounding:.1%} of the delta;"
            " --dtype float32 keeps it"
        )
    return warnings
