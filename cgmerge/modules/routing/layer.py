"""One module around any linear layer, whatever decides how much each expert says.

The base layer is called as it is (nn.Linear, GPT-2's Conv1D, 4- and 8-bit layers); the experts'
share is added to its output. The cheapest of the kernels is taken by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cgmerge.errors import UsageError
from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.scores import Scorer
from cgmerge.modules.routing.stack import Stack

SPARSE_FROM = 3
"""`sparse` is taken where there are more than so many experts for each that a token uses."""
_SPARSE_TOKENS = 32
"""…and at least so many tokens: below, finding out who goes where costs more than it saves."""


@dataclass(frozen=True)
class TokenRule:
    """What gives every token its weights.

    Attributes:
        scorer: Scores from the input.
        choice: Weights from the scores.
        after: Added to the weights, [experts] (LoRA-Flow); weights then need not sum to 1.
    """

    scorer: Scorer
    choice: Choice
    after: Tensor | None = None

    def weights(self, x: Tensor, linear: Tensor | None, z: Tensor | None) -> Tensor:
        """Return the weights of every token, [..., experts], float32."""
        found = self.choice.weights(self.scorer.scores(x, linear, z))
        return found if self.after is None else found + self.after

    @property
    def sparse(self) -> bool:
        """Whether a token uses few of the experts only."""
        scorer, top_k = self.scorer, self.choice.top_k
        if top_k is None or self.after is not None or scorer.present is None:
            return False
        return not scorer.needs_z and scorer.present.shape[0] > SPARSE_FROM * top_k

    def changed(self, change: Callable[[Tensor], Tensor]) -> "TokenRule":
        """Return the rule with every tensor changed, e.g. moved to a device."""
        after = None if self.after is None else change(self.after)
        return TokenRule(self.scorer.changed(change), self.choice, after)

    def to(self, device: torch.device) -> "TokenRule":
        """Return the rule on a device; its own tensors where they are there already."""
        return self.changed(lambda tensor: tensor.to(device))


@dataclass
class Routes:
    """What the layers of one attached composition share.

    Attributes:
        silent: Layers behave as the base.
        plan: Weights of the sequences, for routers that decide per sequence.
        shared: Weights of the current tokens by place, where several modules share a decision.
        watch: Called with (module, weights) whenever a layer has decided.
    """

    silent: bool = False
    plan: kernels.RowPlan | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)
    watch: Callable[[str, Tensor], None] | None = None

    def rows(self, batch: int) -> kernels.RowPlan:
        """Return the plan for a batch; beams follow the sequence they belong to.

        Raises:
            UsageError: Nobody has said which sequences these are.
        """
        plan = self.plan
        if plan is None or batch % plan.batch:
            known = "none" if plan is None else f"{plan.batch} prompts"
            raise UsageError(
                f"a composition that routes per sequence has to know the prompts first: {batch}"
                f" sequences, {known} routed",
                code="route_first",
                hint="call route(prompts) on the attached composition, or use its generate()",
                expected=batch,
                found=0 if plan is None else plan.batch,
            )
        return plan if plan.batch == batch else plan.repeated(batch // plan.batch)


class SharedInput:
    """One product for all modules that read the same input (q, k and v; gate and up).

    Args:
        parts: What each of the modules multiplies the input with, [rows, in].
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.all = torch.cat(list(parts), dim=0) if len(parts) > 1 else parts[0]
        self.sizes = [part.shape[0] for part in parts]
        self._seen: tuple[Tensor, int] | None = None
        self._results: list[Tensor | None] = []

    def product(self, x: Tensor, member: int) -> Tensor:
        """Return part·x of one module; the others' are kept until they ask with the same x."""
        if len(self.sizes) == 1:
            return x @ self.all.T
        fresh = self._seen is None or self._seen[0] is not x or self._seen[1] != x._version
        if fresh or self._results[member] is None:
            self._seen = x, x._version
            self._results = list((x @ self.all.T).split(self.sizes, dim=-1))
        result = self._results[member]
        assert result is not None
        self._results[member] = None
        if not any(part is not None for part in self._results):
            self._seen = None  # nobody waits: do not keep the input alive
        return result


