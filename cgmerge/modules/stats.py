"""What an expert's data does to its modules: input Grams and diagonal Fisher information.

RegMean and MaTS weigh experts by the Gram matrices of their inputs, Fisher merging by how much
each entry of ΔW matters for the expert's own answers. Both are computed once, with the expert
attached to its base, and kept beside the expert in `cgmerge-stats.safetensors`, which names the
expert, the base and the data it belongs to; `compose` picks it up from there.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cgmerge import fs
from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.attach import attached
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.expert import Expert
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.statsfile import SCHEMA, Kind
from cgmerge.shown import some_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 8


@dataclass(frozen=True)
class Statistics:
    """Statistics of one expert.

    Attributes:
        grams: Module to XᵀX / tokens, float32 [in, in], X the inputs of its tokens.
        fishers: Module to the mean over examples of (∂ log p / ∂ΔW)², float32 [out, in].
        rows: Examples that were used.
        tokens: Their tokens, padding not counted.
    """

    grams: dict[str, Tensor] = field(default_factory=dict)
    fishers: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0


def collect(
    loaded: LoadedBase,
    expert: Expert,
    rows: Sequence[Encoded],
    kinds: Sequence[Kind],
    *,
    force_base: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Statistics:
    """Run an expert over its data and collect statistics of every module it adapts.

    Grams: float32 products of at most a few hundred tokens, added up in float64; padding is left
    out. Fisher: the empirical one (true answers, completion only), one example at a time, because
    the square of a sum over a batch is something else.

    Args:
        loaded: The base in memory; unchanged afterwards.
        expert: What is attached.
        rows: From `encode_all`.
        kinds: Which statistics.
        force_base: Accept an expert of another base fingerprint.
        progress: Called with the number of examples just finished.

    Raises:
        Incompatible: A module of the expert that gets no input.
        Damaged: Values that are not finite.
    """
    deltas = expert.deltas(loaded.base, force_base=force_base)
    result = Statistics(rows=len(rows), tokens=sum(map(len, rows)))
    with frozen(loaded.model), attached(loaded.model, deltas):
        if "gram" in kinds:
            result.grams.update(input_grams(loaded.model, list(deltas), rows, progress))
        if "fisher" in kinds:
            result.fishers.update(_fishers(loaded.model, list(deltas), rows, progress))
    check_finite(result.grams)
    check_finite(result.fishers)
    return result


def check_finite(found: Mapping[str, Tensor]) -> None:
    """Refuse statistics that are not finite.

    Raises:
        Damaged: NaN or infinity.
    """
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise Damaged(
                f"the statistics of {name} are not finite",
                code="not_finite",
                hint="the base or the expert gives NaN or infinity on this data",
                tensor=name,
            )


def write_stats(
    path: Path,
    found: Statistics,
    expert: Expert,
    loaded: LoadedBase,
    data: Sequence[str],
    *,
    along: Mapping[str, Any] | None = None,
) -> None:
    """Write statistics with the digests of everything they depend on.

    Args:
        path: Usually the expert's `stats_path`; replaced atomically.
        found: From `collect`.
        expert: What was attached.
        loaded: The base.
        data: sha256 of every data file.
        along: Of layerwise statistics: the merge they belong to.
    """
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for module, gram in sorted(found.grams.items()):
        # Modules that read the same input (q, k, v; gate, up) share one matrix.
        owner = first.setdefault(id(gram), module)
        if owner == module:
            tensors[f"gram.{module}"] = gram
        else:
            shared[module] = owner
    tensors |= {f"fisher.{module}": value for module, value in sorted(found.fishers.items())}
    content = {
        "schema": SCHEMA,
        "expert": expert.digest,
        "base": loaded.base.fingerprint,
        "data": list(data),
        "rows": found.rows,
        "tokens": found.tokens,
        "shared": shared,
    }
    if along is not None:
        content["along"] = dict(along)
    text = json.dumps(content, sort_keys=True)
    fs.replace_tensors(path, tensors, {"cgmerge": text})


class _Enough(Exception):
    """What is wanted of a forward pass has been seen."""


def _stop(*_args: object) -> None:
    raise _Enough


def input_grams(
    model: "PreTrainedModel",
    names: Sequence[str],
    rows: Sequence[Encoded],
    progress: Callable[[int], None] | None,
    *,
    last: str | None = None,
) -> dict[str, Tensor]:
    """Run rows through a model and return XᵀX / tokens of the inputs of modules, float32.

    Args:
        model: As it is, with whatever is attached.
        names: Its modules; those that read the same input share one tensor.
        rows: From `encode_all`; padding is left out.
        progress: Called with the number of examples just finished.
        last: A module after which a pass may end.

    Raises:
        Incompatible: A module that gets no input.
    """
    sums: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    seen: dict[int, str] = {}
    valid = torch.empty(0)

    def watch(name: str) -> Callable[..., None]:
        def look(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Equal inputs are found once and for all in the first batch.
            owner = owners.setdefault(name, seen.setdefault(id(x), name))
            if owner != name:
                return
            kept = x.reshape(-1, x.shape[-1])[valid].float()
            product = (kept.T @ kept).double().cpu()
            sums[name] = sums[name] + product if name in sums else product
            alive.append(x)  # an id is only unique while its object lives

        return look

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_pre_hook(watch(name)) for name in names]
    if last is not None:
        handles.append(modules[last].register_forward_hook(_stop))
    try:
        with torch.no_grad():
            for start in range(0, len(rows), BATCH):
                alive: list[Tensor] = []
                seen.clear()
                part = rows[start : start + BATCH]
                ids, mask = _padded(part, model.device)
                valid = mask.reshape(-1).bool()
                with suppress(_Enough):
                    model(input_ids=ids, attention_mask=mask, use_cache=False)
                if progress:
                    progress(len(part))
    finally:
        for handle in handles:
            handle.remove()
    _check_reached(names, owners)
    tokens = sum(map(len, rows))
    done = {name: (total / tokens).float() for name, total in sums.items()}
    return {name: done[owner] for name, owner in owners.items()}


def _fishers(
    model: "PreTrainedModel",
    names: Sequence[str],
    rows: Sequence[Encoded],
    progress: Callable[[int], None] | None,
) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2)

            def take(gradient: Tensor) -> None:
                # The gradient of ΔW: every token's output gradient times its input.
                product = gradient.flatten(0, -2).T.float() @ x.float()
                gradients[name] = gradients[name] + product if name in gradients else product

            if output.requires_grad:
                output.register_hook(take)

        return look

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(watch(name)) for name in names]
    embedding = model.get_input_embeddings()
    handles.append(embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_()))
    sums: dict[str, Tensor] = {}
    try:
        for row in rows:
            gradients.clear()
            with torch.enable_grad():
                _log_likelihood(model, row).backward()
            for name, gradient in gradients.items():
                square = gradient.double().square().cpu()
                sums[name] = sums[name] + square if name in sums else square
            if progress:
                progress(1)
    finally:
        for handle in handles:
            handle.remove()
    _check_reached(names, sums)
    return {name: (total / len(rows)).float() for name, total in sums.items()}


def _log_likelihood(model: "PreTrainedModel", row: Encoded) -> Tensor:
    """Return log p(target | prompt), summed over the target's tokens."""
    ids = torch.tensor([[*row.prompt_ids, *row.target_ids]], device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
    first = max(len(row.prompt_ids) - 1, 0)
    targets = ids[0, first + 1 :]
    total: Tensor = logits[first:].log_softmax(-1).gather(1, targets[:, None]).sum()
    return total


def _padded(rows: Sequence[Encoded], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    full = [[*row.prompt_ids, *row.target_ids] for row in rows]
    ids = torch.tensor([one + [0] * (width - len(one)) for one in full], device=device)
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in full], device=device)
    return ids, mask


def _check_reached(names: Sequence[str], reached: Mapping[str, object]) -> None:
    idle = [name for name in names if name not in reached]
    if idle:
        raise Incompatible(
            f"{len(idle)} modules of the expert were never used: {some_of(idle)}",
            code="modules",
            found=idle[:5],
        )


@contextmanager
def frozen(model: "PreTrainedModel") -> Iterator[None]:
    """No gradients for a model, no dropout; both as before afterwards."""
    training = model.training
    before = [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    try:
        for parameter, _ in before:
            parameter.requires_grad = False
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad = flag
        model.train(training)
