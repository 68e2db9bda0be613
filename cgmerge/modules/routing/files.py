"""Routed compositions on disk: written in one step, read back without trusting a single field."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, Incompatible, NotFound
from cgmerge.modules.adapter_out import AdapterForm, write_adapter
from cgmerge.modules.base import Base
from cgmerge.modules.card import BaseId, ExpertCard, package_versions, write_card
from cgmerge.modules.composition import Composition
from cgmerge.modules.expert import COMPRESSED, WEIGHTS, Expert, is_adapter, open_expert
from cgmerge.modules.pairs import CONFIG
from cgmerge.modules.recipe import RECORD
from cgmerge.modules.routing.page import composition_page
from cgmerge.modules.routing.router import ROUTERS, Router
from cgmerge.shown import some_of
from cgmerge.tensorfile import TensorFile, file_sha256, read_small

if TYPE_CHECKING:
    from torch import Tensor

    from cgmerge.merge import LowRank

SCHEMA = "cgmerge.routed/1"
ROUTER = "router.safetensors"
EXPERTS = "experts"
MAX_EXPERTS = 100_000
_KEYS = {
    "schema", "method", "params", "base", "experts", "router", "transforms", "fit", "versions",
    "warnings",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True)
class Member:
    """One expert as it goes into a composition.

    Attributes:
        name: Its name there.
        expert: Where it comes from.
        deltas: What it was changed to, e.g. after subtracting another; None for its own files.
    """

    name: str
    expert: Expert
    deltas: "Mapping[str, LowRank] | None" = None


@dataclass(frozen=True)
class Fresh:
    """An expert that was made with the composition and is in no other place.

    Attributes:
        name: Its name there.
        write: Writes adapter and card into an empty folder.
    """

    name: str
    write: Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that a routed composition is written from.

    Attributes:
        method: What made it.
        params: Its parameters.
        members: The experts, in the order of the router's weights.
        router: What decides.
        base: Reference as a label, and fingerprint.
        transforms: What was done to the experts before.
        fit: What the router was learned from, and how that went.
        warnings: What the user should know.
    """

    method: str
    params: Mapping[str, Any]
    members: Sequence[Member | Fresh]
    router: Router
    base: BaseId
    transforms: Sequence[Mapping[str, Any]] = ()
    fit: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def safe_names(experts: Sequence[Expert]) -> list[str]:
    """Name experts by their skills, as folder names, each once.

    Skills that are written alike get a number: `sort`, `sort-2`.
    """
    found: list[str] = []
    for expert in experts:
        plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", expert.name).strip("-._+")[:80] or "expert"
        name, number = plain, 2
        while name in found:
            name, number = f"{plain}-{number}", number + 1
        found.append(name)
    return found


def save_composition(out: Path, contents: Contents, *, overwrite: bool = False) -> Composition:
    """Write a composition and read it back.

    Args:
        out: The folder; appears complete or not at all.
        contents: What to write.
        overwrite: Replace an existing folder.

    Returns:
        The composition as anybody who opens the folder gets it.

    Raises:
        UsageError: `out` exists.
        StorageError: Disk full and the like; nothing is left behind.
    """
    out = fs.absolute(out)
    with fs.new_folder(out, overwrite=overwrite) as stage:
        fs.make_folder(stage / EXPERTS)
        for member in contents.members:
            _write_member(stage / EXPERTS / member.name, member, contents.base)
        tensors = contents.router.tensors()
        digest = ""
        if tensors:
            plain = {name: _plain(tensor) for name, tensor in tensors.items()}
            fs.write_tensors(stage / ROUTER, plain)
            digest = file_sha256(stage / ROUTER)
        opened = [open_expert(str(stage / EXPERTS / m.name)) for m in contents.members]
        fs.write_json(stage / RECORD, _record(contents, opened, digest))
        page = composition_page(
            contents.method,
            contents.router,
            {m.name: e.digest for m, e in zip(contents.members, opened, strict=True)},
            contents.base,
        )
        fs.write_bytes(stage / "README.md", page.encode())
        open_composition(stage)
    return open_composition(out)


def _plain(tensor: "Tensor") -> "Tensor":
    import torch

    kept = tensor if tensor.dtype == torch.bool else tensor.float()
    return kept.detach().contiguous().cpu().clone()  # files may not hold views of one another


def _write_member(folder: Path, member: Member | Fresh, base: BaseId) -> None:
    fs.make_folder(folder)
    if isinstance(member, Fresh):
        member.write(folder)
        return
    expert = member.expert
    if member.deltas is not None:
        rank = max(delta.rank for delta in member.deltas.values())
        _write_changed(folder, member, rank, base)
    elif expert.compressed:
        fs.copy_file(expert.folder, folder / f"expert{COMPRESSED}")
    else:
        for name in (CONFIG, WEIGHTS):
            fs.copy_file(expert.folder / name, folder / name)
        if expert.card is not None:
            write_card(folder, expert.card)


