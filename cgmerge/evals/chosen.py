"""What a composition was chosen on: a score on data that it was tuned on or learned from.

Files are compared by their digests; the same rows in another file are not noticed.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from cgmerge.evals.suite import SkillSet

if TYPE_CHECKING:
    from cgmerge.evals.targets import Target


def data_of(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return (name, sha256) of the data files that decided a composition, each once.

    Args:
        record: A `cgmerge.json` of any kind and from anywhere: of `--tune`, of `--examples`, or
            of a router that was fitted; whatever is malformed names no data.
    """
    fit = _mapping(record.get("fit"))
    entries = [
        *_entries(_mapping(record.get("tuning")).get("data")),
        *_entries(_mapping(fit.get("tuning")).get("data")),
        *_entries(_mapping(fit.get("request")).get("examples")),
    ]
    found = [
        (str(one.get("file") or PurePath(str(one.get("ref", ""))).name), str(one.get("sha256", "")))
        for one in entries
    ]
    return tuple(dict.fromkeys(found))


def tuned_warning(target: str, file: str) -> str:
    """Say that a score is one on data that decided its target."""
    return f"{target} was tuned on this very file, {file}: its score is no test score"


def tuned_warnings(targets: "Sequence[Target]", skills: Sequence[SkillSet]) -> list[str]:
    """Name the targets that are scored on data that decided them, once for each file."""
    return [
        tuned_warning(target.name, source)
        for target in targets
        for source in {s.sha256: s.source for s in skills if s.sha256 in target.tuned_on}.values()
    ]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
