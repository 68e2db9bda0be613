"""A composition: experts, and what decides how much each of them says.

Every composition computes y = W·h + Σ_e w_e(context)·ΔW_e·h. Where the weights depend on nothing
it is one adapter (or, with a routed table, one per task); otherwise a router decides for every
sequence or every token. Whoever evaluates, chats or exports need not ask which kind it is.

A routed composition on disk is a folder of JSON and safetensors:

    cgmerge.json          what it is: base, experts with digests, router, how it was made
    router.safetensors    what the router learned; absent for a table
    experts/NAME/         an ordinary PEFT adapter or a compressed expert each
    README.md             the model card

A static one is a PEFT adapter folder with a `cgmerge.json` beside it, see `compose`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.card import BaseId
from cgmerge.modules.expert import Expert

if TYPE_CHECKING:
    from torch import Tensor

    from cgmerge.merge import LowRank
    from cgmerge.modules.loading import LoadedBase
    from cgmerge.modules.routing.attach import Routing
    from cgmerge.modules.routing.router import Router
    from cgmerge.modules.routing.stack import Stack


@dataclass(frozen=True)
class Composition:
    """Experts and a router; a static composition is one expert without a router.

    Attributes:
        method: What made it.
        experts: In the order of the router's weights.
        names: What they are called here, each once.
        router: What decides; None for a static composition.
        base: Which base it belongs to.
        folder: Where it lies.
        record: Its `cgmerge.json`; empty for a plain adapter.
        warnings: What the user should know.
    """

    method: str
    experts: tuple[Expert, ...]
    names: tuple[str, ...]
    router: "Router | None"
    base: BaseId
    folder: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    router_sha256: str = ""

    @property
    def granularity(self) -> str:
        """Return what the weights depend on: `static`, `sequence` or `token`."""
        return "static" if self.router is None else self.router.granularity

    @property
    def kind(self) -> str:
        """Return the kind of router, or `static`."""
        return "static" if self.router is None else self.router.kind

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks of a routed table; empty for other kinds."""
        from cgmerge.modules.routing.router import TaskRouter

        return tuple(self.router.table) if isinstance(self.router, TaskRouter) else ()

    @cached_property
    def digest(self) -> str:
        """Return a sha256 over everything that decides what it computes."""
        if self.router is None:
            return self.experts[0].digest
        from cgmerge import strictjson

        parts = [
            self.router.kind.encode(),
            strictjson.canonical(self.router.settings()),
            self.router_sha256.encode(),
            *[expert.digest.encode() for expert in self.experts],
        ]
        return hashlib.sha256(b"\n".join(parts)).hexdigest()

    @cached_property
    def stacks(self) -> "dict[str, Stack]":
        """Return all experts' factors by module, read once."""
        from cgmerge.modules.routing.stack import stacks

        return stacks([dict(expert.deltas()) for expert in self.experts])

    def check(self, base: Base, *, force_base: bool = False) -> None:
        """Check that every expert fits a base, and that an encoder is at hand where one is needed.

        Raises:
            Incompatible: Another base, modules that do not fit, or no such encoder.
            MissingExtra: The package of encoders is not installed.
        """
        if self.kind == "retrieval":
            from cgmerge.modules.routing.encoder import find_encoder
            from cgmerge.modules.routing.router import RetrievalRouter

            if isinstance(self.router, RetrievalRouter) and self.router.encoder is not None:
                find_encoder(self.router.encoder)
        for expert in self.experts:
            expert.deltas(base, force_base=force_base)

    @contextmanager
    def attach(self, loaded: "LoadedBase") -> "Iterator[Routing]":
        """Have the composition in a loaded base for the length of a `with` block.

        Yields:
            What tells the router about prompts: call `route` before the model where the
            composition routes per sequence, or `generate`, which does it.

        Raises:
            Incompatible: The model lacks a module.
        """
        from cgmerge.modules.attach import attached
        from cgmerge.modules.routing.attach import Routing, routed
        from cgmerge.modules.routing.layer import Routes

        if self.router is None:
            with attached(loaded.model, self.experts[0].deltas()):
                yield Routing(loaded, None, Routes())
        else:
            with routed(loaded, self.stacks, self.router) as routing:
                yield routing

    def refuse_task(self, task: str | None) -> None:
        """Refuse the name of a task where nothing asks for one.

        Raises:
            UsageError: A task, and no table of tasks.
        """
        if task is not None and not self.tasks:
            raise UsageError(
                f"--task {task!r} means nothing for a composition by `{self.method}`: no tasks",
                code="task",
                hint="leave it out",
                found=task,
            )

    def materialise(self, task: str | None = None) -> "dict[str, LowRank]":
        """Return the one delta that the composition is, exactly, of the used experts' rank.

        Args:
            task: For a routed table: whose row.

        Raises:
            Incompatible: The weights depend on the input, so that there is no such delta.
            UsageError: A table, and no such task.
        """
        from cgmerge.modules.routing.attach import place_of
        from cgmerge.modules.routing.router import TaskRouter

        if self.router is None:
            return dict(self.experts[0].deltas())
        if not isinstance(self.router, TaskRouter):
            what = "token" if self.granularity == "token" else "prompt"
            raise Incompatible(
                f"a composition by `{self.method}` chooses experts anew for every {what};"
                " no single adapter computes the same",
                code="not_static",
                hint="compose a static one (--method lorahub, atlas, ties), or use this folder with"
                " cgmerge eval, chat and generate",
            )
        found = {}
        for path, stack in self.stacks.items():
            weights = self.router.row(task, place_of(path))
            used = weights.nonzero().flatten().tolist()
            part = stack.only(used) if used else None
            if part is not None and part.a.numel():
                found[path] = part.mixed(weights[used])
        return found

    def explain(
        self, loaded: "LoadedBase", prompt: Sequence[int], task: str | None = None
    ) -> "Explanation":
        """Say how much each expert has to say about a prompt, module by module.

        Args:
            loaded: The base.
            prompt: Token ids.
            task: For a routed table.

        Raises:
            UsageError: A static composition, or no such task.
            Damaged: Weights that are not finite.
        """
        import torch

        seen: dict[str, Tensor] = {}

        def watch(path: str, weights: "Tensor") -> None:
            shares = weights.detach().float().cpu()
            seen[path] = shares.reshape(-1, len(self.experts))

        if self.router is None:
            raise UsageError(
                "a static composition has no router: it treats every input alike",
                code="static",
                hint="`cgmerge.json` in its folder holds weights and parameters",
            )
        with self.attach(loaded) as routing, routing.watched(watch), torch.no_grad():
            routing.route([prompt], [task])
            ids = torch.tensor([list(prompt)], device=loaded.model.device)
            loaded.model(input_ids=ids, use_cache=False)
        for path, shares in seen.items():
            if not bool(shares.isfinite().all()):
                raise Damaged(
                    f"the router gives weights in {path} that are not finite (NaN or infinity)",
                    code="not_finite",
                    hint="an expert or the router overflows; try --dtype float32",
                )
        return Explanation(self.names, seen)


@dataclass(frozen=True)
class Explanation:
    """Shares of the experts for one prompt.

    Attributes:
        experts: Their names.
        modules: Weights by module path, [tokens, experts], or [1, experts] where the sequence
            has one decision.
    """

    experts: tuple[str, ...]
    modules: "Mapping[str, Tensor]"

    def by_module(self) -> dict[str, list[float]]:
        """Return the mean weights of each module."""
        return {path: weights.mean(dim=0).tolist() for path, weights in self.modules.items()}

    def by_layer(self) -> dict[str, list[float]]:
        """Return the mean weights of each decoder layer; other modules stand for themselves."""
        from cgmerge.modules.routing.attach import place_of

        groups: dict[str, list[list[float]]] = {}
        for path, shares in self.by_module().items():
            groups.setdefault(place_of(path), []).append(shares)
        return {name: _mean(rows) for name, rows in groups.items()}

    def by_token(self) -> list[list[float]]:
        """Return the mean weights of each token over all modules; one row without tokens."""
        rows = [weights.tolist() for weights in self.modules.values()]
        return [_mean([module[token] for module in rows]) for token in range(len(rows[0]))]

    def overall(self) -> list[float]:
        """Return the mean weights of all modules."""
        return _mean(list(self.by_module().values()))


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
