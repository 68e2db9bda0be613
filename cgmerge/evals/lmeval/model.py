"""Whatever target is in memory, as a model that lm-evaluation-harness can ask.

The harness calls three functions on a model; it needs no base class of its own. Texts become
tokens as in the harness's own model for transformers, so that scores are those of `lm_eval` on a
merged model, but batches go through our scorer: no row depends on its batch-mates, routers see
the prompts they decide on, and nothing of the model's own generation settings gets in between.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cgmerge.errors import DataError, UsageError
from cgmerge.evals import scoring
from cgmerge.evals.targets import Ready
from cgmerge.modules.encoding import Encoded, end_ids
from cgmerge.modules.teacher import position_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_NEW_TOKENS = 256
"""Of a generated answer, where a task does not say; the harness's own default."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_GREEDY = {*_LENGTHS, "until", "do_sample", "temperature", "top_p", "top_k"}


class Asked(Protocol):
    """A request of the harness.

    Attributes:
        args: Context and continuation, or context and settings of generation.
        task_name: The task that it belongs to.
    """

    args: tuple[Any, ...]
    task_name: str | None


class HarnessModel:
    """A target that answers requests.

    Args:
        there: The target in memory.
        batch_size: Most requests in a pass.
        advance: Called with the number of requests that were just answered.
    """

    rank = 0
    world_size = 1

    def __init__(
        self, there: Ready, *, batch_size: int, advance: Callable[[int], None] | None = None
    ) -> None:
        self.there, self.batch_size, self.advance = there, batch_size, advance
        self.cut = 0
        """Requests whose context lost tokens on the left to fit the model."""

    def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it.

        Raises:
            DataError: A continuation without tokens, or longer than the model.
            Damaged: Logits that are not finite.
        """
        loaded = self.there.loaded
        limit = position_limit(loaded.model)
        rows = [
            _fitting(_pair(one.args[0], one.args[1], loaded.tokenizer), one, limit)
            for one in requests
        ]
        self.cut += sum(row.cut > 0 for row in rows)
        scores = scoring.score(
            loaded.model,
            rows,
            batch_size=self.batch_size,
            advance=self.advance,
            prepare=self._prepare(rows, requests),
        )
        return [(one.loglik * one.tokens, one.correct) for one in scores]

    def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
        """Refuse to score whole texts.

        Raises:
            UsageError: Always; such tasks have no score for each item.
        """
        raise UsageError(
            f"{requests[0].task_name} measures the perplexity of whole texts, which is no score of"
            " an item",
            code="output_type",
            hint="cgmerge eval --metric perplexity --data FILE",
        )

    def generate_until(self, requests: Sequence[Asked]) -> list[str]:
        """Return what greedy decoding writes after each context, up to a stop or the end token.

        Raises:
            UsageError: A task that asks for sampling or beams, or for more tokens than the model
                has positions.
        """
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for place, one in enumerate(requests):
            groups.setdefault(_settings(one), []).append(place)
        found: dict[int, str] = {}
        for (until, longest), places in groups.items():
            texts = self._write([requests[i] for i in places], until, longest)
            found.update(zip(places, texts, strict=True))
        return [found[place] for place in range(len(requests))]

    def _write(self, asked: Sequence[Asked], until: tuple[str, ...], longest: int) -> list[str]:
        loaded = self.there.loaded
        limit = position_limit(loaded.model)
        if limit is not None and longest >= limit:
            raise UsageError(
                f"{asked[0].task_name} writes up to {longest} tokens, and the model has positions"
                f" for {limit} in all",
                code="max_gen_toks",
                hint="set max_gen_toks in the generation_kwargs of the task",
                expected=limit,
                found=longest,
            )
        room = None if limit is None else limit - longest
        contexts = [_context(one.args[0], loaded.tokenizer) for one in asked]
        self.cut += sum(room is not None and len(ids) > room for ids in contexts)
        ends = end_ids(loaded.tokenizer)
        # The target is never looked at: `longest` says how much is written.
        rows = [Encoded(ids if room is None else ids[-room:], [ends[0]]) for ids in contexts]
        written = scoring.generate(
            loaded.model,
            rows,
            ends=ends,
            batch_size=self.batch_size,
            longest=longest,
            advance=self.advance,
            prepare=self._prepare(rows, asked),
            stopping=lambda width: _Until(until, loaded.tokenizer, width),
        )
        return [_before(_decode(ids, loaded.tokenizer), until) for ids in written]

    def fingerprint(self, requests: Sequence[Asked]) -> list[float]:
        """Return the log-likelihood of the last token of each context: what tells models apart.

        Args:
            requests: Of any kind; contexts of a single token say nothing and are left out.
        """
        loaded = self.there.loaded
        limit = position_limit(loaded.model) or 0
        ids = [_context(one.args[0], loaded.tokenizer)[-limit:] for one in requests]
        asked = [one for one, tokens in zip(requests, ids, strict=True) if len(tokens) > 1]
        rows = [Encoded(tokens[:-1], tokens[-1:]) for tokens in ids if len(tokens) > 1]
        prepare = self._prepare(rows, asked)
        scores = scoring.score(loaded.model, rows, batch_size=self.batch_size, prepare=prepare)
        return [one.loglik for one in scores]

    def _prepare(self, rows: Sequence[Encoded], asked: Sequence[Asked]) -> scoring.Prepare:
        def prepare(batch: Sequence[int]) -> None:
            if self.there.routing is not None:
                self.there.routing.route(
                    [rows[i].prompt_ids for i in batch], [asked[i].task_name for i in batch]
                )

        return prepare


def _pair(context: str, continuation: str, tokenizer: "PreTrainedTokenizerBase") -> Encoded:
    """Split a text into tokens of context and continuation as the harness does.

    Source:
        `TemplateLM.loglikelihood` and `_encode_pair` of lm_eval 0.4.13: the whole is tokenized,
        and what is longer than the context alone is the continuation; spaces at the end of the
        context belong to the continuation; without a context the begin or end token stands there.
    """
    if not context:
        first, ids = _prefix(tokenizer), _ids(continuation, tokenizer, special=False)
        return Encoded([first], ids) if ids[:1] != [first] else Encoded(ids[:1], ids[1:])
    kept = context.rstrip()
    if not kept:  # tokens of white space alone, all of which would move
        return Encoded(_context(context, tokenizer), _ids(continuation, tokenizer, special=False))
    whole = _ids(context + continuation, tokenizer)
    before = _ids(kept, tokenizer)
    return Encoded(before, whole[len(before) :])


def _fitting(row: Encoded, asked: Asked, limit: int | None) -> Encoded:
    """Cut a row on the left; the last token is asked for, so that it needs no position."""
    if not row.target_ids:
        raise DataError(
            f"{asked.task_name}: the continuation {str(asked.args[1])[:60]!r} has no tokens",
            code="empty_target",
            hint="see `target_delimiter` and the choices of the task",
        )
    if limit is None or len(row) <= limit + 1:
        return row
    room = limit + 1 - len(row.target_ids)
    if room < 1:
        raise DataError(
            f"{asked.task_name}: a continuation has {len(row.target_ids)} tokens, and the model"
            f" has positions for {limit}",
            code="too_long",
            expected=limit,
            found=len(row.target_ids),
        )
    return Encoded(row.prompt_ids[-room:], row.target_ids, len(row.prompt_ids) - room)


def _context(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return _ids(text, tokenizer) or [_prefix(tokenizer)]


def _prefix(tokenizer: "PreTrainedTokenizerBase") -> int:
    begin = tokenizer.bos_token_id
    return end_ids(tokenizer)[0] if begin is None else int(begin)


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase", *, special: bool = True) -> list[int]:
    # A text that brings its own begin token gets no second one.
    has_begin = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    options: dict[str, Any] = {"add_special_tokens": special and not has_begin, "verbose": False}
    ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def _decode(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _settings(asked: Asked) -> tuple[tuple[str, ...], int]:
    """Return where a text stops and how many tokens it has at most."""
    options: Mapping[str, Any] = asked.args[1]
    temperature = options.get("temperature") or 0.0
    strange = [key for key in options if key not in _GREEDY]
    if strange or options.get("do_sample") or (
        temperature and options.get("do_sample") is None
    ):  # fmt: skip
        what = f"{strange[0]} = {options[strange[0]]!r}" if strange else "sampling"
        raise UsageError(
            f"{asked.task_name} asks for {what}; texts are generated greedily",
            code="generation",
            hint="change the generation_kwargs of the task",
        )
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    length = next((options[key] for key in _LENGTHS if options.get(key) is not None), None)
    longest = MOST_NEW_TOKENS if length is None else length
    if not isinstance(longest, int) or longest < 1 or not all(isinstance(s, str) for s in stops):
        raise UsageError(
            f"{asked.task_name}: {longest!r} tokens until {stops!r} is not possible",
            code="generation",
        )
    return tuple(stop for stop in stops if stop), longest


def _before(text: str, until: Sequence[str]) -> str:
    """Return what stands before the first of some texts, each cut in turn as the harness does."""
    for stop in until:
        text = text.split(stop, maxsplit=1)[0]
    return text


class _Until:
    """Stop a row of a batch once one of some texts stands in it."""

    def __init__(
        self, until: Sequence[str], tokenizer: "PreTrainedTokenizerBase", width: int
    ) -> None:
        self.until, self.tokenizer, self.width = until, tokenizer, width
        # A letter is up to four tokens of bytes; older text was looked at when it was new.
        self.tail = 4 * max(map(len, until), default=0) + 4

    def __call__(self, ids: Tensor, _scores: Any, **_options: Any) -> Tensor:
        """Return which rows are done, [rows]."""
        new = ids[:, max(self.width, ids.shape[1] - self.tail) :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True) if self.until else []
        done = [any(stop in text for stop in self.until) for text in texts] or [False] * len(ids)
        return torch.tensor(done, device=ids.device)
