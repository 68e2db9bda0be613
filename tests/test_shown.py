"""Scores as text: halves go up, whatever a float makes of them, and columns add up."""

import re
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.shown import counted, score_text, share_text, some_of

ROOT = Path(__file__).parent.parent / "cgmerge"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.725, "0.73"),  # Python's own format: 0.72
        (0.175, "0.18"),
        (0.075, "0.08"),
        (0.025, "0.03"),
        (0.8 - 0.725, "0.08"),  # 0.07500000000000007
        (0.7 - 0.675, "0.03"),  # 0.02499999999999991
        (-0.025, "-0.03"),
        (0.999, "1.00"),
        (-0.001, "0.00"),
        (-0.0, "0.00"),
        (-0.25, "-0.25"),
        (float("-inf"), "-inf"),
        (1e30, "1000000000000000019884624839000.00"),
    ],
)
def test_halves_go_away_from_zero(value, text):
    assert score_text(value) == text


def test_signs_and_digits():
    assert [score_text(x, 3, plus=True) for x in (0.075, 0.0, -0.0004, -1.0)] == [
        "+0.075", "+0.000", "+0.000", "-1.000",
    ]  # fmt: skip
    assert score_text(float("inf"), plus=True) == "+inf"
    assert [share_text(x) for x in (0.0, 0.125, 0.115, 1.0)] == ["0%", "13%", "12%", "100%"]


def test_long_lists_say_how_much_is_left_out():
    names = [f"m{i}" for i in range(9)]
    assert some_of(names) == "m0, m1, m2, m3, m4 and 4 more"
    assert some_of(names[:6]) == "m0, m1, m2, m3, m4 and 1 more"
    assert some_of(names[:5]) == "m0, m1, m2, m3, m4"
    assert some_of([]) == ""
    assert some_of((str(i) for i in range(2000)), 1) == "0 and 1,999 more"
    assert some_of("abc", 2, between="\n  ") == "a\n  b\n  and 1 more"


def test_counts():
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,000 rows",
    ]
    assert counted(3, "entry", "entries") == "3 entries"
    assert counted(1, "object belongs", "objects belong") == "1 object belongs"


def test_no_message_cuts_a_list_without_a_word():
    """`', '.join(names[:5])` reads as if there were no more."""
    pattern = re.compile(r"""["'](?:, |; |\\n *)["']\.join\([^\n]*\[:(?:[0-9]+|_?[A-Z]\w*)\]\)""")
    found = {
        path.name: match[0]
        for path in sorted(ROOT.rglob("*.py"))
        for match in pattern.finditer(path.read_text())
    }
    # They say it in words of their own: `…`, or a line of its own; the best scores of a page.
    assert set(found) <= {"outputs.py", "page.py"}, found


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(0, 4))
def test_shares_of_items_are_rounded_as_fractions_are(right, n, digits):
    """An oracle in exact arithmetic."""
    share = Fraction(min(right, n), n)
    scaled = Decimal(share.numerator * 10**digits) / Decimal(share.denominator)
    whole = scaled.to_integral_value(ROUND_HALF_UP)
    assert Decimal(score_text(min(right, n) / n, digits)) == whole.scaleb(-digits)


@given(st.sampled_from([10, 20, 40, 50, 100, 125, 200, 250, 500, 1000]), st.data())
def test_with_three_digits_the_change_is_after_minus_before(n, data):
    before, after = (data.draw(st.integers(0, n)) / n for _ in range(2))
    shown = [Decimal(score_text(x, 3)) for x in (before, after, after - before)]
    assert shown[1] - shown[0] == shown[2]


def test_no_score_is_shown_by_another_rule():
    """Formats of Python round halves by what the binary number happens to be."""
    pattern = re.compile(r"\{[^{}]*(?:score|exact_match'\]|difference)\)?:\+?\.[0-9]+[f%]\}")
    found = [
        f"{path.name}: {match[0]}"
        for path in sorted(ROOT.rglob("*.py"))
        for match in pattern.finditer(path.read_text())
        if not match[0].startswith(("{_x(", "{_y("))  # places in a drawing
    ]
    assert found == []
