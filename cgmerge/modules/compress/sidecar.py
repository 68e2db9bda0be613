"""compressed.json: what makes a decompressed folder compress to the very same file again.

A decompressed expert is a plain adapter whose values lie on grids. The sidecar lists the grids and
the manifest; with it the whole numbers are found again exactly, and every value is checked, so
that an adapter that was edited or trained on is never taken for what it was. What was stored
without loss has no grids; the digest of its tensors tells whether they are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged
from cgmerge.modules.compress import digests
from cgmerge.modules.compress.dense import Dense
from cgmerge.modules.compress.manifest import LOSSLESS
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.expert import Expert, ExpertDeltas
from cgmerge.tensorfile import read_small

SIDECAR = "compressed.json"
_LIMIT = 32 << 20
_LARGEST = 1 << 22
_WIDEST = 1e38


class _Grid(BaseModel):
    """How one tensor's values are spaced."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)

    rows: int = Field(ge=0)
    scales: list[Annotated[float, Field(gt=-_WIDEST, lt=_WIDEST)]]


class _File(BaseModel):
    """The content of compressed.json."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True
    )

    schema_: Literal["cgmerge.compressed/1"] = Field(alias="schema")
    manifest: dict[str, Any]
    details: dict[str, Any]
    grids: dict[str, _Grid]
    content: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a decompressed folder was made from.

    Attributes:
        coded: The tensors, exactly.
        fields: The manifest but for what the writer fills in.
        details: The long part of it.
        dense: The tensors of an expert that was stored without loss.
    """

    coded: list[Coded]
    fields: dict[str, Any]
    details: dict[str, Any]
    dense: Mapping[str, Dense] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        """Whether every bit was kept."""
        return bool(self.fields["method"]["mode"] == LOSSLESS)


def write_sidecar(
    folder: Path,
    coded: Sequence[Coded],
    fields: Mapping[str, Any],
    details: Mapping[str, Any],
    content: str | None = None,
) -> None:
    """Write compressed.json into a staged folder.

    Args:
        folder: From `fs.new_folder`.
        coded: Tensors of the file; none where it was stored without loss.
        fields: Its manifest, but for what the writer fills in.
        details: The long part of it.
        content: Digest of the tensors, where it was stored without loss.
    """
    grids = {
        part.name: {"rows": part.levels.shape[0], "scales": [float(s) for s in part.scales]}
        for part in coded
    }
    whole = {
        "schema": "cgmerge.compressed/1",
        "manifest": dict(fields),
        "details": dict(details),
        "grids": grids,
    }
    fs.write_json(folder / SIDECAR, whole | ({"content": content} if content else {}))


def read_sidecar(expert: Expert) -> Restored | None:
    """Find the whole numbers of a decompressed expert again.

    Returns:
        None where there is no sidecar, or where some value is not the one it describes: the
        adapter was changed since, and is an expert like any other.

    Raises:
        Damaged: A sidecar that is not of the schema.
    """
    path = expert.folder / SIDECAR
    if not path.exists():
        return None
    raw = strictjson.loads_object(
        read_small(path, limit=_LIMIT), source=str(path), max_bytes=_LIMIT
    )
    try:
        file = _File.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(
            f"{path}: {where}: {first['msg']}",
            code="sidecar",
            hint=f"remove {path.name}: the adapter is then compressed like any other",
            path=path,
        ) from error
    if file.content is not None:
        return _untouched(expert, file)
    coded = _restore(expert, file.grids)
    return None if coded is None else Restored(coded, dict(file.manifest), dict(file.details))


def _untouched(expert: Expert, file: _File) -> Restored | None:
    """Return what was stored without loss, where weights and config are still the same."""
    config = strictjson.loads_object(expert.config_text, source=str(expert.folder))
    if file.manifest.get("peft") != config or "mode" not in file.manifest.get("method", {}):
        return None
    dense = {name: Dense.of(expert.file.read(name)) for name in expert.file.infos}
    sums = {
        name: digests.of_dense(name, part.dtype, part.shape, [part.data])
        for name, part in dense.items()
    }
    if digests.of_content(sums) != file.content:
        return None
    return Restored([], dict(file.manifest), dict(file.details), dense)


def _restore(expert: Expert, grids: Mapping[str, _Grid]) -> list[Coded] | None:
    names = {f"{module}.lora_{side}" for module in expert.pairs for side in "AB"}
    if names != set(grids) or any(pair.scaling != 1.0 for pair in expert.pairs.values()):
        return None
    deltas = ExpertDeltas(expert)
    coded = []
    for module in sorted(expert.pairs):
        factors = deltas.raw(module)
        for side, values in (("A", factors.a.numpy()), ("B", factors.b.numpy().T)):
            name = f"{module}.lora_{side}"
            levels = _levels(values, grids[name])
            if levels is None:
                return None
            scales = np.array(grids[name].scales, dtype=np.float32)
            coded.append(Coded(name, levels, scales, transposed=side == "B"))
    return coded


def _levels(values: np.ndarray[Any, Any], grid: _Grid) -> np.ndarray[Any, Any] | None:
    """Return the whole numbers whose products with the scales are exactly the values."""
    scales = np.array(grid.scales, dtype=np.float32)
    if scales.shape not in ((1,), (grid.rows,)) or not grid.rows <= values.shape[0]:
        return None
    if values[grid.rows :].any() or not (scales > 0).all() or not np.isfinite(scales).all():
        return None
    kept = values[: grid.rows]
    numbers = np.rint(kept.astype(np.float64) / scales.astype(np.float64)[:, None])
    if kept.size and np.abs(numbers).max() > _LARGEST:
        return None
    exact = np.array_equal(numbers.astype(np.float32) * scales[:, None], kept)
    return np.ascontiguousarray(numbers.astype(np.int32)) if exact else None
