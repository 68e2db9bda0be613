"""Compose experts into one adapter or one model: plan, compute, write, read back.

`make_plan` opens and checks everything and computes nothing; `--dry-run` stops there. `run_plan`
writes the result folder in one step. The order in which experts were named does not matter: they
are sorted by content first, so that equal inputs give equal bytes (except for methods like slerp,
which tell the first from the second).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.errors import Incompatible, NotFound, UsageError
from cgmerge.memory import refuse_shortage
from cgmerge.modules.adapter_config import MAX_RANK
from cgmerge.modules.base import Base, open_base
from cgmerge.modules.compose_checks import check_alike, check_digest, check_same_base
from cgmerge.modules.compose_out import check_out
from cgmerge.modules.compose_record import base_record, experts_record, write_records
from cgmerge.modules.compose_stats import open_stats
from cgmerge.modules.compose_warnings import (
    plan_warnings,
    result_warnings,
    truncation_error,
    written_types,
)
from cgmerge.modules.expert import COMPRESSED, Expert, compressed_file, is_adapter, open_expert
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.quoting import quoted
from cgmerge.refs import local_place

if TYPE_CHECKING:
    from cgmerge.merge import AnyMerger, Rule
    from cgmerge.modules.compose_parts import Rules
    from cgmerge.modules.fullmodel import AnyExpert
    from cgmerge.modules.statsfile import StatsFile

Progress = Callable[[int], None]

_SUSPICIOUS = 1e-2  # below this norm a result is compared with the experts' own
_NOISE = 1e-6
_SMALLEST = 2.0**-126  # of the normal float32 numbers


@dataclass(frozen=True)
class Plan:
    """A checked composition.

    Attributes:
        recipe: What was asked for.
        experts: Opened, as they are merged: adapters, and full models where the result is one.
        refs: How the user named them, in the same order.
        deltas: Their task vectors, by module path; with full models by name of the base's weight.
        rule: Method, parameters and weights, in the same order.
        rank: Rank of the adapter; 0 for a model.
        base: The base, where one was given.
        stats: For methods that need them, those of every expert, in the same order.
        warnings: What the user should know.
    """

    recipe: Recipe
    experts: "list[AnyExpert]"
    refs: list[str]
    deltas: list[Mapping[str, Any]]
    rule: "Rule"
    rank: int
    base: Base | None
    stats: "list[StatsFile] | None" = None
    parts: "Rules" = field(default_factory=list)
    """Rules with their modules, where they differ; `rule` then is for everything else."""
    given: list[int] = field(default_factory=list)
    """Position in `experts` of the first, second … expert as the user named them."""
    warnings: list[str] = field(default_factory=list)

    @property
    def adapters(self) -> list[Expert]:
        """Return those experts that are adapters."""
        return [expert for expert in self.experts if isinstance(expert, Expert)]

    @property
    def has_full(self) -> bool:
        """Whether some expert is a full model."""
        return len(self.adapters) < len(self.experts)

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every module that any expert touches."""
        from cgmerge.merge.deltas import sizes_of

        return {
            path: (out, into)
            for deltas in self.deltas
            for path, (out, into, _) in sizes_of(deltas).items()
        }

    def merger(self) -> "AnyMerger":
        """Return what merges the experts, module by module."""
        from cgmerge.merge import Merger, PartsMerger

        if self.parts:
            return PartsMerger(self.parts, self.deltas, ids=self.ids, stats=self.stats)
        return Merger(self.rule, self.deltas, ids=self.ids, stats=self.stats)

    @property
    def ids(self) -> list[str]:
        """Return what random methods know the experts by: their content."""
        return [expert.digest for expert in self.experts]

    @cached_property
    def shares(self) -> list[float] | None:
        """Return each expert's part of Σ |weight|·‖ΔW‖; None with full models or parts."""
        if self.has_full or self.parts:
            return None
        norms = [math.sqrt(sum(d[path].norm() ** 2 for path in d)) for d in self.deltas]
        sizes = [abs(w) * norm for w, norm in zip(self.rule.weights, norms, strict=True)]
        total = sum(sizes)
        return [size / total if total else 0.0 for size in sizes]

    @property
    def entries(self) -> int:
        """Return the number of adapted weight entries."""
        return sum(out * into for out, into in self.sizes.values())

    @property
    def peak_bytes(self) -> int:
        """Return a rough estimate of the memory above the program's own."""
        from cgmerge.merge.deltas import BLOCK_ENTRIES
        from cgmerge.modules.weights import CHUNK_ENTRIES

        blocks = 16 * BLOCK_ENTRIES
        largest = max(out * into for out, into in self.sizes.values())
        if self.recipe.form == "model":
            whole = self.rule.spec.kind == "matrix" or self.rule.space
            return blocks + 32 * CHUNK_ENTRIES + (16 * len(self.experts) * largest if whole else 0)
        adapter = sum((out + into) * self.rank * 4 for out, into in self.sizes.values())
        return adapter + blocks + (0 if self.rule.low_rank else 3 * largest * 4)


