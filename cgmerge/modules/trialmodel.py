"""A full model that a merge would give, tried out in the loaded base without writing it.

The weights of the model in memory are overwritten in rows with what `compose --as model` would
write, scored, and read back from the base's files: nothing but the model itself is held.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cgmerge.errors import Incompatible
from cgmerge.modules.base import stem_of
from cgmerge.modules.fullmodel import HEAD
from cgmerge.modules.model_out import (
    FileWeight,
    delta_keys,
    kept_dtype,
    layout,
    pieces_of,
    refuse_quantized,
)
from cgmerge.modules.weights import CHUNK_ENTRIES, WeightReader
from cgmerge.shown import some_of
from cgmerge.tensorfile import torch_dtype

if TYPE_CHECKING:
    import torch

    from cgmerge.merge import AnyMerger
    from cgmerge.modules.compose import Plan
    from cgmerge.modules.loading import LoadedBase


class TrialModel:
    """The loaded base as a place for merged weights.

    Args:
        plan: With a base and `form == "model"`.
        loaded: That base in memory.

    Raises:
        Incompatible: A weight that the loaded model does not have, or a quantized base.
    """

    def __init__(self, plan: "Plan", loaded: "LoadedBase") -> None:
        assert plan.base is not None
        refuse_quantized(plan.base)
        self.plan = plan
        self.loaded = loaded
        self.reader = WeightReader(plan.base)
        keys = delta_keys(plan)
        self.splits_head = HEAD in keys
        files = layout(plan, keys, self.reader)
        self.weights = {
            name: weight
            for part in files.values()
            for name, weight in part.items()
            if weight.key or self._kept(weight) != self._stored(weight)
        }

    @contextmanager
    def merged(self, merger: "AnyMerger", scale: float) -> Iterator[None]:
        """Have base + scale·ΔW in the model for the length of a `with` block.

        Args:
            merger: Gives ΔW.
            scale: Factor on it.
        """
        with self._own_head():
            places = self._places()
            try:
                for name, place in places.items():
                    self._write(place, self.weights[name], merger, scale)
                yield
            finally:
                for name, place in places.items():
                    self._restore(place, self.weights[name])

    def _stored(self, weight: FileWeight) -> "torch.dtype":
        return torch_dtype(self.reader.model.infos[weight.source].dtype)

    def _kept(self, weight: FileWeight) -> "torch.dtype":
        return kept_dtype(self.plan, self.reader.model, weight)

    def _write(
        self, place: "torch.Tensor", weight: FileWeight, merger: "AnyMerger", scale: float
    ) -> None:
        """Add in float32 and round as the written model would be."""
        import torch

        kept = self._kept(weight)
        if not weight.key:
            self._restore(place, weight)
            place.copy_(place.to(kept))
            return
        flat, first = place.view(-1), 0
        for delta in pieces_of(merger, weight):
            last = first + delta.numel()
            before = self.reader.floats(weight.source, first, last)
            flat[first:last] = torch.add(before, delta, alpha=scale).to(kept).to(flat)
            first = last

    def _restore(self, place: "torch.Tensor", weight: FileWeight) -> None:
        flat, total = place.view(-1), self.reader.count(weight.source)
        for first in range(0, total, CHUNK_ENTRIES):
            last = min(first + CHUNK_ENTRIES, total)
            flat[first:last] = self.reader.entries(weight.source, first, last).to(flat)

    def _places(self) -> "dict[str, torch.Tensor]":
        """Return the model's own tensor of every weight that changes.

        A weight that is only rounded may be one that the model does without.
        """
        found = {
            stem_of(name): parameter.detach()
            for name, parameter in self.loaded.model.named_parameters(remove_duplicate=False)
        }
        missing = [n for n, one in self.weights.items() if one.key and stem_of(n) not in found]
        if missing:
            raise Incompatible(
                f"the loaded base has no weight {some_of(missing)}",
                code="modules",
                hint="give --scale instead of --tune",
                found=missing[:5],
            )
        return {name: found[stem_of(name)] for name in self.weights if stem_of(name) in found}

    @contextmanager
    def _own_head(self) -> Iterator[None]:
        """Give a tied head a weight of its own where the merge moves it from the embedding."""
        import torch

        model = self.loaded.model
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = head is not None and embedding is not None and head.weight is embedding.weight
        if not (self.splits_head and tied):
            yield
            return
        shared = head.weight
        head.weight = torch.nn.Parameter(shared.detach().clone(), requires_grad=False)
        try:
            yield
        finally:
            head.weight = shared
