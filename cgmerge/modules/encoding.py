"""How an example becomes tokens: the one place that training, scoring and generation share.

Prompt and completion are tokenized apart and joined, so that generation from `prompt_ids` sees
exactly what training saw. A completion ends with the end token: the tokenizer's own for plain
text, the chat template's end of turn for messages. Nothing after the end token is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cgmerge.errors import DataError, Incompatible
from cgmerge.modules.formats import Example, Message
from cgmerge.shown import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rendering = Literal["chat template", "role marks", "joined"]
_MARKS = {"user": "### User:\n", "assistant": "### Assistant:\n", "system": "### System:\n"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one example; the loss covers `target_ids` and nothing else.

    Attributes:
        prompt_ids: What generation starts from (begin token included where the tokenizer adds it).
        target_ids: What must follow, end token included.
        cut: How many prompt tokens were cut from the left to fit `max_length`.
    """

    prompt_ids: list[int]
    target_ids: list[int]
    cut: int = 0

    def __len__(self) -> int:
        """Return the number of tokens in all."""
        return len(self.prompt_ids) + len(self.target_ids)


def encode(
    example: Example, tokenizer: "PreTrainedTokenizerBase", *, max_length: int | None = None
) -> Encoded:
    """Turn one example into tokens; see `encode_all`."""
    return encode_all([example], tokenizer, max_length=max_length)[0]


def unknown_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that stands for what a tokenizer does not know.

    None where it has none, also in the manner of GPT-2, which knows every byte and names its end
    token for it.
    """
    own = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown in own else unknown


def encode_all(
    examples: Sequence[Example],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    source: str = "",
    positions: int | None = None,
) -> list[Encoded]:
    """Turn examples into tokens.

    Args:
        examples: From `read_data`.
        tokenizer: The base's own.
        max_length: Longest prompt and target together; longer prompts lose tokens on the left
            (never the begin token), targets are never cut.
        source: What to call the rows' file in messages.
        positions: Most tokens that the base takes, whatever `max_length` is.

    Returns:
        One `Encoded` per example, in order.

    Raises:
        DataError: Targets that do not fit, or messages that the chat template refuses.
        Incompatible: The tokenizer has no end token.
    """
    style = rendering(tokenizer)
    pairs = [_texts(example, tokenizer, style) for example in examples]
    begin = begin_ids(tokenizer)
    prompts = _ids([prompt for prompt, _ in pairs], tokenizer)
    targets = _ids([target for _, target in pairs], tokenizer)
    ends = end_ids(tokenizer)
    result = []
    for example, prompt, target in zip(examples, prompts, targets, strict=True):
        # A chat template writes its own begin token; plain text gets the tokenizer's.
        chat = isinstance(example.prompt, tuple) and style == "chat template"
        full = target if target and target[-1] in ends else [*target, ends[0]]
        result.append(_fit([] if chat else begin, prompt, full, max_length))
    _refuse_long(examples, result, max_length, (source, positions))
    return result


def begin_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that the tokenizer puts before any text by default (often none)."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def end_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the tokens that end a completion: generation stops at any of them.

    The first is the tokenizer's end token; a chat template may add its own end of turn.

    Raises:
        Incompatible: The tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise Incompatible(
            "the tokenizer of the base has no end token (eos_token)",
            code="eos",
            hint="set eos_token in the base's tokenizer_config.json",
        )
    ends = [int(tokenizer.eos_token_id)]
    if rendering(tokenizer) == "chat template":
        turn = _chat_target((Message("user", "a"),), "b", tokenizer)
        last = _ids([turn], tokenizer)[0][-1:]
        ends += [token for token in last if token in tokenizer.all_special_ids]
    return tuple(dict.fromkeys(ends))


def rendering(tokenizer: "PreTrainedTokenizerBase") -> Rendering:
    """Say how messages become text with this tokenizer.

    `chat template` where the base has one. Otherwise `role marks`: every message under
    `### User:`, `### Assistant:` or `### System:`, with an empty line between. Word-level
    vocabularies that do not know these marks get the bare contents `joined` by line ends.
    """
    if tokenizer.chat_template:
        return "chat template"
    marks = _ids(list(_MARKS.values()), tokenizer)
    unknown = tokenizer.unk_token_id
    if unknown is not None and any(unknown in ids for ids in marks):
        return "joined"
    return "role marks"


def render(example: Example, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Show an example as the model sees it; `⟦ ⟧` stand around what the loss covers."""
    encoded = encode(example, tokenizer)
    prompt = _decode(encoded.prompt_ids, tokenizer)
    gap = " " if prompt and not prompt[-1].isspace() else ""
    return f"{prompt}{gap}⟦{_decode(encoded.target_ids, tokenizer)}⟧"


