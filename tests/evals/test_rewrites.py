"""String rewrites: steps by hand, an independent rewriter, splits, and what never ends."""

import random
import re
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import DataError, LimitExceeded, UsageError
from cgmerge.evals.tasks import rewrites
from cgmerge.evals.tasks.parts import fill


@pytest.mark.parametrize(
    ("rules", "text", "steps"),
    [
        # The first rule goes before an earlier place of the second.
        ([("b", "c"), ("a", "b")], "ab", ["ab", "ac", "bc", "cc"]),
        ([("a", "b"), ("b", "c")], "ba", ["ba", "bb", "cb", "cc"]),
        ([("aa", "a")], "aaa", ["aaa", "aa", "a"]),
        ([("ab", "")], "aabb", ["aabb", "ab", ""]),
        ([("c", "d")], "ab", ["ab"]),
        ([], "ab", ["ab"]),
        # Markov's own example: binary to unary, with | for one.
        (
            [("|0", "0||"), ("1", "0|"), ("0", "")], "101",
            ["101", "0|01", "00||1", "00||0|", "00|0|||", "000|||||", "00|||||", "0|||||",
             "|||||"],
        ),
    ],
)  # fmt: skip
def test_steps_by_hand(rules, text, steps):
    assert rewrites.rewrite(rules, text) == steps


def test_what_does_not_end_is_refused():
    with pytest.raises(LimitExceeded, match="still apply after 1,000 steps"):
        rewrites.rewrite([("a", "a")], "a")
    with pytest.raises(LimitExceeded, match="after 7 steps there are 8 letters; at most 7"):
        rewrites.rewrite([("a", "aa")], "a", most_letters=7)
    assert len(rewrites.rewrite([("a", "b")], "aaa", most_steps=3)) == 4
    with pytest.raises(LimitExceeded, match="after 2 steps"):
        rewrites.rewrite([("a", "b")], "aaa", most_steps=2)
    with pytest.raises(DataError, match="nothing on its left"):
        rewrites.rewrite([("", "a")], "b")


def oracle(rules, text, steps):
    """Rewrite by searching places letter by letter; None where it goes on after so many steps."""
    for _ in range(steps + 1):
        for left, right in rules:
            places = [p for p in range(len(text)) if text[p : p + len(left)] == left]
            if places:
                text = text[: places[0]] + right + text[places[0] + len(left) :]
                break
        else:
            return text
    return None


sides = st.text("ab", max_size=2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=2), sides), max_size=3),
    st.text("ab", max_size=6),
)
def test_against_a_rewriter_that_shares_nothing(rules, text):
    expected = oracle(rules, text, 30)
    try:
        assert rewrites.rewrite(rules, text, most_steps=30)[-1] == expected
    except LimitExceeded:
        assert expected is None


def test_a_row_by_hand():
    row = rewrites.example((("ab", "c"), ("c", "")), "ab")
    assert row == {
        "prompt": "a b -> c ; c -> _ : a b =", "completion": " _", "skill": "rules2",
        "rules": "a b -> c ; c -> _", "size": 2, "steps": 2,
    }  # fmt: skip
    assert rewrites.example((("ab", "c"), ("c", "")), "ab", steps=True)["completion"] == " c > _"
    assert rewrites.example((("c", "a"),), "ab", steps=True)["completion"] == " a b"


def read(row):
    """Return the rules and the string that a prompt names."""
    shown, text = row["prompt"].removesuffix(" =").split(" : ")
    rules = [
        tuple(re.sub("[ _]", "", side) for side in rule.split(" -> "))
        for rule in shown.split(" ; ")
    ]
    return rules, text.replace(" ", "")


@pytest.mark.parametrize("split", rewrites.SPLITS)
def test_splits_hold_out_what_they_say(split):
    parts = rewrites.make(split, random.Random(3), 500)
    assert [len(rows) for _, rows in parts.items()] == [360, 40, 100]
    learned = [*parts.train, *parts.validation]
    shown, asked = ({row["rules"] for row in rows} for rows in (learned, parts.test))
    assert (not shown & asked) == split.startswith("rules")
    longest = max(row["size"] for row in learned)
    assert all(row["size"] > longest for row in parts.test) == split.startswith("length")
    for row in [*learned, *parts.test]:
        rules, text = read(row)
        answer = row["completion"].split(" > ")[-1].replace(" ", "").replace("_", "")
        assert answer == oracle(rules, text, 24)
        if split.endswith("-steps"):
            assert row["completion"].count(" > ") == max(row["steps"] - 1, 0)
    still = sum(row["steps"] == 0 for row in [*learned, *parts.test])
    assert 0 < still < 75  # strings that no rule fits are asked too, but few


def test_more_rows_than_there_are_end_in_words():
    letters = cycle("abc")
    with pytest.raises(UsageError, match="3 rows are wanted; after 2 no new one"):
        fill(lambda _: {"prompt": next(letters)}, 3, {"a"})
