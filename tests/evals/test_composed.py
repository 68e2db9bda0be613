"""Compositionality gap, weakest links, curves and calibration against values by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.errors import UsageError
from cgmerge.evals.composed import (
    calibration,
    composition_gaps,
    curve,
    link_of,
    numbers_of,
    spans,
    weakest_links,
)
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Choice, Item
from cgmerge.evals.stats import wilson

EXACT = METRICS["exact_match"]


def item(name, *, right=True, skill="s", **more):
    fields = {"loglik": -0.5, "prediction": "", "expected": "", "tokens": 1, "right": 0}
    return Item(name, skill, "m", correct=right, **{**fields, **more})


def wholes(rows):
    """Two hops and a whole for each (hop 1, hop 2, whole)."""
    skills = {"one": [], "two": [], "both": []}
    for n, (first, second, whole) in enumerate(rows):
        skills["one"].append(item(f"a{n}", right=first, skill="one"))
        skills["two"].append(item(f"b{n}", right=second, skill="two"))
        parts = (f"a{n}", f"b{n}")
        skills["both"].append(item(f"c{n}", right=whole, skill="both", parts=parts))
    return skills


def test_the_gap_counts_only_wholes_whose_parts_are_right():
    rows = [(1, 1, 0)] * 2 + [(1, 1, 1)] * 3 + [(0, 1, 0)] * 4 + [(0, 0, 1)]
    (gap,) = composition_gaps(wholes(rows), EXACT)
    assert (gap.skill, gap.wholes, gap.n, gap.wrong, gap.gap) == ("both", 10, 5, 2, 0.4)
    assert (gap.low, gap.high) == (wilson(2, 5).low, wilson(2, 5).high)


def test_no_whole_with_right_parts_is_no_gap_of_zero():
    (gap,) = composition_gaps(wholes([(0, 1, 0)]), EXACT)
    assert (gap.n, gap.gap, gap.low) == (0, None, None)
    assert composition_gaps({"s": [item("a")]}, EXACT) == []


def test_all_wholes_together():
    skills = wholes([(1, 1, 0)])
    skills["more"] = [item("d", skill="more", parts=("a0",)), item("e", skill="more")]
    gaps = composition_gaps(skills, EXACT)
    assert [(g.skill, g.wholes, g.n, g.wrong) for g in gaps] == [
        ("both", 1, 1, 1), ("more", 1, 1, 0), (None, 2, 2, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("score", "link"),
    [
        (0.29, "below both"),
        (0.3, "nearer weak"),
        (0.59, "nearer weak"),
        (0.6, "nearer strong"),
        (0.9, "nearer strong"),
        (0.91, "above both"),
    ],
)
def test_links_between_030_and_090(score, link):
    assert link_of(score, 0.3, 0.9) == link


def test_weakest_links_follow_from_the_parts_of_items():
    (link,) = weakest_links(wholes([(1, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0)]), EXACT)
    assert (link.skill, link.parts) == ("both", ("one", "two"))
    assert (link.score, link.weak, link.strong, link.link) == (0.25, 0.25, 1.0, "nearer weak")
    one_part = {"s": [item("a")], "t": [item("b", skill="t", parts=("a",))]}
    assert weakest_links(one_part, EXACT) == []
    assert weakest_links(wholes([(1, 1, 1)]), METRICS["perplexity"]) == []


def test_spans_of_few_values_are_the_values():
    assert spans([3, 1, 1, 2]) == [(1, 1), (2, 2), (3, 3)]
    assert spans([7.5]) == [(7.5, 7.5)]


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=80))
def test_spans_hold_every_number_once(numbers):
    cuts = spans(numbers)
    assert all(sum(first <= one <= last for first, last in cuts) == 1 for one in numbers)
    assert all(any(first <= one <= last for one in numbers) for first, last in cuts)
    assert len(cuts) <= 8
    assert cuts == sorted(cuts)


def test_spans_hold_about_equally_many():
    assert spans([float(n) for n in range(60)])[:2] == [(0, 9), (10, 19)]


def test_curves_by_hand():
    items = [
        item("a", tokens=2),
        item("b", tokens=2, right=False),
        item("c", tokens=5, right=False),
    ]
    numbers = numbers_of(items, "tokens")
    short, long = curve(items, numbers, spans(list(numbers.values())), EXACT)
    assert (short.first, short.last, short.n, short.score) == (2, 2, 2, 0.5)
    assert (short.low, short.high) == (wilson(1, 2).low, wilson(1, 2).high)
    assert (long.first, long.n, long.score) == (5, 1, 0.0)


def test_curves_over_a_column():
    assert numbers_of([item("a", at={"depth": 3.0})], "depth") == {"a": 3.0}
    for one in (item("a"), item("a", at={"width": 1.0})):
        with pytest.raises(UsageError) as error:
            numbers_of([one], "depth")
        assert error.value.hint == "evaluate with --by depth"


def sure(probability, *, right, tokens=1):
    return item("i", right=right, loglik=math.log(probability) / tokens, tokens=tokens)


def test_calibration_by_hand():
    # (0.9, 1]: two of three right at 0.95; (0.1, 0.2]: none of one at 0.15.
    items = [sure(0.95, right=True, tokens=3)] * 2 + [sure(0.95, right=False)]
    items.append(sure(0.15, right=False))
    found = calibration(items)
    assert found.ece == pytest.approx((abs(2 - 3 * 0.95) + 0.15) / 4)
    assert found.confidence == pytest.approx((3 * 0.95 + 0.15) / 4)
    assert (found.right, found.n, found.bins, found.about) == (0.5, 4, 10, "answers")


def test_bins_are_closed_above():
    # 0.5 is in (0.4, 0.5] of ten bins: apart from 0.51; of two bins they are apart too, of one not.
    items = [sure(0.5, right=True), sure(0.51, right=False)]
    assert calibration(items, bins=2).ece == pytest.approx((0.5 + 0.51) / 2)
    assert calibration(items, bins=1).ece == pytest.approx(0.01 / 2)
    nothing = item("i", right=False, loglik=-1e6)
    assert calibration([nothing]).ece == 0.0


def test_calibration_of_choices_is_that_of_the_picked_one():
    choices = (Choice("x", math.log(0.3), 2), Choice("y", math.log(0.1), 1))
    found = calibration([item("i", choices=choices, choice=0)] * 3, bins=15)
    assert (found.about, found.right) == ("choices", 1.0)
    assert found.confidence == pytest.approx(0.75)
    assert found.ece == pytest.approx(0.25)
    wrong = calibration([item("i", choices=choices, choice=1)])
    assert wrong.ece == pytest.approx(0.75)


def test_older_records_have_no_calibration():
    assert calibration([item("i", tokens=None)]) is None
    for items, bins in (([], 10), ([item("i")], 0)):
        with pytest.raises(UsageError):
            calibration(items, bins=bins)


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.booleans()), min_size=1), st.integers(1, 20))
def test_the_error_is_at_least_the_mean_gap_and_at_most_one(rows, bins):
    found = calibration([sure(p, right=right) for p, right in rows], bins=bins)
    assert abs(found.confidence - found.right) - 1e-9 <= found.ece <= 1.0
