"""Pure tensor mathematics of merging: tensors in, tensors out.

`merge_state_dicts` is the simple door; `engine` works on low-rank experts module by module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cgmerge.errors import Damaged, Incompatible
from cgmerge.merge.deltas import LowRank, inner, pad_rank, stack
from cgmerge.merge.engine import Merger, Rule, make_rule, plan_rank, rule_of, space_of
from cgmerge.merge.flaws import flaw_of
from cgmerge.merge.lowrank import Truncated, best_dense, truncate, truncate_dense
from cgmerge.merge.parts import AnyMerger, PartsMerger
from cgmerge.merge.registry import MethodSpec, all_methods, get_method

__all__ = [
    "AnyMerger",
    "LowRank",
    "Merger",
    "MethodSpec",
    "PartsMerger",
    "Rule",
    "Truncated",
    "all_methods",
    "best_dense",
    "get_method",
    "inner",
    "make_rule",
    "merge_state_dicts",
    "pad_rank",
    "plan_rank",
    "rule_of",
    "space_of",
    "stack",
    "truncate",
    "truncate_dense",
]


def merge_state_dicts(
    method: str,
    deltas: Sequence[Mapping[str, Tensor]],
    *,
    weights: Sequence[float | None] | None = None,
    params: Mapping[str, Any] | None = None,
    ids: Sequence[str] | None = None,
    stats: Sequence[Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Merge plain task vectors with any registered method.

    Args:
        method: Name or alias, see `all_methods`; `core+NAME` or `knots+NAME` for a space.
        deltas: One mapping per expert, name to ΔW (any shape, floating point); not modified.
            A name that an expert lacks counts as zero for it.
        weights: One per expert; None takes the method's default.
        params: Parameters of the method, e.g. `{"density": 0.2, "scale": 1.0}`.
        ids: What each expert is called, for methods that draw random numbers; default its position.
        stats: For methods that need them: one mapping per expert, name to Gram or Fisher.

    Returns:
        Name to merged delta, names sorted, each in the (promoted) dtype and shape of its inputs.
        Computed in float32, or float64 where an input is float64.

    Raises:
        UsageError: Unknown method or parameter, value out of range, wrong number of weights.
        Incompatible: Shapes that differ, tensors that are not floating point, or a result that
            their type cannot hold.
        Damaged: NaN or infinity in an input; statistics that cannot be right.

    Example:
        >>> a, b = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([3.0, 4.0])}
        >>> merge_state_dicts("linear", [a, b])["w"]
        tensor([2., 1.])
    """
    rule = make_rule(method, len(deltas), weights=weights, params=params)
    kinds = _check(deltas)
    _check_stats(rule, stats or (), kinds)
    double = any(dtype == torch.float64 for _, dtype in kinds.values())
    compute = torch.float64 if double else torch.float32
    merger = Merger(rule, deltas, compute, ids=ids, stats=stats)
    merged = {
        name: merger.dense(name).reshape(kinds[name][0]).to(kinds[name][1]) for name in merger.names
    }
    for name, tensor in merged.items():
        if not torch.isfinite(tensor).all():
            raise Incompatible(
                f"the merged {name!r} overflows {str(tensor.dtype).removeprefix('torch.')}",
                code="overflow",
                hint="use smaller weights or a smaller scale, or inputs of a wider float type",
                tensor=name,
            )
    return merged


def _check_stats(
    rule: Rule,
    stats: Sequence[Mapping[str, Tensor]],
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Refuse values that no statistic has; the rule itself knows which shape it wants."""
    gram = rule.spec.traits.stats != "fisher"
    for number, expert in enumerate(stats):
        for name in sorted(expert.keys() & kinds.keys()):
            values, shape = expert[name], kinds[name][0]
            if gram and values.shape != (shape[1:].numel(),) * 2:
                continue
            flaw = flaw_of(values, gram=gram)
            if flaw is not None:
                raise Damaged(
                    f"the statistics of {name!r} of expert {number}: the matrix {flaw}",
                    code="stats",
                    tensor=name,
                )


def _check(
    deltas: Sequence[Mapping[str, Tensor]],
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and result dtype of every name, after checking that they fit together."""
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for number, expert in enumerate(deltas):
        for name, tensor in expert.items():
            if not tensor.is_floating_point():
                raise Incompatible(
                    f"expert {number}: {name!r} has dtype {tensor.dtype}, a float type is wanted",
                    code="dtype",
                    tensor=name,
                )
            if not torch.isfinite(tensor).all():
                raise Damaged(
                    f"expert {number}: {name!r} holds NaN or infinity",
                    code="not_finite",
                    tensor=name,
                )
            shape, dtype = kinds.get(name, (tensor.shape, tensor.dtype))
            if shape != tensor.shape:
                raise Incompatible(
                    f"{name!r} has shape {list(tensor.shape)} in expert {number}, "
                    f"{list(shape)} before",
                    code="shape",
                    tensor=name,
                    expected=list(shape),
                    found=list(tensor.shape),
                )
            kinds[name] = shape, torch.promote_types(dtype, tensor.dtype)
    return kinds
