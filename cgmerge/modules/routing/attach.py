"""Put a composition into a loaded base for a while, and tell its router about prompts."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cgmerge.errors import Incompatible
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.routing.encoder import embed_by
from cgmerge.modules.routing.family import Family, together
from cgmerge.modules.routing.kernels import RowPlan
from cgmerge.modules.routing.layer import (
    RoutedLinear,
    Routes,
    SequenceLinear,
    SharedLinear,
    TokenLinear,
)
from cgmerge.modules.routing.router import (
    RetrievalRouter,
    Router,
    TaskRouter,
    TokenRouter,
    check_hidden,
)
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.stack import Stack
from cgmerge.shown import some_of

_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")  # the first number: experts of an MoE have others
# Layers that transformers' models feed with one and the same tensor. Another input is noticed and
# computed on its own, so that a model that differs is merely slower.
_SIBLINGS = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"wi_0", "wi_1"},
)


class Routing:
    """A composition that is in a model now.

    Args:
        loaded: The base; its layers are wrapped.
        router: What decides; None where nothing has to.
        routes: Shared with the layers.
    """

    def __init__(self, loaded: LoadedBase, router: Router | None, routes: Routes) -> None:
        self.loaded = loaded
        self.router = router
        self.routes = routes

    def route(
        self, prompts: Sequence[Sequence[int]], tasks: Sequence[str | None] | None = None
    ) -> Tensor | None:
        """Tell which prompts come next; needed before the model is called, once for each batch.

        Args:
            prompts: Token ids, one list for each sequence of the batch, in order, unpadded.
            tasks: The name of each one's task, for routers by task.

        Returns:
            The weights, [batch, experts], or [batch, layers, experts] where a table differs
            between layers; None where tokens decide for themselves.

        Raises:
            UsageError: A router by task, and a task that it does not know.
        """
        weights = self.weights(prompts, tasks)
        if weights is not None:
            self._plan(weights.to(self.loaded.model.device))
        return weights

    def _plan(self, weights: Tensor) -> None:
        layers = self.router.layers if isinstance(self.router, TaskRouter) else ()
        if not layers:
            self.routes.plan = RowPlan.of(weights)
            return
        rows = zip(layers, weights.unbind(1), strict=True)
        self.routes.layers = {name: RowPlan.of(own) for name, own in rows}

    def weights(
        self, prompts: Sequence[Sequence[int]], tasks: Sequence[str | None] | None = None
    ) -> Tensor | None:
        """Return what `route` would decide, and leave things as they are."""
        if isinstance(self.router, TaskRouter):
            return self.router.weights(tasks or [None] * len(prompts))
        if isinstance(self.router, RetrievalRouter):
            with self.without():
                return self.router.weights(embed_by(self.router.encoder, self.loaded, prompts))
        return None

    @contextmanager
    def without(self) -> Iterator[None]:
        """Have the plain base for the length of a `with` block."""
        before, self.routes.silent = self.routes.silent, True
        try:
            yield
        finally:
            self.routes.silent = before

    def generate(
        self, ids: Tensor, *, tasks: Sequence[str | None] | None = None, **options: Any
    ) -> Tensor:
        """Route the prompts and continue them with the model's own `generate`.

        Args:
            ids: Prompts, [batch, tokens], padded on the left where a mask is given.
            tasks: As in `route`.
            options: For `generate`; `attention_mask` says what is padding.
        """
        mask = options.get("attention_mask")
        rows = [
            (row if mask is None else row[mask[i].bool()]).tolist() for i, row in enumerate(ids)
        ]
        self.route(rows, tasks)
        write: Any = self.loaded.model.generate
        written: Tensor = write(ids, **options)
        return written

    @contextmanager
    def watched(self, watch: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call `watch(module, weights)` for every decision in the `with` block."""
        self.routes.watch = watch
        try:
            yield
        finally:
            self.routes.watch = None


@contextmanager
def routed(loaded: LoadedBase, stacks: Mapping[str, Stack], router: Router) -> Iterator[Routing]:
    """Wrap the layers of a loaded base for the length of a `with` block.

    Args:
        loaded: The base; afterwards the same object with the same bits.
        stacks: The experts by module path.
        router: What decides how much each says.

    Raises:
        Incompatible: A path that the model does not have, a router for other modules, or a model
            that reads prompts with an encoder.
    """
    model = loaded.model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Incompatible(
            f"{loaded.base.ref} reads prompts with an encoder; routers take causal language models",
            code="encoder",
            hint="compose a static one: --method ties, lorahub, atlas …",
        )
    modules = dict(model.named_modules())
    missing = [path for path in stacks if path not in modules]
    if missing:
        raise Incompatible(
            f"the model has no module {some_of(missing)}", code="modules", found=missing[:5]
        )
    _check_width(router, model)
    routes = Routes()
    layers = _layers(modules, stacks, router, routes)
    with ExitStack() as undo:
        if isinstance(router, TokenRouter) and router.scope != "module":
            for place, rule in router.rules.items():
                undo.callback(_decide_at(modules, place, rule, routes).remove)
        for path, layer in layers.items():
            parent, _, leaf = path.rpartition(".")
            undo.callback(setattr, modules[parent], leaf, modules[path])
            setattr(modules[parent], leaf, layer)
        yield Routing(loaded, router, routes)


