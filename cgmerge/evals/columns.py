"""Columns of a data row that say more than prompt and answer: what evaluations read of them.

`choices` and `references` serve metrics, `part_ids` says which other rows ask for the parts of a
row, and any column of numbers can be one that scores are read over.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cgmerge.errors import DataError
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Metric
from cgmerge.modules.formats import Example, read_choices

TOKENS = "tokens"
"""Not a column: the length of the answer in tokens, end token included."""
_PARTS = "part_ids"


@dataclass(frozen=True, slots=True)
class Question:
    """One item before any model saw it.

    Attributes:
        id: See `questions`.
        skill: Name of its skill.
        example: What is asked and expected.
        parts: Ids of the questions for its parts.
        at: Numbers of the columns that scores shall be read over.
    """

    id: str
    skill: str
    example: Example
    parts: tuple[str, ...] = ()
    at: Mapping[str, float] = field(default_factory=dict)


def choices_of(question: Question) -> tuple[str, ...]:
    """Return the answers that an item offers.

    Raises:
        DataError: It offers none, the right one is not among them, or it has no prompt.
    """
    example = question.example
    wrong = partial(
        _wrong, question, hint="rows of multiple choice have a prompt, `choices` and `answer`"
    )
    if example.prompt is None or "choices" not in example.extra:
        raise wrong("there are no choices to choose from", code="choices")
    choices = read_choices(example.extra["choices"], wrong)
    if example.completion not in choices:
        raise wrong(f"{example.completion!r} is not among the choices", code="choices")
    return choices


def references_of(question: Question) -> tuple[str, ...]:
    """Return the texts that a generated answer is measured against: the target, other wordings.

    Raises:
        DataError: A `references` column that is no list of texts.
    """
    example = question.example
    others = example.extra.get("references") or []
    if not isinstance(others, list) or not all(isinstance(one, str) for one in others):
        raise _wrong(question, "'references' must be a list of texts", code="type")
    return tuple(dict.fromkeys([example.completion, *others]))


def check_metric(asked: Sequence[Question], metric: Metric) -> None:
    """Refuse items that lack what a metric needs.

    Raises:
        DataError: Names the first row.
    """
    needs = METRICS[metric].needs
    for question in asked:
        if needs == "choices":
            choices_of(question)
        elif needs == "answer":
            references_of(question)


def other_choices(asked: Sequence[Question]) -> list[Question]:
    """Return an item for each choice that is not the right one, in order; they keep the ids."""
    return [
        replace(question, example=replace(question.example, completion=choice))
        for question in asked
        for choice in choices_of(question)
        if choice != question.example.completion
    ]


def numbers_at(question: Question, by: Sequence[str]) -> dict[str, float]:
    """Return the numbers of an item in columns; texts that are numbers are numbers too.

    Raises:
        DataError: The row has no finite number there.
    """
    return {name: _number(question, name) for name in by if name != TOKENS}


def _number(question: Question, name: str) -> float:
    value = question.example.extra.get(name)
    try:
        number = float("nan") if isinstance(value, bool | None) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(
            question,
            f"column {name!r} must hold a number, found {value!r}",
            code="number",
            hint=f"columns are {', '.join(question.example.extra) or '(none)'}, and {TOKENS} is the"
            " length of the answer",
        )
    return number


def with_parts(asked: Sequence[Question]) -> list[Question]:
    """Say of each item which others ask for its parts: rows whose `id` its `part_ids` names.

    Raises:
        DataError: No list of ids, an id that no row has, that several have, or the row's own.
    """
    if all(_PARTS not in one.example.extra for one in asked):
        return list(asked)
    counts = Counter(_id(one) for one in asked)
    places = {_id(one): one.id for one in asked}
    found = []
    for question in asked:
        names = question.example.extra.get(_PARTS) or []
        if not isinstance(names, list) or not all(isinstance(one, str | int) for one in names):
            raise _wrong(question, f"{_PARTS!r} must be a list of ids", code="type")
        for name in map(str, names):
            if counts[name] == 1 and places[name] != question.id:
                continue
            owners = "no row" if not counts[name] else f"{counts[name]} rows"
            what = f"an id of {owners}" if counts[name] != 1 else "the row itself"
            raise _wrong(
                question,
                f"{_PARTS} names {name!r}, {what}",
                code="part_ids",
                hint="each part needs an `id` that is unique over all data files (and within"
                " --limit)",
            )
        found.append(replace(question, parts=tuple(places[str(one)] for one in names)))
    return found


def _id(question: Question) -> str | None:
    value: Any = question.example.extra.get("id")
    return None if value is None else str(value)


def _wrong(question: Question, what: str, *, code: str, hint: str | None = None) -> DataError:
    row = question.example.row
    return DataError(f"skill {question.skill!r}, row {row}: {what}", code=code, hint=hint, row=row)
