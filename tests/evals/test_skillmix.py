"""Mixed skills: rows with their parts by hand, what is held out, and the gap from end to end."""

import random

import pytest

from cgmerge.errors import UsageError
from cgmerge.evals.composed import composition_gaps, weakest_links
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Item
from cgmerge.evals.suite import questions, read_skills
from cgmerge.evals.tasks import chains, skillmix
from cgmerge.evals.tasks.parts import write_parts
from cgmerge.evals.tasks.suites import Wanted, find_suite, make_parts


def test_a_row_and_its_parts_by_hand():
    whole, *steps = skillmix.with_parts(("reverse", "droplast", "caesar"), ["a", "b", "l"], "x")
    assert whole["prompt"] == "reverse droplast caesar : a b l ="
    assert whole["completion"] == " b c a > b c > c b"
    assert [(one["prompt"], one["completion"], one["skill"], one["k"]) for one in steps] == [
        ("caesar : a b l =", " b c a", "caesar", 1),
        ("droplast : b c a =", " b c", "droplast", 1),
        ("reverse : b c =", " c b", "reverse", 1),
    ]
    assert whole["part_ids"] == [one["id"] for one in steps]
    assert (whole["skill"], whole["skills"], whole["k"]) == ("mix3", "reverse droplast caesar", 3)
    assert whole["id"] == "x reverse droplast caesar : a b l ="


def tuples(rows):
    return {tuple(row["skills"].split()) for row in rows if row["k"] > 1}


@pytest.mark.parametrize("split", skillmix.SPLITS)
def test_the_test_asks_for_tuples_that_training_never_shows(split):
    parts = skillmix.make(split, random.Random(2), 1500)
    assert len(parts.train) == 1200
    assert 140 <= len(parts.validation) <= 150
    assert 140 <= len(parts.test) <= 150
    shown, asked = tuples(parts.train), tuples(parts.test)
    assert not shown & asked
    assert tuples(parts.validation).isdisjoint(asked)
    assert {row["skill"] for row in parts.train if row["k"] == 1} == set(skillmix.SKILLS)
    assert sum(row["k"] == 1 for row in parts.train) == 480
    assert {row["k"] for row in parts.train} == ({1, 2} if split == "depth" else {1, 2, 3})
    assert {row["k"] for row in parts.test} == ({1, 3} if split == "depth" else {1, 2, 3})
    if split == "skills":
        mixed = {name for one in shown for name in one}
        assert len(mixed) == len(skillmix.SKILLS) - 4
        assert all(set(one) - mixed for one in asked)


def test_no_question_for_a_part_can_occur_in_training_data():
    parts = skillmix.make("tuples", random.Random(5), 1000)
    for name, rows in parts.items():
        for row in rows:
            letters = row["prompt"].removesuffix(" =").split(" : ")[1].split()
            assert chains.split_of(letters) == name
            steps = " > ".join(" ".join(one) for one in _steps(row["skills"].split(), letters))
            assert row["completion"] == f" {steps}"


def _steps(names, letters):
    return [chains.apply(names[-count:], letters) for count in range(1, len(names) + 1)]


def test_every_whole_has_its_parts_in_the_file_once():
    for rows in skillmix.make("tuples", random.Random(7), 2000).items()[1:]:
        ids = [row["id"] for row in rows[1]]
        assert len(set(ids)) == len(ids)
        by_id = {row["id"]: row for row in rows[1]}
        wholes = [row for row in rows[1] if "part_ids" in row]
        assert {part for row in wholes for part in row["part_ids"]} | {
            row["id"] for row in wholes
        } == set(ids)
        for row in wholes:
            steps = [by_id[part] for part in row["part_ids"]]
            assert " ".join(one["skills"] for one in reversed(steps)) == row["skills"]
            assert " >".join(one["completion"] for one in steps) == row["completion"]


def test_too_many_rows_are_refused():
    with pytest.raises(UsageError, match="at most 100,000"):
        skillmix.make("tuples", random.Random(0), 100_001)


def scored(path, wrong):
    """Answer a data file as a model would that fails where `wrong` says so."""
    asked = questions(read_skills([str(path)]))
    skills = {}
    for one in asked:
        item = Item(
            id=one.id, skill=one.skill, target="m", correct=not wrong(one), loglik=-1.0,
            prediction="", expected=one.example.completion, tied=False, parts=one.parts or None,
        )  # fmt: skip
        skills.setdefault(one.skill, []).append(item)
    return skills


@pytest.mark.parametrize(("suite", "split"), [("skillmix", "tuples"), ("chains", "pairs-parts")])
def test_the_gap_is_read_from_the_file_as_it_is(tmp_path, suite, split):
    parts = make_parts(find_suite(suite), Wanted(split, count=1500))
    write_parts(tmp_path / "out", dict(parts.items()), {}, overwrite=False)
    path, info = tmp_path / "out" / "test.jsonl", METRICS["exact_match"]
    wholes = [row for row in parts.test if row["k"] > 1]
    # All parts right and every whole wrong: the gap is 1, of all wholes.
    total = composition_gaps(scored(path, lambda one: one.parts), info)[-1]
    assert (total.skill, total.wholes, total.n, total.gap) == (None, len(wholes), len(wholes), 1.0)
    # A skill that fails takes its wholes out of the denominator; the others are all right.
    skills = scored(path, lambda one: one.skill == "caesar")
    total = composition_gaps(skills, info)[-1]
    assert total.n == sum("caesar" not in row["skills"].split() for row in wholes)
    assert 0 < total.n < total.wholes
    assert total.wrong == 0
    links = weakest_links(skills, info)
    assert {one.skill for one in links} == {row["skill"] for row in wholes}
    assert {one.weak for one in links if "caesar" in one.parts} == {0.0}
    assert {one.link for one in links if "caesar" in one.parts} == {"nearer strong"}