def _check_width(router: Router, model: Any) -> None:
    """Refuse a router whose layers read inputs of another width; modules were compared before."""
    if not isinstance(router, TokenRouter) or router.scope == "module":
        return
    rows = [rule.scorer.rows for rule in router.rules.values()]
    check_hidden({x.shape[-1] for x in rows if x is not None},
                 int(model.config.get_text_config().hidden_size))  # fmt: skip


def _layers(
    modules: Mapping[str, nn.Module], stacks: Mapping[str, Stack], router: Router, routes: Routes
) -> dict[str, RoutedLinear]:
    layers: dict[str, RoutedLinear] = {}
    rules: dict[str, TokenRule] = {}
    for path, stack in stacks.items():
        module = modules[path]
        weight = next(module.parameters())
        # 4-bit weights are bytes; their layers take and give the type that they compute in.
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        placed = stack.to(weight.device, dtype)
        if not isinstance(router, TokenRouter):
            place = _known_place(router, path)
            layers[path] = SequenceLinear(module, path, placed, routes, place)
        elif router.scope == "module":
            rules[path] = _rule(router, path).to(weight.device)
            if not rules[path].scorer.of_rows:
                placed = stack.orthonormal().to(weight.device, dtype)
            layers[path] = TokenLinear(module, path, placed, routes)
        else:
            place = _place(router, path)
            layers[path] = SharedLinear(module, path, placed, routes, place)
    _decide_together(layers, rules, routes)
    return layers


def _rule(router: TokenRouter, path: str) -> TokenRule:
    rule = router.rules.get(path)
    if rule is None:
        raise Incompatible(
            f"the router knows nothing about module {path}, which the experts change",
            code="router",
            hint="it was made for other experts; compose again",
            found=path,
        )
    return rule


def _place(router: TokenRouter, path: str) -> str:
    """Return where the decision for a module is made."""
    if router.scope == "model":
        return next(iter(router.rules))
    place = layer_of(path)
    if place not in router.rules:
        raise Incompatible(
            f"the router knows nothing about the layer of module {path}", code="router", found=path
        )
    return place


def _known_place(router: Router, path: str) -> str:
    place = place_of(path)
    if isinstance(router, TaskRouter) and router.layers and place not in router.layers:
        raise Incompatible(
            f"the table knows nothing about {place}, which the experts change",
            code="router",
            hint="it was made for other experts",
            found=place,
        )
    return place


def place_of(path: str) -> str:
    """Return what a table by layer calls the layer of a module; a module in none is its own."""
    return layer_name(path) or path


def layer_of(path: str) -> str:
    """Return the decoder layer that a module is in: `model.layers.3` of `model.layers.3.mlp.up`.

    Raises:
        Incompatible: The module is in no numbered layer.
    """
    found = layer_name(path)
    if found is None:
        raise Incompatible(
            f"module {path} belongs to no layer, so that no layer can decide for it",
            code="scope",
            hint="use --set scope=module",
            found=path,
        )
    return found


def layer_name(path: str) -> str | None:
    """Return the decoder layer that a module is in, or None where it is in none."""
    found = _LAYER.match(path)
    return found.group() if found else None


def _decide_at(
    modules: Mapping[str, nn.Module], place: str, rule: TokenRule, routes: Routes
) -> Any:
    module = modules.get(place)
    if module is None:
        raise Incompatible(f"the model has no layer {place}", code="modules", found=place)
    placed = rule.to(next(module.parameters()).device)

    def decide(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if routes.silent:
            return
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        rows = placed.scorer.rows
        assert rows is not None  # without a module there are no norms to read
        scores = placed.scorer.scores(x, x.to(rows.dtype) @ rows.T)
        weights = placed.choice.weights(scores)
        routes.shared[place] = weights if placed.after is None else weights + placed.after

    return module.register_forward_pre_hook(decide, with_kwargs=True)


def _decide_together(
    layers: Mapping[str, RoutedLinear], rules: Mapping[str, TokenRule], routes: Routes
) -> None:
    """Let modules that read the same input decide together; every other one is alone."""
    families: dict[tuple[str, int | str], list[list[TokenLinear]]] = {}
    for path, layer in layers.items():
        if not isinstance(layer, TokenLinear):
            continue
        parent, _, leaf = path.rpartition(".")
        kin = next((i for i, names in enumerate(_SIBLINGS) if leaf in names), leaf)
        known = families.setdefault((parent, kin), [])
        own = layer.stack, rules[path]
        for members in known:
            if together((members[0].stack, rules[members[0].path]), own):
                members.append(layer)
                break
        else:
            known.append([layer])
    for members in (group for known in families.values() for group in known):
        paths = [member.path for member in members]

        def tell(number: int, weights: Tensor, paths: list[str] = paths) -> None:
            if routes.watch is not None:
                routes.watch(paths[number], weights)

        family = Family(
            [(m.stack, rules[m.path]) for m in members], tell, lambda: routes.watch is not None
        )
        for number, member in enumerate(members):
            member.family, member.member = family, number