@dataclass(frozen=True)
class ModuleReport:
    """What happened to one module: norm of the merged delta, relative error of the truncation."""

    norm: float
    error: float


@dataclass(frozen=True)
class Composed:
    """The result of `run_plan`, as stored in cgmerge.json and printed with `--json`."""

    out: Path
    plan: Plan
    modules: dict[str, ModuleReport]
    rounding_error: float
    warnings: list[str]

    @property
    def norm(self) -> float:
        """Return ‖ΔW‖ over all modules, before it is cut to a rank."""
        return math.sqrt(sum(report.norm**2 for report in self.modules.values()))

    @property
    def written_norm(self) -> float:
        """Return ‖ΔW‖ of what is written: the best cut to a rank is a projection."""
        kept = (r.norm**2 * (1.0 - min(r.error, 1.0) ** 2) for r in self.modules.values())
        return math.sqrt(sum(kept))

    @property
    def truncation_error(self) -> float:
        """Return ‖ΔW − written‖ / ‖ΔW‖ over all modules, from the truncation alone."""
        return truncation_error(self.modules)


def make_plan(recipe: Recipe) -> Plan:
    """Open base and experts, check that they fit, and fix order, weights and rank.

    Raises:
        CgmergeError: Anything that would make the composition wrong or impossible; see `Recipe`,
            `open_expert`, `open_base` and the method.
    """
    from cgmerge.merge import make_rule, plan_rank

    base = _open_base(recipe) if recipe.base is not None else None
    opened = [(_open_checked(item, recipe, base), item) for item in recipe.experts]
    weights = [item.weight for item in recipe.experts]
    rule = make_rule(recipe.method, len(opened), weights=weights, params=recipe.params)
    order = rule.order([_order_key(one) for one in opened])
    plain, rule = rule, rule.reordered(order)
    experts = [opened[i][0] for i in order]
    items = [opened[i][1] for i in order]
    check_same_base([expert for expert in experts if isinstance(expert, Expert)], recipe)
    deltas = _deltas(experts, base, recipe)
    parts: Rules = []
    if recipe.parts or recipe.by_tensor:
        from cgmerge.modules.compose_parts import rules_by_module, weight_names

        names = weight_names(experts, base)
        found = rules_by_module(recipe, plain, itertools.chain(*deltas), names, base)
        parts = [(one.reordered(order), modules) for one, modules in found]
    rank = plan_rank(rule, deltas, recipe.rank) if recipe.form == "adapter" else 0
    if rank > MAX_RANK:
        raise UsageError(
            f"the adapter would have rank {rank:,}; the limit is {MAX_RANK:,}",
            code="rank",
            hint="give a smaller --rank (the error is measured), or --as model",
            expected=MAX_RANK,
            found=rank,
        )
    given = [order.index(i) for i in range(len(order))]
    refs = [item.ref for item in items]
    stats = open_stats(experts, items, rule, recipe, base)
    plan = Plan(recipe, experts, refs, deltas, rule, rank, base, stats, parts, given)
    plan.warnings.extend(plan_warnings(plan))
    return plan


