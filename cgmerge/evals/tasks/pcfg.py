"""PCFG SET: string functions in prefix notation, `repeat append A1 B2 , C3` = A1 B2 C3 A1 B2 C3.

    S -> F1 S | F2 S "," S | string of 2 to 5 symbols out of 520 (A1 … Z20)

Source: Hupkes, Dankers, Mul & Bruni 2020, "Compositionality decomposed". The interpreter gives
the published answer on every published pair.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from cgmerge.errors import DataError, LimitExceeded

UNARY = ("copy", "reverse", "shift", "swap_first_last", "repeat", "echo")
BINARY = ("append", "prepend", "remove_first", "remove_second")
FUNCTIONS = UNARY + BINARY
SYMBOLS = tuple(
    f"{letter}{number}" for letter in map(chr, range(65, 91)) for number in range(1, 21)
)
TWIN = "_twin"
MAX_SYMBOLS = 1_000_000

_COMMA, _COMMAS = -1, (",",)
_SYMBOLS = frozenset(SYMBOLS)
_KINDS = {name: name for name in FUNCTIONS} | {name + TWIN: name for name in FUNCTIONS}


def interpret(source: str, *, most: int = MAX_SYMBOLS) -> str:
    """Return the string that an expression stands for.

    The cost is that of reading the source and writing the answer, whatever the nesting: strings
    are joined by moving the shorter one, reversing is a mark, and what `remove_first` removes is
    not computed.

    Args:
        source: Tokens separated by spaces; `f_twin` means f.
        most: Refuse a longer answer; forty nested `repeat` would give 10¹² symbols.

    Raises:
        DataError: Not an expression.
        LimitExceeded: The answer has more than `most` symbols.

    Example:
        >>> interpret("swap_first_last append A1 B2 , C3")
        'C3 B2 A1'
    """
    nodes = _parse(source.split())
    needed = _needed(nodes)
    values: list[_Text] = []
    for place, (kind, value, children) in enumerate(nodes):
        if not needed[place] or kind == "string":
            values.append(_Text(value if needed[place] else ()))
        else:
            values.append(_applied(kind, [values[child] for child in children], most))
    return " ".join(values[-1].symbols())


def functions(source: str) -> list[str]:
    """Return the functions of an expression in reading order."""
    return [token for token in source.split() if token in _KINDS]


def structure(source: str) -> str:
    """Write an expression as nested parentheses, every string as `s`.

    Example:
        >>> structure("repeat append A1 B2 , C3")
        '(repeat (append s s))'
    """
    nodes = _parse(source.split())
    written: list[str] = []
    for kind, _, children in nodes:
        inner = " ".join(written[child] for child in children)
        written.append(f"({kind} {inner})" if children else "s")
    return written[-1]


_Node = tuple[str, tuple[str, ...], tuple[int, ...]]


def _parse(tokens: Sequence[str]) -> list[_Node]:
    """Return nodes (function or `string`, symbols, children), children before parents."""
    nodes: list[_Node] = []
    stack: list[int] = []
    place = len(tokens)
    while place:
        place -= 1
        token = tokens[place]
        if token in _COMMAS:
            stack.append(_COMMA)
        elif token in _KINDS:
            kind = _KINDS[token]
            children = _operands(stack, 2 if kind in BINARY else 1, token)
            nodes.append((kind, (), children))
            stack.append(len(nodes) - 1)
        else:
            end = place + 1
            while place and tokens[place - 1] in _SYMBOLS:
                place -= 1
            run = tuple(tokens[place:end])
            if token not in _SYMBOLS:
                raise DataError(f"{token!r} is no symbol and no function of PCFG SET", code="pcfg")
            nodes.append(("string", run, ()))
            stack.append(len(nodes) - 1)
    if len(stack) != 1 or stack[0] == _COMMA:
        raise DataError(f"not one expression: {' '.join(tokens[:20]) or '(empty)'}", code="pcfg")
    return nodes


def _operands(stack: list[int], count: int, token: str) -> tuple[int, ...]:
    shape = [stack.pop() if stack else None for _ in range(2 * count - 1)]
    found = tuple(one for one in shape[::2] if one is not None and one != _COMMA)
    if len(found) != count or (count == 2 and shape[1] != _COMMA):
        wants = "one argument" if count == 1 else "two arguments with a comma between them"
        raise DataError(f"{token!r} takes {wants}", code="pcfg")
    return found


def _needed(nodes: Sequence[_Node]) -> list[bool]:
    """Mark the nodes whose value reaches the answer."""
    needed = [False] * len(nodes)
    needed[-1] = True
    for place in range(len(nodes) - 1, -1, -1):
        if needed[place]:
            kind, _, children = nodes[place]
            kept = {"remove_first": children[1:], "remove_second": children[:1]}
            for child in kept.get(kind, children):
                needed[child] = True
    return needed


class _Text:
    """A string that is joined at the price of its shorter part and reversed for nothing."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.line = deque(symbols)
        self.reversed = False

    def symbols(self) -> list[str]:
        return list(reversed(self.line)) if self.reversed else list(self.line)

    def push(self, symbols: Sequence[str], *, end: bool) -> None:
        """Put symbols, given in reading order, before or behind."""
        if end != self.reversed:
            self.line.extend(symbols if end else reversed(symbols))
        else:
            self.line.extendleft(symbols if end else reversed(symbols))

    def shift(self) -> None:
        self.line.rotate(1 if self.reversed else -1)

    def swap_ends(self) -> None:
        self.line[0], self.line[-1] = self.line[-1], self.line[0]


def _applied(kind: str, values: list[_Text], most: int) -> _Text:
    """Apply a function; the operands are used up."""
    if kind == "remove_first":
        return values[1]
    one = values[0]
    if kind in ("append", "prepend"):
        first, second = values if kind == "append" else reversed(values)
        one = _joined(first, second)
    elif kind == "reverse":
        one.reversed = not one.reversed
    elif kind == "shift":
        one.shift()
    elif kind == "swap_first_last":
        one.swap_ends()
    elif kind == "echo":
        one.push(list(islice(one.line if one.reversed else reversed(one.line), 1)), end=True)
    elif kind == "repeat":
        if 2 * len(one.line) <= most:
            one.push(one.symbols(), end=True)
        else:
            raise _too_long(most)
    if len(one.line) > most:
        raise _too_long(most)
    return one


def _joined(first: _Text, second: _Text) -> _Text:
    if len(first.line) >= len(second.line):
        first.push(second.symbols(), end=True)
        return first
    second.push(first.symbols(), end=False)
    return second


def _too_long(most: int) -> LimitExceeded:
    return LimitExceeded(f"the answer has more than {most:,} symbols", code="pcfg")
