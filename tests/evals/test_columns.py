"""Columns that say more: parts by id, numbers to read scores over."""

import pytest

from cgmerge.errors import DataError
from cgmerge.evals.suite import SkillSet, questions
from cgmerge.modules.data import Example


def sets(*parts):
    return [
        SkillSet(name, tuple(Example(f"p{name}{n}", "c", n + 1, row) for n, row in enumerate(rows)))
        for name, rows in parts
    ]


def test_parts_are_found_over_all_skills():
    skills = sets(
        ("one", [{"id": "a"}, {"id": 7}]), ("both", [{"id": "c", "part_ids": ["a", 7]}, {}])
    )
    first, second, whole, plain = questions(skills)
    assert whole.parts == (first.id, second.id)
    assert first.parts == plain.parts == ()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": "a", "part_ids": ["b"]}], "names 'b', an id of no row"),
        ([{"id": "a"}, {"id": "a"}, {"part_ids": ["a"]}], "an id of 2 rows"),
        ([{"id": "a", "part_ids": ["a"]}], "the row itself"),
        ([{"part_ids": "a"}], "must be a list of ids"),
        ([{"part_ids": [["a"]]}], "must be a list of ids"),
    ],
)
def test_parts_that_are_none(rows, says):
    with pytest.raises(DataError, match=says) as error:
        questions(sets(("s", rows)))
    assert f"skill 's', row {len(rows)}" in error.value.message


def test_ids_may_repeat_where_no_part_names_them():
    rows = [{"id": "a"}, {"id": "a"}, {"id": "b"}, {"part_ids": ["b"]}, {"part_ids": []}]
    assert [len(one.parts) for one in questions(sets(("s", rows)))] == [0, 0, 0, 1, 0]


def test_numbers_of_columns():
    rows = [{"depth": 3, "x": "1.5"}, {"depth": 2.0, "x": "-2"}]
    found = [one.at for one in questions(sets(("s", rows)), ["depth", "x", "tokens"])]
    assert found == [{"depth": 3.0, "x": 1.5}, {"depth": 2.0, "x": -2.0}]
    assert questions(sets(("s", rows)))[0].at == {}


@pytest.mark.parametrize("value", [None, "deep", True, float("nan"), float("inf"), [], 10**400])
def test_columns_without_a_number_are_refused(value):
    with pytest.raises(DataError, match="column 'depth' must hold a number") as error:
        questions(sets(("s", [{"depth": 1}, {"depth": value}])), ["depth"])
    assert "row 2" in error.value.message
    assert "columns are depth" in error.value.hint
