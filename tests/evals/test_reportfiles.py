"""What the files of targets add to a report: sizes, curves, and warnings."""

import json
from dataclasses import replace

import pytest
from record_support import make_evaluation
from report_support import DEMO, KINDS, Page, page_of, sections_of

from cgmerge.errors import NotFound
from cgmerge.evals.report.charts import _ticks, curves
from cgmerge.evals.report.files import (
    Curve,
    Files,
    Point,
    Tuned,
    _look_at,
    read_files,
    tuned_on_reported,
)


@pytest.fixture(scope="module")
def demo():
    return make_evaluation(DEMO, kinds=KINDS)


def test_ticks_are_round_and_inside():
    assert _ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert _ticks(0.0, 1.4) == [0.0, 0.5, 1.0]
    assert _ticks(-0.3, 30.0) == [0.0, 10.0, 20.0, 30.0]


def test_a_curve_shows_every_trial_and_the_choice():
    tuned = Tuned(
        (), (Curve("a", (Point(0.5, 0.2), Point(1.0, 0.9))), Curve("b", (Point(2, 0.1),))), 1.0
    )
    text = curves(tuned, "score")
    Page(text)
    assert text.count("<circle") == 3
    assert "chosen 1" in text
    assert 'cx="46.0"' not in text  # the axis begins at zero, where nothing was tried
    assert f'cy="{284 - 0.9 * 272:.1f}"' in text
    alone = curves(Tuned((), (Curve("", (Point(0.0, 0.5),)),)), "score")
    assert alone.count("<circle") == 1


def test_files_give_size_recipe_and_curve(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "w").write_bytes(b"x" * 100)
    trials = [
        {"params": {"scale": s, "density": 0.2}, "score": s / 2, "skills": {}} for s in (1.0, 0.5)
    ]
    trials += [
        {"params": "no"},
        3,
        {"params": {"scale": True}, "score": 1},
        {"params": {"scale": 1}},
    ]
    content = {
        "method": "ties",
        "params": {"density": 0.2, "scale": 0.5, "deep": {}},
        "tuning": {
            "data": [{"file": "v.jsonl", "sha256": "ab"}, 7],
            "chosen": {"scale": 0.5},
            "trials": trials,
        },
    }
    (folder / "cgmerge.json").write_text(json.dumps(content))
    found = _look_at(folder)
    assert found.size == 100 + (folder / "cgmerge.json").stat().st_size
    assert found.made_by == "ties, density 0.2, scale 0.5"
    curve = Curve("density 0.2", (Point(0.5, 0.25), Point(1.0, 0.5)))
    assert found.tuned == Tuned((("v.jsonl", "ab"),), (curve,), 0.5)
    (folder / "cgmerge.json").write_text("{}")
    assert _look_at(folder).tuned is None
    (folder / "link").symlink_to(folder / "w")
    assert _look_at(folder).size == 102


def test_a_strange_record_makes_no_huge_or_broken_curve(tmp_path):
    scales = [5e-324, 1e300, -1e300, 10**18, 0.0]
    trials = [{"params": {"scale": scale}, "score": 1e9} for scale in scales]
    content = {"tuning": {"trials": trials * 1000, "data": [{"file": "f"}] * 1000}}
    (tmp_path / "cgmerge.json").write_text(json.dumps(content))
    tuned = _look_at(tmp_path).tuned
    assert tuned.data == (("f", ""),)
    assert {point.scale for point in tuned.curves[0].points} == {0.0, 5e-324}
    assert len(tuned.curves[0].points) == 200
    Page(curves(tuned, "score"))
    Page(curves(replace(tuned, chosen=1e300), "score"))


def test_tuned_on_what_is_reported_is_a_warning(demo):
    (section,) = sections_of(demo)
    known = {"ties": Files(1, "", Tuned((("v.jsonl", "sha of old"),)))}
    assert tuned_on_reported(section, known) == [
        "ties was tuned on this very file, old.jsonl: its score is no test score"
    ]
    assert 'class="warn">ties was tuned on this very file, old.j' in page_of(demo, known=known)
    assert tuned_on_reported(section, {"ties": Files(1, "", Tuned((("v", "cd"),)))}) == []


def test_files_of_unknown_targets(demo, tmp_path):
    with pytest.raises(NotFound) as error:
        read_files({"tise": str(tmp_path)}, sections_of(demo))
    assert "did you mean ties?" in error.value.hint


def test_files_belong_to_the_model_that_they_hold(demo):
    other = make_evaluation({"ties": {"new": "10"}}, digests={"ties": "another"})
    known = {"ties": Files(123456, "", None, "another")}
    text = page_of(demo, other, known=known)
    assert text.count("123,456") == 1
    assert text.index("Part 2") < text.index("123,456")
    assert page_of(demo, known=known).count("123,456") == 0