def _write_changed(folder: Path, member: Member, rank: int, base: BaseId) -> None:
    from cgmerge.merge import pad_rank

    assert member.deltas is not None
    expert, config = member.expert, member.expert.config
    padded = {path: pad_rank(delta, rank) for path, delta in member.deltas.items()}
    form = AdapterForm(rank, rank, config.base_name, config.fan_in_fan_out, config.task_type)
    write_adapter(folder, {path: (delta.a, delta.b) for path, delta in padded.items()}, form)
    skill = expert.name
    write_card(folder, ExpertCard(skill=skill, base=base, versions=package_versions()))


def _record(contents: Contents, opened: Sequence[Expert], digest: str) -> dict[str, Any]:
    router = contents.router
    return {
        "schema": SCHEMA,
        "method": contents.method,
        "params": dict(contents.params),
        "base": contents.base.model_dump(),
        "experts": [
            {
                "name": member.name,
                "path": f"{EXPERTS}/{member.name}",
                "sha256": written.digest,
                "source": None
                if isinstance(member, Fresh)
                else {"ref": member.expert.ref, "sha256": member.expert.digest},
            }
            for member, written in zip(contents.members, opened, strict=True)
        ],
        "router": {
            "kind": router.kind,
            "settings": router.settings(),
            "sha256": digest or None,
            "experts_sha256": _order_digest(opened),
        },
        "transforms": list(contents.transforms),
        "fit": dict(contents.fit),
        "versions": package_versions(),
        "warnings": list(contents.warnings),
    }


def is_routed(folder: Path) -> bool:
    """Whether a folder holds a routed composition."""
    path = folder / RECORD
    if not path.is_file() or is_adapter(folder):
        return False
    raw = strictjson.loads(read_small(path, limit=strictjson.MAX_BYTES), source=str(path))
    return isinstance(raw, dict) and str(raw.get("schema", "")).startswith("cgmerge.routed/")


def open_composition(
    folder: Path, base: Base | None = None, *, force_base: bool = False
) -> Composition:
    """Open a routed composition, or an adapter as a static one.

    Headers, records and digests are read and checked; the experts' weights are read when the
    composition is attached.

    Args:
        folder: Local.
        base: Where known, the experts are checked against it.
        force_base: Accept experts of another fingerprint.

    Raises:
        NotFound: Neither of the two.
        Damaged: A file, digest or field that is not as it must be.
        Incompatible: A newer format, or another base.
    """
    if not is_routed(folder):
        expert = open_expert(str(folder), base=base)
        known = expert.card.base if expert.card else BaseId(name=expert.config.base_name)
        static = Composition("static", (expert,), (expert.name,), None, known, folder)
        if base is not None:
            static.check(base, force_base=force_base)
        return static
    source = str(folder / RECORD)
    raw = strictjson.loads_object(read_small(folder / RECORD), source=source)
    if raw.get("schema") != SCHEMA:
        raise Incompatible(
            f"{source} has schema {raw.get('schema')!r}; this version reads {SCHEMA!r}",
            code="composition_schema",
            hint="update cgmerge",
            expected=SCHEMA,
            found=raw.get("schema"),
        )
    unknown = sorted(set(raw) - _KEYS)
    if unknown:
        raise Damaged(f"{source} has unknown fields {some_of(unknown)}", code="composition")
    listed = _listed(raw, source)
    opened = tuple(_open_member(folder, entry, source) for entry in listed)
    router, digest = _open_router(folder, raw, source)
    _check_order(raw["router"], opened, source)
    found = Composition(
        method=_text(raw, "method", source),
        experts=opened,
        names=tuple(entry["name"] for entry in listed),
        router=router,
        base=_base(raw, source),
        folder=folder,
        record=raw,
        warnings=tuple(text for expert in opened for text in expert.warnings),
        router_sha256=digest,
    )
    _check_router(found, source)
    if base is not None:
        found.check(base, force_base=force_base)
    return found


