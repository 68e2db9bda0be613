"""Rows of data files as examples: which format a row is in, and what is learned from it.

| format            | columns                                 | becomes                           |
|-------------------|-----------------------------------------|-----------------------------------|
| prompt/completion | prompt, completion: two strings         | one plain example                 |
| prompt/completion | prompt, completion: lists of messages   | one example per assistant message |
| messages          | messages: list of {role, content}       | one example per assistant message |
| sharegpt          | conversations: list of {from, value}    | as messages                       |
| alpaca            | instruction, output, input?, system?    | as messages                       |
| multiple choice   | prompt, choices: list, answer           | one example, the right choice     |
| text              | text                                    | one example, all of it is learned |

The `answer` of a multiple choice is one of the choices or its place, from 0; `choices` stays among
the other columns. All other columns are kept in `Example.extra`. An assistant message with
`"weight": 0` is context and not learned. Nothing is repaired, skipped or guessed: a row that does
not fit, or that holds what would be lost (tool calls, reasoning), is a `DataError` that names the
row, what was found and what was expected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cgmerge.errors import DataError

FormatName = Literal[
    "prompt/completion", "multiple choice", "messages", "sharegpt", "alpaca", "text"
]

# In this order: alpaca files often carry a rendered `text` column beside their own three, and
# chat files a `prompt` beside `messages`.
FORMATS: dict[FormatName, tuple[str, ...]] = {
    "prompt/completion": ("prompt", "completion"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "multiple choice": ("prompt", "choices", "answer"),
    "text": ("text",),
}
_OPTIONAL: dict[FormatName, tuple[str, ...]] = {
    "sharegpt": ("system",),
    "alpaca": ("input", "system", "history"),
}
_KEPT = {"choices"}
"""Columns of a format that stay in `Example.extra`: metrics of choices read them."""
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
# What a chat template would write and these formats cannot hold.
_LOST_KEYS = ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "thinking")
_LOST_COLUMNS = ("tools", "functions", "tool_calls", "function_call")
_NO_EXTRA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One thing to learn: what stands before, and what must follow.

    Attributes:
        prompt: A string, the messages before the answer, or None when all text is learned.
        completion: What must follow (for `prompt=None` the whole text).
        row: Number of the row in its file, from 1.
        extra: The row's other columns, such as `skill` or `id`.
    """

    prompt: str | tuple[Message, ...] | None
    completion: str
    row: int = 1
    extra: Mapping[str, Any] = field(default_factory=lambda: _NO_EXTRA, hash=False)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row with what its error messages need."""

    source: str
    number: int
    values: Mapping[str, Any]

    def wrong(self, what: str, *, code: str, hint: str | None = None) -> DataError:
        return DataError(
            f"{self.source}, row {self.number}: {what}", code=code, hint=hint, row=self.number
        )

    def text(self, column: str, *, required: bool = True) -> str:
        value = self.values.get(column)
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            raise self.wrong(f"{column!r} must be a string, found {_kind(value)}", code="type")
        if required and not value.strip():
            raise self.wrong(f"{column!r} is empty", code="empty", hint="remove or complete it")
        return value


def detect_format(columns: Sequence[str], *, source: str, row: int) -> FormatName:
    """Name the format that a row's columns belong to.

    Raises:
        DataError: No format has these columns.
    """
    for name, needed in FORMATS.items():
        if all(column in columns for column in needed):
            return name
    found = ", ".join(columns) or "(none)"
    for name, needed in FORMATS.items():
        missing = [column for column in needed if column not in columns]
        # `answer` alone is in files of many kinds.
        begun = "choices" in columns if "choices" in needed else len(missing) < len(needed)
        if begun:
            raise missing_columns(missing, columns, name, source=source, row=row)
    known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in FORMATS.items())
    raise DataError(
        f"{source}, row {row}: no known format has the columns {found}",
        code="format",
        hint=f"rename the columns to one of: {known}",
        row=row,
        found=list(columns),
    )


def missing_columns(
    missing: Sequence[str], columns: Sequence[str], name: FormatName, *, source: str, row: int
) -> DataError:
    """Return the error for a row that lacks columns of a format.

    Args:
        missing: What the format needs and the row has not.
        columns: What the row has.
        name: The format.
        source: What to call the file in messages.
        row: The row's number, from 1.
    """
    words = "the column" if len(missing) == 1 else "the columns"
    return DataError(
        f"{source}, row {row}: {words} {', '.join(map(repr, missing))} of {name} rows"
        f" {'is' if len(missing) == 1 else 'are'} missing; found {', '.join(columns) or '(none)'}",
        code="column",
        hint=f"rows of {name} have {', '.join(FORMATS[name])}; add or rename what is missing",
        row=row,
        expected=list(FORMATS[name]),
        found=list(columns),
    )


def examples_of(
    values: Mapping[str, Any], format_name: FormatName, *, source: str, number: int
) -> list[Example]:
    """Turn one row into its examples.

    Args:
        values: Column to value.
        format_name: From `detect_format`.
        source: What to call the file in messages.
        number: The row's number, from 1.

    Returns:
        At least one example.

    Raises:
        DataError: A value is missing, empty or of the wrong type.
    """
    row = _Row(source, number, values)
    used = {*FORMATS[format_name], *_OPTIONAL.get(format_name, ())} - _KEPT
    extra = MappingProxyType({key: item for key, item in values.items() if key not in used})
    pairs = _READERS[format_name](row)
    return [Example(prompt, completion, number, extra) for prompt, completion in pairs]


_Pair = tuple[str | tuple[Message, ...] | None, str]
_Turn = tuple[Message, bool]
"""A message and whether it is learned (where it is an answer)."""


def _prompt_completion(row: _Row) -> list[_Pair]:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(row, "prompt", prompt, ("role", "content"))
        answer = _messages(row, "completion", completion, ("role", "content"))
        return _assistant_turns(row, [message for message, _ in before], answer)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise row.wrong(
            "'prompt' and 'completion' must both be strings or both be lists of messages, "
            f"found {_kind(prompt)} and {_kind(completion)}",
            code="type",
        )
    return [(row.text("prompt"), row.text("completion"))]


def _multiple_choice(row: _Row) -> list[_Pair]:
    answer, choices = row.values["answer"], read_choices(row.values["choices"], row.wrong)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        answer = choices[answer]
    elif answer not in choices:
        raise row.wrong(
            f"'answer' must be one of the {len(choices)} choices, or its place from 0 to"
            f" {len(choices) - 1}, found {answer!r}",
            code="answer",
        )
    if isinstance(row.values["prompt"], list):
        turns = _messages(row, "prompt", row.values["prompt"], ("role", "content"))
        return [(tuple(message for message, _ in turns), answer)]
    return [(row.text("prompt"), answer)]


def read_choices(value: Any, wrong: Callable[..., DataError]) -> tuple[str, ...]:
    """Check the `choices` of a row: at least two different texts.

    Args:
        value: What the column holds.
        wrong: Makes the error, from what is wrong and a `code`.

    Raises:
        DataError: Something else.
    """
    if not isinstance(value, list) or len(value) < 2:
        raise wrong(f"'choices' must be a list of at least two, found {_kind(value)}", code="type")
    for one in value:
        if not isinstance(one, str) or not one.strip():
            raise wrong(f"'choices' must hold texts, found {one!r}", code="type")
    if len(set(value)) < len(value):
        raise wrong("'choices' holds the same text twice", code="choices")
    return tuple(value)


def _chat(row: _Row) -> list[_Pair]:
    messages = _messages(row, "messages", row.values["messages"], ("role", "content"))
    return _assistant_turns(row, [], messages)


def _sharegpt(row: _Row) -> list[_Pair]:
    turns = _messages(row, "conversations", row.values["conversations"], ("from", "value"))
    system = row.text("system", required=False)
    before = [Message("system", system)] if system.strip() else []
    return _assistant_turns(row, before, turns)


def _alpaca(row: _Row) -> list[_Pair]:
    instruction = row.text("instruction")
    context = row.text("input", required=False)
    system = row.text("system", required=False)
    before = [Message("system", system)] if system.strip() else []
    before += _history(row)
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    return [((*before, Message("user", question)), row.text("output"))]


def _history(row: _Row) -> list[Message]:
    """Return earlier turns; nothing, and the empty cell of a table, mean none."""
    value = row.values.get("history")
    if value is None or value == "":
        return []
    turns = value if isinstance(value, list) else [value]
    result = []
    for turn in turns:
        if not isinstance(turn, list) or [_kind(part) for part in turn] != ["string", "string"]:
            found = "" if turns is value else f", found {_kind(value)}"
            raise row.wrong(f"'history' must be a list of [question, answer]{found}", code="type")
        result += [Message("user", turn[0]), Message("assistant", turn[1])]
    return result


def _text(row: _Row) -> list[_Pair]:
    return [(None, row.text("text"))]


_READERS: dict[FormatName, Callable[[_Row], list[_Pair]]] = {
    "prompt/completion": _prompt_completion,
    "multiple choice": _multiple_choice,
    "messages": _chat,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "text": _text,
}


def _messages(row: _Row, column: str, value: Any, keys: tuple[str, str]) -> list[_Turn]:
    role_key, text_key = keys
    for name in _LOST_COLUMNS:
        if row.values.get(name) not in (None, "", "[]", [], {}):
            raise _lost(row, "there is the column", name)
    if not isinstance(value, list) or not value:
        raise row.wrong(
            f"{column!r} must be a list of {{{role_key}, {text_key}}}, found {_kind(value)}",
            code="type",
        )
    turns = (
        _message(row, f"{column!r}, message {place}", turn, keys)
        for place, turn in enumerate(value, start=1)
    )
    return [turn for turn in turns if turn is not None]


def _message(row: _Row, where: str, turn: Any, keys: tuple[str, str]) -> _Turn | None:
    """Read one message; None for an empty system message, which says that there is none."""
    role_key, text_key = keys
    if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
        found = f"keys {', '.join(turn)}" if isinstance(turn, dict) else _kind(turn)
        raise row.wrong(
            f"{where} must hold {role_key!r} and {text_key!r}, found {found}", code="type"
        )
    for name in _LOST_KEYS:
        if turn.get(name) not in (None, "", [], {}):
            raise _lost(row, f"{where} has", name)
    role, content = turn[role_key], turn[text_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise row.wrong(
            f"{where} has the role {role!r}; known are {', '.join(_ROLES)}", code="role"
        )
    if not isinstance(content, str):
        raise row.wrong(f"{where} must hold a string, found {_kind(content)}", code="type")
    if not content.strip():
        if _ROLES[role] == "system":
            return None
        raise row.wrong(f"{where} ({role}) is empty", code="empty")
    message = Message(_ROLES[role], content)
    return message, _is_learned(row, where, message, turn.get("weight"))


def _lost(row: _Row, what: str, name: str) -> DataError:
    return row.wrong(
        f"{what} {name!r}, which cannot be learned: it would be lost",
        code="unsupported",
        hint=f"remove {name!r}, or write it into the text of the messages",
    )


def _is_learned(row: _Row, where: str, message: Message, weight: Any) -> bool:
    """Read the `weight` of a message: 0 makes an answer context; only answers can be learned."""
    if weight is None:
        return True
    allowed = (0, 1) if message.role == "assistant" else (0,)
    if isinstance(weight, bool) or weight not in allowed:
        words = " or ".join(map(str, allowed))
        raise row.wrong(
            f"{where} ({message.role}): 'weight' must be {words}, found {weight!r}",
            code="weight",
            hint="answers of weight 1 are learned, all else is context; repeat rows to weigh more",
        )
    return bool(weight)


def _assistant_turns(row: _Row, before: list[Message], turns: list[_Turn]) -> list[_Pair]:
    pairs: list[_Pair] = []
    context = list(before)
    for message, learned in turns:
        if message.role != "assistant":
            context.append(message)
            continue
        if not any(earlier.role == "user" for earlier in context):
            raise row.wrong(
                "the first assistant message has no user message before it",
                code="role",
                hint="a conversation starts with the user (a system message may stand before)",
            )
        if learned:
            pairs.append((tuple(context), message.content))
        context.append(message)
    if not pairs:
        raise row.wrong("there is no assistant message to learn from", code="role")
    return pairs


def _kind(value: Any) -> str:
    names = {
        type(None): "nothing",
        str: "string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return names.get(type(value), type(value).__name__)
