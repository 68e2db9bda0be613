"""What may enter a library: experts that open, hold numbers, and change something."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cgmerge.errors import Damaged, UsageError, readable
from cgmerge.modules.card import CARD
from cgmerge.modules.compress.container import CgeFile
from cgmerge.modules.compress.sidecar import SIDECAR
from cgmerge.modules.expert import COMPRESSED, WEIGHTS, Expert, compressed_file, open_expert
from cgmerge.modules.library.entry import MAX_COUNT, Entry, Part, check_name, digest_of
from cgmerge.modules.library.store import STORED, Source
from cgmerge.modules.pairs import CONFIG
from cgmerge.modules.recipe import RECORD
from cgmerge.refs import label, local_place
from cgmerge.tensorfile import file_sha256

PAGE = "README.md"
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_TAG = re.compile(r"[\w][\w .:/+-]{0,63}")


@dataclass(frozen=True, slots=True)
class Item:
    """An expert that may be stored: its entry, and where its files are now."""

    entry: Entry
    sources: Mapping[str, Source]


def admit(
    ref: str, *, name: str | None = None, licence: str | None = None, tags: Sequence[str] = ()
) -> Item:
    """Check an expert down to its last number and describe it.

    Args:
        ref: As everywhere.
        name: In the library; by default that of its folder or file.
        licence: Where the expert itself does not say.
        tags: More words to find it by.

    Raises:
        NotFound, Unsafe, Incompatible: As `open_expert`.
        Damaged: Also values that are not finite, or an expert that changes nothing.
        UsageError: Names that a library cannot take.
    """
    _check_words(licence, tags)
    place = local_place(ref, what="expert", suffix=COMPRESSED)
    chosen = check_name(name if name is not None else label(ref, place))
    small = compressed_file(place)
    if small is not None:
        sources = _sources({STORED: small})
        entry = _compressed(small, ref, chosen, sources)
    else:
        expert = open_expert(ref)
        try:
            sources = _sources(dict(_folder_files(place, expert)))
            check_values(expert)
            entry = _described(expert, chosen, "peft", sources)
        finally:
            expert.file.close()
    words = (*tags, *(tag for tag in entry.tags if tag not in tags))
    return Item(replace(entry, license=licence or entry.license, tags=words), sources)


def check_values(expert: Expert) -> None:
    """Read every weight of an adapter.

    Raises:
        Damaged: Values that are not finite, or nothing but zeros.
    """
    deltas = expert.deltas()
    works = False
    for path in expert.pairs:
        factors = deltas.raw(path)
        works = works or bool(factors.a.any() and factors.b.any())
    if not works:
        raise Damaged(
            f"{expert.folder} changes nothing: in each of {len(expert.pairs)} modules one of the"
            " factors is zero",
            code="empty",
            hint="the training failed, or another file was meant",
            path=expert.folder,
        )


def _compressed(path: Path, ref: str, name: str, sources: Mapping[str, Source]) -> Entry:
    with CgeFile.open(path) as file:
        file.verify()
        manifest = file.manifest
    parameters = _parameters(manifest)
    scores = dict(_manifest_scores(manifest.get("eval") or []))
    if manifest["peft"] is None:
        return Entry(
            name=name,
            kind="full",
            files=_parts(sources),
            digest=digest_of(_parts(sources)),
            base=_line(manifest["base"]["id"]),
            base_fingerprint=manifest["base"].get("fingerprint"),
            parameters=parameters,
            scores=scores,
            license=_license(manifest),
        )
    expert = open_expert(ref)
    try:
        check_values(expert)
        entry = _described(expert, name, "cge", sources)
    finally:
        expert.file.close()
    return replace(entry, parameters=parameters, scores=scores, license=_license(manifest))


def _parameters(manifest: Mapping[str, Any]) -> int:
    """Return those of the expert that was compressed, as `compress` and `inspect` count them."""
    known = (manifest.get("sizes") or {}).get("parameters")
    return known if type(known) is int and 0 <= known < MAX_COUNT else int(manifest["numel"])


def _described(expert: Expert, name: str, kind: str, sources: Mapping[str, Source]) -> Entry:
    card = expert.card
    pairs = expert.pairs.values()
    parts = _parts(sources)
    return Entry(
        name=name,
        kind=kind,
        files=parts,
        digest=digest_of(parts),
        expert=expert.digest,
        base=_line(expert.config.base_name or (card.base.name if card else "")),
        base_fingerprint=expert.base_fingerprint,
        skill=_line(card.skill) if card else "",
        parameters=sum(pair.rank * (pair.in_features + pair.out_features) for pair in pairs),
        rank=max(expert.ranks),
        scores=dict(_numbers(card.metrics)) if card else {},
    )


def _folder_files(folder: Path, expert: Expert) -> Iterator[tuple[str, Path]]:
    """Find the files that an adapter consists of; statistics and strangers' files stay behind."""
    listed = set(expert.card.files) if expert.card else set()
    own = {CONFIG, WEIGHTS, CARD, RECORD, SIDECAR, PAGE}
    for name in sorted(own | listed):
        path = folder / name
        if path.exists() or path.is_symlink():
            yield name, path


def _sources(files: Mapping[str, Path]) -> dict[str, Source]:
    return {
        name: Source(path, file_sha256(path, follow_links=False), path.stat().st_size)
        for name, path in files.items()
    }


def _parts(sources: Mapping[str, Source]) -> dict[str, Part]:
    return {name: Part(source.sha256, source.size) for name, source in sources.items()}


def _numbers(metrics: Mapping[str, Any], stem: str = "") -> Iterator[tuple[str, float]]:
    """Flatten what a card says of scores to named numbers."""
    for key, value in sorted(metrics.items()):
        name = _line(f"{stem}{key}")
        if isinstance(value, dict) and not stem:
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _manifest_scores(scores: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for score in scores:
        value = score.get("compressed")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield _line(f"{score.get('suite', 'suite')}.{score.get('metric', 'score')}"), value


def _license(manifest: Mapping[str, Any]) -> str | None:
    found = manifest.get("license")
    return found if isinstance(found, str) and _SPDX.fullmatch(found) else None


def _line(text: str) -> str:
    return readable(text, 200).replace("\n", " ")


def _check_words(licence: str | None, tags: Sequence[str]) -> None:
    if licence is not None and not _SPDX.fullmatch(licence):
        raise UsageError(
            f"the licence {licence[:60]!r} is not a short name such as `apache-2.0` or `mit`",
            code="license",
        )
    odd = next((tag for tag in tags if not _TAG.fullmatch(tag)), None)
    if odd is not None:
        raise UsageError(f"{odd[:60]!r} cannot be a tag", code="tag")
