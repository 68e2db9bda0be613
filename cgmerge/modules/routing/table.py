"""A table from tasks to experts: whoever asks says which task it is.

Without a table every expert is its own task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgmerge import fs, strictjson
from cgmerge.errors import DataError, NotFound
from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.fitting import FitInput, Fitted
from cgmerge.modules.routing.router import TaskRouter, is_weight
from cgmerge.nearest import nearest
from cgmerge.shown import some_of
from cgmerge.tensorfile import read_small


@dataclass(frozen=True, kw_only=True)
class TaskParams(Checked):
    """Parameters of `task`."""

    table: str = param(
        "", 'JSON file, {"TASK": "EXPERT" or {"EXPERT": weight, …}}; empty: one task per expert'
    )


def make_table(fit: FitInput) -> Fitted:
    """Read the table.

    Raises:
        NotFound: No such file.
        DataError: Not a table, or an expert that is not there.
        Damaged: Not JSON.
    """
    p = fit.params
    assert isinstance(p, TaskParams)
    names = list(fit.names)
    if not p.table:
        rows = {name: _row({name: 1.0}, names) for name in names}
        return Fitted(TaskRouter(rows), {})
    path = Path(p.table)
    if not path.is_file():
        raise NotFound(f"no such file: {path}", code="table", path=path)
    content = read_small(fs.absolute(path), limit=strictjson.MAX_BYTES, follow_links=True)
    raw = strictjson.loads_object(content, source=str(path))
    if not raw:
        raise DataError(f"{path} names no task", code="table", path=path)
    table = {task: _row(_weights(value, task, path), names) for task, value in raw.items()}
    idle = [name for i, name in enumerate(names) if not any(row[i] for row in table.values())]
    warnings = [f"no task uses {', '.join(idle)}"] if idle else []
    return Fitted(TaskRouter(table), {}, warnings)


def _weights(value: object, task: str, path: Path) -> Mapping[str, float]:
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, dict) and all(map(is_weight, value.values())):
        return {name: float(weight) for name, weight in value.items()}
    raise DataError(
        f"{path}: task {task!r} must name an expert, or experts with weights",
        code="table",
        hint='like {"sort": "sort-expert", "both": {"sort-expert": 1.0, "reverse": 0.5}}',
        path=path,
    )


def _row(weights: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    for name in weights:
        if name not in names:
            near = nearest(name, names)
            raise DataError(
                f"the table names the expert {name!r}, which is not here",
                code="table",
                hint=f"did you mean {near[0]!r}?" if near else f"there are {some_of(names, 10)}",
                expected=list(names),
                found=name,
            )
    return tuple(weights.get(name, 0.0) for name in names)
