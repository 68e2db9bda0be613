"""Which rows to hold out: at random, the long ones, whole templates, one primitive's contexts.

Every maker takes the structures of distinct items, how many rows each stands for, and the wanted
share of test rows; it returns one flag for each item, true for the test. Items are never split.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.splits.structure import Structure, normal
from cgmerge.nearest import nearest


@dataclass(frozen=True)
class Made:
    """A split.

    Attributes:
        tests: For each item, whether it is held out.
        facts: What was decided, for the card (threshold, primitive …).
        warnings: What a reader of the scores must know.
        left_out: Items that are in no part, by their places.
    """

    tests: list[bool] = field(repr=False)
    facts: dict[str, Any]
    warnings: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()


def split_iid(
    items: Sequence[Structure], rows: Sequence[int], share: float, rng: random.Random
) -> Made:
    """Hold out items at random."""
    groups = [[place] for place in range(len(items))]
    return Made(_taken(groups, rows, share, rng), {})


def split_length(items: Sequence[Structure], rows: Sequence[int], share: float) -> Made:
    """Hold out everything longer than a threshold, the one whose share is nearest.

    Raises:
        DataError: All items are equally long.
    """
    sizes = [len(item.labels) for item in items]
    total = sum(rows)
    longer: dict[int, int] = defaultdict(int)
    for size, count in zip(sizes, rows, strict=True):
        longer[size] += count
    known = sorted(longer)
    if len(known) < 2:
        raise DataError(
            f"all rows have {known[0]} words or nodes; nothing is longer", code="length"
        )
    best, gap, above = known[0], 2.0, total
    for size in known[:-1]:
        above -= longer[size]
        if abs(above / total - share) < gap:
            best, gap = size, abs(above / total - share)
    return Made([size > best for size in sizes], {"longest_train": best, "longest": known[-1]})


def split_template(
    items: Sequence[Structure], rows: Sequence[int], share: float, rng: random.Random
) -> Made:
    """Hold out whole templates: trees without their leaves, words without numbers and quotes.

    Raises:
        DataError: All items have one template.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        groups[item.template()].append(place)
    if len(groups) < 2:
        raise DataError(
            f"all rows have one template: {next(iter(groups))[:200]}",
            code="template",
            hint="--column names a column that tells them apart",
        )
    tests = _taken(list(groups.values()), rows, share, rng)
    held = sum(tests[places[0]] for places in groups.values())
    own = len(groups) == len(items)
    note = "every row has a template of its own, so that this is a random split; --column names"
    return Made(
        tests,
        {"templates": len(groups), "templates_test": held},
        (f"{note} a column with their structure",) if own else (),
    )


def split_primitive(
    items: Sequence[Structure], rows: Sequence[int], share: float, primitive: str | None
) -> Made:
    """Hold out every context of a primitive; alone it stays in training.

    Args:
        items: Distinct structures.
        rows: Of each.
        share: Wanted share of test rows, which chooses the primitive where none is named.
        primitive: Words, a label, or a sub-tree in parentheses.

    Raises:
        UsageError: The primitive occurs nowhere, or in all items.
        DataError: No item is a primitive alone, so that none can be chosen.
    """
    chosen = _chosen(items, rows, share) if primitive is None else normal(primitive)
    tests = [item.has(chosen) and item.text != chosen for item in items]
    if not any(tests) or all(tests):
        atoms = {label for item in items for label in item.labels}
        near = nearest(chosen, atoms)
        where = "no row that has it beside something else" if not any(tests) else "every row"
        raise UsageError(
            f"{chosen!r} cannot be held out: found in {where}",
            code="primitive",
            hint=f"did you mean {near[0]!r}?" if near and near[0] != chosen else None,
        )
    alone = sum(count for item, count in zip(items, rows, strict=True) if item.text == chosen)
    note = f"no row is {chosen!r} alone: it is new in the test part"
    return Made(tests, {"primitive": chosen, "alone": alone}, () if alone else (note,))


def _chosen(items: Sequence[Structure], rows: Sequence[int], share: float) -> str:
    """Return the primitive that stands alone somewhere and whose contexts are nearest the share."""
    single = sorted({item.text for item in items if len(item.labels) == 1})
    if not single:
        raise DataError(
            "no row is one word alone, so that no primitive can be chosen",
            code="primitive",
            hint="name it: --primitive WORD",
        )
    total = sum(rows)

    def gap(word: str) -> float:
        held = sum(n for item, n in zip(items, rows, strict=True) if item.has(word))
        return abs(held / total - share)

    return min(single, key=gap)


def _taken(
    groups: list[list[int]], rows: Sequence[int], share: float, rng: random.Random
) -> list[bool]:
    """Take groups in random order while they fit; at least one, never all."""
    tests = [False] * len(rows)
    mixed = rng.sample(groups, len(groups))
    room = share * sum(rows)
    for number, places in enumerate(mixed[:-1]):
        size = sum(rows[place] for place in places)
        if size <= room + 1e-9 or (number == len(mixed) - 2 and not any(tests)):
            room -= size
            for place in places:
                tests[place] = True
    return tests
