"""Adapters as they are in one verified file: for those that must keep every bit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs, strictjson
from cgmerge._version import __version__
from cgmerge.errors import UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.dense import Dense
from cgmerge.modules.compress.manifest import LOSSLESS
from cgmerge.modules.expert import WEIGHTS, Expert
from cgmerge.modules.pairs import CONFIG

if TYPE_CHECKING:
    import torch


def write_lossless(
    expert: Expert, base: Base | None, out: Path, *, overwrite: bool = False
) -> tuple[int, dict[str, Any]]:
    """Write an adapter's tensors and config as they are.

    Args:
        expert: A folder.
        base: Where known; its fingerprint is written where the expert has none.
        out: The `.cge` file.
        overwrite: Replace a file that exists.

    Returns:
        The bytes of the file, and its manifest's fields.

    Raises:
        UsageError: The expert is a `.cge` file already.
        Damaged: Values that are not finite.
        StorageError: Disk full and the like; nothing is left behind.
    """
    if expert.compressed:
        raise UsageError(
            f"{expert.folder} is compressed already; nothing brings back what it lost",
            code="lossless",
            hint="compress the folder that it was made from",
        )
    dense = {name: Dense.of(expert.file.read(name)) for name in expert.file.infos}
    pairs = expert.pairs.values()
    entries = sum(pair.rank * (pair.out_features + pair.in_features) for pair in pairs)
    fingerprint = expert.base_fingerprint or (base.fingerprint if base else None)
    name = expert.card.base.name if expert.card else expert.config.base_name
    method = {"mode": LOSSLESS, "gauge": "raw", "density": 1.0, "asked": {"mode": LOSSLESS}}
    if base is not None and fingerprint != base.fingerprint:
        method["forced_base"] = base.fingerprint
    fields: dict[str, Any] = {
        "base": {"id": name or "unknown"} | ({"fingerprint": fingerprint} if fingerprint else {}),
        "peft": strictjson.loads_object(expert.config_text, source=str(expert.folder / CONFIG)),
        "method": method,
        "producer": f"cgmerge {__version__}",
        "sizes": {"bytes": expert.file.size, "parameters": entries},
        "fidelity": {
            "error": 0.0, "cosine": 1.0, "cosine_min": 1.0, "cosine_mean": 1.0, "emptied": 0,
        },
        "parents": [{"name": expert.name, "sha256": expert.digest}],
    }  # fmt: skip
    return write_cge(out, [], dense, fields, overwrite=overwrite).size, fields


def restore(file: CgeFile, stage: Path) -> None:
    """Write weights and config of a lossless file into a staged folder, every bit as it was."""
    tensors: dict[str, torch.Tensor] = {
        name: file.read_dense(name).tensor() for name in sorted(file.dense)
    }
    fs.write_tensors(stage / WEIGHTS, tensors)
    fs.write_json(stage / CONFIG, file.manifest["peft"])
