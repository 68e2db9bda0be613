"""Routers: what decides how much each expert says, and on what the decision rests.

- `TokenRouter` (Arrow, spectral, gates): every token, from the input of a module, layer or model.
- `RetrievalRouter`: every sequence, from an embedding of the prompt, by default the base's own.
- `TaskRouter`: every sequence, from the name of its task.

A router is plain tensors and settings; saving one is writing them, without any code.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.modules.routing.choice import LEAST, MOST, Choice
from cgmerge.modules.routing.encoder import Encoder
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import SCORERS
from cgmerge.plain import exact
from cgmerge.shown import some_of

Granularity = Literal["token", "sequence"]
Scope = Literal["module", "layer", "model"]
Row = tuple[float, ...]
"""Weights of all experts."""

_AFTER = "after"
_TABLE = "weights"


class Router(ABC):
    """What decides; see the module."""

    kind: ClassVar[str]
    granularity: ClassVar[Granularity]
    needs_text: ClassVar[bool] = False
    """Whether the base has to read the prompt before the experts speak."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return everything learned, by name, float32."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything else, as JSON values."""

    @classmethod
    @abstractmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Router":
        """Make a router of what `settings` and `tensors` gave.

        Raises:
            Damaged: They do not belong together.
        """


@dataclass(frozen=True)
class TokenRouter(Router):
    """Every token decides.

    Attributes:
        rules: By the place where the input is read: a module, or a decoder layer that decides for
            all its modules; the first layer decides for the whole model.
        scope: Which of these.
    """

    kind = "token"
    granularity = "token"

    rules: Mapping[str, TokenRule]
    scope: Scope = "module"

    @property
    def choice(self) -> Choice:
        """Return how scores become weights; the same everywhere."""
        return next(iter(self.rules.values())).choice

    def chosen(self, choice: Choice) -> "TokenRouter":
        """Return the router with another choice, e.g. pruned to the best k."""
        rules = {
            place: TokenRule(rule.scorer, choice, rule.after) for place, rule in self.rules.items()
        }
        return TokenRouter(rules, self.scope)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "TokenRouter":
        """Return the router with every tensor changed."""
        rules = {place: rule.changed(change) for place, rule in self.rules.items()}
        return TokenRouter(rules, self.scope)

    def tensors(self) -> dict[str, Tensor]:
        """Return the scorers' tensors, `PLACE.FIELD`."""
        found = {}
        for place, rule in self.rules.items():
            for name, tensor in rule.scorer.tensors().items():
                found[f"{place}.{name}"] = tensor
            if rule.after is not None:
                found[f"{place}.{_AFTER}"] = rule.after
        return found

    def settings(self) -> dict[str, Any]:
        """Return scope, form of the scorer and choice."""
        form = next(iter(self.rules.values())).scorer.form
        choice = self.choice
        return {
            "scope": self.scope,
            "form": form,
            "top_k": choice.top_k,
            "temperature": choice.temperature,
        }

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "TokenRouter":
        """See `Router.restore`."""
        form, scope = settings.get("form"), settings.get("scope")
        if not isinstance(form, str) or form not in SCORERS:
            raise Damaged(f"a token router of form {form!r}", code="router")
        if scope not in ("module", "layer", "model"):
            raise Damaged(f"a token router of scope {scope!r}", code="router")
        if scope != "module" and not SCORERS[form].of_rows:
            raise Damaged(f"a router of form {form!r} cannot decide for a {scope}", code="router")
        choice = Choice(
            _natural(settings.get("top_k"), "top_k"), _positive(settings, "temperature")
        )
        places: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            place, _, part = name.rpartition(".")
            places.setdefault(place, {})[part] = tensor
        if not places:
            raise Damaged("a token router without tensors", code="router")
        rules = {}
        for place, parts in places.items():
            after = parts.pop(_AFTER, None)
            try:
                scorer = SCORERS[form].of_tensors(parts)
            except (TypeError, KeyError) as error:
                raise Damaged(f"router of {place}: {error}", code="router") from error
            rules[place] = TokenRule(scorer, choice, after)
        return cls(rules, scope)


class SequenceRouter(Router):
    """Every sequence decides once, on its prompt."""

    granularity = "sequence"


