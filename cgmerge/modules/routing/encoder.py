"""A sentence-transformers model in place of the base's own embedding; optional, `retrieval` only.

It is known by the digest of its files, so that a router is never asked about embeddings of another
model. Only safetensors and modules of the package itself are loaded: no pickle, no code of a
folder. What a composition names is looked for on this machine and never fetched.
"""

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge import strictjson
from cgmerge.errors import (
    Damaged,
    EnvironmentProblem,
    Incompatible,
    InputError,
    MissingExtra,
    Unsafe,
    UsageError,
)
from cgmerge.modules.library.store import HUB
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.routing.embed import embed
from cgmerge.refs import local_folder
from cgmerge.tensorfile import file_sha256, read_small

_ENDINGS = (".json", ".txt", ".model", ".safetensors")
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
_OTHER = {"onnx", "openvino"}  # the same weights for other runtimes, which are not used
_MODULES = "modules.json"
_OWN = "sentence_transformers."
_MOST_FILES = 1000


@dataclass(frozen=True, slots=True)
class Encoder:
    """Which encoder made the embeddings of a router.

    Attributes:
        name: What the user wrote: a folder, or `hf://user/repo[@revision]`.
        sha256: Over names and contents of its files.
    """

    name: str
    sha256: str

    def as_dict(self) -> dict[str, str]:
        """Return it for the record."""
        return asdict(self)

    @classmethod
    def of_record(cls, value: object) -> "Encoder | None":
        """Read what `as_dict` gave.

        Raises:
            Damaged: Something else.
        """
        if value is None:
            return None
        good = isinstance(value, Mapping) and set(value) == {"name", "sha256"}
        if not good or not all(isinstance(text, str) and text for text in value.values()):  # type: ignore[attr-defined]
            raise Damaged(f"a retrieval router with encoder {value!r}"[:200], code="router")
        return cls(**value)  # type: ignore[arg-type]


def open_encoder(name: str) -> Encoder:
    """Find an encoder that the user names, fetching it where that is a remote reference.

    Args:
        name: A folder, or `hf://user/repo[@revision]`; with HF_HUB_OFFLINE it must be in the cache.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        NotFound, EnvironmentProblem: No such folder or repository.
        Incompatible, Unsafe: A folder that is none, or that holds what is not loaded.
    """
    _package()
    return Encoder(name, _digest(_folder(name, offline=False)))


def find_encoder(encoder: Encoder) -> Path:
    """Return the folder of the encoder that a router was made with; nothing is fetched.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        Incompatible: It is not here, or another one is there.
    """
    wanted = f"this composition chooses experts with the encoder {encoder.name}"
    _package(f"{wanted}, which")
    try:
        folder = _folder(encoder.name, offline=True)
        found = _digest(folder)
    except (UsageError, InputError, EnvironmentProblem) as error:
        raise Incompatible(
            f"{wanted}, which is not here: {error}",
            code="encoder",
            hint="fetch it, or put its folder where that name leads to",
            expected=encoder.sha256,
        ) from error
    if found != encoder.sha256:
        raise Incompatible(
            f"{wanted} of sha256 {encoder.sha256[:16]}…; what is there has {found[:16]}…",
            code="encoder",
            hint="its embeddings are others; get the one it was made with, or compose again",
            expected=encoder.sha256,
            found=found,
        )
    return folder


def embed_by(
    encoder: Encoder | None, loaded: LoadedBase, prompts: Sequence[Sequence[int]]
) -> Float[Tensor, "prompts width"]:
    """Return one vector per prompt, by an encoder, or by the base itself where there is none.

    Args:
        encoder: Reads the prompts as text, without special tokens.
        loaded: The base, without experts.
        prompts: Token ids of at least one token each.
    """
    if encoder is None:
        return embed(loaded, prompts)
    tokenizer = loaded.tokenizer
    texts = [str(tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in prompts]
    model = _model(encoder, str(loaded.model.device))
    found = model.encode(texts, convert_to_numpy=True, normalize_embeddings=False)
    return torch.as_tensor(found).float().to(loaded.model.device)


@lru_cache(maxsize=2)
def _model(encoder: Encoder, device: str) -> Any:
    return _package().SentenceTransformer(str(find_encoder(encoder)), device=device)


def _package(who: str = "an encoder") -> Any:
    try:
        return importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise MissingExtra(
            f"{who} needs the package sentence-transformers",
            code="sentence_transformers",
            hint='pip install "cgmerge[encoder]"',
        ) from error


def _folder(name: str, *, offline: bool) -> Path:
    if not name.startswith(HUB):
        return local_folder(name, what="encoder")
    from cgmerge.modules.library.fetch import hub_model

    patterns = [f"*{ending}" for ending in _ENDINGS]
    return hub_model(name, "encoder", files=patterns, offline=offline)


def _digest(folder: Path) -> str:
    """Hash the files that decide the embeddings; refuse what would not be loaded safely."""
    files = _files(folder)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    kept = {name: path for name, path in names.items() if name.endswith(_ENDINGS)}
    if _MODULES not in kept and "config.json" not in kept:
        raise Incompatible(
            f"{folder} is no sentence encoder: neither {_MODULES} nor config.json is in it",
            code="encoder",
            path=folder,
        )
    weighted = {path.parent for name, path in kept.items() if name.endswith(".safetensors")}
    pickled = sorted(
        name
        for name, path in names.items()
        if path.suffix in _PICKLES and path.parent not in weighted
    )
    if pickled or not weighted:
        raise Unsafe(
            f"{folder} has no weights in safetensors"
            + (f" beside {pickled[0]}, and pickles are never read" if pickled else ""),
            code="pickle",
            hint="save it again with sentence-transformers: model.save_pretrained(FOLDER)",
            path=folder,
        )
    if _MODULES in kept:
        _check_modules(kept[_MODULES])
    lines = [f"{name}\0{file_sha256(path)}\n" for name, path in sorted(kept.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if parts[0] in _OTHER or any(part.startswith(".") for part in parts):
            continue
        if path.is_file():
            found.append(path)
        if len(found) > _MOST_FILES:
            raise Incompatible(
                f"{folder} is no sentence encoder: it holds more than {_MOST_FILES} files",
                code="encoder",
                path=folder,
            )
    return found


def _check_modules(path: Path) -> None:
    """Refuse modules that are not of the package: their names say what is imported."""
    listed = strictjson.loads(read_small(path), source=str(path))
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise Damaged(f"{path} is no list of modules", code="encoder", path=path)
    for item in listed:
        if not str(item.get("type")).startswith(_OWN):
            raise Unsafe(
                f"{path} asks for {item.get('type')!r}; only modules of sentence-transformers"
                " itself are loaded",
                code="code",
                path=path,
            )