class RoutedLinear(nn.Module):
    """A linear layer with experts beside it.

    Args:
        base: The layer; never changed.
        path: Its name in the model.
        stack: The experts, on the layer's device, in the type of its inputs.
        routes: What is shared with the other layers.
    """

    def __init__(self, base: nn.Module, path: str, stack: Stack, routes: Routes) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.stack = stack
        self.routes = routes

    def __getattr__(self, name: str) -> Any:
        # Models look at `weight` and `in_features` of their layers.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return base(x) + Σ_e w_e·ΔW_e·x."""
        result: Tensor = self.base(x, *args, **kwargs)
        if self.routes.silent:
            return result
        return _plus(result, self.share(x.to(self.stack.a.dtype)))

    def share(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Return what the experts add, whole or as two factors still to be multiplied."""
        raise NotImplementedError

    def _watched(self, weights: Tensor) -> Tensor:
        if self.routes.watch is not None:
            self.routes.watch(self.path, weights)
        return weights


class FixedLinear(RoutedLinear):
    """Weights that depend on nothing: one adapter of the summed rank."""

    def __init__(
        self, base: nn.Module, path: str, stack: Stack, routes: Routes, weights: Tensor
    ) -> None:
        super().__init__(base, path, stack, routes)
        self.weights = weights
        self.mixed = stack.mixed(weights)

    def share(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the mixed delta."""
        self._watched(self.weights)
        return x @ self.mixed.a.T, self.mixed.b


class SequenceLinear(RoutedLinear):
    """Weights that were decided for the whole sequence."""

    def share(self, x: Tensor) -> Tensor:
        """Send each sequence through its own experts."""
        plan = self.routes.rows(x.shape[0]) if x.dim() > 2 else self._flat(x)
        rows = x if x.dim() > 2 else x.unflatten(0, (plan.batch, -1))
        if self.routes.watch is not None:
            self.routes.watch(self.path, plan.weights(self.stack.experts))
        return kernels.by_row(rows, self.stack, plan).view(*x.shape[:-1], -1)

    def _flat(self, x: Tensor) -> kernels.RowPlan:
        """Models that flatten [batch, tokens] before a layer keep the tokens of a row together."""
        batch = self.routes.plan.batch if self.routes.plan else x.shape[0]
        return self.routes.rows(batch)


class TokenLinear(RoutedLinear):
    """Weights that each token decides from the module's own input."""

    def __init__(
        self, base: nn.Module, path: str, stack: Stack, routes: Routes, rule: TokenRule
    ) -> None:
        super().__init__(base, path, stack, routes)
        self.rule = rule
        self.inputs: tuple[SharedInput, SharedInput | None] | None = None
        """Products with the factors and with the scorer's rows, where they are shared."""
        self.member = 0

    def share(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """Score, choose, and send each token through its experts."""
        flat = x.reshape(-1, x.shape[-1])
        if self.rule.sparse and flat.shape[0] >= _SPARSE_TOKENS and not torch.is_grad_enabled():
            scores = self.rule.scorer.scores(flat, self._linear(x, flat), None)
            chosen, weights = self.rule.choice.best(scores)
            if self.routes.watch is not None:
                full = torch.zeros_like(scores).scatter(-1, chosen, weights)
                self.routes.watch(self.path, full.view(*x.shape[:-1], -1))
            return kernels.sparse(flat, self.stack, chosen, weights).view(*x.shape[:-1], -1)
        z = self._z(x)
        linear = self._linear(x, None)
        weights = self._watched(self.rule.weights(x, linear, z))
        return z * kernels.spread(weights, self.stack).to(z.dtype), self.stack.b

    def _z(self, x: Tensor) -> Tensor:
        if self.inputs is not None:
            return self.inputs[0].product(x, self.member)
        return x @ self.stack.a.T

    def _linear(self, x: Tensor, flat: Tensor | None) -> Tensor | None:
        rows = self.rule.scorer.rows
        if rows is None:
            return None
        if self.inputs is not None and self.inputs[1] is not None and not rows.requires_grad:
            found = self.inputs[1].product(x, self.member)
        else:
            found = x.to(rows.dtype) @ rows.T
        return found if flat is None else found.reshape(flat.shape[0], -1)


class SharedLinear(RoutedLinear):
    """Weights that each token decided once for several modules."""

    def __init__(
        self, base: nn.Module, path: str, stack: Stack, routes: Routes, place: str
    ) -> None:
        super().__init__(base, path, stack, routes)
        self.place = place

    def share(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh all experts with the decision of the place."""
        weights = self._watched(self.routes.shared[self.place])
        z = x @ self.stack.a.T
        if x.dim() == 2 and weights.dim() == 3:
            weights = weights.flatten(0, 1)
        return z * kernels.spread(weights, self.stack).to(z.dtype), self.stack.b


def _plus(result: Tensor, share: tuple[Tensor, Tensor] | Tensor) -> Tensor:
    """Add the experts' share; without gradients into the memory of the result."""
    if isinstance(share, Tensor):
        return result + share.to(result.dtype)
    z, b = share
    if torch.is_grad_enabled() or result.dtype != b.dtype or not result.is_contiguous():
        return result + (z @ b.T).to(result.dtype)
    result.view(-1, result.shape[-1]).addmm_(z.reshape(-1, z.shape[-1]), b.T)
    return result
