"""What a row is made of: a tree of labels, or its words in a row.

| written as                       | is                                             |
|----------------------------------|------------------------------------------------|
| `(twice (plain walk left))`      | a tree: the first word is the label            |
| `["twice", ["plain", "walk"]]`   | the same in JSON                               |
| `walk left twice`, `["a", "b"]`  | words; each stands above the next one          |

Atoms are labels or words. Compounds of two are (parent, which child, child); of three, with the
grandparent and its child's place.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from cgmerge.errors import DataError

_TOKEN = re.compile(r"[()]|[^\s()]+")
_SLOT = re.compile(r'"[^"]*"|\d+(?:[.,]\d+)*')
_OPEN, _CLOSE = ("(",), (")",)
_ROOT = -1


@dataclass(frozen=True, slots=True)
class Structure:
    """One row's structure.

    Attributes:
        labels: Of the nodes, parents before children; or the words.
        parents: Index of each node's parent, -1 for the root.
        places: Which child of its parent a node is, from 0.
        text: Tokens separated by spaces, parentheses included; equal structures, equal texts.
        tree: Whether it was written as a tree.
    """

    labels: tuple[str, ...]
    parents: tuple[int, ...]
    places: tuple[int, ...]
    text: str
    tree: bool

    def atoms(self) -> tuple[str, ...]:
        """Return the labels or words, repeated ones included."""
        return self.labels

    def compounds(self, size: int) -> list[Hashable]:
        """Return all compounds of two or three nodes."""
        found: list[Hashable] = []
        for node, parent in enumerate(self.parents):
            if parent == _ROOT:
                continue
            pair = (self.labels[parent], self.places[node], self.labels[node])
            if size == 2:
                found.append(pair)
            elif (above := self.parents[parent]) != _ROOT:
                found.append((self.labels[above], self.places[parent], *pair))
        return found

    def has(self, part: str) -> bool:
        """Whether some words, a label or a whole sub-tree in `text` form occur in it."""
        return f" {part} " in f" {self.text} "

    def template(self) -> str:
        """Return the text without its fillers: leaves of a tree, numbers and quotes in words."""
        if not self.tree:
            return _SLOT.sub("_", self.text)
        inner = set(self.parents)
        tokens, node = [], 0
        for token in self.text.split(" "):
            if token in ("(", ")"):
                tokens.append(token)
                continue
            tokens.append(token if node in inner else "_")
            node += 1
        return " ".join(tokens)


def parse(value: Any, where: str = "the structure") -> Structure:
    """Read a structure from a column's value.

    Args:
        value: A string, or a list of strings and lists.
        where: What to call it in messages.

    Raises:
        DataError: Empty, another type, or parentheses that do not fit.
    """
    if isinstance(value, list):
        value = _written(value, where)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{where}: a string or a list is wanted, found {type(value).__name__}", code="structure"
        )
    text = str(value).strip()
    if text.startswith("(") and text.endswith(")"):
        found = _tree(_TOKEN.findall(text))
        if found is not None:
            return found
    return words(text, where)


def words(text: str, where: str = "the structure") -> Structure:
    """Take a text as words, whatever they are.

    Raises:
        DataError: No words.
    """
    labels = tuple(text.split())
    if not labels:
        raise DataError(f"{where} is empty", code="structure")
    count = len(labels)
    return Structure(
        labels, tuple(range(-1, count - 1)), (0,) * count, " ".join(labels), tree=False
    )


def normal(part: str) -> str:
    """Write words or a sub-tree as they stand in `Structure.text`."""
    return " ".join(_TOKEN.findall(part) if part.strip().startswith("(") else part.split())


def _tree(tokens: list[str]) -> Structure | None:
    """Build a tree; None where the tokens are not exactly one."""
    labels: list[str] = []
    parents: list[int] = []
    places: list[int] = []
    open_: list[int] = []
    children: list[int] = []  # so far, of each node
    expects_label = False
    for place, token in enumerate(tokens):
        if token in _CLOSE:
            if not open_ or expects_label or (len(open_) == 1 and place != len(tokens) - 1):
                return None
            open_.pop()
        elif token in _OPEN:
            if expects_label:
                return None
            expects_label = True
        else:
            if not open_ and not expects_label:
                return None
            parent = open_[-1] if open_ else _ROOT
            parents.append(parent)
            places.append(children[parent] if parent != _ROOT else 0)
            if parent != _ROOT:
                children[parent] += 1
            labels.append(token)
            children.append(0)
            if expects_label:
                open_.append(len(labels) - 1)
                expects_label = False
    if open_ or expects_label or not labels:
        return None
    return Structure(tuple(labels), tuple(parents), tuple(places), " ".join(tokens), tree=True)


def _written(value: list[Any], where: str) -> str:
    """Write a JSON list as text: nested ones as a tree, strings alone as words."""
    nested = any(isinstance(item, list) for item in value)
    tokens: list[str] = []
    waiting: list[Any] = [value] if nested else list(reversed(value))
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            tokens.append("(")
            waiting += [None, *reversed(item)]
        elif item is None:
            tokens.append(")")
        elif isinstance(item, str | int | float) and str(item).split() == [str(item)]:
            tokens.append(str(item))
        else:
            raise DataError(
                f"{where}: a list of single words and lists is wanted, found {item!r}"[:300],
                code="structure",
            )
    text = " ".join(tokens)
    if nested and _tree(tokens) is None:
        raise DataError(
            f"{where}: every list begins with its label: {text[:200]}", code="structure"
        )
    return text
