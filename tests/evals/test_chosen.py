"""Scores on data that decided a composition: what records name, and when it is said."""

import json

import pytest

from cgmerge.evals.chosen import data_of, tuned_warnings
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.targets import Target, _with_record

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def test_every_kind_of_record_names_its_data_once():
    tuning = {"data": [{"file": "v.jsonl", "sha256": A}, {"file": "v.jsonl", "sha256": A}]}
    assert data_of({"tuning": tuning}) == (("v.jsonl", A),)
    examples = [{"name": "x", "ref": "some/where/e.jsonl", "sha256": B}]
    routed = {"fit": {"request": {"examples": examples}, "tuning": {"data": [{"sha256": C}]}}}
    assert data_of(routed) == (("", C), ("e.jsonl", B))


@pytest.mark.parametrize(
    "record",
    [{}, {"tuning": None}, {"tuning": {"data": 3}}, {"tuning": {"data": [1, None]}}, {"fit": []},
     {"fit": {"request": 1, "tuning": []}}, {"fit": {"request": {"examples": "abc"}}}],
)  # fmt: skip
def test_a_strange_record_names_none(record):
    assert data_of(record) == ()


def test_each_target_and_file_is_warned_of_once():
    skills = [SkillSet(n, (), f, d) for n, f, d in
              (("one", "v.jsonl", A), ("two", "v.jsonl", A), ("other", "w.jsonl", B),
               ("made", "", ""))]  # fmt: skip
    targets = [
        Target("t", "merged", C, tuned_on=frozenset({A, B})),
        Target("u", "model", C, tuned_on=frozenset({A})),
        Target("e", "expert", C),
    ]
    assert tuned_warnings(targets, skills) == [
        f"{target} was tuned on this very file, {file}: its score is no test score"
        for target, file in (("t", "v.jsonl"), ("t", "w.jsonl"), ("u", "v.jsonl"))
    ]


def test_a_record_that_cannot_be_read_is_said(tmp_path):
    target = Target("t", "merged", C, warnings=("before",))
    assert _with_record(target, tmp_path) is target
    (tmp_path / "cgmerge.json").write_text(json.dumps({"tuning": {"data": [{"sha256": A}]}}))
    assert _with_record(target, tmp_path).tuned_on == {A}
    (tmp_path / "cgmerge.json").write_text("{")
    found = _with_record(target, tmp_path)
    assert found.tuned_on == frozenset()
    assert found.warnings[0] == "before"
    assert found.warnings[1].startswith("t: what it was tuned on is not known: ")
