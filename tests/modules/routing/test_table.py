"""Tables from tasks to experts."""

import json

import pytest
import routing_support as rs

from cgmerge.errors import Damaged, DataError, NotFound, UsageError
from cgmerge.modules.routing.methods import FitInput, find_routed
from cgmerge.modules.routing.router import TaskRouter
from cgmerge.modules.routing.stack import stacks

NAMES = ["sort", "copy"]


def made(table=""):
    method = find_routed("task")
    found = stacks([rs.expert({"m": (4, 4)}, 2, seed) for seed in (1, 2)])
    params = method.make_params({"table": str(table)})
    return method.make(FitInput(names=NAMES, stacks=found, params=params))


def written(folder, value):
    path = folder / "table.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_every_expert_is_its_own_task():
    router = made().router
    assert router.table == {"sort": (1.0, 0.0), "copy": (0.0, 1.0)}
    assert router.weights(["copy", "sort", "copy"]).tolist() == [[0, 1], [1, 0], [0, 1]]


def test_a_table_names_experts_or_weighs_them(tmp_path):
    fitted = made(written(tmp_path, {"a": "copy", "b": {"sort": 1, "copy": -0.5}}))
    assert fitted.router.table == {"a": (0.0, 1.0), "b": (1.0, -0.5)}
    assert fitted.warnings == []
    again = TaskRouter.restore(fitted.router.settings(), {})
    assert again == fitted.router


def test_experts_without_a_task_are_named(tmp_path):
    assert made(written(tmp_path, {"a": "copy"})).warnings == ["no task uses sort"]


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({"a": "cpoy"}, DataError, "names the expert 'cpoy', which is not here"),
        ({"a": {"sort": True}}, DataError, "task 'a' must name an expert"),
        ({"a": ["sort"]}, DataError, "task 'a' must name an expert"),
        ({}, DataError, "names no task"),
        ('{"a": NaN}', Damaged, "NaN"),
        ("[]", Damaged, "table.json"),
    ],
)
def test_tables_that_say_nothing_are_refused(tmp_path, table, error, message):
    with pytest.raises(error, match=message):
        made(written(tmp_path, table))


def test_a_near_name_is_suggested(tmp_path):
    with pytest.raises(DataError) as error:
        made(written(tmp_path, {"a": "cop"}))
    assert error.value.hint == "did you mean 'copy'?"


def test_a_missing_file_is_not_a_table(tmp_path):
    with pytest.raises(NotFound, match="no such file"):
        made(tmp_path / "nowhere.json")


def test_unknown_tasks_are_refused_with_those_there_are():
    with pytest.raises(UsageError, match="task 'reverse' is not in its table") as error:
        made().router.weights(["reverse"])
    assert error.value.hint == "name one of copy, sort"
