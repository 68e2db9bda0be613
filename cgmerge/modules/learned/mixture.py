"""All experts attached to a model at once, with coefficients that can be changed in place.

One pass costs one LoRA of the summed rank: ((x·A_catᵀ) ⊙ c)·B_catᵀ with every expert's own
coefficient on its ranks and the scaling folded into B. Ranks may differ, and so may the modules:
an expert that lacks one has no columns there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.attach import Hook, MakeHook, hooked

if TYPE_CHECKING:
    from cgmerge.merge import LowRank


class Mixture:
    """Σ_e c[e, module]·ΔW_e beside every module of a model.

    Args:
        experts: One mapping per expert, module path to factors; read when attached.

    Attributes:
        modules: Every module that some expert changes, sorted.
        values: c, [experts, modules], float32, on the model's device once attached. Replaced or
            changed in place between passes; with `requires_grad` the pass is differentiable in it.
    """

    def __init__(self, experts: "Sequence[Mapping[str, LowRank]]") -> None:
        self.experts = experts
        self.modules = sorted(set().union(*[set(expert) for expert in experts]))
        self.values: Float[Tensor, "experts modules"] = torch.zeros(len(experts), len(self.modules))
        self._silent = False

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[None]:
        """Have the mixture in a model for the length of a `with` block.

        Raises:
            Incompatible: A module that the model does not have.
        """
        makers = {name: self._maker(place, name) for place, name in enumerate(self.modules)}
        self.values = self.values.to(next(model.parameters()).device)
        with hooked(model, makers):
            yield

    @contextmanager
    def without(self) -> Iterator[None]:
        """Have the plain model for the length of a `with` block, where the mixture is attached."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def set(self, values: Float[Tensor, "experts modules"]) -> None:
        """Take other coefficients; they are copied."""
        self.values = values.detach().to(self.values.device, torch.float32, copy=True)

    def _maker(self, place: int, name: str) -> MakeHook:
        def make(device: torch.device, dtype: torch.dtype | None) -> Hook:
            deltas = {i: e[name] for i, e in enumerate(self.experts) if name in e}
            a = torch.cat([delta.a for delta in deltas.values()]).to(device, dtype)
            b = torch.cat([delta.b for delta in deltas.values()], dim=1).to(device, dtype)
            ranks = [i for i, delta in deltas.items() for _ in range(delta.rank)]
            owners = torch.tensor(ranks, device=device)

            def mix(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                if self._silent:
                    return output
                gate = self.values[owners, place].to(a)
                x = inputs[0].to(a.dtype)
                return output + (((x @ a.T) * gate) @ b.T).to(output.dtype)

            return mix

        return make
