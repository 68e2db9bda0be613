"""What a `.cge` file says about itself: one JSON document in the header, checked before use.

The document carries its own digest: the sha256 of its text with that digest replaced by zeros. So
a flipped bit in a licence or a score is found as one in the weights is, and no second program has
to serialise JSON byte for byte to check it.
"""

import hashlib
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cgmerge import strictjson
from cgmerge.errors import Damaged, Incompatible, Unsafe, UsageError

MAJOR = 1
SPEC = f"cgmerge/{MAJOR}"
CODEC = "split-golomb"
CODEC_VERSION = 1
MAX_DEPTH = 16
LOSSLESS = "lossless"

_ZEROS = "0" * 64
_SPEC = re.compile(r"cgmerge/([1-9][0-9]{0,8})")
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, Field(max_length=1000)]
Word = Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]


class _Part(BaseModel):
    """Fields that this version knows; others are kept and ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True, strict=True)


class Base(_Part):
    """The base model that the expert belongs to."""

    id: Label
    revision: Label | None = None
    architecture: Label | None = None
    fingerprint: Label | None = None
    dtype: Label | None = None


class Method(_Part):
    """How the numbers were made; reading them takes none of this."""

    mode: Word
    gauge: Literal["raw", "svd"] = "raw"
    density: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None


class Codec(_Part):
    """How levels are coded in `payload`."""

    name: Word
    version: Count


class Digest(_Part):
    """Digests of the tensors, of the stored index, and of this document."""

    algorithm: Literal["sha256"]
    content: Hex
    index: Hex
    manifest: Hex


class Manifest(_Part):
    """The manifest of a `.cge` file, version 1."""

    spec: Label
    base: Base
    peft: dict[str, Any] | None
    method: Method
    codec: Codec
    digest: Digest
    numel: Count
    must_understand: Annotated[list[Label], Field(max_length=100)] = []
    producer: Label | None = None
    created: Label | None = None
    tokenizer: dict[str, Any] | None = None
    sizes: dict[str, Any] | None = None
    fidelity: dict[str, Any] | None = None
    eval: list[dict[str, Any]] | None = None
    data: list[dict[str, Any]] | None = None
    parents: list[dict[str, Any]] | None = None
    license: Label | None = None
    base_license: Label | None = None


WRITTEN_HERE = ("spec", "codec", "digest", "numel")
"""Fields that the container fills in."""


def build(fields: dict[str, Any], *, numel: int, content: str, index: str) -> str:
    """Complete a manifest and return its text.

    Args:
        fields: What the caller knows: `base`, `peft`, `method`, and anything optional.
        numel: Entries of all tensors.
        content: Digest of the tensors, hexadecimal.
        index: Digest of the stored index, hexadecimal.

    Raises:
        UsageError: A field of the wrong type, or one that only the container knows.
    """
    reserved = sorted(set(fields) & set(WRITTEN_HERE))
    if reserved:
        raise UsageError(f"the manifest's {reserved[0]!r} is written by the program itself")
    digest = {"algorithm": "sha256", "content": content, "index": index, "manifest": _ZEROS}
    codec = {"name": CODEC, "version": CODEC_VERSION}
    whole = {**fields, "spec": SPEC, "codec": codec, "digest": digest, "numel": numel}
    try:
        text = strictjson.canonical(whole).decode()
        Manifest.model_validate(whole)
    except ValidationError as error:
        raise UsageError(f"the manifest cannot be written: {_first(error)}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"the manifest cannot be written as JSON: {error}") from error
    if strictjson.depth(whole) > MAX_DEPTH:
        raise UsageError(f"the manifest is nested more than {MAX_DEPTH} deep")
    place = f'"manifest":"{_ZEROS}"'
    if text.count(_ZEROS) != 1:
        raise UsageError("the manifest holds 64 zeros, the place of its own digest")
    return text.replace(place, f'"manifest":"{_own_digest(text)}"')


def parse(text: str, source: str) -> dict[str, Any]:
    """Read and check a manifest.

    Args:
        text: As in the header.
        source: The file, for messages.

    Returns:
        The fields, those that this version does not know included.

    Raises:
        Incompatible: Written by a newer version, or needs something that this one lacks.
        Damaged: Not the schema, or altered.
        Unsafe: Nested beyond the limit.
    """
    fields = strictjson.loads_object(text.encode(), source=f"the manifest of {source}")
    if strictjson.depth(fields) > MAX_DEPTH:
        raise Unsafe(f"the manifest of {source} is nested more than {MAX_DEPTH} deep", code="depth")
    _check_spec(fields.get("spec"), source)
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        raise Damaged(
            f"the manifest of {source} is wrong: {_first(error)}", code="manifest"
        ) from error
    stated = manifest.digest.manifest
    if text.count(stated) != 1 or _own_digest(text.replace(stated, _ZEROS)) != stated:
        raise Damaged(
            f"the manifest of {source} is not what it was: its sha256 is not {stated[:16]}…",
            code="digest",
            hint="the file is damaged or was edited; fetch or write it again",
            field="digest.manifest",
        )
    _check_understood(manifest, source)
    return fields


def _check_spec(spec: object, source: str) -> None:
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise Damaged(f"{source} has spec {spec!r}; expected {SPEC!r}", code="spec", found=spec)
    if int(match[1]) != MAJOR:
        raise Incompatible(
            f"{source} has format {spec}; this version reads {SPEC}",
            code="version",
            hint="install a newer cgmerge, or ask for a file in the older format",
            expected=SPEC,
            found=spec,
        )


def _check_understood(manifest: Manifest, source: str) -> None:
    unknown = [name for name in manifest.must_understand if name not in Manifest.model_fields]
    if unknown:
        raise Incompatible(
            f"{source} can only be read by a program that knows {unknown[0]!r}",
            code="must_understand",
            hint="install a newer cgmerge",
            field=unknown[0],
        )
    codec = manifest.codec
    if (codec.name, codec.version) != (CODEC, CODEC_VERSION):
        raise Incompatible(
            f"{source} is coded by {codec.name!r} version {codec.version}; this version reads"
            f" {CODEC!r} version {CODEC_VERSION}",
            code="codec",
            field="codec",
        )


def _own_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}"