@dataclass(frozen=True)
class RetrievalRouter(SequenceRouter):
    """The experts whose examples resemble the prompt, in an embedding, by default the base's own.

    Attributes:
        centroids: Mean embedding of each expert's examples, minus `centre`, without `noise`, of
            length 1, [E, d].
        centre: Mean of the experts' mean embeddings, [d].
        noise: U, [n, d]: an embedding x counts as x − UᵀU·x, because examples of one and the same
            expert differ along U; None leaves x as it is.
        choice: Of the cosines; a small temperature makes it sharp.
        width: β of kernel weights exp(−(1 − cos)/β²); None for the softmax of `choice`.
        threshold: Kernel weights below this share are dropped.
        encoder: What embeds the prompts; None for the base itself.
    """

    kind = "retrieval"
    needs_text = True

    centroids: Float[Tensor, "experts width"]
    centre: Float[Tensor, "width"]
    noise: Float[Tensor, "directions width"] | None = None
    choice: Choice = field(default_factory=lambda: Choice(top_k=1))
    width: float | None = None
    threshold: float = 0.01
    encoder: Encoder | None = None

    @property
    def single(self) -> bool:
        """Whether a prompt always gets exactly one expert."""
        return self.width is None and self.choice.top_k == 1

    def similarities(self, embedded: Float[Tensor, "batch width"]) -> Tensor:
        """Return the cosine of every prompt with every expert, [batch, experts]."""
        check_hidden({self.centre.shape[-1]}, embedded.shape[-1])
        moved = embedded.float() - self.centre.to(embedded.device)
        if self.noise is not None:
            noise = self.noise.to(moved.device)
            moved = moved - (moved @ noise.T) @ noise
        lengths = moved.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        cosines: Tensor = (moved / lengths) @ self.centroids.to(embedded.device).T
        return cosines

    def weights(self, embedded: Float[Tensor, "batch width"]) -> Float[Tensor, "batch experts"]:
        """Return the weights of every sequence; they sum to 1."""
        cosines = self.similarities(embedded)
        if self.width is None:
            return self.choice.weights(cosines)
        # The largest exponent is taken out, so that a prompt far from all experts has weights too.
        shares = ((cosines - 1.0) / self.width**2).softmax(dim=-1)
        best = shares.amax(dim=-1, keepdim=True)  # stays, also where all are below the threshold
        kept = shares.where((shares > self.threshold) | (shares == best), 0.0)
        return kept / kept.sum(dim=-1, keepdim=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return centroids, centre and noise."""
        noise = {} if self.noise is None or not len(self.noise) else {"noise": self.noise}
        return {"centroids": self.centroids, "centre": self.centre, **noise}

    def settings(self) -> dict[str, Any]:
        """Return choice and kernel, and the encoder where there is one."""
        own = {} if self.encoder is None else {"encoder": self.encoder.as_dict()}
        return own | {
            "top_k": self.choice.top_k,
            "temperature": self.choice.temperature,
            "width": self.width,
            "threshold": self.threshold,
        }

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> "RetrievalRouter":
        """See `Router.restore`."""
        if set(tensors) - {"noise"} != {"centroids", "centre"}:
            raise Damaged(f"a retrieval router with tensors {sorted(tensors)}", code="router")
        noise = tensors.get("noise")
        if noise is not None and noise.shape[1:] != tensors["centre"].shape:
            raise Damaged(
                f"a retrieval router with noise {list(noise.shape)} and centre"
                f" {list(tensors['centre'].shape)}",
                code="router",
            )
        width = None if settings.get("width") is None else _positive(settings, "width")
        choice = Choice(
            _natural(settings.get("top_k"), "top_k"), _positive(settings, "temperature")
        )
        threshold = settings.get("threshold")
        if not isinstance(threshold, float) or not 0 <= threshold < 1:
            raise Damaged(f"a retrieval router with threshold {threshold!r}", code="router")
        encoder = Encoder.of_record(settings.get("encoder"))
        return cls(
            tensors["centroids"], tensors["centre"], noise, choice, width, threshold, encoder
        )


@dataclass(frozen=True)
class TaskRouter(SequenceRouter):
    """A table: which experts a task uses, said by whoever asks.

    Attributes:
        table: By name of the task: weights of all experts, or such a row for each of `layers`.
        layers: Decoder layers, and modules that are in none, by path; empty where a task has one
            row for the whole model.
    """

    kind = "task"

    table: Mapping[str, Row | tuple[Row, ...]]
    layers: tuple[str, ...] = ()

    def weights(self, tasks: Sequence[str | None]) -> Float[Tensor, "batch *layers experts"]:
        """Return the weights of every sequence; by layer, where they differ between layers.

        Raises:
            UsageError: A task that is not in the table, or none named.
        """
        for task in tasks:
            if task not in self.table:
                said = "no task is named" if task is None else f"task {task!r} is not in its table"
                raise UsageError(
                    f"this composition routes by task, and {said}",
                    code="task",
                    hint=f"name one of {some_of(sorted(self.table), 10)}",
                    expected=sorted(self.table),
                    found=task,
                )
        return torch.tensor([self.table[task] for task in tasks if task is not None])

    def row(self, task: str | None, place: str) -> Float[Tensor, "experts"]:
        """Return the weights of a task in a layer.

        Raises:
            UsageError: As `weights`.
        """
        weights = self.weights([task])[0]
        return weights[self.layers.index(place)] if self.layers else weights

    def tensors(self) -> dict[str, Tensor]:
        """Return [tasks, layers, experts] where layers differ; else the table is a setting."""
        return {_TABLE: self.weights(list(self.table))} if self.layers else {}

    def settings(self) -> dict[str, Any]:
        """Return the table, or what its tensor's axes stand for."""
        if self.layers:
            return {"tasks": list(self.table), "layers": list(self.layers)}
        return {"table": {task: list(weights) for task, weights in self.table.items()}}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "TaskRouter":
        """See `Router.restore`."""
        if "layers" in settings:
            return cls._by_layer(settings, tensors)
        table = settings.get("table")
        good = isinstance(table, dict) and bool(table) and not tensors
        if not good or not all(_is_row(row) for row in table.values()):  # type: ignore[union-attr]
            raise Damaged("a task router needs a table of weights by task", code="router")
        assert isinstance(table, dict)
        return cls({str(task): tuple(map(float, row)) for task, row in table.items()})

    @classmethod
    def _by_layer(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "TaskRouter":
        tasks, layers = settings.get("tasks"), settings.get("layers")
        if set(settings) != {"tasks", "layers"} or set(tensors) != {_TABLE}:
            raise Damaged(
                f"a table by layer with settings {sorted(settings)} and tensors {sorted(tensors)}",
                code="router",
            )
        if not (_are_names(tasks) and _are_names(layers)):
            raise Damaged(
                "a table by layer must name its tasks and layers, each once", code="router"
            )
        assert isinstance(tasks, list)
        assert isinstance(layers, list)
        shape = tuple(tensors[_TABLE].shape)
        if len(shape) != 3 or shape[:2] != (len(tasks), len(layers)):
            raise Damaged(
                f"a table of shape {list(shape)} for {len(tasks)} tasks and {len(layers)} layers",
                code="router",
                expected=[len(tasks), len(layers)],
                found=list(shape),
            )
        rows = tensors[_TABLE].tolist()
        table = {task: tuple(map(tuple, own)) for task, own in zip(tasks, rows, strict=True)}
        return cls(table, tuple(layers))


ROUTERS: dict[str, type[Router]] = {
    kind.kind: kind for kind in (TokenRouter, RetrievalRouter, TaskRouter)
}
"""Every kind of router by the name in saved files."""


def check_hidden(found: set[int], expected: int) -> None:
    """Refuse a router that reads hidden states of another width than the model has.

    Raises:
        Incompatible: With both.
    """
    if found - {expected}:
        raise Incompatible(
            f"the router reads hidden states of width {max(found - {expected})}, the model's have"
            f" {expected}",
            code="router",
            hint="it was made for another base; compose again",
            expected=expected,
            found=max(found - {expected}),
        )


def is_weight(value: object) -> bool:
    """Whether a value from a file can be the weight of an expert: a number within ±1e6."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
    )  # also false for NaN


def _is_row(row: object) -> bool:
    return isinstance(row, list) and all(map(is_weight, row))


def _are_names(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(name, str) and name for name in value)
        and 0 < len(value) == len(set(value))
    )


def _natural(value: object, name: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise Damaged(f"router: {name} must be a whole number of at least 1 or null", code="router")


def _positive(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if isinstance(value, float) and LEAST <= value <= MOST:
        return value
    raise Damaged(
        f"router: {name} must be a number from {exact(LEAST)} to {exact(MOST)}, found {value!r}",
        code="router",
    )
