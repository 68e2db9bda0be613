"""One module around any linear layer, whatever decides how much each expert says.

The base layer is called as it is (nn.Linear, GPT-2's Conv1D, 4- and 8-bit layers); the experts'
share is added to its output. The cheapest of the kernels is taken by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cgmerge.errors import UsageError
from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.family import Family, One
from cgmerge.modules.routing.stack import Stack

Share = Tensor | tuple[Tensor, Tensor] | list[tuple[float, Tensor, Tensor]]
"""What experts add: whole, as two factors still to be multiplied, or for one token, without
gradients, as terms weight · b·z with z [r] and b [out, r]."""


@dataclass
class Routes:
    """What the layers of one attached composition share.

    Attributes:
        silent: Layers behave as the base.
        plan: Weights of the sequences, for routers that decide per sequence.
        layers: The same for single layers, where they differ.
        shared: Weights of the current tokens by place, where several modules share a decision.
        watch: Called with (module, weights) whenever a layer has decided.
    """

    silent: bool = False
    plan: kernels.RowPlan | None = None
    layers: Mapping[str, kernels.RowPlan] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    watch: Callable[[str, Tensor], None] | None = None

    def planned(self, place: str) -> kernels.RowPlan | None:
        """Return the plan of a layer as it was routed; None before that."""
        return self.layers.get(place, self.plan)

    def rows(self, batch: int, place: str = "") -> kernels.RowPlan:
        """Return the plan of a layer for a batch; beams follow the sequence they belong to.

        Raises:
            UsageError: Nobody has said which sequences these are.
        """
        plan = self.planned(place)
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


class RoutedLinear(nn.Module, ABC):
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

    @abstractmethod
    def share(self, x: Tensor) -> Share:
        """Return what the experts add."""

    def _watched(self, weights: Tensor) -> Tensor:
        if self.routes.watch is not None:
            self.routes.watch(self.path, weights)
        return weights


class SequenceLinear(RoutedLinear):
    """Weights that were decided for the whole sequence; `place` is the layer it is in."""

    def __init__(
        self, base: nn.Module, path: str, stack: Stack, routes: Routes, place: str
    ) -> None:
        super().__init__(base, path, stack, routes)
        self.place = place

    def share(self, x: Tensor) -> Tensor:
        """Send each sequence through its own experts."""
        plan = self.routes.rows(x.shape[0], self.place) if x.dim() > 2 else self._flat(x)
        rows = x if x.dim() > 2 else x.unflatten(0, (plan.batch, -1))
        if self.routes.watch is not None:
            self.routes.watch(self.path, plan.weights(self.stack.experts))
        return kernels.by_row(rows, self.stack, plan).view(*x.shape[:-1], -1)

    def _flat(self, x: Tensor) -> kernels.RowPlan:
        """Models that flatten [batch, tokens] before a layer keep the tokens of a row together."""
        plan = self.routes.planned(self.place)
        return self.routes.rows(plan.batch if plan else x.shape[0], self.place)


class TokenLinear(RoutedLinear):
    """Weights that each token decides from the module's own input; see `Family`."""

    family: Family
    """Set by the family: it decides for all modules that read the same input."""
    member: int

    def share(self, x: Tensor) -> Share:
        """Take what the family decided."""
        found = self.family.part(x, self.member)
        if isinstance(found, Tensor):
            return found, self.stack.b
        if isinstance(found, One):
            b = self.stack.blocks[1]
            return [(weight, z, b[expert].T) for expert, weight, z in found.terms]
        flat = x.reshape(-1, x.shape[-1])
        sent = kernels.sparse(flat, self.stack, found.chosen, found.weights)
        return sent.view(*x.shape[:-1], -1)


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
        if x.dim() == 2 and weights.dim() == 3:
            weights = weights.flatten(0, 1)
        return kernels.weigh(x @ self.stack.a.T, self.stack, weights), self.stack.b


def _plus(result: Tensor, share: Share) -> Tensor:
    """Add the experts' share; without gradients into the memory of the result."""
    if isinstance(share, Tensor):
        return result + share.to(result.dtype)
    if isinstance(share, list):
        there = result if result.is_contiguous() else result.contiguous()
        flat = there.view(-1)
        for weight, z, b in share:
            if b.dtype == flat.dtype:
                flat.addmv_(b, z, alpha=weight)
            else:
                flat.add_((b @ z).to(flat.dtype), alpha=weight)
        return there
    z, b = share
    if torch.is_grad_enabled() or result.dtype != b.dtype or not result.is_contiguous():
        return result + (z @ b.T).to(result.dtype)
    result.view(-1, result.shape[-1]).addmm_(z.reshape(-1, z.shape[-1]), b.T)
    return result
