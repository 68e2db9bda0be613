"""What servers take: one adapter per request, by name, and a table that says which.

- `peft`: one ordinary adapter, for what is static; `rank` cuts it.
- `vllm`: a folder of adapters, the flags that name them, and the routing table.
- `ollama`: a Modelfile beside one adapter.

Compositions in which every token decides cannot be served that way, and are refused by name.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cgmerge import fs
from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules import builtin
from cgmerge.modules.adapter_config import MAX_RANK
from cgmerge.modules.adapter_out import AdapterForm, missing_siblings, write_adapter
from cgmerge.modules.card import ExpertCard, package_versions, write_card
from cgmerge.modules.composition import Composition
from cgmerge.modules.routing.router import RetrievalRouter

if TYPE_CHECKING:
    from cgmerge.merge import LowRank

Server = Literal["peft", "vllm", "ollama"]
TABLE = "routing.json"
ADAPTERS = "adapters"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""

VLLM_DEFAULT_RANK = 16
"""The largest rank that vLLM takes where nobody says --max-lora-rank."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        adapters: Name to its path inside the folder (`.` for the folder itself).
        rank: The largest rank.
        error: Share of ‖ΔW‖ that cutting to a rank lost, of the worst adapter.
        command: How a server is started with it, or None.
    """

    adapters: Mapping[str, str]
    rank: int
    error: float
    command: str | None = None


def export(
    composition: Composition,
    out: Path,
    server: Server,
    *,
    task: str | None = None,
    rank: int | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a composition in the form that a server reads.

    Args:
        composition: From `open_composition`.
        out: The folder; appears complete or not at all.
        server: Which form.
        task: For a routed table as one adapter: whose row.
        rank: Cut adapters to it; None keeps them exact.
        overwrite: Replace an existing folder.

    Raises:
        Incompatible: Tokens decide, so that no adapter per request does the same.
        UsageError: `out` exists, or a rank that no server takes.
    """
    out = fs.absolute(out)
    fs.check_target(out, overwrite=overwrite)
    adapters, planned = _planned(composition, server, task, rank)
    with fs.new_folder(out, overwrite=overwrite) as stage:
        if server == "vllm":
            fs.make_folder(stage / ADAPTERS)
        errors = []
        for name, path in planned.adapters.items():
            if server == "vllm":
                fs.make_folder(stage / path)
            errors.append(_write(stage / path, adapters[name], name, composition, rank))
        exported = replace(planned, error=max(errors))
        if server == "vllm":
            _vllm(stage, composition, exported)
        if server == "ollama":
            _ollama(stage, composition)
    return exported


def plan_export(
    composition: Composition, server: Server, *, task: str | None = None, rank: int | None = None
) -> Exported:
    """Say what `export` would write, and refuse what it would refuse; nothing is written.

    Args:
        composition: From `open_composition`.
        server: Which form.
        task: For a routed table as one adapter: whose row.
        rank: Cut adapters to it; None keeps them exact.

    Returns:
        Names, the rank, and the command; `error` is 0, as it is measured while cutting.

    Raises:
        Incompatible: Tokens decide, so that no adapter per request does the same.
        UsageError: A rank that no server takes.
    """
    return _planned(composition, server, task, rank)[1]


def _planned(
    composition: Composition, server: Server, task: str | None, rank: int | None
) -> "tuple[Mapping[str, Mapping[str, LowRank]], Exported]":
    """Return the deltas by name, and what is known of the result before it is written."""
    if rank is not None and not 1 <= rank <= MAX_RANK:
        raise UsageError(f"the rank must be from 1 to {MAX_RANK:,}, found {rank}", code="rank")
    adapters = _adapters(composition, server, task)
    empty = next((name for name, deltas in adapters.items() if not deltas), None)
    if empty is not None:
        raise Incompatible(
            f"task {empty!r} uses no expert at all: there is no adapter to write",
            code="no_effect",
            hint="serve the base for it",
        )
    kept = max(_exact(deltas) for deltas in adapters.values()) if rank is None else rank
    places = {name: f"{ADAPTERS}/{name}" if server == "vllm" else "." for name in adapters}
    command = _command(composition, places, kept) if server == "vllm" else None
    return adapters, Exported(places, kept, 0.0, command)


def _exact(deltas: "Mapping[str, LowRank]") -> int:
    return max(delta.rank for delta in deltas.values())


def _adapters(
    composition: Composition, server: Server, task: str | None
) -> "Mapping[str, Mapping[str, LowRank]]":
    """Return the deltas that are written, by name."""
    if composition.granularity == "token":
        raise Incompatible(
            f"every token decides in a composition by `{composition.method}`; servers take one"
            " adapter per request",
            code="not_servable",
            hint="compose a static one (--method lorahub, atlas, ties), one by retrieval or task,"
            " or use cgmerge generate and chat",
        )
    if isinstance(composition.router, RetrievalRouter) and not composition.router.single:
        raise Incompatible(
            "this composition mixes several experts for a prompt; servers take one adapter per"
            " request",
            code="not_servable",
            hint="compose it with --top-k 1",
        )
    if composition.router is None or task is not None or server != "vllm":
        name = task or (composition.names[0] if composition.router is None else "composed")
        single = _task_names(composition).get(name) or _plain_name(name)
        return {single: composition.materialise(task)}
    if composition.tasks:
        names = _task_names(composition)
        return {names[name]: composition.materialise(name) for name in composition.tasks}
    return {
        name: dict(expert.deltas())
        for name, expert in zip(composition.names, composition.experts, strict=True)
    }