def _listed(raw: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    listed = raw.get("experts")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_EXPERTS:
        raise Damaged(f"{source}: experts must be a list of at least one", code="composition")
    for entry in listed:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Damaged(f"{source}: an expert has the name {name!r}", code="composition")
        if entry.get("path") != f"{EXPERTS}/{name}" or not isinstance(entry.get("sha256"), str):
            raise Damaged(
                f"{source}: expert {name} must have a digest and lie in {EXPERTS}/{name}",
                code="composition",
            )
    names = [entry["name"] for entry in listed]
    if len(set(names)) != len(names):
        raise Damaged(f"{source} lists an expert twice", code="composition")
    return listed


def _open_member(folder: Path, entry: Mapping[str, Any], source: str) -> Expert:
    place = folder / EXPERTS / entry["name"]
    if place.parent.is_symlink() or place.is_symlink() or not place.is_dir():
        raise Damaged(
            f"{source} lists the expert {entry['name']}, which is not in {place}",
            code="file_missing",
            hint="copy the whole folder, or compose it again",
        )
    expert = open_expert(str(place))
    if expert.digest != entry["sha256"]:
        raise Damaged(
            f"{place} is not the expert that {RECORD} names: sha256 {expert.digest[:16]}…,"
            f" expected {entry['sha256'][:16]}…",
            code="digest",
            hint="a router is only valid for the experts it was made for; compose again",
            path=place,
            expected=entry["sha256"],
            found=expert.digest,
        )
    return expert


def _open_router(folder: Path, raw: Mapping[str, Any], source: str) -> tuple[Router, str]:
    described = raw.get("router")
    kind = described.get("kind") if isinstance(described, dict) else None
    if not isinstance(described, dict) or not isinstance(kind, str) or kind not in ROUTERS:
        raise Damaged(
            f"{source}: unknown kind of router {kind!r}",
            code="router",
            hint=f"this version knows {', '.join(sorted(ROUTERS))}",
        )
    settings, digest = described.get("settings"), described.get("sha256")
    if not isinstance(settings, dict):
        raise Damaged(f"{source}: the router has no settings", code="router")
    path = folder / ROUTER
    tensors: dict[str, Tensor] = {}
    if digest is not None:
        if not path.exists():
            raise Damaged(f"{folder} lacks {ROUTER}, which {RECORD} names", code="file_missing")
        found = file_sha256(path, follow_links=False)
        if found != digest:
            raise Damaged(
                f"{path} is not what {RECORD} says: sha256 {found[:16]}…, expected"
                f" {str(digest)[:16]}…",
                code="digest",
                path=path,
                expected=digest,
                found=found,
            )
        tensors = _read_tensors(path)
    router = ROUTERS[kind].restore(settings, tensors)
    # A field that nobody here reads may change what another version computes.
    unknown = sorted(set(settings) - set(router.settings()))
    unknown += sorted(set(described) - {"kind", "settings", "sha256", "experts_sha256"})
    if unknown:
        raise Damaged(
            f"{source}: the router has unknown settings {some_of(unknown)}", code="router"
        )
    return router, digest or ""


def _order_digest(experts: Sequence[Expert]) -> str:
    """Return a sha256 over the experts in their order, which the router's numbers stand for."""
    return hashlib.sha256("\n".join(expert.digest for expert in experts).encode()).hexdigest()


def _check_order(router: Mapping[str, Any], experts: Sequence[Expert], source: str) -> None:
    expected, found = router.get("experts_sha256"), _order_digest(experts)
    if expected != found:
        raise Damaged(
            f"{source}: the router was made for other experts, or for another order of them",
            code="router",
            hint="compose again: adding, removing or changing an expert needs a new router",
            expected=expected,
            found=found,
        )


def _read_tensors(path: Path) -> "dict[str, Tensor]":
    import torch

    found = {}
    with TensorFile(path) as file:
        for name, info in file.infos.items():
            wanted = "BOOL" if name.endswith(".present") else "F32"
            if info.dtype != wanted:
                raise Damaged(
                    f"{path}: tensor {name!r} is {info.dtype}, expected {wanted}", code="router"
                )
            found[name] = file.read(name)
            if not bool(torch.isfinite(found[name]).all()):
                raise Damaged(
                    f"{path}: tensor {name!r} holds NaN or infinity", code="not_finite", tensor=name
                )
    return found


def _check_router(composition: Composition, source: str) -> None:
    """Compare the router with the experts: numbers of experts, widths and ranks."""
    from cgmerge.modules.routing.check import check_router

    sizes = [
        {path: (p.out_features, p.in_features, p.rank) for path, p in expert.pairs.items()}
        for expert in composition.experts
    ]
    assert composition.router is not None
    check_router(composition.router, sizes, source)


def _base(raw: Mapping[str, Any], source: str) -> BaseId:
    base = raw.get("base")
    if not isinstance(base, dict) or set(base) - {"name", "fingerprint"}:
        raise Damaged(f"{source}: base must have a name and a fingerprint", code="composition")
    name, fingerprint = base.get("name"), base.get("fingerprint")
    if not isinstance(name, str) or not isinstance(fingerprint, str | None):
        raise Damaged(f"{source}: base must have a name and a fingerprint", code="composition")
    return BaseId(name=name, fingerprint=fingerprint)


def _text(raw: Mapping[str, Any], key: str, source: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value.isprintable() or len(value) > 100:
        raise Damaged(f"{source}: {key} must be a short text", code="composition")
    return value


def find_composition(folder: Path) -> None:
    """Refuse a folder that holds no composition of any kind.

    Raises:
        NotFound: Neither a routed composition nor an adapter.
    """
    if not is_routed(folder) and not is_adapter(folder):
        raise NotFound(
            f"{folder} holds neither a composition nor an adapter",
            code="composition",
            hint="make one: cgmerge compose EXPERTS --method arrow -o OUT",
        )
