"""Training, validation and test rows as a folder: three files and a card that says what made them.

    out/train.jsonl  out/validation.jsonl  out/test.jsonl  out/card.json

A part without rows has no file. The same rows give the same bytes.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgmerge import fs
from cgmerge._version import __version__
from cgmerge.errors import DataError, UsageError

PARTS = ("train", "validation", "test")
CARD = "card.json"
CARD_SCHEMA = "cgmerge.card/1"
_TRIES = 1000

Record = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """Rows of a task, each in one part.

    Attributes:
        train: To learn from.
        validation: To choose scales and other settings on.
        test: To report.
        notes: What a reader of the scores must know.
    """

    train: Sequence[Record] = field(repr=False)
    validation: Sequence[Record] = field(repr=False)
    test: Sequence[Record] = field(repr=False)
    notes: tuple[str, ...] = ()

    def items(self) -> list[tuple[str, Sequence[Record]]]:
        """Return (name, rows) of the three parts."""
        return list(zip(PARTS, (self.train, self.validation, self.test), strict=True))


def carve(
    rows: Sequence[Record], share: float, rng: random.Random, key: str = "prompt"
) -> tuple[list[Record], list[Record]]:
    """Take validation rows out of training rows; a repeated row always stays with its like.

    Rows that occur more than once stay in training: they are there to weigh, as the bare `jump`
    of SCAN, and one of them in validation would have to take all with it.

    Args:
        rows: Training rows; order is kept.
        share: Of the rows, 0 to 1.
        rng: Source of the draw.
        key: The column that tells rows apart.

    Returns:
        What stays, what was taken.
    """
    often = Counter(row[key] for row in rows)
    single = [place for place, row in enumerate(rows) if often[row[key]] == 1]
    taken = set(rng.sample(single, min(len(single), round(len(rows) * share))))
    return (
        [row for place, row in enumerate(rows) if place not in taken],
        [rows[place] for place in sorted(taken)],
    )


def shrink(parts: Parts, count: int, rng: random.Random) -> Parts:
    """Keep so many rows, drawn from every part in proportion, in the order they have.

    Raises:
        UsageError: More rows are wanted than there are.
    """
    sides = (parts.train, parts.validation, parts.test)
    total = sum(map(len, sides))
    if count > total:
        raise UsageError(f"{count:,} rows are wanted, there are {total:,}", code="n", found=count)
    kept = []
    for rows in sides:
        wanted = min(len(rows), max(bool(rows), round(len(rows) * count / total)))
        kept.append([rows[place] for place in sorted(rng.sample(range(len(rows)), wanted))])
    return Parts(kept[0], kept[1], kept[2], parts.notes)


def fill(draw: Callable[[int], Record], count: int, seen: set[str]) -> list[Record]:
    """Draw rows until there are so many, none with a prompt that was seen.

    Args:
        draw: Makes a row; it is given the number of rows so far.
        count: Rows wanted.
        seen: Prompts that are taken; those of the new rows are added.

    Raises:
        UsageError: A thousand draws in a row were all taken.
    """
    rows: list[Record] = []
    while len(rows) < count:
        for _ in range(_TRIES):
            row = draw(len(rows))
            if row["prompt"] not in seen:
                break
        else:
            raise UsageError(
                f"{count:,} rows are wanted; after {len(rows):,} no new one is found",
                code="n",
                hint="ask for fewer with --n",
            )
        seen.add(row["prompt"])
        rows.append(row)
    return rows


def write_parts(
    out: Path, parts: Mapping[str, Sequence[Record]], facts: Mapping[str, Any], *, overwrite: bool
) -> dict[str, Any]:
    """Write the files and the card, all or nothing.

    Args:
        out: A folder, new unless `overwrite`.
        parts: Name of each part to its rows; empty parts have no file.
        facts: What made the rows; goes into the card.
        overwrite: Whether `out` may exist.

    Returns:
        The card: `facts`, rows and sha256 of each part, and `digest`, one for all of them.

    Raises:
        UsageError: `out` exists, or is no folder.
        DataError: A value that JSON cannot hold.
    """
    files: dict[str, Any] = {}
    with fs.new_folder(out, overwrite=overwrite) as stage:
        for name, rows in parts.items():
            if not rows:
                continue
            content = b"".join(_line(row, f"{name}, row {n}") for n, row in enumerate(rows, 1))
            fs.write_bytes(stage / f"{name}.jsonl", content)
            digest = hashlib.sha256(content).hexdigest()
            files[name] = {"file": f"{name}.jsonl", "rows": len(rows), "sha256": digest}
        words = " ".join(f"{name}:{one['sha256']}" for name, one in sorted(files.items()))
        card = {
            "schema": CARD_SCHEMA,
            "version": __version__,
            **facts,
            "parts": files,
            "digest": hashlib.sha256(words.encode()).hexdigest(),
        }
        fs.write_json(stage / CARD, card)
    return card


def _line(row: Record, where: str) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} cannot be written as JSON: {error}", code="json") from error
