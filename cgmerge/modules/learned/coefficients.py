"""Coefficients of experts for groups of modules."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cgmerge.modules.compose_parts import layer_of

Granularity = Literal["model", "layer", "module"]
ALL = "all modules"
OUTSIDE = "outside the layers"


@dataclass(frozen=True)
class Groups:
    """Modules that share a coefficient.

    Attributes:
        names: What each group is called: `all modules`, `layer 3`, or the module itself.
        members: Its modules, sorted.
    """

    names: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]

    def index(self, modules: Sequence[str]) -> Int[Tensor, " modules"]:
        """Return the group of every module."""
        place = {module: i for i, group in enumerate(self.members) for module in group}
        return torch.tensor([place[module] for module in modules])


def group_modules(modules: Iterable[str], granularity: Granularity) -> Groups:
    """Put modules into groups; layers in the order of their numbers."""
    names = sorted(set(modules))
    if granularity == "model":
        return Groups((ALL,), (tuple(names),))
    if granularity == "module":
        return Groups(tuple(names), tuple((name,) for name in names))
    layers: dict[int | None, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    order = sorted(layers, key=lambda layer: (layer is None, layer or 0))
    titles = [OUTSIDE if layer is None else f"layer {layer}" for layer in order]
    return Groups(tuple(titles), tuple(tuple(layers[layer]) for layer in order))


@dataclass(frozen=True, eq=False)
class Coefficients:
    """One number per expert and group.

    Attributes:
        groups: Which modules share one.
        values: [experts, groups], float64.
    """

    groups: Groups
    values: Float[Tensor, "experts groups"]

    def rows(self) -> list[list[float]]:
        """Return the numbers of each group, in the order of the experts."""
        found: list[list[float]] = self.values.T.tolist()
        return found

    def means(self) -> list[float]:
        """Return each expert's mean over all modules, which shows its part in the whole."""
        sizes = [len(group) for group in self.groups.members]
        # A mean of one group must be its value to the last bit: it is then the weight itself.
        shares = torch.tensor([size / sum(sizes) for size in sizes], dtype=torch.float64)
        found: list[float] = (self.values @ shares).tolist()
        return found

    def record(self) -> dict[str, Any]:
        """Return plain data: group to its numbers."""
        return dict(zip(self.groups.names, self.rows(), strict=True))
