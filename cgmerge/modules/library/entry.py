"""What a library says of one expert: a small JSON file, checked before anything in it is used."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cgmerge import strictjson
from cgmerge.errors import Damaged, Incompatible, LimitExceeded, Unsafe, UsageError

SCHEMA = "cgmerge.entry/1"
MAX_BYTES = 1 << 16
ENDING = ".json"
KINDS = ("peft", "cge", "full")
"""A PEFT folder, a compressed adapter, or the compressed delta of a full model."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# Names of devices on Windows, where the file system finds them in every folder.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{p}{n}" for p in ("com", "lpt") for n in range(1, 10))}
_OWN = {"entries", "objects", "removing"}
_HEX = re.compile("[0-9a-f]{64}")
_MAX_FILES = 64
_MAX_TAGS = 100
MAX_COUNT = 2**53
_COMPARED = 3


class Part(NamedTuple):
    """One file of an expert: its sha256 and its bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One expert of a library.

    Attributes:
        name: By which users refer to it.
        kind: What its files are, one of `KINDS`.
        files: Name to digest and bytes of each.
        digest: Of the files, see `digest_of`; the object's name.
        expert: The digest that recipes pin; None for the delta of a full model.
        base: What the expert calls its base model.
        base_fingerprint: Which base that is.
        skill: What it was trained for.
        parameters: Entries of all its tensors, before it was compressed.
        rank: The largest; None for the delta of a full model.
        scores: Numbers that the expert's own card gives.
        license: As the hub and SPDX write it.
    """

    name: str
    kind: str
    files: Mapping[str, Part]
    digest: str
    expert: str | None = None
    base: str = ""
    base_fingerprint: str | None = None
    skill: str = ""
    parameters: int = 0
    rank: int | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    license: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the bytes of all its files."""
        return sum(part.size for part in self.files.values())

    @property
    def file_name(self) -> str:
        """Return the name of its file, the same for names that differ in capitals only."""
        return file_name(self.name)

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        files = {name: [part.sha256, part.size] for name, part in self.files.items()}
        return strictjson.canonical({"schema": SCHEMA, **self._fields(), "files": files}) + b"\n"

    def facts(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**self._fields(), "size_bytes": self.size, "files": sorted(self.files)}

    def _fields(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "digest": self.digest,
            "expert": self.expert,
            "base": self.base,
            "base_fingerprint": self.base_fingerprint,
            "skill": self.skill,
            "parameters": self.parameters,
            "rank": self.rank,
            "scores": dict(self.scores),
            "license": self.license,
            "tags": list(self.tags),
        }


def ordered_scores(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return what an expert reaches, the most telling first; then what it is compared with.

    Files hold their keys in alphabetical order, where the base comes before the expert.

    Example:
        >>> ordered_scores({"eval.base_loss": 3.6, "eval.loss": 0.2, "eval.exact_match": 0.7})
        [('eval.exact_match', 0.7), ('eval.loss', 0.2), ('eval.base_loss', 3.6)]
    """
    return sorted(scores.items(), key=lambda item: (_place(item[0]), item[0]))