def _texts(
    example: Example, tokenizer: "PreTrainedTokenizerBase", style: Rendering
) -> tuple[str, str]:
    prompt = example.prompt
    if prompt is None:
        return "", example.completion
    if isinstance(prompt, str):
        return prompt, example.completion
    match style:
        case "joined":
            return "".join(f"{message.content}\n" for message in prompt), example.completion
        case "role marks":
            parts = [f"{_MARKS[message.role]}{message.content}\n\n" for message in prompt]
            return "".join(parts) + _MARKS["assistant"], example.completion
    try:
        text = _template(prompt, tokenizer, ask=True)
        return text, _chat_target(prompt, example.completion, tokenizer)
    except Incompatible as error:
        raise DataError(
            f"row {example.row}: {error.message}", code="chat_template", row=example.row
        ) from error


def _chat_target(
    prompt: tuple[Message, ...], completion: str, tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """Text that follows the prompt up to and including the end of turn."""
    before = _template(prompt, tokenizer, ask=True)
    full = _template((*prompt, Message("assistant", completion)), tokenizer, ask=False)
    if full.startswith(before):
        target = full[len(before) :]
    else:
        # The template asks for an answer differently from how it writes one (an opened
        # reasoning block, for example): keep the prompt that generation will see.
        start = full.rfind(completion.strip())
        target = full[start:] if start >= 0 else ""
    if not target.strip():
        raise Incompatible("the chat template does not write the assistant's text")
    trimmed = target.rstrip()
    ends_turn = any(trimmed.endswith(token) for token in tokenizer.all_special_tokens)
    return trimmed if ends_turn else target


def _template(
    messages: tuple[Message, ...], tokenizer: "PreTrainedTokenizerBase", *, ask: bool
) -> str:
    from jinja2 import TemplateError

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask))
    except TemplateError as error:
        raise Incompatible(f"the chat template refuses the messages: {error}") from error


def _ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    if not texts:
        return []
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False}
    # `verbose=False` silences the advice about long inputs: lengths are checked here.
    ids: list[list[int]] = tokenizer(texts, verbose=False, **options)["input_ids"]
    return ids


def _fit(begin: list[int], prompt: list[int], target: list[int], limit: int | None) -> Encoded:
    room = len(prompt) if limit is None else limit - len(begin) - len(target)
    cut = max(0, len(prompt) - max(room, 0))
    return Encoded([*begin, *prompt[cut:]], target, cut)


def _refuse_long(
    examples: Sequence[Example],
    encoded: Sequence[Encoded],
    limit: int | None,
    about: tuple[str, int | None],
) -> None:
    if limit is None:
        return
    long = [
        (len(item), example.row)
        for example, item in zip(examples, encoded, strict=True)
        if len(item) > limit
    ]
    if long:
        longest, row = max(long)
        source, positions = about
        beyond = sum(length > (positions or longest) for length, _ in long)
        hint = f"--max-length {longest}, or shorten the rows"
        if beyond:
            hint = (
                f"the base takes at most {positions} tokens: shorten or drop the"
                f" {counted(beyond, 'row')} whose targets are longer"
            )
        raise DataError(
            f"{source}: "
            * bool(source)
            + f"{len(long)} of {len(encoded)} rows have a target that does not fit into "
            f"{limit} tokens; the longest (row {row}) needs {longest}",
            code="too_long",
            hint=hint,
            row=row,
            expected=limit,
            found=longest,
        )


def _decode(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))
