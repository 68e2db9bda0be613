"""A `.cge` file back as an ordinary PEFT folder, the same bytes every time."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.adapter_config import AdapterConfig, parse_adapter_config
from cgmerge.modules.adapter_out import AdapterForm, write_adapter
from cgmerge.modules.base import Base
from cgmerge.modules.card import BaseId, ExpertCard, write_card
from cgmerge.modules.compose_adapter import verify_adapter
from cgmerge.modules.compose_out import check_out
from cgmerge.modules.compress.container import CgeFile
from cgmerge.modules.compress.lossless import restore
from cgmerge.modules.compress.manifest import LOSSLESS, WRITTEN_HERE
from cgmerge.modules.compress.modes import decode
from cgmerge.modules.compress.opened import open_compressed
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.sidecar import write_sidecar
from cgmerge.modules.compress.wholemodel import refused

if TYPE_CHECKING:
    from cgmerge.merge.deltas import LowRank


@dataclass(frozen=True, slots=True)
class Expanded:
    """What `decompress` wrote.

    Attributes:
        out: The folder.
        modules: How many modules it adapts.
        rank: Of all of them; smaller ones are padded with zeros.
        size: Bytes of the `.cge` file.
        manifest: What the file says of itself.
    """

    out: Path
    modules: int
    rank: int
    size: int
    manifest: dict[str, Any]


def decompress(
    path: Path,
    out: Path,
    *,
    overwrite: bool = False,
    base: Base | None = None,
    force_base: bool = False,
) -> Expanded:
    """Write the adapter that a compressed file stands for, float32, scaling folded into B.

    What was stored without loss comes back as it was, type and scaling included.

    Args:
        path: The `.cge` file; everything in it is verified first.
        out: Result folder; appears complete or not at all.
        overwrite: Replace an existing folder.
        base: Where given, the expert must fit it.
        force_base: Accept another fingerprint.

    Raises:
        UsageError: `out` exists, or holds something else.
        Damaged: A file that is not what was written, or that lacks half of a module.
        Incompatible: The delta of a full fine-tune, which is no adapter.
        StorageError: Disk full and the like; nothing is left behind.
    """
    out = fs.absolute(out)
    check_out(out, [path], base)
    fs.check_target(out, overwrite=overwrite)
    if base is not None:
        expert = open_compressed(path, str(path))
        with closing(expert.file):
            expert.deltas(base, force_base=force_base)
    with CgeFile.open(path) as file:
        file.verify()
        if file.manifest["method"]["mode"] == LOSSLESS:
            return _restore(file, out, overwrite=overwrite)
        config = _config(file)
        coded = [file.read(name) for name in file.coded]
        fields = {key: value for key, value in file.manifest.items() if key not in WRITTEN_HERE}
        details, size = dict(file.details), file.size
    _check_pairs(path, coded, config.rank)
    with fs.new_folder(out, overwrite=overwrite) as stage:
        _write(stage, coded, config, fields, details, path.stem)
    return Expanded(out, len(coded) // 2, config.rank, size, fields)


def _restore(file: CgeFile, out: Path, *, overwrite: bool) -> Expanded:
    expert = open_compressed(file.path, str(file.path))
    expert.file.close()
    fields = {key: value for key, value in file.manifest.items() if key not in WRITTEN_HERE}
    with fs.new_folder(out, overwrite=overwrite) as stage:
        restore(file, stage)
        write_sidecar(stage, [], fields, file.details, file.content)
        if expert.card is not None:
            write_card(stage, expert.card.model_copy(update={"training": {}}))
    return Expanded(out, len(expert.pairs), max(expert.ranks), file.size, fields)


def _write(
    stage: Path,
    coded: list[Coded],
    config: AdapterConfig,
    fields: dict[str, Any],
    details: dict[str, Any],
    name: str,
) -> None:
    from cgmerge.merge.deltas import pad_rank

    factors = {}
    for path, delta in decode(coded).items():
        padded: LowRank = pad_rank(delta, config.rank)
        factors[path] = padded.a, padded.b
    form = AdapterForm(
        rank=config.rank,
        alpha=config.rank,
        base_name=config.base_name,
        fan_in_fan_out=config.fan_in_fan_out,
        task_type=config.task_type,
    )
    write_adapter(stage, factors, form)
    verify_adapter(stage, factors)
    write_sidecar(stage, coded, fields, details)
    base, parents = fields["base"], fields.get("parents") or [{}]
    write_card(
        stage,
        ExpertCard(
            skill=str(parents[0].get("name", name)),
            base=BaseId(name=base["id"], fingerprint=base.get("fingerprint")),
            training={"compressed": fields["method"]},
        ),
    )


def _config(file: CgeFile) -> AdapterConfig:
    raw = file.manifest["peft"]
    if raw is None:
        raise refused(file.path, "not an adapter")
    if not file.coded or file.dense:
        raise Incompatible(
            f"{file.path} holds more than LoRA factors; a PEFT folder cannot",
            code="no_adapter",
            hint="only adapters can be decompressed",
            path=file.path,
        )
    return parse_adapter_config(raw, source=f"the adapter config in {file.path}")


def _check_pairs(path: Path, coded: list[Coded], rank: int) -> None:
    rows = {part.name: part.levels.shape[0] for part in coded}
    modules = {name.rsplit(".lora_", 1)[0] for name in rows}
    for part in coded:
        module, _, side = part.name.rpartition(".lora_")
        twin = f"{module}.lora_{'B' if side == 'A' else 'A'}"
        fits = part.transposed == (side == "B") and part.levels.shape[0] <= rank
        if side not in ("A", "B") or rows.get(twin) != part.levels.shape[0] or not fits:
            raise Damaged(
                f"{path}: tensor {part.name!r} is no factor of rank {rank} at most with a twin"
                f" {twin!r}",
                code="pair",
                path=path,
                tensor=part.name,
            )
    assert 2 * len(modules) == len(rows)
