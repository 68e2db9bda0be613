"""Split the rows of data files: read, group what is the same, hold out, measure."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.splits.divergence import measure
from cgmerge.evals.splits.makers import (
    Made,
    split_iid,
    split_length,
    split_primitive,
    split_template,
)
from cgmerge.evals.splits.names import By
from cgmerge.evals.splits.structure import Structure, parse, words
from cgmerge.modules.data import Example, read_rows
from cgmerge.modules.formats import detect_format, examples_of

_Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """How to split.

    Attributes:
        by: The rule.
        share: Of the rows that should be test, above 0 and below 1.
        seed: Of everything random.
        column: Where the structure is; None takes the words of the prompt.
        primitive: What to hold out, for `primitive`.
        size: Of compounds, for `mcd`.
        leave_out: Share of the rows that may be left out, for `mcd`.
    """

    by: By
    share: float = 0.2
    seed: int = 0
    column: str | None = None
    primitive: str | None = None
    size: int = 3
    leave_out: float = 0.0


@dataclass(frozen=True)
class Items:
    """Rows grouped into items: rows with one prompt are one item, which is never split.

    Attributes:
        rows: As read, in order.
        members: Of each item, the places of its rows.
        structures: Of each item.
        inputs: Name and sha256 of each file.
    """

    rows: list[_Row] = field(repr=False)
    members: list[list[int]] = field(repr=False)
    structures: list[Structure] = field(repr=False)
    inputs: list[dict[str, str]]

    @property
    def duplicates(self) -> int:
        """Rows that have the prompt of an earlier one."""
        return len(self.rows) - len(self.members)


@dataclass(frozen=True)
class Split:
    """A split that was made.

    Attributes:
        train: Rows.
        test: Rows.
        facts: For the card: settings, decisions, duplicates, divergences.
        warnings: What a reader of the scores must know.
    """

    train: list[_Row] = field(repr=False)
    test: list[_Row] = field(repr=False)
    facts: dict[str, Any]
    warnings: tuple[str, ...]


def read_items(paths: Sequence[Path], column: str | None) -> Items:
    """Read files and find out what their rows are made of.

    Args:
        paths: json, jsonl, csv or parquet.
        column: Where the structure is; None takes the words of the prompt.

    Raises:
        NotFound: No such file.
        DataError: A row lacks the column, or is in no known format where none is named; or two
            rows of one prompt have different structures.
        Damaged: A file that is not what its suffix says.
    """
    rows: list[_Row] = []
    inputs = []
    groups: dict[str, int] = {}
    members: list[list[int]] = []
    structures: list[Structure] = []
    for path in paths:
        found, sha256 = read_rows(path)
        inputs.append({"file": path.name, "sha256": sha256})
        for number, row in enumerate(found, 1):
            where = f"{path}, row {number}"
            structure, key = _structure(row, column, str(path), number)
            item = groups.setdefault(key, len(members))
            if item == len(members):
                members.append([])
                structures.append(structure)
            elif structures[item].text != structure.text:
                raise DataError(
                    f"{where}: another row has the same prompt but the {column!r} "
                    f"{structures[item].text[:80]!r} instead of {structure.text[:80]!r}",
                    code="structure",
                    row=number,
                )
            members[item].append(len(rows))
            rows.append(row)
    return Items(rows, members, structures, inputs)


def split_items(
    items: Items, asked: Asked, progress: Callable[[int], object] = lambda _: None
) -> Split:
    """Make a split and measure it.

    Raises:
        UsageError: A primitive that cannot be held out.
        DataError: Rows of which no such split can be made.
    """
    if len(items.members) < 2:
        raise DataError("a split needs two different rows or more", code="split")
    made = _made(items, asked, progress)
    left_out = set(made.left_out)
    parts: dict[bool, list[int]] = {False: [], True: []}
    for item, tested in enumerate(made.tests):
        if item not in left_out:
            parts[tested] += items.members[item]
    train, test = ([items.rows[place] for place in sorted(parts[side])] for side in (False, True))
    structure_of = {p: s for s, m in zip(items.structures, items.members, strict=True) for p in m}
    sides = [[structure_of[place] for place in parts[side]] for side in (False, True)]
    facts = {
        "by": asked.by,
        "seed": asked.seed,
        "test_share": {"wanted": asked.share, "found": len(test) / (len(train) + len(test))},
        "column": asked.column,
        "inputs": items.inputs,
        "rows": len(items.rows),
        "duplicates": items.duplicates,
        "left_out": len(items.rows) - len(train) - len(test),
        "divergence": asdict(measure(*sides)),
        **made.facts,
    }
    return Split(train, test, facts, made.warnings)


def _made(items: Items, asked: Asked, progress: Callable[[int], object]) -> Made:
    counts = [len(member) for member in items.members]
    structures, rng = items.structures, random.Random(f"split {asked.by} {asked.seed}")
    if asked.by == "iid":
        return split_iid(structures, counts, asked.share, rng)
    if asked.by == "length":
        return split_length(structures, counts, asked.share)
    if asked.by == "template":
        return split_template(structures, counts, asked.share, rng)
    if asked.by == "primitive":
        return split_primitive(structures, counts, asked.share, asked.primitive)
    from cgmerge.evals.splits.mcd import split_mcd

    return split_mcd(
        structures,
        counts,
        asked.share,
        rng,
        size=asked.size,
        leave_out=asked.leave_out,
        progress=progress,
    )


def _structure(row: _Row, column: str | None, source: str, number: int) -> tuple[Structure, str]:
    """Return what a row is made of, and what makes it the same as another."""
    where = f"{source}, row {number}"
    if column is None:
        example = _example(row, source, number)
        text = _asked_text(example)
        return words(text, where), json.dumps(text)
    if column not in row:
        raise DataError(
            f"{where}: the column {column!r} is missing; found {', '.join(row) or '(none)'}",
            code="column",
            hint="--column names one of those found",
            row=number,
            found=list(row),
        )
    return parse(row[column], f"{where}, {column!r}"), _identity(row, column)


def _example(row: Mapping[str, Any], source: str, number: int) -> Example:
    found = detect_format(list(row), source=source, row=number)
    return examples_of(row, found, source=source, number=number)[-1]


def _asked_text(example: Example) -> str:
    if isinstance(example.prompt, tuple):
        return "\n".join(message.content for message in example.prompt)
    return example.prompt if example.prompt is not None else example.completion


def _identity(row: _Row, column: str) -> str:
    """Return what two rows share that must not be in two parts: the prompt, or all there is."""
    for name in ("prompt", "messages", "conversations", "text"):
        if name in row and name != column:
            return json.dumps(row[name], sort_keys=True, default=str)
    if "instruction" in row:
        return json.dumps([row["instruction"], row.get("input")], default=str)
    return json.dumps(row[column] if column == "prompt" else row, sort_keys=True, default=str)


def check_share(share: float) -> None:
    """Refuse a share that leaves a part empty.

    Raises:
        UsageError: Not above 0 and below 1.
    """
    if not 0.0 < share < 1.0:
        raise UsageError(
            f"--test-share must be above 0 and below 1, found {share:g}",
            code="test_share",
            found=share,
        )
