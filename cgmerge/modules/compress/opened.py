"""Open a `.cge` file as an expert, so that every command takes one where it takes a folder."""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import strictjson
from cgmerge.errors import Damaged, readable
from cgmerge.modules.adapter_config import parse_adapter_config
from cgmerge.modules.card import BaseId, ExpertCard
from cgmerge.modules.compress.container import CgeFile
from cgmerge.modules.compress.manifest import LOSSLESS
from cgmerge.modules.compress.wholemodel import refused
from cgmerge.modules.expert import Expert
from cgmerge.modules.pairs import PREFIX, Pair, check_rank, pair_up
from cgmerge.refs import label
from cgmerge.tensorfile import TensorInfo

if TYPE_CHECKING:
    import torch

_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])")


class CgeTensors:
    """The tensors of a `.cge` file under the names that an adapter's weights file gives them.

    Args:
        file: An open compressed expert.

    Attributes:
        infos: Name to float type and shape; nothing is decoded for it.
    """

    def __init__(self, file: CgeFile) -> None:
        self.file = file
        self.path = file.path
        self._coded: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name, info in file.coded.items():
            own = f"{PREFIX}{name}.weight"
            shape = (info.rows, info.columns)
            self._coded[own] = name
            self.infos[own] = TensorInfo("F32", shape[::-1] if info.transposed else shape, 0, 0)
        self.infos |= file.dense

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return self.file.size

    def read(self, name: str) -> "torch.Tensor":
        """Decode one tensor: float32, or as it was where it is stored without loss.

        Raises:
            Damaged: Names the tensor.
        """
        if name in self._coded:
            return self.file.read(self._coded[name]).tensor()
        return self.file.read_dense(name).tensor()

    def sha256(self) -> str:
        """Return the digest of the file: equal experts have equal bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return self.file.sha256()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_compressed(path: Path, ref: str) -> Expert:
    """Open a `.cge` file: header, manifest and index; nothing is decoded.

    Args:
        path: The file.
        ref: What the user wrote.

    Raises:
        Damaged: Truncated or altered, or tensors that do not form pairs of factors.
        Incompatible: A newer format, the delta of a full model, other features than LoRA.
        Unsafe: Beyond a limit.
    """
    file = CgeFile.open(path)
    try:
        manifest = file.manifest
        if manifest["peft"] is None:
            raise refused(path, "not an adapter")
        config = parse_adapter_config(manifest["peft"], source=f"the manifest of {path}")
        tensors = CgeTensors(file)
        lossless = manifest["method"]["mode"] == LOSSLESS
        pairs = pair_up(tensors, config) if lossless else _pairs(file)
        card = _card(manifest, label(ref, path))
    except BaseException:
        file.close()
        raise
    name = readable(card.skill if card else label(ref, path), 200)
    text = strictjson.canonical(manifest["peft"])
    return Expert(
        ref, name.replace("\n", " "), path, config, card, pairs, tensors, config_text=text
    )


def _pairs(file: CgeFile) -> dict[str, Pair]:
    """Form the pairs of a coded expert; what its config scales B by is in the scales already."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, info in file.coded.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise Damaged(
                f"{file.path} holds {name!r}, which is no LoRA factor", code="names", tensor=name
            )
        shape = (info.columns, info.rows) if info.transposed else (info.rows, info.columns)
        found.setdefault(match["path"], {})[match["factor"]] = shape
    if file.dense or not found:
        what = f"{next(iter(file.dense))!r} beside its factors" if file.dense else "no tensors"
        raise Damaged(f"{file.path} holds {what}", code="names")
    pairs = {}
    for path, shapes in sorted(found.items()):
        if set(shapes) != {"A", "B"} or shapes["A"][0] != shapes["B"][1] or 0 in shapes["B"]:
            raise Damaged(
                f"{file.path}: module {path} has factors {dict(sorted(shapes.items()))}",
                code="pair",
                hint="the file is damaged; fetch or write it again",
                tensor=path,
            )
        check_rank(file.path, path, shapes["A"][0])
        a, b = (f"{PREFIX}{path}.lora_{factor}.weight" for factor in "AB")
        pairs[path] = Pair(a, b, shapes["A"][0], shapes["B"][0], shapes["A"][1], 1.0)
    return pairs


def _card(manifest: dict[str, Any], name: str) -> ExpertCard | None:
    """Return what the manifest says of skill and base; None where it names no fingerprint."""
    base, parents = manifest["base"], manifest.get("parents") or [{}]
    if base.get("fingerprint") is None:
        return None
    skill = str(parents[0].get("name", name))
    labels = readable(skill, 200), readable(base["id"], 200)
    return ExpertCard(
        skill=labels[0].replace("\n", " "),
        base=BaseId(name=labels[1], fingerprint=base["fingerprint"]),
        training={"compressed": manifest["method"]},
    )
