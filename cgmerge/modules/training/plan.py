"""Everything that is known before the first step: rows as tokens, modules, counts, defaults.

The base is read by its headers and built without weights, so a dry run costs seconds and no
memory whatever the size of the model.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cgmerge.errors import DataError, Incompatible, UsageError
from cgmerge.inputs import refuse_inputs
from cgmerge.modules.base import Base, open_base
from cgmerge.modules.data import (
    DataFile,
    Encoded,
    Example,
    Rendering,
    encode_all,
    read_data,
    render,
    rendering,
)
from cgmerge.modules.encoding import unknown_token
from cgmerge.modules.loading import load_tokenizer, pick_device, pick_dtype
from cgmerge.modules.training.defaults import Chosen, choose
from cgmerge.modules.training.processes import process_count
from cgmerge.modules.training.quantized import settle_bitsandbytes
from cgmerge.modules.training.settings import TrainSettings
from cgmerge.modules.training.skeleton import build_empty, find_targets

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")


@dataclass(frozen=True)
class Plan:
    """A run that can start.

    Attributes:
        settings: What the user asked for.
        chosen: What the user left open, filled in.
        base: The base by its headers.
        data: The training files.
        eval_data: The files that are scored afterwards.
        rows: Training rows as tokens.
        eval_rows: Evaluation rows as tokens.
        targets: Module path to (out, in) features, in the order of the model.
        transposed: Whether the targets are GPT-2's Conv1D.
        total: Parameters of the base.
        device: Type of the device, e.g. `cpu`.
        dtype: Float type of the base in memory.
        example: The first row as the model sees it, `⟦ ⟧` around what is learned.
        how: How messages become text, or None where rows are plain text.
        warnings: What the user should know.
    """

    settings: TrainSettings
    chosen: Chosen
    base: Base = field(repr=False)
    data: tuple[DataFile, ...]
    eval_data: tuple[DataFile, ...]
    rows: tuple[Encoded, ...] = field(repr=False)
    eval_rows: tuple[Encoded, ...] = field(repr=False)
    targets: dict[str, tuple[int, int]] = field(repr=False)
    transposed: bool
    total: int
    device: str
    dtype: str
    example: str
    how: Rendering | None
    warnings: tuple[str, ...]

    @property
    def trainable(self) -> int:
        """Return the number of parameters of all A and B together."""
        return self.settings.rank * sum(out + width for out, width in self.targets.values())

    @property
    def step_rows(self) -> int:
        """Return the rows of a step: a batch never holds a row twice."""
        return min(self.chosen.batch_size, len(self.rows))

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest training row."""
        return max(map(len, self.rows))

    @property
    def base_bytes(self) -> int:
        """Estimate the memory of the frozen base in bytes."""
        widths = {"float32": 4, "bfloat16": 2, "float16": 2}
        whole = self.total * widths[self.dtype]
        if not self.settings.load_in_4bit:
            return whole
        linear = sum(out * width for out, width in self.targets.values())
        return whole - linear * widths[self.dtype] + linear * 9 // 16

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a run to go on from another run's checkpoint.

        The result's bytes follow from these (and from package versions and thread count).
        """
        settings = asdict(self.settings) | asdict(self.chosen)
        for name in ("data", "eval_data", "out", "epochs", "checkpoint_steps", "reasons"):
            del settings[name]
        return {
            **settings,
            "target_modules": list(self.settings.target_modules),
            "base": self.base.fingerprint,
            "data": [file.sha256 for file in self.data],
            "eval_data": [file.sha256 for file in self.eval_data],
            "tokens": _token_digest(self.rows),
            "device": self.device,
            "dtype": self.dtype,
            "processes": process_count(),
        }


def make_plan(settings: TrainSettings) -> Plan:
    """Read base headers and data, tokenize, choose what the user left open.

    Raises:
        NotFound: No such base or data file.
        DataError: Rows that cannot be used.
        Incompatible: A base that is no causal language model, or whose tokenizer does not fit.
        UsageError: Settings that do not fit the base.
        MissingExtra: 4-bit asked for without bitsandbytes.
    """
    if settings.load_in_4bit:
        settle_bitsandbytes(needed=True)
    files = tuple(read_data(path) for path in settings.data)
    eval_files = tuple(read_data(path) for path in settings.eval_data)
    base = open_base(settings.base)
    refuse_inputs(settings.out, [*settings.data, *settings.eval_data, base.folder])
    device = _device(settings)
    dtype = str(pick_dtype(settings.dtype, device)).removeprefix("torch.")
    tokenizer = load_tokenizer(base)
    limit = _length_limit(settings, base)
    rows = _encode(files, tokenizer, limit, _positions(base))
    eval_rows = _encode(eval_files, tokenizer, limit, _positions(base))
    _check_vocabulary(base, (*rows, *eval_rows))
    targets, transposed = find_targets(build_empty(base), settings.target_modules)
    first = files[0].examples[0]
    return Plan(
        settings=settings,
        chosen=choose(settings, base, rows, limit),
        base=base,
        data=files,
        eval_data=eval_files,
        rows=rows,
        eval_rows=eval_rows,
        targets=targets,
        transposed=transposed,
        total=sum(math.prod(info.shape) for info in base.infos.values()),
        device=device.type,
        dtype=dtype,
        example=render(first, tokenizer),
        how=rendering(tokenizer) if isinstance(first.prompt, tuple) else None,
        warnings=tuple(_warnings(files, eval_files, (rows, eval_rows), tokenizer)),
    )


def _device(settings: TrainSettings) -> "torch.device":
    device = pick_device(settings.device)
    if device.index:
        # transformers' trainer takes the first accelerator that a process sees.
        raise UsageError(
            f"training cannot be put on {device}; it takes the first device it sees",
            code="device",
            hint=f"CUDA_VISIBLE_DEVICES={device.index} cgmerge train … --device {device.type}",
            found=str(device),
        )
    return device


def _encode(
    files: Sequence[DataFile],
    tokenizer: "PreTrainedTokenizerBase",
    limit: int | None,
    positions: int | None,
) -> tuple[Encoded, ...]:
    result: list[Encoded] = []
    for file in files:
        encoded = encode_all(
            file.examples,
            tokenizer,
            max_length=limit,
            source=str(file.path),
            positions=positions,
        )
        for example, row in zip(file.examples, encoded, strict=True):
            _check_learnable(file, example, row)
        result += encoded
    return tuple(result)


def _check_learnable(file: DataFile, example: Example, row: Encoded) -> None:
    """A target of nothing but the end token would teach the model to stop at once."""
    if len(row.target_ids) < 2:
        raise DataError(
            f"{file.path}, row {example.row}: the tokenizer makes no tokens of the completion "
            f"{example.completion[:40]!r}",
            code="no_target",
            hint="the base's tokenizer knows none of it: change the row, or the base",
            row=example.row,
        )


def _check_vocabulary(base: Base, rows: Sequence[Encoded]) -> None:
    size = base.vocab_size
    if size is None or not rows:
        return
    highest = max(max(*row.prompt_ids, *row.target_ids) for row in rows)
    if highest >= size:
        raise Incompatible(
            f"the tokenizer of {base.ref} gives token {highest}; its model knows {size} tokens",
            code="vocabulary",
            hint="the base folder mixes files of two models",
            expected=size,
            found=highest,
        )


def _positions(base: Base) -> int | None:
    """Return the most tokens that the base takes, where its config says."""
    values = (base.config.get(name) for name in _POSITIONS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _length_limit(settings: TrainSettings, base: Base) -> int | None:
    own = _positions(base)
    if settings.max_length is None:
        return own
    if own is not None and settings.max_length > own:
        raise UsageError(
            f"max_length {settings.max_length} is beyond the {own} positions of {base.ref}",
            code="max_length",
            expected=own,
            found=settings.max_length,
        )
    return settings.max_length


def _unknown(token: int, rows: Sequence[Encoded]) -> list[str]:
    """Say how much of the data the tokenizer does not know: what it cannot write is not learned."""
    count = sum((*row.prompt_ids, *row.target_ids).count(token) for row in rows)
    if not count:
        return []
    total = sum(len(row.prompt_ids) + len(row.target_ids) for row in rows)
    answers = sum(token in row.target_ids for row in rows)
    said = f"{count:,} of {total:,} tokens of the data are unknown to the base's tokenizer"
    if answers:
        said += f"; {answers:,} of {len(rows):,} answers hold such, and can never be written"
    return [said]


def _warnings(
    files: Sequence[DataFile],
    eval_files: Sequence[DataFile],
    encoded: tuple[Sequence[Encoded], Sequence[Encoded]],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[str]:
    rows, eval_rows = encoded
    result = [
        f"{file.path}: {file.duplicates} of {len(file.examples)} examples repeat an earlier one"
        for file in files
        if file.duplicates
    ]
    cut = sum(1 for row in rows if row.cut)
    if cut:
        result.append(f"{cut} of {len(rows)} prompts were cut from the left to fit --max-length")
    unknown = unknown_token(tokenizer)
    if unknown is not None:
        result += _unknown(unknown, [*rows, *eval_rows])
    seen = {(e.prompt, e.completion) for file in files for e in file.examples}
    shared = sum((e.prompt, e.completion) in seen for f in eval_files for e in f.examples)
    if shared:
        result.append(
            f"{shared} of {len(eval_rows)} evaluation rows stand in the training data too: "
            "the score will flatter"
        )
    return result


def _token_digest(rows: Sequence[Encoded]) -> str:
    """Digest of the training rows as tokens: covers tokenizer, template, order and truncation."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.prompt_ids}{row.target_ids}\n".encode())
    return digest.hexdigest()
