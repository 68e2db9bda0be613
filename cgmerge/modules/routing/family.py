"""Modules that read the same input decide together: one product, one softmax, for q, k and v.

For one token the number of small operations is what counts, for many the number of products.
Everything that a family needs of its input comes from one matrix: the factors A of all experts of
all its modules, and below them what their scorers multiply the input with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Scorer
from cgmerge.modules.routing.stack import Stack

SPARSE_FROM = 3
"""`sparse` is taken where there are more than so many experts for each that a token uses."""
SPARSE_TOKENS = 256
"""…and at least so many tokens: below, finding out who goes where costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Few:
    """Chosen experts of each token and their weights, [tokens, k], both."""

    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class One:
    """The experts chosen for the only token: which, with what weight, and their A·x, [r]."""

    terms: tuple[tuple[int, float, Tensor], ...]


Part = Tensor | Few | One
"""What one module needs: weighted A·x of all experts, [..., Σr], or less where few are chosen."""


def together(first: tuple[Stack, TokenRule], second: tuple[Stack, TokenRule]) -> bool:
    """Whether two modules with the same input can decide together."""
    (one, rule), (two, other) = first, second
    return (
        (one.a.shape[1], one.a.dtype, one.a.device, one.experts)
        == (two.a.shape[1], two.a.dtype, two.a.device, two.experts)
        and rule.choice == other.choice
        and (rule.after is None) == (other.after is None)
        and rule.scorer.joins(other.scorer)
    )


class Family:
    """One decision for each of some modules that read the same input.

    Args:
        members: Stack and rule of each, see `together`.
        watch: Called with (member, weights) whenever they have decided.
        watching: Whether somebody wants to know now.
    """

    def __init__(
        self,
        members: Sequence[tuple[Stack, TokenRule]],
        watch: Callable[[int, Tensor], None] | None = None,
        watching: Callable[[], bool] = lambda: True,
    ) -> None:
        stacks, rules = [stack for stack, _ in members], [rule for _, rule in members]
        self.experts, self.watch, self.watching = stacks[0].experts, watch, watching
        self.choice = rules[0].choice
        self.rules = rules
        self.learning = any(tensor.requires_grad for rule in rules for tensor in rule.tensors())
        self.joint = rules[0].joined(rules[1:]).simplified()
        a = torch.cat([stack.a for stack in stacks])
        ranks = tuple(rank for stack in stacks for rank in stack.ranks)
        # The experts of the second module come behind those of the first, and so on.
        self.stack = Stack(a, a.new_empty(0, a.shape[0]), ranks)
        self.sizes = [stack.a.shape[0] for stack in stacks]
        rows = self.joint.scorer.rows
        fits = rows is not None and rows.dtype == a.dtype and not self.learning
        self.matrix = torch.cat([a, rows]) if fits and rows is not None else None
        top_k = self.choice.top_k
        choosing = top_k is not None and self.joint.after is None and self.joint.scorer.of_rows
        self.sparse = choosing and self.experts > SPARSE_FROM * (top_k or 0)
        # Elsewhere than on a CPU, numbers that Python reads would be waited for.
        self.single = choosing and self.stack.uniform is not None and a.device.type == "cpu"
        self._seen: tuple[Tensor, int] | None = None
        self._parts: list[Part | None] = []

    def part(self, x: Tensor, member: int) -> Part:
        """Return what one module needs; the others' parts are kept until they ask for the same x.

        Another tensor, or the same one changed in place, is computed anew.
        """
        if len(self.sizes) == 1:
            return self._decide(x)[0]
        version = -1 if x.is_inference() else x._version  # inference tensors count no changes
        seen = self._seen
        fresh = seen is None or seen[0] is not x or seen[1] != version or version < 0
        if fresh or self._parts[member] is None:
            self._seen, self._parts = (x, version), list(self._decide(x))
        part, self._parts[member] = self._parts[member], None
        assert part is not None
        if all(waiting is None for waiting in self._parts):
            self._seen = None  # nobody waits: do not keep the input alive
        return part

    def _decide(self, x: Tensor) -> Sequence[Part]:
        tokens = x.numel() // x.shape[-1]
        if not torch.is_grad_enabled():
            if self.single and tokens == 1:
                return self._one(x)
            if self.sparse and tokens >= SPARSE_TOKENS:
                return self._few(x)
        # Tensors that are being learned change under the joint copy: join them anew.
        rule = self.rules[0].joined(self.rules[1:]) if self.learning else self.joint
        z, read = self._products(x, rule.scorer)
        weights = self.choice.weights(self._scores(x, read, rule.scorer))
        if rule.after is not None:
            weights = weights + rule.after.view(-1, self.experts)
        self._tell(weights)
        parts: tuple[Tensor, ...] = kernels.weigh(z, self.stack, weights.flatten(-2)).split(
            self.sizes, dim=-1
        )
        return parts

    def _few(self, x: Tensor) -> Sequence[Part]:
        """Score only; each token's few experts compute the rest."""
        scores = self._ratings(x)
        chosen, weights = self.choice.best(scores)
        if self._is_watched():
            self._tell(torch.zeros_like(scores).scatter(-1, chosen, weights))
        k = chosen.shape[-1]
        pairs = zip(chosen.unbind(-2), weights.unbind(-2), strict=True)
        return [Few(one.reshape(-1, k), share.reshape(-1, k)) for one, share in pairs]

    def _one(self, x: Tensor) -> Sequence[Part]:
        """Choose in Python, and read the factors of the chosen experts where they lie.

        For one token calls are what costs, and reading what no expert in use needs.
        """
        scores = self._ratings(x)
        if self._is_watched():
            self._tell(self.choice.weights(scores))
        vector, (a, _) = x.flatten(), self.stack.blocks
        parts: list[Part] = []
        for member, own in enumerate(scores.view(-1, self.experts).tolist()):
            first = member * self.experts
            chosen = self.choice.best_of(own)
            parts.append(One(tuple((e, w, a[first + e].mv(vector)) for e, w in chosen)))
        return parts

    def _ratings(self, x: Tensor) -> Tensor:
        """Return the scores, [..., members, experts], of a scorer that reads rows."""
        scorer = self.joint.scorer
        assert scorer.rows is not None
        return self._scores(x, x.to(scorer.rows.dtype) @ scorer.rows.T, scorer)

    def _products(self, x: Tensor, scorer: Scorer) -> tuple[Tensor, Tensor]:
        """Return A·x, and what the scorer reads."""
        if self.matrix is not None:
            both = x @ self.matrix.T
            ranks = self.stack.a.shape[0]
            return both[..., :ranks], both[..., ranks:]
        z = x @ self.stack.a.T
        if scorer.rows is None:
            return z, kernels.norms(z, self.stack)
        return z, x.to(scorer.rows.dtype) @ scorer.rows.T

    def _scores(self, x: Tensor, read: Tensor, scorer: Scorer) -> Tensor:
        """Return the scores, [..., members, experts]."""
        found: Tensor = scorer.scores(x, read).unflatten(-1, (-1, self.experts))
        return found

    def _is_watched(self) -> bool:
        return self.watch is not None and self.watching()

    def _tell(self, weights: Tensor) -> None:
        if self.watch is not None and self.watching():
            for member, own in enumerate(weights.unbind(-2)):
                self.watch(member, own)
