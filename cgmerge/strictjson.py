"""JSON as files from strangers must be read: no surprises, bounded work.

Python's own parser accepts NaN, keeps the last of two equal keys, recurses without limit and
raises bare ValueErrors. Here all of these are `Damaged` errors that name the file.
"""

import json
import math
from collections import Counter
from typing import Any

from cgmerge.errors import Damaged, LimitExceeded

MAX_BYTES = 16 * 1024 * 1024
MAX_INT = 2**63


def loads(data: bytes, *, source: str, max_bytes: int = MAX_BYTES) -> Any:
    """Parse one JSON document strictly.

    Args:
        data: UTF-8 bytes without a byte order mark.
        source: What to call the document in messages.
        max_bytes: Refuse longer input before parsing.

    Returns:
        The parsed value.

    Raises:
        Damaged: Not UTF-8, not JSON, duplicate keys, NaN or Infinity, numbers beyond 64 bits.
        LimitExceeded: Longer than `max_bytes` or nested too deeply.
    """
    if len(data) > max_bytes:
        raise LimitExceeded(
            f"{source} has {len(data):,} bytes; the limit is {max_bytes:,}", code="json_size"
        )
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, source),
            parse_constant=lambda word: _refuse_constant(word, source),
            parse_float=lambda digits: _finite(digits, source),
            parse_int=lambda digits: _bounded(digits, source),
        )
        # Only an escape can make text that is not Unicode; looking at each string costs more than
        # all the rest.
        text_ok = "\\u" not in text or _encodable(value)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Damaged(
            f"{source} is not valid JSON: {error}", code="json", hint=_next_step(data, error)
        ) from error
    except RecursionError as error:
        raise LimitExceeded(f"{source} is nested too deeply", code="json_depth") from error
    if not text_ok:
        raise Damaged(f"{source} holds text that is not valid Unicode", code="json")
    return value


def kind_of(value: Any) -> str:
    """Call a parsed value what JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def loads_object(data: bytes, *, source: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Parse a document whose top level must be an object."""
    value = loads(data, source=source, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise Damaged(f"{source} must hold an object, found {kind_of(value)}", code="json")
    return value


def dumps(value: Any) -> bytes:
    """Serialise canonically: sorted keys, two-space indent, UTF-8, final newline, no NaN."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def canonical(value: Any) -> bytes:
    """Serialise in one line: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def depth(value: Any) -> int:
    """Return how deeply lists and objects are nested; 0 for a number or a string."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        item, level = waiting.pop()
        deepest = max(deepest, level)
        if isinstance(item, dict):
            waiting += [(inner, level + 1) for inner in item.values()] or [(None, level + 1)]
        elif isinstance(item, list):
            waiting += [(inner, level + 1) for inner in item] or [(None, level + 1)]
    return deepest


def _next_step(data: bytes, error: ValueError) -> str | None:
    """Say how text of another encoding, or with other line ends, becomes readable."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:64]:
        return "it looks like UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    if isinstance(error, UnicodeDecodeError):
        return (
            "save it as UTF-8; if it is Latin-1 or Windows-1252:"
            " iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
        )
    if data.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark; take that off: tail -c +4 OLD > NEW"
    if b"\r" in data and b"\n" not in data:
        return "its lines end with CR alone; write LF: tr '\\r' '\\n' < OLD > NEW"
    return "it may be cut short, or edited by hand: correct it there, or get it again"


def _unique(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Damaged(
            f"{source} holds the key {twice!r} twice",
            code="json",
            hint="keep one of the two",
        )
    return result


def _refuse_constant(word: str, source: str) -> Any:
    raise Damaged(
        f"{source} holds {word}, which is not JSON",
        code="json",
        hint="write a finite number, or null where there is none",
    )


def _finite(digits: str, source: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Damaged(f"{source} holds the number {digits}, which is out of range", code="json")
    return value


def _bounded(digits: str, source: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= MAX_INT:
        raise Damaged(f"{source} holds an integer of {len(digits)} digits", code="json")
    return int(digits)


def _encodable(value: Any) -> bool:
    """Whether every string can be written as UTF-8 (lone surrogates cannot)."""
    if isinstance(value, str):
        return value.isascii() or not any(0xD800 <= ord(char) <= 0xDFFF for char in value)
    if isinstance(value, list):
        return all(_encodable(item) for item in value)
    if isinstance(value, dict):
        return all(_encodable(key) and _encodable(item) for key, item in value.items())
    return True