def _plain_name(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "._+-" else "-" for char in name)
    return kept.strip("-._") or "composed"


def _task_names(composition: Composition) -> dict[str, str]:
    """Name the adapter of each task, as a folder and each once: `a-b`, `a-b-2`."""
    found: dict[str, str] = {}
    for task in composition.tasks:
        plain = name = _plain_name(task)
        number = 2
        while name in found.values():
            name, number = f"{plain}-{number}", number + 1
        found[task] = name
    return found


def _write(
    folder: Path,
    deltas: "Mapping[str, LowRank]",
    name: str,
    composition: Composition,
    rank: int | None,
) -> float:
    """Write one adapter with one rank for all modules; return the share that was lost."""
    from cgmerge.merge import LowRank, pad_rank, truncate

    kept = _exact(deltas) if rank is None else rank
    lost = total = 0.0
    padded: dict[str, LowRank] = {}
    for path, delta in deltas.items():
        if delta.rank > kept:
            cut = truncate(delta, kept)
            lost, total = lost + cut.error_sq, total + cut.norm_sq
            padded[path] = pad_rank(cut.delta, kept)
        else:
            total += delta.norm() ** 2
            padded[path] = pad_rank(delta, kept)
    for path, (outs, into) in missing_siblings({p: d.shape for p, d in padded.items()}).items():
        like = next(iter(padded.values()))
        padded[path] = LowRank(like.a.new_zeros(kept, into), like.b.new_zeros(outs, kept))
    config = composition.experts[0].config
    form = AdapterForm(kept, kept, config.base_name, config.fan_in_fan_out, config.task_type)
    write_adapter(folder, {path: (delta.a, delta.b) for path, delta in padded.items()}, form)
    training = {"exported": composition.method}
    card = ExpertCard(
        skill=name, base=composition.base, training=training, versions=package_versions()
    )
    write_card(folder, card)
    return math.sqrt(lost / total) if total else 0.0


def _command(composition: Composition, places: Mapping[str, str], rank: int) -> str:
    """Return how vLLM is started with adapters of a rank."""
    fits = next((size for size in VLLM_RANKS if size >= rank), None)
    if fits is None:
        raise UsageError(
            f"vLLM takes ranks up to {VLLM_RANKS[-1]}; these adapters have {rank}",
            code="rank",
            hint="cut them with --rank N",
            expected=VLLM_RANKS[-1],
            found=rank,
        )
    names = " ".join(f"{name}={path}" for name, path in places.items())
    return (
        f"vllm serve {shlex.quote(_served_base(composition))} --enable-lora"
        f" --max-lora-rank {fits} --max-loras {min(len(places), 8)}"
        f" --lora-modules {names}"
    )


def _vllm(stage: Path, composition: Composition, exported: Exported) -> None:
    fs.write_json(stage / TABLE, _table(composition, exported))
    fs.write_bytes(
        stage / "serve.sh",
        f"#!/bin/sh\n# From this folder.{_note(composition)}\n{exported.command}\n".encode(),
    )


def _table(composition: Composition, exported: Exported) -> dict[str, Any]:
    """Return what tells a client which adapter name to put into a request."""
    table: dict[str, Any] = {
        "schema": "cgmerge.routing-table/1",
        "base": composition.base.model_dump(),
        "kind": composition.kind,
        "adapters": [
            {"name": name, "path": path, "rank": exported.rank}
            for name, path in exported.adapters.items()
        ],
    }
    router = composition.router
    if router is None:
        return table
    if composition.tasks:
        return table | {
            "tasks": {t: n for t, n in _task_names(composition).items() if n in exported.adapters}
        }
    embedded = "mean of the base's last hidden states over its tokens, begin token left out"
    if isinstance(router, RetrievalRouter) and router.encoder is not None:
        embedded = "encode(), not normalised, of the sentence-transformers model in `encoder`"
    vectors = {name: tensor.tolist() for name, tensor in router.tensors().items()}
    rule = (
        f"embed the prompt: {embedded}; x minus `centre`, minus noiseᵀ·(noise·x) where there is"
        " `noise`, scaled to length 1; the adapter whose row of `centroids` has the largest product"
        " with it"
    )
    return table | {"rule": rule, **router.settings(), **vectors}


def _ollama(stage: Path, composition: Composition) -> None:
    lines = [
        "# ollama create NAME -f Modelfile   (FROM must be the base that the adapter is for)"
        + _note(composition),
        f"FROM {_served_base(composition)}",
        "ADAPTER .",
    ]
    fs.write_bytes(stage / "Modelfile", ("\n".join(lines) + "\n").encode())


def _served_base(composition: Composition) -> str:
    """Return the base's name for a server, to which the built-in bases' names mean nothing."""
    name = composition.base.name
    return "BASE" if not name or name in builtin.NAMES else name


def _note(composition: Composition) -> str:
    if composition.base.name not in builtin.NAMES:
        return ""
    return (
        f"\n# BASE: a folder or repository of the model that cgmerge calls {composition.base.name}."
    )


def servers() -> Sequence[str]:
    """Return the forms that can be exported to."""
    return ("peft", "vllm", "ollama")
