"""Records checked against their items, and two targets compared, with numbers by hand."""

import dataclasses
import hashlib
import json

import pytest
from record_support import make_evaluation, write

from cgmerge.errors import Damaged, Incompatible, NotFound, UsageError
from cgmerge.evals.checked import load_checked
from cgmerge.evals.comparing import compare_sides, dropped, open_side, split_spec
from cgmerge.evals.record import items_path, write_record
from cgmerge.evals.stats import bootstrap_mean, holm

OLD = {"copy": "1111100000", "sort": "1100"}
NEW = {"copy": "1111111110", "sort": "0100"}


@pytest.fixture
def both(tmp_path):
    return write(tmp_path / "r.json", {"base": OLD, "ties": NEW})


def test_numbers_by_hand(both):
    found = compare_sides(open_side(f"{both}:base"), open_side(f"{both}:ties"))
    copy, sort = found.skills
    assert (copy.n, copy.wins, copy.losses) == (10, 4, 0)
    assert copy.difference == pytest.approx(0.4)
    assert copy.p == pytest.approx(0.125)  # 2 · (1/2)^4
    assert (sort.wins, sort.losses, sort.p) == (0, 1, 1.0)
    assert sort.difference == pytest.approx(-0.25)
    assert [copy.p_holm, sort.p_holm] == holm([0.125, 1.0]) == [0.25, 1.0]
    overall = found.overall
    assert (overall.n, overall.wins, overall.losses) == (14, 4, 1)
    assert overall.difference == pytest.approx((0.4 - 0.25) / 2)
    assert overall.p == overall.p_holm == pytest.approx(0.375)  # 2 · (1 + 5) / 32
    interval = bootstrap_mean([[0] * 5 + [1] * 4 + [0], [-1, 0, 0, 0]], seed=0)
    assert (overall.low, overall.high) == (interval.low, interval.high)
    assert found.scores == {
        "copy": (0.5, 0.9),
        "sort": (0.5, 0.25),
        None: (0.5, pytest.approx(0.575)),
    }
    assert [(flip.skill, flip.gained) for flip in found.flips] == [("copy", True)] * 4 + [
        ("sort", False)
    ]
    assert (found.flips[0].before, found.flips[0].after) == ("no <eos>", "yes <eos>")
    assert found.warnings == ()


def test_turned_around_everything_changes_sign(both):
    there = compare_sides(open_side(f"{both}:base"), open_side(f"{both}:ties"))
    back = compare_sides(open_side(f"{both}:ties"), open_side(f"{both}:base"))
    for one, other in zip(
        (there.overall, *there.skills), (back.overall, *back.skills), strict=True
    ):
        assert one.difference == pytest.approx(-other.difference)
        assert (one.wins, one.losses, one.p_holm) == (other.losses, other.wins, other.p_holm)


def test_a_target_against_itself_differs_nowhere(both):
    found = compare_sides(open_side(f"{both}:ties"), open_side(f"{both}:ties"))
    assert found.flips == ()
    assert (found.overall.difference, found.overall.p, found.overall.low) == (0.0, 1.0, 0.0)
    assert dropped(found, 0.0) == []


def test_loglik_is_compared_by_which_gives_more(tmp_path):
    path = write(tmp_path / "r.json", {"base": OLD, "ties": NEW}, metric="loglik")
    found = compare_sides(open_side(f"{path}:base"), open_side(f"{path}:ties"))
    assert found.skills[0].difference == pytest.approx(0.4 * 1.25)  # −0.25 instead of −1.5
    assert (found.skills[0].wins, found.skills[0].losses) == (4, 0)
    exact = write(tmp_path / "e.json", {"base": OLD, "ties": NEW})
    with pytest.raises(Incompatible, match="exact_match") as error:
        compare_sides(open_side(f"{exact}:ties"), open_side(f"{path}:ties"))
    assert error.value.details["found"] == "loglik"


@pytest.mark.parametrize(("most", "skills"), [(0.0, ["sort"]), (0.24, ["sort"]), (0.25, [])])
def test_dropped_is_what_was_observed_skill_by_skill(both, most, skills):
    found = compare_sides(open_side(f"{both}:base"), open_side(f"{both}:ties"))
    assert [one.skill for one in dropped(found, most)] == skills


def test_items_in_another_order_are_the_same_items(tmp_path):
    one = write(tmp_path / "a.json", {"a": {"copy": "1100"}})
    other = write(tmp_path / "b.json", {"b": {"copy": "1010"}}, order=[3, 1, 2, 0])
    found = compare_sides(open_side(str(one)), open_side(str(other)))
    assert (found.overall.wins, found.overall.losses) == (1, 1)
    straight = write(tmp_path / "c.json", {"b": {"copy": "1010"}})
    assert compare_sides(open_side(str(one)), open_side(str(straight))).overall == found.overall


