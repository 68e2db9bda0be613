"""The modules that tasks share, in a model while they and their allocation are learned.

y = W·h + Σ_s ẑ_s·(alpha/r)·B_s·A_s·h: the outputs of the modules are mixed, never A and B apart.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.modules.attach import Hook, MakeHook, hooked
from cgmerge.modules.modular import allocation
from cgmerge.modules.routing import kernels
from cgmerge.modules.routing.attach import place_of
from cgmerge.modules.routing.stack import Stack

_LOGIT = 1e-3


@dataclass(frozen=True)
class Frame:
    """The sizes of everything that is learned.

    Attributes:
        targets: Module path to (out, in).
        places: Layers that have an allocation of their own; one empty name where all share one.
        tasks: How many.
        skills: How many modules they share.
        rank: Of every module.
        scaling: Factor on B·A.
    """

    targets: Mapping[str, tuple[int, int]]
    places: tuple[str, ...]
    tasks: int
    skills: int
    rank: int
    scaling: float


def stream(seed: int, name: str) -> torch.Generator:
    """Return a generator that depends on a seed and on what it is for, and on nothing else."""
    digest = hashlib.blake2b(f"cgmerge-modular {seed} {name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class Inventory:
    """Modules and allocation.

    A is drawn as in PEFT, from U(−1/√in, 1/√in), and B is zero: the model is the base at first,
    and modules differ by their A.

    Args:
        frame: Sizes.
        seed: Of A and of the allocation.
        device: Where the model is.

    Attributes:
        logits: Of a task using a module, [tasks, places, skills].
        a: By module path: A of all modules one below the other, [skills·rank, in].
        b: B side by side, without the scaling, [out, skills·rank].
        shares: Weights of the current sequences, [batch, places, skills]; a batch of 1 is for all.
    """

    def __init__(self, frame: Frame, seed: int, device: torch.device) -> None:
        self.frame = frame
        ranks = frame.skills * frame.rank
        generator = stream(seed, "A")
        self.a, self.b = {}, {}
        for path, (out, into) in frame.targets.items():
            drawn = (2 * torch.rand(ranks, into, generator=generator) - 1) / math.sqrt(into)
            self.a[path] = drawn.to(device).requires_grad_()
            self.b[path] = torch.zeros(out, ranks, device=device, requires_grad=True)
        self.size = (frame.tasks, len(frame.places), frame.skills)
        drawn = torch.rand(self.size, generator=stream(seed, "allocation"))
        self.logits: Float[Tensor, "tasks places skills"]
        self.logits = (_LOGIT * (2 * drawn - 1)).to(device).requires_grad_()
        self.shares: Float[Tensor, "batch places skills"] | None = None

    @property
    def modules(self) -> list[Tensor]:
        """Return every A and B."""
        return [*self.a.values(), *self.b.values()]

    def weights(
        self, uniform: Tensor | None = None, temperature: float = 1.0
    ) -> Float[Tensor, "tasks places skills"]:
        """Return the weights of the tasks; each row sums to 1.

        Args:
            uniform: Draws from (0, 1) for relaxed Bernoulli weights; None takes σ(logit).
            temperature: Of the draws.
        """
        if uniform is None:
            return allocation.rows(self.logits.sigmoid())
        drawn = allocation.relaxed(self.logits, uniform.to(self.logits.device), temperature)
        return allocation.rows(drawn)

    def skill(self, number: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A [rank, in] and B [out, rank] of one module by path, copies on the CPU."""
        rank = self.frame.rank
        part = slice(number * rank, (number + 1) * rank)
        return {
            path: (
                self.a[path].detach()[part].cpu().clone(),
                self.b[path].detach()[:, part].cpu().clone(),
            )
            for path in self.a
        }

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[None]:
        """Have the modules in a model for the length of a `with` block; `shares` weighs them.

        Raises:
            Incompatible: The model lacks a module.
        """
        with hooked(model, {path: self._maker(path) for path in self.a}):
            yield

    def _maker(self, path: str) -> MakeHook:
        frame = self.frame
        place = frame.places.index(place_of(path)) if len(frame.places) > 1 else 0
        stack = Stack(self.a[path], self.b[path], (frame.rank,) * frame.skills)

        def make(_device: torch.device, _dtype: torch.dtype | None) -> Hook:
            def mix(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                assert self.shares is not None, "nobody said which tasks these are"
                weights = self.shares[:, None, place] * frame.scaling
                x = inputs[0].to(stack.a.dtype)
                # Models that flatten [batch, tokens] keep the tokens of a row together.
                lines = x if x.dim() > 2 else x.unflatten(0, (weights.shape[0], -1))
                added = kernels.dense(lines @ stack.a.T, stack, weights)
                return output + added.view(output.shape).to(output.dtype)

            return mix

        return make