def run_plan(
    plan: Plan, out: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> Composed:
    """Compute, write and verify the result folder.

    Args:
        plan: From `make_plan`.
        out: Result folder; appears complete or not at all.
        overwrite: Replace an existing folder.
        progress: Called with the number of finished modules.

    Raises:
        UsageError: `out` exists, or lies inside an expert.
        Incompatible: The result changes nothing, or rounding swallows most of it.
        Damaged: An input is not finite, or what was written does not read back the same.
        StorageError: Disk full and the like; nothing is left behind.
        LimitExceeded: It needs more memory than this process may take.
    """
    out = fs.absolute(out)
    check_outputs(plan, out, overwrite=overwrite)
    with fs.new_folder(out, overwrite=overwrite) as stage:
        if plan.recipe.form == "model":
            from cgmerge.modules.model_out import write_model

            modules, rounding = write_model(plan, stage, progress)
        else:
            from cgmerge.modules.compose_adapter import write_merged_adapter

            modules, rounding = write_merged_adapter(plan, stage, progress)
        warnings = [*plan.warnings, *result_warnings(plan, modules, rounding)]
        composed = Composed(out, plan, modules, rounding, warnings)
        write_records(composed, stage)
    return composed


def check_outputs(plan: Plan, out: Path, *, overwrite: bool) -> None:
    """Refuse an unusable result folder, or too little memory, before any work is done.

    Raises:
        UsageError: It exists, or lies inside an expert or the base.
        StorageError: It cannot be written.
        LimitExceeded: The memory that is left cannot hold what is computed.
    """
    out = fs.absolute(out)
    check_out(out, [expert.folder for expert in plan.experts], plan.base)
    fs.check_target(out, overwrite=overwrite)
    refuse_shortage(plan.peak_bytes, "this merge")


def describe(composed: Composed) -> dict[str, Any]:
    """Return the documented keys of `compose --json` (without `out`)."""
    plan = composed.plan
    params = asdict(plan.rule.params)
    scale = params.pop("scale")
    return {
        "method": plan.rule.name,
        "params": params,
        "scale": scale,
        "experts": [experts_record(plan)[i] for i in plan.given],
        "shares": plan.shares and [plan.shares[i] for i in plan.given],
        "base": base_record(plan),
        "as": plan.recipe.form,
        "rank": plan.rank or None,
        "truncation_error": composed.truncation_error,
        "rounding_error": composed.rounding_error,
        "norm": composed.norm,
        "tuning": plan.recipe.tuning,
        "warnings": [*plan.recipe.notes, *composed.warnings],
    }


def _open_base(recipe: Recipe) -> Base:
    assert recipe.base is not None
    try:
        base = open_base(recipe.base)
    except NotFound:
        beside = recipe.beside(recipe.base)
        if beside is None:
            raise
        base = replace(open_base(str(beside)), ref=recipe.base)
    pinned = recipe.base_fingerprint
    if pinned not in (None, base.fingerprint) and not recipe.force_base:
        raise Incompatible(
            f"{recipe.base} is not the base that the recipe names: {base.fingerprint},"
            f" expected {pinned}",
            code="base",
            hint="pass the base it was made with; compose and eval take --force-base",
            expected=pinned,
            found=base.fingerprint,
        )
    return base


def _holds_full_delta(file: Path) -> bool:
    from cgmerge.modules.compress.container import read_manifest

    return read_manifest(file)["peft"] is None


def _open_checked(item: ExpertRef, recipe: Recipe, base: Base | None) -> "AnyExpert":
    try:
        expert = _open(item.ref, recipe, base)
    except NotFound as missing:
        beside = recipe.beside(item.ref)
        if beside is None and not recipe.recorded:
            raise
        if beside is None:
            raise NotFound(
                f"no such expert: {item.ref}",
                code="expert",
                hint="references of a record are relative to where it was made, and looked up in"
                f" {recipe.folder} and the folders above it as well",
                path=item.ref,
            ) from missing
        expert = replace(_open(str(beside), recipe, base), ref=item.ref)
    if item.sha256 is not None:
        check_digest(
            f"{item.ref} is not the expert that the recipe names",
            expert.digest,
            item.sha256,
            "the expert was changed since; remove `sha256` to take it as it is",
        )
    return expert


def _open(ref: str, recipe: Recipe, base: Base | None) -> "AnyExpert":
    """Open an adapter or, where there is a config.json instead, a full model."""
    folder = local_place(ref, what="expert", suffix=COMPRESSED)
    file = compressed_file(folder)
    whole = file if file is not None and _holds_full_delta(file) else None
    if whole is None and (is_adapter(folder) or not (folder / "config.json").exists()):
        return open_expert(ref, base=base)
    if base is None or recipe.form != "model":
        from cgmerge.modules.compress.wholemodel import uses_of

        shown = quoted(recipe.base or "BASE")
        raise UsageError(
            f"{ref} is a full model, not an adapter; full models are composed to a full model",
            code="full_model",
            hint=f"add --base {shown} --as model, or make an adapter of it:"
            f" cgmerge extract {quoted(ref)} --base {shown} --rank 16 -o OUT"
            if whole is None
            else f"add --base {shown} --as model; {uses_of(whole)}",
            path=folder,
        )
    if whole is not None:
        from cgmerge.modules.compress.openedfull import open_compressed_full

        return open_compressed_full(whole, ref, base, force_base=recipe.force_base)
    from cgmerge.modules.fullmodel import open_full

    return open_full(ref, base, force_base=recipe.force_base)


def _deltas(
    experts: "Sequence[AnyExpert]", base: Base | None, recipe: Recipe
) -> list[Mapping[str, Any]]:
    adapters = [expert for expert in experts if isinstance(expert, Expert)]
    if base is not None and len(adapters) < len(experts):
        from cgmerge.modules.fullmodel import task_vectors

        return task_vectors(experts, base, force_base=recipe.force_base)
    deltas = [expert.deltas(base, force_base=recipe.force_base) for expert in adapters]
    check_alike(adapters)
    return list(deltas)


def _order_key(opened: "tuple[AnyExpert, ExpertRef]") -> tuple[str, float, str]:
    expert, item = opened
    return expert.digest, item.weight if item.weight is not None else 1.0, item.ref


def refuse_noop(plan: Plan, norm: float) -> None:
    """Refuse a result whose merged delta is zero, unless the recipe allows it.

    Raises:
        Incompatible: `norm` is 0, or too small for any number of a model.
    """
    if _cancelled(plan, norm) and not plan.recipe.allow_noop:
        tiny = f"so small (‖ΔW‖ {norm:.1e}) that float32 holds none of it"
        size = tiny if 0.0 < norm < _SMALLEST else "zero in every module"
        raise Incompatible(
            f"the composition changes nothing: the merged delta is {size}",
            code="no_effect",
            hint="check weights and experts (an untrained expert has B = 0); --allow-noop accepts"
            " it",
            found=norm,
        )


def _cancelled(plan: Plan, norm: float) -> bool:
    """Whether a result is zero, or only what rounding leaves of deltas that cancel."""
    if norm < _SMALLEST or plan.has_full or norm > _SUSPICIOUS:
        return norm < _SMALLEST
    given = math.fsum(
        abs(weight) * math.fsum(delta.norm() for delta in deltas.values())
        for weight, deltas in zip(plan.rule.weights, plan.deltas, strict=True)
    )
    return norm <= _NOISE * abs(plan.rule.params.scale) * given


def refuse_rounding(plan: Plan, lost: float) -> None:
    """Refuse a result whose float type swallows most of the delta, unless the recipe allows it.

    Raises:
        Incompatible: More than half of it is lost.
    """
    if lost > 0.5 and not plan.recipe.allow_rounding:
        raise Incompatible(
            f"rounding to {written_types(plan)} loses {lost:.0%} of the delta",
            code="rounding",
            hint="use --dtype float32, or --allow-rounding to accept it",
            found=lost,
        )
