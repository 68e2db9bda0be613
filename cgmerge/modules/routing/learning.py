"""Learn the tensors of token routers inside the routed layers, and prune what was learned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.routing.attach import Routing, layer_name, layer_of, routed
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.router import Scope, TokenRouter
from cgmerge.modules.routing.stack import Stack
from cgmerge.modules.routing.support import Descent, Mark, Part, Support
from cgmerge.modules.stats import frozen

Stacks = Mapping[str, Stack]


def places(stacks: Stacks, loaded: LoadedBase, scope: Scope) -> dict[str, tuple[int, torch.device]]:
    """Return where a router of some scope reads, with the width there and the device.

    Raises:
        Incompatible: A module that is in no layer, where layers decide.
    """
    modules = dict(loaded.model.named_modules())
    devices = {path: next(modules[path].parameters()).device for path in stacks if path in modules}
    if scope == "module":
        return {path: (stack.a.shape[1], devices[path]) for path, stack in stacks.items()}
    if scope == "layer":
        wanted = {layer_of(path) for path in stacks}
    else:
        wanted = {name for path in stacks if (name := layer_name(path))}
        wanted = wanted or {layer_of(path) for path in stacks}
    width = int(loaded.model.config.get_text_config().hidden_size)
    found = {
        name: (width, next(module.parameters()).device)
        for name, module in modules.items()
        if name in wanted
    }  # in the order of the model
    return found if scope == "layer" else dict(list(found.items())[:1])


def zeros(count: int, width: int, device: torch.device) -> Float[Tensor, "count width"]:
    """Return a matrix to be learned, zero at the start."""
    return torch.zeros(count, width, device=device, requires_grad=True)


def parameters(router: TokenRouter) -> list[Tensor]:
    """Return the tensors of a router that require gradients."""
    return [tensor for tensor in router.tensors().values() if tensor.requires_grad]


@contextmanager
def learning(loaded: LoadedBase, stacks: Stacks, router: TokenRouter) -> Iterator[Routing]:
    """Have a router in a frozen base, in evaluation mode, for the length of a `with` block."""
    with frozen(loaded.model), routed(loaded, stacks, router) as routing:
        yield routing


@contextmanager
def penalised(
    routing: Routing, names: Sequence[str], *, entropy: float, guide: float
) -> Iterator[Callable[[Part], Tensor] | None]:
    """Return what gives the penalty on the weights of the last pass: a mean over modules, tokens.

    Padding does not count. Yields None where both factors are 0.

    Args:
        routing: The routed layers.
        names: The experts, in the order of the weights.
        entropy: Factor on the entropy of the weights.
        guide: Factor on −log of the weight of the expert whose example it is; examples of no
            expert add nothing.
    """
    if entropy == 0.0 and guide == 0.0:
        yield None
        return
    seen: list[Tensor] = []

    def penalty(part: Part) -> Tensor:
        found = [_penalty(weights, part, names, entropy, guide) for weights in seen]
        seen.clear()
        return torch.stack(found).mean()

    with routing.watched(lambda _path, weights: seen.append(weights)):
        yield penalty


def _penalty(
    weights: Tensor, part: Part, names: Sequence[str], entropy: float, guide: float
) -> Tensor:
    rows = part.batch.mask.shape[0]
    shares = weights.reshape(rows, -1, len(names))
    counted = part.batch.mask[:, -shares.shape[1] :].bool()  # a head sees the last positions alone
    found: Tensor = entropy * torch.special.entr(shares[counted]).sum(-1).mean()
    known = [row for row, skill in enumerate(part.skills) if skill in names]
    if guide and known:
        own = torch.tensor([names.index(part.skills[row]) for row in known], device=shares.device)
        mine = shares[known].take_along_dim(own[:, None, None], -1)[..., 0]
        # An expert without this module has the weight 0 here, whatever is learned.
        logs = torch.where(mine > 0, mine.clamp_min(torch.finfo(mine.dtype).tiny).log(), 0.0)
        found = found - guide * logs[counted[known]].sum() / counted.sum()
    return found


def settled(router: TokenRouter) -> TokenRouter:
    """Return a learned router without gradients, on the CPU."""
    return router.changed(lambda tensor: tensor.detach().cpu())


def measure(loaded: LoadedBase, stacks: Stacks, router: TokenRouter, support: Support) -> Mark:
    """Return what a router reaches on examples, through the kernels that it will use."""
    with learning(loaded, stacks, router):
        return support.mark()


@dataclass(frozen=True)
class Pruned:
    """A router that lets fewer experts speak.

    Attributes:
        router: The result; the one that was given where nothing was good enough.
        mark: What it reaches on the examples; None for the one that was given.
        tried: (k, what it reaches), in the order they were tried.
    """

    router: TokenRouter
    mark: Mark | None
    tried: Sequence[tuple[int, Mark]]

    def table(self) -> list[dict[str, Any]]:
        """Return what was tried, for the record."""
        return [{"top_k": k, **mark.as_dict()} for k, mark in self.tried]


def prune(
    router: TokenRouter,
    measured: Callable[[TokenRouter], Mark],
    candidates: Sequence[int],
    least: Mark | None,
) -> Pruned:
    """Keep the best k experts of every token, for the first k that is good enough.

    Args:
        router: With all experts.
        measured: What a router reaches on the examples.
        candidates: Numbers of experts, tried in order.
        least: What it has to reach; None takes the first candidate.
    """
    tried = []
    for k in candidates:
        fewer = router.chosen(Choice(k, router.choice.temperature))
        mark = measured(fewer)
        tried.append((k, mark))
        if least is None or (mark.loss <= least.loss and mark.score >= least.score):
            return Pruned(fewer, mark, tried)
    return Pruned(router, None, tried)


def failure(descent: Descent, steps: int) -> list[str]:
    """Say that a descent ended early, where it did."""
    if descent.failed is None:
        return []
    text = (
        f"step {descent.failed} of {steps} gave a loss or gradient that is not finite; the best"
        " before it is kept (try a smaller --set lr=…)"
    )
    return [text]
