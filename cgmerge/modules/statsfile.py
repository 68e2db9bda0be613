"""A file of statistics: whom it belongs to, and whether it can be used at all.

Everything is checked before anything is computed from it: structure by the header, values in one
pass that also hashes the file, with one tensor in memory at a time.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch import Tensor

from cgmerge import strictjson
from cgmerge.errors import Damaged, Incompatible, NotFound
from cgmerge.merge.flaws import flaw_of
from cgmerge.modules.expert import STATS, Expert
from cgmerge.modules.usage import base_names, base_word, stats_command
from cgmerge.modules.weights import raw
from cgmerge.shown import counted, some_of
from cgmerge.tensorfile import TensorFile

Kind = Literal["gram", "fisher", "layerwise"]
KINDS: tuple[Kind, ...] = ("gram", "fisher")
"""What one expert alone has; `layerwise` belongs to several, see `layerstats`."""

SCHEMA = "cgmerge.stats/1"
_CONTENT = {"expert": str, "base": str, "shared": dict, "data": list, "rows": int, "tokens": int}
_FLOATS = ("F64", "F32", "F16", "BF16")


def path_of(expert: Expert, kind: str) -> Path:
    """Return where a kind of statistics of an expert is kept."""
    path = expert.stats_path
    return path.with_stem(f"{path.stem}-layerwise") if kind == "layerwise" else path


def is_stats_name(name: str) -> bool:
    """Whether a file in an expert's folder is one of its statistics, by its name."""
    return name.startswith(STATS)


class StatsFile(Mapping[str, Tensor]):
    """One kind of statistics of one expert: module to tensor (float64), read when asked for.

    Args:
        path: From `write_stats`.
        expert: What it must belong to.
        kind: Which.
        sizes: Module to (out, in) of those that must be there; default the expert's own.
        command: What computes it, for hints; default that for this expert alone.

    Raises:
        NotFound: No such file, or not this kind in it.
        Damaged: Not a file of statistics, or modules lack or have another shape.
        Incompatible: Those of another expert, or of an earlier state of it.
    """

    def __init__(
        self,
        path: Path,
        expert: Expert,
        kind: Kind,
        *,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        command: str | None = None,
    ) -> None:
        self.path = path
        self.expert = expert
        self.kind = kind
        base = base_word(None, base_names([expert]))
        self.command = command or stats_command([expert], base, overwrite=True)
        if not path.is_file():
            raise NotFound(f"{expert.name} has no {kind} statistics", code="stats", path=path)
        self.file = TensorFile(path)
        self.content = self._content()
        if self.content["expert"] != expert.digest:
            raise Incompatible(
                f"{path} belongs to another expert, or to an earlier state of {expert.name}",
                code="stats",
                hint=f"compute them again: {self.command}",
                path=path,
                expected=expert.digest,
                found=self.content["expert"],
            )
        own = self._stored("fisher." if kind == "fisher" else "gram.")
        if not own:
            raise NotFound(f"{path} holds no {kind} statistics", code="stats", path=path)
        shared = self._shared()
        self.names = own if kind == "fisher" else own | {n: own[o] for n, o in shared.items()}
        self._check_modules(expert.sizes if sizes is None else sizes)

    def check_base(self, fingerprint: str, said: str) -> None:
        """Refuse statistics that were computed on another base.

        Args:
            fingerprint: Of the base that is wanted.
            said: Who names it, for the message.

        Raises:
            Incompatible: Says both.
        """
        if self.content["base"] != fingerprint:
            raise Incompatible(
                f"{self.path} was computed on another base: {self.content['base']}, but"
                f" {said} {fingerprint}",
                code="base",
                hint=f"compute them again: {self.command}\n  compose and eval take --force-base",
                path=self.path,
                expected=fingerprint,
                found=self.content["base"],
            )

    @cached_property
    def sha256(self) -> str:
        """Read the file once: refuse values that cannot be right, and hash it.

        Raises:
            Damaged: Values that are not finite or below 0, a Gram matrix that is not symmetric.
        """
        wanted = {tensor: module for module, tensor in reversed(self.names.items())}
        infos = sorted(self.file.infos.items(), key=lambda item: (item[1].start, item[1].end))
        digest = hashlib.sha256(self.file.read_span(0, infos[0][1].start))
        for name, _ in infos:
            values = self.file.read(name)
            digest.update(raw(values))
            flaw = flaw_of(values, gram=self.kind != "fisher") if name in wanted else None
            if flaw is not None:
                self._refuse(f"the {name.partition('.')[0]} of {wanted[name]} {flaw}", tensor=name)
        return digest.hexdigest()

    def pin(self) -> dict[str, Any]:
        """Return what a record says of the file: its digest, and what it says of its data."""
        known = {key: self.content[key] for key in ("data", "rows", "tokens")}
        return {"kind": self.kind, "sha256": self.sha256, **known}

    def _content(self) -> dict[str, Any]:
        text = self.file.metadata.get("cgmerge")
        content = strictjson.loads_object(text.encode(), source=str(self.path)) if text else {}
        fits = all(type(content.get(key)) is kind for key, kind in _CONTENT.items())
        if content.get("schema") != SCHEMA or not fits:
            self._refuse(f"is not a {SCHEMA}")
        if not all(isinstance(digest, str) for digest in content["data"]):
            self._refuse("has digests of data that are not text")
        return content

    def _stored(self, mark: str) -> dict[str, str]:
        return {n.removeprefix(mark): n for n in self.file.infos if n.startswith(mark)}

    def _shared(self) -> dict[str, str]:
        """Return which modules have the Gram matrix of another."""
        shared: dict[str, str] = self.content["shared"]
        grams = self._stored("gram.")
        for name, owner in shared.items():
            if not isinstance(owner, str) or owner not in grams:
                found = repr(owner)[:200]
                self._refuse(f"gives {name} the Gram of {found}, which it does not hold")
            if name in grams:
                self._refuse(f"gives {name} the Gram of {owner}, and one of its own")
        return shared

    def _check_modules(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        lost = [module for module in sizes if module not in self.names]
        if lost:
            self._refuse(
                f"holds {self.kind} statistics of {len(sizes) - len(lost)} of"
                f" {counted(len(sizes), 'module')}; not of {some_of(lost)}",
                found=lost[:5],
                expected=len(sizes),
            )
        for module, (out, into) in sizes.items():
            info = self.file.infos[self.names[module]]
            shape = (out, into) if self.kind == "fisher" else (into, into)
            if info.shape != shape or info.dtype not in _FLOATS:
                self._refuse(
                    f"holds {info.dtype} {list(info.shape)} for {module}, a float type and"
                    f" {list(shape)} are expected",
                    tensor=module,
                    found=list(info.shape),
                    expected=list(shape),
                )

    def _refuse(self, what: str, **details: Any) -> NoReturn:
        raise Damaged(
            f"{self.path} {what}" if not what.startswith("the ") else f"{self.path}: {what}",
            code="stats",
            hint=f"compute them again: {self.command}",
            path=self.path,
            **details,
        )

    def __getitem__(self, module: str) -> Tensor:
        return self.file.read(self.names[module]).double()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
