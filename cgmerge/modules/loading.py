"""Bring a base model into memory with transformers: offline, no remote code, guarded 4-bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgmerge.errors import EnvironmentProblem, Incompatible, MissingExtra, UsageError
from cgmerge.modules.base import Base
from cgmerge.shown import some_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", ".tiktoken")
"""Parts of the names of files that tokenizers come in."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A model in evaluation mode, its tokenizer, and the files both came from."""

    base: Base
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def pick_device(wanted: str = "auto") -> "torch.device":
    """Choose where to compute: the first accelerator there is, else the CPU.

    Raises:
        UsageError: No such kind of device.
        EnvironmentProblem: The device that was asked for is not there.
    """
    import torch

    _check_device(wanted)

    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(wanted)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentProblem(
            f"device {wanted!r} cannot be used: {reason}", code="device", hint="use --device cpu"
        ) from error
    return device


def devices() -> list[str]:
    """List what can be computed on: `cpu`, and every accelerator by number."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))]


def _check_device(wanted: str) -> None:
    """Refuse what names no device, and `meta`, which computes nothing."""
    import torch

    if wanted == "auto":
        return
    try:
        known = torch.device(wanted).type != "meta"
    except RuntimeError:
        known = False
    if not known:
        raise UsageError(
            f"unknown device {wanted!r}",
            code="device",
            hint=f"there are: auto, {', '.join(devices())}",
            found=wanted,
        )


def pick_dtype(wanted: str, device: "torch.device") -> "torch.dtype":
    """Choose the float type: float32 on the CPU, bfloat16 (else float16) on an accelerator.

    Raises:
        UsageError: Not one of `DTYPES`.
    """
    import torch

    if wanted not in DTYPES:
        raise UsageError(f"unknown dtype {wanted!r}; one of {', '.join(DTYPES)}", code="dtype")
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def load_base(
    base: Base,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    with_encoder: bool = False,
) -> LoadedBase:
    """Load model and tokenizer from the base's own folder.

    Args:
        base: From `open_base`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` …
        dtype: One of `DTYPES`.
        load_in_4bit: NF4 through bitsandbytes, with its CPU repacking switched off.
        with_encoder: Whether the caller can use a model that reads prompts with an encoder.

    Raises:
        Incompatible: Not a language model that transformers knows, or one with an encoder where
            only causal ones will do.
        MissingExtra: 4-bit asked for without bitsandbytes.
        EnvironmentProblem: No such device.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if not with_encoder:
        refuse_encoder(base)
    place = pick_device(device)
    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "dtype": pick_dtype(dtype, place),
    }
    if load_in_4bit:
        options["quantization_config"] = _four_bit(options["dtype"])
        options["device_map"] = {"": place}
    with quiet_transformers():
        try:
            kind: Any = AutoModelForSeq2SeqLM if base.has_encoder else AutoModelForCausalLM
            model = kind.from_pretrained(base.folder, **options)
        except (ValueError, KeyError, OSError) as error:
            raise Incompatible(
                f"transformers cannot load {base.folder}: {str(error).splitlines()[0]}",
                code="base_load",
                path=base.folder,
            ) from error
    tokenizer = load_tokenizer(base)
    if not load_in_4bit:
        model.to(place)
    guard_four_bit(model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return LoadedBase(base, model.eval(), tokenizer)


def load_tokenizer(base: Base) -> "PreTrainedTokenizerBase":
    """Load the base's tokenizer: offline, no remote code.

    Raises:
        Incompatible: There is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    # Without files some classes make a tokenizer that knows nothing, others an odd error.
    names = {path.name for path in base.folder.iterdir()}
    if not any(word in name for name in names for word in _TOKENIZER):
        raise Incompatible(
            f"{base.folder} holds no tokenizer: none of {some_of(sorted(names))} is a file of one",
            code="tokenizer",
            hint="copy tokenizer.json, tokenizer_config.json and the like from where the model is"
            " from",
            path=base.folder,
            found=sorted(names),
        )
    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                base.folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError, TypeError) as error:
            raise Incompatible(
                f"transformers cannot load a tokenizer from {base.folder}: "
                f"{' '.join(str(error).split())[:200]}",
                code="tokenizer",
                hint="its files may be damaged, or of another model: copy them again",
                path=base.folder,
            ) from error
    return tokenizer


def refuse_encoder(base: Base) -> None:
    """Refuse a model that reads prompts with an encoder, for what only causal ones can do.

    Raises:
        Incompatible: It is one.
    """
    if base.has_encoder:
        raise Incompatible(
            f"{base.ref} reads prompts with an encoder; this takes causal language models",
            code="encoder",
            hint="such models can be merged, scored (eval) and learned for (compose --examples,"
            " --tune)",
        )


def guard_four_bit(model: "torch.nn.Module") -> int:
    """Stop bitsandbytes from repacking 4-bit weights in place on AVX512-BF16 CPUs.

    One evaluation pass there converts the weights to another layout, after which merging,
    saving and training gradients are silently wrong (bitsandbytes 0.50).

    Returns:
        How many layers were guarded.
    """
    guarded = 0
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            guarded += 1
    return guarded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence loading bars and advice on stderr; errors still raise."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _four_bit(compute: "torch.dtype") -> Any:
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise MissingExtra(
            f"4-bit loading needs bitsandbytes, which cannot be imported: {error}",
            code="bitsandbytes",
            hint="pip install bitsandbytes",
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