def own_scores(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return those of the expert alone, the most telling first: never the base's, no counts."""
    return [item for item in ordered_scores(scores) if _place(item[0])[0] < _COMPARED]


def _place(name: str) -> tuple[int, bool]:
    """Return where a score belongs: exact match, other scores, losses, then what is not its own."""
    last = name.rpartition(".")[2]
    if last == "n" or last.startswith(("base_", "first_")):
        kind = _COMPARED
    elif last == "exact_match":
        kind = 0
    else:
        kind = 2 if last == "loss" else 1
    return kind, not name.startswith("eval.")  # on held-out rows before those of the training


def check_name(name: str) -> str:
    """Return a name that an entry may have on every system, or refuse it.

    Raises:
        UsageError: Other characters than ASCII letters, digits, `.`, `_`, `-`; too long; reserved.
    """
    if not is_name(name):
        raise UsageError(
            f"{name[:120]!r} cannot be the name of an expert in a library",
            code="name",
            hint="1 to 100 of the letters A-Z, a-z, digits, `.`, `_` and `-`, beginning with a"
            " letter, a digit or `_`: --name NAME",
            found=name[:120],
        )
    return name


def is_name(name: str) -> bool:
    """Whether an expert in a library may be called so."""
    stem = name.lower().partition(".")[0]
    good = _NAME.fullmatch(name) is not None and not name.endswith(".")
    return good and stem not in _DEVICES and stem not in _OWN


def is_digest(name: str) -> bool:
    """Whether a name is that of an object."""
    return _HEX.fullmatch(name) is not None


def file_name(name: str) -> str:
    """Return the name of an entry's file; some systems do not tell capitals apart."""
    return name.lower() + ENDING


def digest_of(files: Mapping[str, Part]) -> str:
    """Return the sha256 of one line `sha256 size name` for each file, in the order of names."""
    lines = [f"{sha256} {size} {name}\n" for name, (sha256, size) in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def parse_entry(data: bytes, *, file: str, source: str) -> Entry:
    """Read an entry from its file.

    Args:
        data: The content.
        file: Name of the file, which the entry's own name must fit.
        source: What to call it in messages.

    Raises:
        Damaged: Not the schema, or a digest that its files do not have.
        Incompatible: Written by a newer version.
        Unsafe: Names that lead elsewhere, or beyond a limit.
    """
    quick = _quick(data)
    named = quick is not None and file_name(quick.name) == file and is_name(quick.name)
    if quick is not None and named and digest_of(quick.files) == quick.digest:
        return quick
    raw = _raw(data, source)
    files = _files(raw.get("files"), source)
    name = raw.get("name")
    if not isinstance(name, str) or not is_name(name) or file_name(name) != file:
        raise Unsafe(f"{source} calls itself {str(name)[:120]!r}", code="entry_name")
    wrong = next((key for key, is_good in _FIELDS.items() if not is_good(raw.get(key))), None)
    if wrong is not None:
        found = repr(raw.get(wrong))[:60]
        raise Damaged(f"{source} has {wrong} {found}", code="entry", field=wrong)
    expected = digest_of(files)
    if raw["digest"] != expected:
        raise Damaged(
            f"{source} names {raw['digest'][:16]}…, but its files make {expected[:16]}…",
            code="entry_digest",
            hint="the entry was edited or damaged; add the expert again",
            expected=expected,
            found=raw["digest"],
        )
    return _entry(raw, files)


def _entry(raw: Mapping[str, Any], files: dict[str, Part]) -> Entry:
    fields = {key: raw[key] for key in _FIELDS if raw.get(key) is not None}
    tags = tuple(fields.pop("tags", ()))
    return Entry(name=raw["name"], files=files, tags=tags, **fields)


def _quick(data: bytes) -> Entry | None:
    """Read an entry that has exactly the form in which they are written; None for others.

    Libraries have thousands of entries: one pattern makes all checks of the long way but those of
    the name and the digest. No text has an escape, so that what stands there is what it means.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    match = _FORM.fullmatch(text)
    if match is None or not (text.isascii() or text[:-1].isprintable()):
        return None
    base, fingerprint, digest, expert, listed, kind, licence, name, *rest = match.groups()
    parameters, rank, scored, skill, tagged = rest
    parts = _PART.findall(listed)
    files = {file: Part(sha256, int(size)) for file, sha256, size in parts}
    scores: dict[str, float] = _SCAN(scored)[0]
    if len(files) < len(parts) or len(scores) < scored.count('":'):
        return None  # a key that comes twice
    return Entry(
        name=name,
        kind=kind,
        files=files,
        digest=digest,
        expert=expert,
        base=base,
        base_fingerprint=fingerprint,
        skill=skill,
        parameters=int(parameters),
        rank=None if rank is None else int(rank),
        scores=scores,
        license=licence,
        tags=tuple(_SCAN(tagged)[0]),
    )


def _raw(data: bytes, source: str) -> dict[str, Any]:
    try:
        raw = strictjson.loads_object(data, source=source, max_bytes=MAX_BYTES)
    except LimitExceeded as error:
        raise Unsafe(error.message, code="entry_size") from error
    if raw.get("schema") != SCHEMA:
        raise Incompatible(
            f"{source} has schema {str(raw.get('schema'))[:60]!r}; this version reads {SCHEMA!r}",
            code="entry_schema",
            hint="update cgmerge, or remove the file if nobody wrote it on purpose",
        )
    return raw


def _files(raw: Any, source: str) -> dict[str, Part]:
    if not isinstance(raw, dict) or not 1 <= len(raw) <= _MAX_FILES:
        raise Damaged(f"{source} lists no files, or more than {_MAX_FILES}", code="entry")
    files = {}
    for name, value in raw.items():
        if not _NAME.fullmatch(name):
            raise Unsafe(f"{source} lists the file {name[:120]!r}", code="entry_name")
        if not (isinstance(value, list) and len(value) == 2 and _is_digest(value[0])):
            raise Damaged(f"{source} describes the file {name!r} wrongly", code="entry")
        if not _is_count(value[1]):
            raise Damaged(f"{source} describes the file {name!r} wrongly", code="entry")
        files[name] = Part(value[0], value[1])
    return files


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1000 and (value.isprintable() or not value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(key) and type(number) in (int, float) and math.isfinite(number)
        for key, number in value.items()
    )


def _are_tags(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_TAGS and all(map(_is_text, value))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: isinstance(value, str) and value in KINDS,
    "digest": _is_digest,
    "expert": lambda value: value is None or _is_digest(value),
    "base": lambda value: value is None or _is_text(value),
    "base_fingerprint": lambda value: value is None or _is_text(value),
    "skill": lambda value: value is None or _is_text(value),
    "parameters": lambda value: value is None or _is_count(value),
    "rank": lambda value: value is None or _is_count(value),
    "scores": lambda value: value is None or _are_scores(value),
    "license": lambda value: value is None or _is_text(value),
    "tags": lambda value: value is None or _are_tags(value),
}


def _form() -> re.Pattern[str]:
    """Return the pattern of a whole file; its groups are the fields but the schema, in order."""
    text, count = r'[^"\\\x00-\x1f\x7f]{0,1000}', "(?:0|[1-9][0-9]{0,14})"
    part = rf'"{_NAME.pattern}":\["{_HEX.pattern}",{count}\]'
    score = rf'"{text}":-?{count}(?:\.[0-9]{{1,30}})?(?:e[+-]?[0-9]{{1,2}})?'
    fields = {
        "base": f'"({text})"',
        "base_fingerprint": f'(?:"({text})"|null)',
        "digest": f'"({_HEX.pattern})"',
        "expert": f'(?:"({_HEX.pattern})"|null)',
        "files": rf"(\{{{part}(?:,{part}){{0,{_MAX_FILES - 1}}}\}})",
        "kind": f'"({"|".join(KINDS)})"',
        "license": f'(?:"({text})"|null)',
        "name": f'"({_NAME.pattern})"',
        "parameters": f"({count})",
        "rank": f"(?:({count})|null)",
        "schema": f'"{re.escape(SCHEMA)}"',
        "scores": rf"(\{{(?:{score}(?:,{score})*)?\}})",
        "skill": f'"({text})"',
        "tags": rf'(\[(?:"{text}"(?:,"{text}"){{0,{_MAX_TAGS - 1}}})?\])',
    }
    return re.compile(r"\{" + ",".join(f'"{key}":{form}' for key, form in fields.items()) + r"\}\n")


_FORM = _form()
_PART = re.compile(rf'"({_NAME.pattern})":\["({_HEX.pattern})",([0-9]+)\]')
_SCAN = json.JSONDecoder().raw_decode  # `json.loads` also looks for spaces around it
