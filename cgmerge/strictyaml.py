"""YAML as recipes need it: plain data, bounded work, numbers as everybody writes them.

PyYAML's safe loader expands aliases without limit, keeps the last of two equal keys, reads `no`
as false, `1:30` as 90 and `1e-4` as text, and lets bare ValueErrors through. Here its parser
gives the events only: no aliases, tags or dates, equal keys are errors, and plain scalars follow
the core schema of YAML 1.2 (`true`, `false`, `null`, decimal numbers; all else is text).
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from cgmerge.errors import UsageError

MAX_BYTES = 128 * 1024
"""PyYAML needs some 20 µs a byte; this is a recipe of a thousand experts."""

MAX_DEPTH = 12
MAX_VALUES = 10_000
_MAX_DIGITS = 300
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.title(), word.upper())
}


def loads_mapping(data: bytes, *, source: str) -> dict[str, Any]:
    """Parse one YAML document that holds a mapping.

    Args:
        data: UTF-8 bytes.
        source: What to call the document in messages.

    Raises:
        UsageError: Too long, not YAML, aliases, tags, equal keys, or not a mapping.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{source} has {len(data):,} bytes; the limit for YAML is {MAX_BYTES:,}",
            code="recipe",
            hint="write it as .json, which is read faster",
        )
    try:
        value = _Builder(data.decode("utf-8")).document()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{source} is not valid YAML: {reason}", code="recipe") from error
    if not isinstance(value, dict):
        raise UsageError(
            f"{source} must hold a mapping, found {type(value).__name__}", code="recipe"
        )
    return value


class _Builder:
    """Plain Python data from the parser's events."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.values = 0

    def document(self) -> Any:
        """Return the content of the only document, None when there is none."""
        value = None
        seen = False
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    raise _refused("a second document", event)
                seen = True
                value = self._value(next(self.events), 0)
        return value

    def _value(self, event: Any, depth: int) -> Any:
        self.values += 1
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases are not read", event)
        if event.tag is not None:
            raise _refused("tags are not read", event)
        if self.values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES:,} values", event)
        if depth > MAX_DEPTH:
            raise _refused("nested too deeply", event)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else _plain(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(depth)
        return self._mapping(depth)

    def _list(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise _refused("a key must be a plain word", event)
            if event.value in result:
                raise _refused(f"the key {event.value[:60]!r} stands twice", event)
            result[event.value] = self._value(next(self.events), depth + 1)
        return result


def _plain(event: Any) -> Any:
    text: str = event.value
    if text in _WORDS:
        return _WORDS[text]
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    if not _FLOAT.fullmatch(text):
        return text
    if len(text) > _MAX_DIGITS:
        raise _refused(f"a number of {len(text)} digits", event)
    return int(text) if _INT.fullmatch(text) else float(text)


def _refused(problem: str, event: Any) -> yaml.YAMLError:
    mark = event.start_mark
    return yaml.YAMLError(f"{problem} (line {mark.line + 1}, column {mark.column + 1})")
