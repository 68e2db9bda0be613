"""Analyses as reports show them: tables of HTML and Markdown, and records that hold columns."""

import dataclasses
import hashlib

import pytest
from record_support import make_evaluation
from report_support import DEMO, KINDS, Page, page_of, sections_of

from cgmerge.errors import Damaged
from cgmerge.evals.checked import load_checked
from cgmerge.evals.record import write_record
from cgmerge.evals.report.markdown import render_markdown
from cgmerge.evals.report.page import Report
from cgmerge.evals.statements import analyse_evaluation


@pytest.fixture
def demo():
    return make_evaluation(DEMO, kinds=KINDS)


def with_items(evaluation, change, **settings):
    """The same evaluation with fields of items set by change(item, number)."""
    items = [
        dataclasses.replace(item, **change(item, n % 10)) for n, item in enumerate(evaluation.items)
    ]
    record = dataclasses.replace(
        evaluation.record,
        settings=dataclasses.replace(evaluation.record.settings, **settings),
    )
    return dataclasses.replace(evaluation, record=record, items=tuple(items))


def parts_of_sort(item, number):
    """`old` items are made of one item of copy and one of sort."""
    if item.skill != "old":
        return {}
    ids = [hashlib.sha256(f"{s} {number}".encode()).hexdigest()[:16] for s in ("copy", "sort")]
    return {"parts": tuple(ids)}


def text_of(report):
    """Markdown without its escapes."""
    return render_markdown(report).replace("\\", "")


def test_effects_stand_on_the_page(demo):
    (section,) = sections_of(demo)
    ties = next(one for one in Report("T", [section]).statements(section) if one.target == "ties")
    assert ties.effects.recovered.value == pytest.approx((1.0 + 0.9) / 2)
    assert ties.effects.forgetting.value == pytest.approx(0.8)
    page = page_of(demo)
    Page(page)
    assert "Kept, lost and carried over" in page
    assert "+0.80" in page
    assert "calibration" not in page  # these items hold no numbers of tokens
    text = text_of(Report("T", [section]))
    assert "| model | gain kept | of the expert's score | lost to merging | forgotten |" in text
    assert "0.95 (" in text


def test_of_an_evaluation_as_of_its_page(demo):
    (section,) = sections_of(demo)
    assert analyse_evaluation(demo) == Report("T", [section]).statements(section)


def test_calibration_is_a_column(demo):
    made = with_items(demo, lambda item, n: {"tokens": 2, "right": 0})
    text = text_of(Report("T", sections_of(made)))
    assert "calibration error |" in text
    assert "over 10 bins of the probability of the whole right answer" in text


def test_parts_make_gaps_and_links(demo):
    made = with_items(demo, parts_of_sort)
    text = text_of(Report("T", sections_of(made)))
    # ties: 9 items with both parts right, of which 7 are wrong.
    assert "| ties | 0.78 (" in text
    assert "9 of 10" in text
    assert "| base | – (0 of 10) |" in text
    assert "| ties | old (copy + sort) | 0.20 | 0.90 | 1.00 | below both |" in text
    page = page_of(made)
    Page(page)
    assert "Compositionality gap" in page
    assert "Weakest links" in page


def test_columns_make_curves(demo):
    made = with_items(demo, lambda item, n: {"at": {"depth": float(n // 5)}}, by=("depth",))
    text = text_of(Report("T", sections_of(made)))
    assert "Scores by depth" in text
    # ties: copy and sort 5 of 5 below, then 5 and 4; old 2 of 5, then 0.
    first, second = (line for line in text.splitlines() if "(n = 15)" in line)
    assert first.startswith("| 0 (n = 15) | ")
    assert "| 0.80 (" in first
    assert "| 0.60 (" in second


def test_names_of_columns_are_shown_as_text(demo):
    name = "<b>|x"
    made = with_items(demo, lambda item, n: {"at": {name: 1.0}}, by=(name,))
    page = page_of(made)
    Page(page)
    assert "<b>|x" not in page
    assert "&lt;b&gt;\\|x" in render_markdown(Report("T", sections_of(made)))


def test_records_keep_columns_and_parts(demo, tmp_path):
    made = with_items(demo, lambda item, n: {**parts_of_sort(item, n), "at": {"d": 1.0}}, by=("d",))
    write_record(tmp_path / "r.json", made)
    loaded = load_checked(tmp_path / "r.json")
    assert loaded.items == made.items
    assert loaded.record.settings.by == ("d",)


def test_a_record_whose_parts_are_gone_is_refused(demo, tmp_path):
    made = with_items(demo, lambda item, n: {"parts": ("f" * 16,)} if n == 3 else {})
    write_record(tmp_path / "r.json", made)
    with pytest.raises(Damaged, match="has a part"):
        load_checked(tmp_path / "r.json")
