"""Run a method over all modules: factors in, factors or dense deltas out, one module at a time.

Peak memory is one module's dense delta (none at all for linear methods) plus one block of rows of
all experts, whatever the size of the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks, LowRank, stack
from cgmerge.merge.lowrank import Truncated, truncate, truncate_dense
from cgmerge.merge.registry import MethodSpec, Params, get_method

AUTO_RANK_LIMIT = 64
"""`auto` never goes beyond this rank unless an expert does: servers load 64 without options."""

T = TypeVar("T")
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


def merge_factors(
    rule: Rule, experts: Sequence[LowRankExpert], rank: int
) -> Iterator[tuple[str, Truncated]]:
    """Merge module by module to factors of rank at most `rank`.

    Args:
        rule: From `make_rule`.
        experts: One mapping per expert; modules may differ (absent is zero) and so may ranks.
        rank: From `plan_rank`.

    Yields:
        Module name, merged factors and the error of the truncation; names sorted.
    """
    return _stepwise(_factors(rule, experts, rank))


def merge_dense(
    rule: Rule, experts: Sequence[Mapping[str, LowRank | Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Merge module by module to dense deltas, with no truncation at all.

    Args:
        rule: From `make_rule`.
        experts: Factors or plain tensors of any shape.
        dtype: float32, or float64 to compute and return in double.

    Yields:
        Name and merged delta, [out, in] (tensors: flattened to a matrix), names sorted.
    """
    blocks = Blocks(experts, dtype=dtype)
    return _stepwise(_summed(rule, blocks) if rule.spec.linear else _entrywise(rule, blocks))


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
    names = sorted(set().union(*[set(expert) for expert in experts]))
    needed, largest = 1, 1
    for name in names:
        present = [expert[name] for expert in experts if name in expert]
        ranks = [delta.rank for delta in present]
        needed = max(needed, min(sum(ranks), *present[0].shape))
        largest = max(largest, *ranks)
    return needed if rank == "exact" else min(needed, max(AUTO_RANK_LIMIT, largest))


def _stepwise(steps: Iterator[T]) -> Iterator[T]:
    """Run each step of a generator under `one_thread`, and the consumer outside it."""
    while True:
        with one_thread():
            try:
                item = next(steps)
            except StopIteration:
                return
        yield item


def _factors(
    rule: Rule, experts: Sequence[LowRankExpert], rank: int
) -> Iterator[tuple[str, Truncated]]:
    if rule.spec.linear:
        for name, delta in _linear(rule, experts):
            yield name, truncate(delta, rank)
        return
    for name, matrix in _entrywise(rule, Blocks(experts)):
        present = [expert[name].a for expert in experts if name in expert]
        yield name, truncate_dense(matrix, rank, torch.cat(present))


def _summed(rule: Rule, blocks: Blocks) -> Iterator[tuple[str, Tensor]]:
    factors = torch.tensor(_coefficients(rule), dtype=blocks.dtype)
    for name in blocks.names:
        yield name, _assemble(blocks, name, lambda block: _weighted_sum(block.values, factors))


def _assemble(blocks: Blocks, name: str, merge: Callable[[Block], Tensor]) -> Tensor:
    """Merge one module block by block into its dense delta."""
    merged = torch.empty(blocks.shapes[name], dtype=blocks.dtype)
    row = 0
    for block in blocks.only(name):
        count = block.values.shape[1]
        merged[row : row + count] = merge(block)
        row += count
    return merged


def _linear(rule: Rule, experts: Sequence[LowRankExpert]) -> Iterator[tuple[str, LowRank]]:
    coefficients = _coefficients(rule)
    for name in sorted(set().union(*[set(expert) for expert in experts])):
        pairs = [(e[name], c) for e, c in zip(experts, coefficients, strict=True) if name in e]
        yield name, stack([delta for delta, _ in pairs], [c for _, c in pairs])


def _entrywise(rule: Rule, blocks: Blocks) -> Iterator[tuple[str, Tensor]]:
    spec = rule.spec
    state = spec.prepare(blocks, rule.weights, rule.params) if spec.prepare else {}
    kernel = spec.kernel
    assert kernel is not None
    for name in blocks.names:
        known = state.get(name)
        yield name, _assemble(
            blocks,
            name,
            lambda block, known=known: kernel(block, rule.weights, rule.params, known),
        )


def _coefficients(rule: Rule) -> list[float]:
    assert rule.spec.coefficients is not None
    return rule.spec.coefficients(rule.weights, rule.params)


def _weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Σ_e c_e·values_e, one term after the other (a matmul would reorder the additions)."""
    total = values[0] * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total += value * factor
    return total
