"""Let a target write: token by token, greedily or sampled with a seed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from cgmerge.errors import Damaged, LimitExceeded, UsageError
from cgmerge.evals.targets import Ready
from cgmerge.modules.encoding import encode, end_ids
from cgmerge.modules.formats import Example, Message
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.teacher import position_limit

OnText = Callable[[str], None]
"""Called with each piece of text as it is written."""


@dataclass(frozen=True, slots=True)
class Style:
    """How to write.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        temperature: 0 is greedy.
        top_p: Share of the probability that is sampled from.
        seed: Of the sampling; the same seed gives the same text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What was written.

    Attributes:
        text: Without the end token.
        tokens: How many were written, the end token included.
        finish: Whether it came to its end, or to the limit.
    """

    text: str
    tokens: int
    finish: Literal["end", "length"]


def prompt_ids(prompt: str | Sequence[Message], loaded: LoadedBase) -> list[int]:
    """Turn a text, or a conversation whose last turn is the user's, into tokens.

    The same as in training and evaluation; see `encode_all`.

    Raises:
        UsageError: There are none.
        LimitExceeded: More than the model has positions for.
    """
    whole = prompt if isinstance(prompt, str) else tuple(prompt)
    # The completion stands for nothing: chat templates have to be given one.
    ids = encode(Example(whole, "."), loaded.tokenizer).prompt_ids
    if not ids:
        raise UsageError(
            "a prompt is empty, and this base begins with nothing of its own",
            code="prompt",
            hint="leave out empty prompts and lines",
        )
    limit = position_limit(loaded.model)
    if limit is not None and len(ids) >= limit:
        raise LimitExceeded(
            f"the prompt has {len(ids)} tokens; the model has positions for {limit}",
            code="positions",
            hint="shorten it, or begin a new conversation",
            expected=limit,
            found=len(ids),
        )
    return ids


def write(
    there: Ready,
    prompt: str | Sequence[Message],
    style: Style,
    *,
    task: str | None = None,
    on_text: OnText | None = None,
) -> Reply:
    """Continue a prompt.

    Args:
        there: From `ready`.
        prompt: Plain text, or a conversation.
        style: How.
        task: For compositions that route by task.
        on_text: Called while the text comes in.

    Raises:
        LimitExceeded: The prompt fills all positions of the model.
        UsageError: A routed table, and no such task.
        Damaged: The model gives values that are not finite.
    """
    loaded = there.loaded
    ids = prompt_ids(prompt, loaded)
    ends = end_ids(loaded.tokenizer)
    count = _room(ids, loaded, style.max_new_tokens)
    stream = _Stream(loaded, ends, on_text)
    if there.routing is not None:
        there.routing.route([ids], [task])
    config = GenerationConfig(
        max_new_tokens=count,
        do_sample=style.temperature > 0,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        use_cache=True,
        **({"temperature": style.temperature, "top_p": style.top_p, "top_k": 0}
           if style.temperature > 0 else {}),
    )  # fmt: skip
    generate: Any = loaded.model.generate
    seeded = torch.random.fork_rng() if style.temperature > 0 else nullcontext()
    with seeded, torch.no_grad():
        if style.temperature > 0:
            torch.manual_seed(style.seed)
        place = torch.tensor([ids], device=loaded.model.device)
        try:
            generate(
                place,
                attention_mask=torch.ones_like(place),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Finite()]),
                streamer=stream,
            )
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise _not_finite() from error  # of a temperature near 0
    ended = bool(stream.tokens) and stream.tokens[-1] in ends
    return Reply(stream.shown, len(stream.tokens), "end" if ended else "length")


def _room(ids: Sequence[int], loaded: LoadedBase, wanted: int) -> int:
    limit = position_limit(loaded.model)
    return wanted if limit is None else min(wanted, limit - len(ids))


class _Finite(LogitsProcessor):
    """Refuse what has no likeliest token; `generate` itself would take the first of NaN."""

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        if not bool(scores.max(dim=-1).values.isfinite().all()):  # NaN and infinity are the largest
            raise _not_finite()
        return scores


def _not_finite() -> Damaged:
    return Damaged(
        "the model gives values that are not finite (NaN or infinity)",
        code="not_finite",
        hint="the weights hold NaN or infinity, or overflow their type: --dtype float32",
    )


class _Stream(BaseStreamer):
    """Collect tokens and pass on text that can no longer change."""

    def __init__(self, loaded: LoadedBase, ends: Sequence[int], on_text: OnText | None) -> None:
        self.loaded, self.ends, self.on_text = loaded, ends, on_text
        self.tokens: list[int] = []
        self.shown = ""
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then token by token."""
        if self._prompt:
            self._prompt = False
            return
        self.tokens += value.flatten().tolist()
        text = self._text()
        if not text.endswith("�"):  # the bytes of one character may come in several tokens
            self._show(text)

    def end(self) -> None:
        """Pass on what is left."""
        self._show(self._text())

    def _text(self) -> str:
        kept = [token for token in self.tokens if token not in self.ends]
        return str(self.loaded.tokenizer.decode(kept, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if self.on_text is not None and text.startswith(self.shown):
            new = text[len(self.shown) :]
            if new:
                self.on_text(new)
        self.shown = text
