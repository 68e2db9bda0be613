"""expert.json: what an expert is, what it was made from, and the digests of its files."""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, Incompatible
from cgmerge.tensorfile import file_sha256, read_small

CARD = "expert.json"
SCHEMA = "cgmerge.expert/1"
README = "README.md"


class BaseId(BaseModel):
    """Which base an expert belongs to: a label for people, a fingerprint for the program."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    name: str
    fingerprint: str | None = None


class DataSource(BaseModel):
    """One training file: its name (no path), digest and number of rows."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    name: str
    sha256: str
    rows: int


class ExpertCard(BaseModel):
    """The content of expert.json; unknown fields are kept out, so that a typo cannot hide."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True
    )

    schema_: Literal["cgmerge.expert/1"] = Field(default="cgmerge.expert/1", alias="schema")
    skill: str
    base: BaseId
    data: list[DataSource] = []
    training: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    seed: int | None = None
    versions: dict[str, str] = {}
    files: dict[str, str] = {}


def write_card(folder: Path, card: ExpertCard) -> None:
    """Write expert.json into a staged folder, with the digests of the files already there.

    Args:
        folder: A folder from `fs.new_folder` that holds the adapter files.
        card: Everything but `files`.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != CARD)
    digests = {name: file_sha256(folder / name) for name in names}
    content = card.model_copy(update={"files": digests}).model_dump(mode="json", by_alias=True)
    fs.write_json(folder / CARD, content)


def read_card(folder: Path) -> ExpertCard | None:
    """Read expert.json and verify the digests it lists.

    Returns:
        The card, or None where there is none (an adapter from another tool).

    Raises:
        Damaged: Not the schema, or a file differs from its digest.
        Incompatible: Written by a newer version.
    """
    path = folder / CARD
    if not path.exists() and not path.is_symlink():
        return None
    raw = strictjson.loads_object(read_small(path, limit=1 << 20), source=str(path))
    if raw.get("schema") != SCHEMA:
        raise Incompatible(
            f"{path} has schema {raw.get('schema')!r}; this version reads {SCHEMA!r}",
            code="card_schema",
            expected=SCHEMA,
            found=raw.get("schema"),
        )
    try:
        card = ExpertCard.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(f"{path}: {where}: {first['msg']}", code="card", path=path) from error
    labels = [card.skill, card.base.name, *(source.name for source in card.data)]
    odd = next((text for text in labels if not text.isprintable() or len(text) > 1000), None)
    if odd is not None:
        raise Damaged(
            f"{path} holds a name that is not one printable line: {odd[:80]!r}", code="card"
        )
    for name, expected in card.files.items():
        if name == README:
            continue  # for people, who edit it before they publish
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise Damaged(f"{path} lists the file {name!r} outside its folder", code="card")
        if not (folder / name).exists():
            raise Damaged(f"{folder} lacks {name}, which its card lists", code="file_missing")
        found = file_sha256(folder / name, follow_links=False)
        if found != expected:
            raise Damaged(
                f"{folder / name} is not what its card says: sha256 {found[:16]}…,"
                f" expected {expected[:16]}…",
                code="digest",
                hint="the file was changed or damaged; fetch it again (or remove expert.json if"
                " you changed it on purpose)",
                path=folder / name,
                expected=expected,
                found=found,
            )
    return card


def package_versions() -> dict[str, str]:
    """Return the versions that shape results, for cards and records."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from cgmerge._version import __version__

    names = ("torch", "transformers", "peft", "safetensors")
    return {"cgmerge": __version__, **{name: version(name) for name in names}}