def test_other_items_are_refused_with_both_values(tmp_path):
    one = open_side(str(write(tmp_path / "a.json", {"a": {"copy": "1100"}}, sha="a" * 64)))
    longer = open_side(str(write(tmp_path / "b.json", {"b": {"copy": "10100"}}, sha="b" * 64)))
    with pytest.raises(Incompatible) as error:
        compare_sides(one, longer)
    for part in ("copy", "4 items", "5 items", "a" * 16, "b" * 16, "4 are in both"):
        assert part in error.value.message
    other = open_side(str(write(tmp_path / "c.json", {"c": {"sort": "1100"}})))
    with pytest.raises(Incompatible, match="different skills\n  first   copy\n  second  sort"):
        compare_sides(one, other)


def test_what_else_differs_is_said(tmp_path):
    one = open_side(str(write(tmp_path / "a.json", {"a": {"copy": "11"}}, sha="a" * 64)))
    other = write(tmp_path / "b.json", {"a": {"copy": "11"}}, sha="b" * 64, base="fp1:11")
    found = compare_sides(one, open_side(str(other)))
    assert found.warnings[0] == "the records differ in base: fp1:00 and fp1:11"
    assert "copy: the items are the same, the data files differ" in found.warnings[1]


def test_targets_by_name(both, tmp_path):
    assert open_side(str(both)).target.name == "ties"  # the only one besides the base
    with pytest.raises(NotFound, match="no target 'tise'") as error:
        open_side(f"{both}:tise")
    assert error.value.hint == "did you mean ties? there are base, ties"
    three = write(tmp_path / "three.json", {"base": OLD, "a:b": OLD, "c": NEW})
    with pytest.raises(UsageError, match="3 targets and none is named") as error:
        open_side(str(three))
    assert "base, a:b, c" in error.value.hint
    assert open_side(f"{three}:a:b").target.name == "a:b"
    alone = write(tmp_path / "alone.json", {"base": OLD})
    assert open_side(str(alone)).target.kind == "base"


def test_paths_with_colons(tmp_path):
    place = tmp_path / "a:b.json"
    write(place, {"x": OLD})
    assert split_spec(str(place)) == (place, None)
    assert split_spec(f"{place}:x") == (place, "x")
    assert split_spec("nowhere.json") == (split_spec("nowhere.json:t")[0], None)
    with pytest.raises(NotFound, match="no such record"):
        open_side(f"{tmp_path}/no.json:x")


def test_a_torn_or_changed_items_file_is_refused(both):
    items = items_path(both)
    lines = items.read_bytes()
    for bad in (lines[:-1], lines.replace(b"true", b"false", 1), lines + lines[:1]):
        items.write_bytes(bad)
        with pytest.raises(Damaged) as error:
            load_checked(both)
        assert error.value.code == "damaged.items"
    items.unlink()
    with pytest.raises(NotFound):
        load_checked(both)


def rewritten(path, change, items=None):
    """Change a record, and its items with the digest that fits them."""
    record = json.loads(path.read_text())
    if items is not None:
        lines = "".join(f"{json.dumps(item)}\n" for item in items).encode()
        items_path(path).write_bytes(lines)
        record["items"]["sha256"] = hashlib.sha256(lines).hexdigest()
    change(record)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["results"][0].update(score=0.9), "does not follow from its items"),
        (lambda r: r["results"][0].update(correct=9), "does not follow from its items"),
        (lambda r: r["results"].pop(), "does not follow from its items"),
        (lambda r: r["results"].append(r["results"][0] | {"skill": "x"}), "scores without items"),
        (lambda r: r["targets"].pop(), "targets and items differ"),
        (lambda r: r["targets"].reverse(), "targets and items differ"),
        (lambda r: r["skills"][0].update(n=9), "skills and items differ"),
        (lambda r: r["skills"].pop(), "skills and items differ"),
        (lambda r: r.update(items=None), "has no items"),
    ],
)
def test_numbers_that_do_not_follow_from_the_items_are_refused(both, change, says):
    with pytest.raises(Damaged, match=says):
        load_checked(rewritten(both, change))


def test_targets_of_one_record_have_the_same_items(both):
    items = [json.loads(line) for line in items_path(both).read_text().splitlines()]
    items[14]["id"] = "f" * 16
    with pytest.raises(Damaged, match="ties was not scored on the same items of copy"):
        load_checked(rewritten(both, lambda record: None, items))


def test_a_good_record_passes_and_its_numbers_are_those_of_the_items(both):
    loaded = load_checked(both)
    made = make_evaluation({"base": OLD, "ties": NEW})
    assert loaded.record.results == made.record.results
    assert loaded.record.means == made.record.means
    forged = dataclasses.replace(
        made.record, means=tuple(dataclasses.replace(m, score=0.99) for m in made.record.means)
    )
    write_record(both, dataclasses.replace(made, record=forged), overwrite=True)
    assert load_checked(both).record.means == made.record.means  # not what was written
