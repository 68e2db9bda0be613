"""Columns of picked experts: made of recorded answers, and never called a model."""

import dataclasses
import re

import pytest
from record_support import make_evaluation
from report_support import DEMO, KINDS, Page, page_of, sections_of

from cgmerge.cli.scoretable import how_to_read, score_table
from cgmerge.errors import UsageError
from cgmerge.evals.baselines import best_single, check_picks, with_baselines
from cgmerge.evals.checked import load_checked
from cgmerge.evals.record import write_record
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import by_target
from cgmerge.evals.targets import Target

VALIDATION = {"copy": {"v": "1100", "w": "0000"}, "sort": {"v": "1100", "w": "1000"}}


@pytest.fixture
def both():
    validation = make_evaluation(VALIDATION, kinds=KINDS)
    return with_baselines(make_evaluation(DEMO, kinds=KINDS), oracle=True, validation=validation)


def test_the_oracle_has_the_best_expert_of_each_skill(both):
    scores = {(r.target, r.skill): r.score for r in both.record.results}
    for skill in ("copy", "sort", "old"):
        assert scores["oracle", skill] == max(scores[name, skill] for name in ("copy", "sort"))
    oracle = both.record.targets[-1]
    assert (oracle.name, oracle.kind) == ("oracle", "baseline")
    assert oracle.note == "picked on these very items: copy on copy, sort on sort, copy on old"


def test_the_best_single_expert_is_picked_on_other_data(both):
    chosen = both.record.targets[-2]
    assert (chosen.name, chosen.digest) == ("best-single", "digest of sort")
    assert chosen.note.startswith("sort, which has the best mean on v.jsonl (sha256 sha of v")
    groups = by_target(both.items)
    for skill, items in groups["best-single"].items():
        same = [dataclasses.replace(one, target="sort") for one in items]
        assert same == groups["sort"][skill]


def test_the_first_of_equals_is_taken():
    rows = {"copy": {"v": "10"}, "sort": {"v": "01"}}
    assert best_single(make_evaluation(rows, kinds=KINDS)) == "copy"
    loglik = {"copy": {"v": "00"}, "sort": {"v": "01"}}
    assert best_single(make_evaluation(loglik, kinds=KINDS, metric="loglik")) == "sort"


def test_everything_follows_from_the_items(both, tmp_path):
    write_record(tmp_path / "r.json", both)
    loaded = load_checked(tmp_path / "r.json")
    assert loaded.record.results == both.record.results
    assert loaded.record.means == both.record.means


def test_only_what_was_asked_for():
    plain = make_evaluation(DEMO, kinds=KINDS)
    names = [one.name for one in with_baselines(plain, oracle=True).record.targets]
    assert names == ["base", "copy", "sort", "ties", "oracle"]


def test_picks_need_experts_and_other_data():
    one = Target("a", "expert", "d")
    data = [SkillSet("s", (), "s.jsonl", "ab")]
    check_picks([one, one], [SkillSet("v", (), "v.jsonl", "cd")], data)
    with pytest.raises(UsageError, match="at least two are needed, found 1"):
        check_picks([one, Target("m", "merged", "d")], [], data)
    with pytest.raises(UsageError, match="s2.jsonl is scored") as error:
        check_picks([one, one], [SkillSet("v", (), "s2.jsonl", "ab")], data)
    assert "--oracle" in error.value.hint
    with pytest.raises(UsageError):
        with_baselines(make_evaluation({"base": {"s": "1"}, "a": {"s": "1"}}), oracle=True)


def test_an_oracle_is_never_the_best_model(both):
    (section,) = sections_of(both)
    (plain,) = sections_of(make_evaluation(DEMO, kinds=KINDS))
    assert section.column("oracle").mean.score > section.top.mean.score
    assert section.top.name == "ties"
    # Nor does it change what is said of the models, or any p-value.
    assert (section.base, section.expert, section.others) == (
        plain.base, plain.expert, plain.others
    )  # fmt: skip
    page = page_of(both)
    Page(page)
    assert "picked on these very items" in page
    assert "4 models were scored on 30 items" in page
    rows = re.findall(r"<tr>.*?</tr>", page.partition("<h2>Groups")[0])
    best = {place for row in rows for place, cell in enumerate(row.split("<td")) if "best" in cell}
    assert best
    assert not best & {5, 6}  # best-single and oracle stand last
    titles, cells = score_table(both.record)
    row = {line[0]: line[-2 if titles[-1].startswith("vs") else -1] for line in cells}
    assert "*" not in row["oracle"]
    assert "*" in row["ties"]
    assert "oracle: picked on these very items" in how_to_read(both.record)
