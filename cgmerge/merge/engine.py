"""Run a method over all modules: factors in, factors or dense deltas out, one module at a time.

Peak memory is one module's dense delta (none at all for linear methods) plus one block of rows of
all experts, whatever the size of the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks, LowRank, sizes_of, stack
from cgmerge.merge.lowrank import OVERSAMPLE, Truncated, truncate, truncate_dense
from cgmerge.merge.registry import MethodSpec, Params, get_method

AUTO_RANK_LIMIT = 64
"""`auto` never goes beyond this rank unless an expert does: servers load 64 without options."""

RankRule = int | Literal["exact", "auto"]
LowRankExpert = Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Rule:
    """A method with everything it needs to run.

    Attributes:
        spec: The method.
        params: Its parameters, of the type `spec.params`.
        weights: One per expert, in the order of the experts.
    """

    spec: MethodSpec
    params: Params
    weights: tuple[float, ...]


def make_rule(
    name: str,
    experts: int,
    *,
    weights: Sequence[float | None] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Rule:
    """Look a method up and check its parameters and weights.

    Raises:
        UsageError: Unknown method or parameter, value out of range, wrong weights, no expert.
    """
    if experts < 1:
        raise UsageError("no expert was given", code="experts")
    spec, fixed = get_method(name)
    given = dict(params or {})
    for key, value in fixed.items():
        if key in given and given[key] != value:
            raise UsageError(f"`{name}` is `{spec.name}` with {key}={value}", code="parameter")
    made = spec.make_params({**given, **fixed})
    return Rule(spec, made, tuple(spec.resolve_weights(weights, experts)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that results do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


class Merger:
    """One merge, module by module and in any order.

    Args:
        rule: From `make_rule`.
        experts: One mapping per expert, module name to factors (or plain tensors of any shape);
            modules may differ (absent is zero) and so may ranks.
        dtype: What is computed in: float32, or float64 for float64 inputs.
    """

    def __init__(
        self,
        rule: Rule,
        experts: Sequence[Mapping[str, LowRank | Tensor]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rule = rule
        self.blocks = Blocks(experts, dtype=dtype)

    @property
    def names(self) -> list[str]:
        """Return the modules that any expert touches, sorted."""
        return self.blocks.names

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """Look at the whole stream once, where the method needs to (thresholds and the like)."""
        prepare = self.rule.spec.prepare
        if prepare is None:
            return {}
        with one_thread():
            found: Mapping[str, Any] = prepare(self.blocks, self.rule.weights, self.rule.params)
            return found

    def dense(self, name: str) -> Float[Tensor, "out in"]:
        """Return one module's merged delta, with no truncation at all (tensors: as a matrix)."""
        spec, rule = self.rule.spec, self.rule
        if spec.linear:
            factors = torch.tensor(_coefficients(rule), dtype=self.blocks.dtype)
            return self._assemble(name, lambda block: _weighted_sum(block.values, factors))
        kernel, known = spec.kernel, self.state.get(name)
        assert kernel is not None
        return self._assemble(name, lambda block: kernel(block, rule.weights, rule.params, known))

    def factors(self, name: str, rank: int) -> Truncated:
        """Return one module's merged delta at rank at most `rank`, and the error of that.

        Args:
            name: A module that every expert holds as `LowRank` or not at all.
            rank: From `plan_rank`.
        """
        present = self.blocks.fetch(name)
        kept = [(d, i) for i, d in enumerate(present) if isinstance(d, LowRank)]
        deltas = [delta for delta, _ in kept]
        if self.rule.spec.linear:
            coefficients = _coefficients(self.rule)
            with one_thread():
                return truncate(stack(deltas, [coefficients[i] for _, i in kept]), rank)
        matrix = self.dense(name)
        with one_thread():
            # The sum of the experts spans nearly the same directions and is cheap to decompose.
            total = stack(deltas, [self.rule.weights[i] for _, i in kept])
            return truncate_dense(matrix, rank, truncate(total, rank + OVERSAMPLE).delta.a)

    def _assemble(self, name: str, merge: Callable[[Block], Tensor]) -> Tensor:
        with one_thread():
            merged = torch.empty(self.blocks.shapes[name], dtype=self.blocks.dtype)
            row = 0
            for block in self.blocks.only(name):
                count = block.values.shape[1]
                merged[row : row + count] = merge(block)
                row += count
            return merged


def plan_rank(rule: Rule, experts: Sequence[LowRankExpert], rank: RankRule) -> int:
    """Decide the rank of the merged adapter, the same for every module.

    Args:
        rule: From `make_rule`.
        experts: One mapping per expert.
        rank: A number; `exact`: large enough to lose nothing (linear methods only); `auto`: the
            sum of the experts' ranks, at most 64 or the largest expert's rank.

    Raises:
        UsageError: `exact` for a method that is not linear, or a rank below 1.
    """
    if isinstance(rank, int):
        if rank < 1:
            raise UsageError(f"the rank must be at least 1, found {rank}", code="rank")
        return rank
    if rank == "exact" and not rule.spec.linear:
        raise UsageError(
            f"`{rule.spec.name}` is not linear, so no adapter of small rank holds it exactly",
            code="rank",
            hint="give a rank (the error is measured), or --as model to keep everything",
        )
    totals: dict[str, int] = {}
    limits: dict[str, int] = {}
    largest = 1
    for expert in experts:
        for name, (out, into, own) in sizes_of(expert).items():
            totals[name] = totals.get(name, 0) + own
            limits[name] = min(out, into)
            largest = max(largest, own)
    needed = max((min(totals[name], limits[name]) for name in totals), default=1)
    return needed if rank == "exact" else min(needed, max(AUTO_RANK_LIMIT, largest))


def _coefficients(rule: Rule) -> list[float]:
    assert rule.spec.coefficients is not None
    return rule.spec.coefficients(rule.weights, rule.params)


def _weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Σ_e c_e·values_e, one term after the other (a matmul would reorder the additions)."""
    total = values[0] * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total += value * factor
    return total
