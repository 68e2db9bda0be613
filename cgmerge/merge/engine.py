"""Run a method over all modules: factors in, factors or dense deltas out, one module at a time.

Peak memory is one module's dense delta (none at all for methods that stay in factors) plus one
block of rows of all experts, whatever the size of the model (`Merger.pieces`: the block alone).
Matrix rules on plain tensors hold one module of every expert in float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.deltas import Block, Blocks, Delta, LowRank, Rows, sizes_of, stack
from cgmerge.merge.lowrank import Truncated, main_rows, truncate, truncate_dense
from cgmerge.merge.registry import MethodSpec, Params, get_method, is_method
from cgmerge.merge.spaces import SPACES, Projected, Space, SpaceExperts, project
from cgmerge.merge.ternary import all_ternary, merge_patterns

AUTO_RANK_LIMIT = 64
"""`auto` never goes beyond this rank unless an expert does: servers load 64 without options."""

RankRule = int | Literal["exact", "auto"]
LowRankExpert = Mapping[str, LowRank]
Statistics = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """A method with everything it needs to run.

    Attributes:
        spec: The method.
        params: Its parameters, of the type `spec.params`.
        weights: One per expert, in the order of the experts.
        space: The space it runs in, or "" for the deltas as they are.
    """

    spec: MethodSpec
    params: Params
    weights: tuple[float, ...]
    space: Space | Literal[""] = ""

    @property
    def name(self) -> str:
        """Return what users type, e.g. `ties` or `core+ties`."""
        return f"{self.space}+{self.spec.name}" if self.space else self.spec.name

    @property
    def low_rank(self) -> bool:
        """Whether merging LoRA experts gives a delta of rank at most the sum of their ranks."""
        return bool(self.space) or self.spec.low_rank

    @property
    def even(self) -> bool:
        """Whether all directions weigh the same, so that a cut to a lower rank is arbitrary."""
        known = self.spec.traits.even
        return known is not None and all(getattr(self.params, k) == v for k, v in known.items())

    def order(self, keys: Sequence[Any]) -> list[int]:
        """Return the order in which experts are merged: sorted by key, unless order matters.

        Sums are then made in the same order however the experts were named.
        """
        places = range(len(keys))
        return list(places) if self.spec.traits.ordered else sorted(places, key=keys.__getitem__)

    def reordered(self, order: Sequence[int]) -> "Rule":
        """Return the rule for the experts in another order."""
        return replace(self, weights=tuple(self.weights[i] for i in order))


def make_rule(
    name: str,
    experts: int,
    *,
    weights: Sequence[float | None] | None = None,
    params: Mapping[str, Any] | None = None,
) -> Rule:
    """Look a method up and check its parameters and weights.

    Args:
        name: A method, or `SPACE+METHOD`.
        experts: How many there are.
        weights: One per expert; None takes the method's default.
        params: Name to value; strings are read.

    Raises:
        UsageError: Unknown method, space or parameter, value out of range, wrong weights, too few
            or too many experts.
    """
    if experts < 1:
        raise UsageError("no expert was given", code="experts")
    space, rest = _split_space(name)
    spec, fixed = get_method(rest)
    _check_space(space, spec)
    given = dict(params or {})
    for key, value in fixed.items():
        if key in given and given[key] != value:
            raise UsageError(f"`{name}` is `{spec.name}` with {key}={value}", code="parameter")
    made = spec.make_params({**given, **fixed})
    spec.check_count(experts)
    resolved = tuple(spec.resolve_weights(weights, experts))
    made.check(resolved)
    return Rule(spec, made, resolved, space)


def rule_of(name: str) -> str:
    """Return the method in `SPACE+METHOD`, or the name as it is.

    Raises:
        UsageError: Unknown space.
    """
    return _split_space(name)[1]


def space_of(name: str) -> Space | None:
    """Return the space in `SPACE+METHOD`, None where there is none.

    Raises:
        UsageError: Unknown space or method, or a method that cannot run in one.
    """
    space, rest = _split_space(name)
    if space:
        _check_space(space, get_method(rest)[0])
    return space or None


def _check_space(space: str, spec: MethodSpec) -> None:
    if space and not spec.runs_in_spaces:
        raise UsageError(
            f"`{spec.name}` uses statistics of the inputs, which `{space}` does not have",
            code="method",
            hint=f"use `{spec.name}` alone",
        )


def _split_space(name: str) -> tuple[Space | Literal[""], str]:
    prefix, plus, rest = name.partition("+")
    if not plus or is_method(name):
        return "", name
    for space in SPACES:
        if prefix == space:
            return space, rest
    known = is_method(rest) and get_method(rest)[0].runs_in_spaces
    raise UsageError(
        f"unknown space `{prefix}` in `{name}`",
        code="method",
        hint=f"spaces: {', '.join(SPACES)}; for example core+{rest if known else 'ties'}",
        found=prefix,
        expected=list(SPACES),
    )


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
        experts: One mapping per expert, module name to factors (or plain tensors of any shape,
            or `Rows`); modules may differ (absent is zero) and so may ranks.
        dtype: What is computed in: float32, or float64 for float64 inputs.
        ids: What each expert is called; random methods draw the same for the same name, whatever
            the order. Default: the position.
        stats: For methods that need statistics, one mapping per expert, module to tensor.
        names: The modules that are merged; default all.

    Raises:
        UsageError: The method needs statistics and there are none.
    """

    def __init__(
        self,
        rule: Rule,
        experts: Sequence[Mapping[str, Delta]],
        dtype: torch.dtype = torch.float32,
        *,
        ids: Sequence[str] | None = None,
        stats: Sequence[Statistics] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.rule = rule
        self.experts = experts
        self.dtype = dtype
        self.stats = stats
        if rule.spec.traits.stats and stats is None:
            raise UsageError(
                f"method `{rule.spec.name}` needs {rule.spec.traits.stats} statistics of every"
                " expert, found none",
                code="stats",
                hint="compute them with `cgmerge stats EXPERT --base BASE --data FILE`",
            )
        self.space = SpaceExperts(experts, rule.space) if rule.space else None
        seen = self.space.views if self.space else experts
        self.blocks = Blocks(seen, names=names, dtype=dtype, ids=ids)

    @property
    def names(self) -> list[str]:
        """Return the modules that are merged, sorted."""
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
        if self.space is not None:
            merged = self._merged(name)
            with one_thread():
                projected = self.space.of(name)
                return merged if projected is None else projected.lift(merged).to(self.dtype)
        return self._merged(name)

    def pieces(self, name: str) -> Iterator[Float[Tensor, "rows in"]]:
        """Yield the rows of `dense` one block after the other; only matrix rules hold all of them.

        A piece is valid until the next one is asked for.
        """
        kernel = None if self.space is not None else self._kernel(name)
        if kernel is None:
            yield self.dense(name)
            return
        pieces = self._pieces(name, kernel)
        while True:
            with one_thread():  # not around the yield: the caller's own settings hold there
                piece = next(pieces, None)
                if piece is None:
                    return
            yield piece

    def _pieces(self, name: str, kernel: Callable[[Block], Tensor]) -> Iterator[Tensor]:
        """Merge block by block; entries that can take few values are looked up in a table."""
        deltas = self.blocks.fetch(name)
        spec = self.rule.spec
        alike = spec.kind in ("linear", "gram") or (
            spec.traits.pointwise is not None and spec.traits.pointwise(self.state.get(name))
        )
        if alike and self.space is None and all_ternary(deltas):
            yield from merge_patterns(name, deltas, kernel, dtype=self.dtype, ids=self.blocks.ids)
            return
        for block in self.blocks.only(name):
            yield kernel(block)

    def factors(self, name: str, rank: int) -> Truncated:
        """Return one module's merged delta at rank at most `rank`, and the error of that.

        Args:
            name: A module that every expert holds as `LowRank` or not at all.
            rank: From `plan_rank`.
        """
        deltas = [expert.get(name, None) for expert in self.experts]
        kept = [(d, i) for i, d in enumerate(deltas) if isinstance(d, LowRank)]
        present = [delta for delta, _ in kept]
        if self.space is not None:
            merged = self._merged(name)
            with one_thread():
                projected = self.space.of(name)
                assert projected is not None
                return truncate(_cast(projected.factors(merged), self.dtype), rank)
        spec = self.rule.spec
        with one_thread():
            if spec.kind in ("linear", "gram"):
                coefficients = self._coefficients(name)
                return truncate(stack(present, [coefficients[i] for _, i in kept]), rank)
            if spec.low_rank:
                projected, merged = self._matrix(name)
                return truncate(_cast(projected.factors(merged), self.dtype), rank)
        matrix = self._merged(name)
        with one_thread():
            # The sum of the experts spans nearly the same directions and is cheap to decompose.
            total = stack(present, [self.rule.weights[i] for _, i in kept])
            return truncate_dense(matrix, rank, main_rows(total, rank))

    def _merged(self, name: str) -> Tensor:
        """Apply the rule to one module as the blocks show it."""
        kernel = self._kernel(name)
        if kernel is not None:
            return self._assemble(name, kernel)
        with one_thread():
            projected, merged = self._matrix(name)
            return projected.lift(merged).to(self.dtype)

    def _kernel(self, name: str) -> Callable[[Block], Tensor] | None:
        """Return what merges a block of one module; None for rules that need all of it."""
        spec, rule = self.rule.spec, self.rule
        if spec.kind == "matrix":
            with one_thread():
                return self._sum(self._mean()) if self._is_vector(name) else None
        if spec.kind in ("linear", "gram"):
            return self._sum(self._coefficients(name))
        known, scale = self.state.get(name), rule.params.scale

        def kernel(block: Block) -> Tensor:
            merged: Tensor = spec.function(block, rule.weights, rule.params, known)
            return merged if scale == 1.0 else merged.mul_(scale)

        return kernel

    def _matrix(self, name: str) -> tuple[Projected, Tensor]:
        """Run a matrix rule in the smallest space that holds its result."""
        spec, rule = self.rule.spec, self.rule
        projected = project(self.blocks.fetch(name), spec.traits.sides)
        known = None
        if self.stats is not None:
            known = [one.get(name, None) for one in self.stats]
        merged = spec.function(projected.matrices, rule.weights, rule.params, known)
        return projected, merged * rule.params.scale

    def _coefficients(self, name: str) -> list[float]:
        spec, rule = self.rule.spec, self.rule
        if spec.kind == "linear":
            found = spec.function(rule.weights, rule.params)
        else:
            with one_thread():
                found = spec.function(self.blocks.gram(name), rule.weights, rule.params)
        return [rule.params.scale * float(value) for value in found]

    def _mean(self) -> list[float]:
        """Return the coefficients of the average, for tensors that are no matrices."""
        rule = self.rule
        total = sum(rule.weights) if rule.spec.traits.relative_weights else float(len(rule.weights))
        return [rule.params.scale * weight / (total or 1.0) for weight in rule.weights]

    def _is_vector(self, name: str) -> bool:
        return any(isinstance(d, Tensor | Rows) and d.ndim < 2 for d in self.blocks.fetch(name))

    def _sum(self, coefficients: list[float]) -> Callable[[Block], Tensor]:
        factors = torch.tensor(coefficients, dtype=self.dtype)
        return lambda block: _weighted_sum(block.values, factors)

    def _assemble(self, name: str, merge: Callable[[Block], Tensor]) -> Tensor:
        with one_thread():
            merged = torch.empty(self.blocks.shapes[name], dtype=self.dtype)
            row = 0
            for piece in self._pieces(name, merge):
                merged[row : row + len(piece)] = piece
                row += len(piece)
            return merged


def plan_rank(rule: Rule, experts: Sequence[LowRankExpert], rank: RankRule) -> int:
    """Decide the rank of the merged adapter, the same for every module.

    Args:
        rule: From `make_rule`.
        experts: One mapping per expert.
        rank: A number; `exact`: large enough to lose nothing (methods whose result has low rank);
            `auto`: the sum of the experts' ranks, at most 64 or the largest expert's rank.

    Raises:
        UsageError: `exact` for a method whose result has full rank, or a rank below 1.
    """
    if isinstance(rank, int):
        if rank < 1:
            raise UsageError(f"the rank must be at least 1, found {rank}", code="rank")
        return rank
    if rank == "exact" and not rule.low_rank:
        core = f", `core+{rule.spec.name}`," if rule.spec.runs_in_spaces else ""
        raise UsageError(
            f"`{rule.name}` works entry by entry, so no adapter of small rank holds it exactly",
            code="rank",
            hint=f"give a rank (the error is measured){core} or --as model",
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


def _cast(delta: LowRank, dtype: torch.dtype) -> LowRank:
    return LowRank(delta.a.to(dtype), delta.b.to(dtype))


def _weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Σ_e c_e·values_e, one term after the other (a matmul would reorder the additions)."""
    total = values[0] * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total += value * factor
    return total
