"""Records as comparisons and reports take them: every score is computed again from the items."""

import math
from dataclasses import replace
from pathlib import Path

from cgmerge.errors import Damaged
from cgmerge.evals.record import Evaluation, Record, Result, load_record
from cgmerge.evals.summary import Skills, by_target, summarise

_CLOSE = 1e-9


def load_checked(path: Path) -> Evaluation:
    """Read a record, and check that its items are all there and give its numbers.

    Args:
        path: The record; its items file stands beside it.

    Returns:
        The record with its results and means as computed from the items, so that nothing that was
        edited by hand can be reported.

    Raises:
        NotFound: No such record, or its items file is gone.
        Damaged: Not a record, items that are not its own, or numbers that do not follow from them.
    """
    evaluation = load_record(path)
    record, groups = evaluation.record, by_target(evaluation.items)
    if not evaluation.items:
        raise _damaged(path, "it has no items", "at least one item", "none")
    _check_names(path, record, groups)
    _check_same_items(path, groups)
    _check_parts(path, evaluation)
    numbers = summarise(evaluation.items, metric=record.settings.metric, seed=record.settings.seed)
    written = {(one.target, one.skill): one for one in record.results}
    for found in numbers.results:
        given = written.pop((found.target, found.skill), None)
        if given is None or not _agree(given, found):
            raise _damaged(
                path,
                f"the score of {found.target} on {found.skill} does not follow from its items",
                f"{found.score:.6g} ({found.correct} of {found.n} right)",
                "none" if given is None else f"{given.score:.6g} ({given.correct} of {given.n})",
            )
    if written:
        raise _damaged(
            path, "it has scores without items", "none", " on ".join(next(iter(written)))
        )
    checked = replace(record, results=numbers.results, means=numbers.means, comparisons=())
    return Evaluation(checked, evaluation.items)


def _check_names(path: Path, record: Record, groups: dict[str, Skills]) -> None:
    targets = [one.name for one in record.targets]
    if targets != list(groups):
        raise _damaged(path, "targets and items differ", list(groups), targets)
    for skills in groups.values():
        found = {name: len(items) for name, items in skills.items()}
        wanted = {one.name: one.n for one in record.skills}
        if list(found.items()) != list(wanted.items()) or len(wanted) != len(record.skills):
            raise _damaged(path, "skills and items differ", found, wanted)


def _check_same_items(path: Path, groups: dict[str, Skills]) -> None:
    first = next(iter(groups.values()))
    wanted = {name: [item.id for item in items] for name, items in first.items()}
    for target, skills in groups.items():
        for name, items in skills.items():
            if [item.id for item in items] != wanted[name]:
                raise _damaged(
                    path,
                    f"{target} was not scored on the same items of {name} as the others",
                    f"{len(wanted[name])} items from {wanted[name][0]} on",
                    f"{len(items)} items from {items[0].id} on",
                )


def _check_parts(path: Path, evaluation: Evaluation) -> None:
    ids = {item.id for item in evaluation.items}
    for item in evaluation.items:
        strange = [part for part in item.parts or () if part not in ids]
        if strange:
            raise _damaged(path, f"item {item.id} has a part", "none of this id", strange[0])


def _agree(given: Result, found: Result) -> bool:
    return (
        (given.n, given.correct, given.metric) == (found.n, found.correct, found.metric)
        and math.isclose(given.score, found.score, rel_tol=_CLOSE, abs_tol=_CLOSE)
        and _close(given.loglik, found.loglik)
    )


def _close(given: float | None, found: float | None) -> bool:
    if given is None or found is None:
        return given is found
    return math.isclose(given, found, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _damaged(path: Path, what: str, expected: object, found: object) -> Damaged:
    return Damaged(
        f"{path}: {what}: the items say {expected}, the record says {found}",
        code="record",
        hint="evaluate again",
        path=path,
        expected=str(expected),
        found=str(found),
    )
