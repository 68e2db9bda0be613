"""Structures and divergences: hand values, published values, and a second way to compute them."""

import random

import numpy as np
import public_data
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.errors import DataError
from cgmerge.evals.splits.divergence import divergence, measure
from cgmerge.evals.splits.structure import normal, parse
from cgmerge.evals.tasks import scan

# From the files of Lake & Baroni 2018 and Keysers et al. 2020 (ContextualSP), with this scheme.
PUBLISHED = {
    "simple_split/tasks_{}_simple": (0.000068, 0.000131, 0.000448, 0),
    "add_prim_split/tasks_{}_addprim_jump": (0.047175, 0.152545, 0.205452, 7706),
    "add_prim_split/tasks_{}_addprim_turn_left": (0.041851, 0.032694, 0.062202, 0),
    "template_split/tasks_{}_template_opposite_right": (0.042282, 0.165625, 0.225478, 4476),
    "mcd_split/tasks_{}_mcd1": (0.006598, 0.289187, 0.950663, 1038),
    "mcd_split/tasks_{}_mcd2": (0.016625, 0.286024, 0.951632, 1031),
}
RULES = {"length": (0.035895, 0.053471, 0.212348, 0),
         "addprim-jump": (0.047175, 0.152545, 0.205452, 7706),
         "template-around-right": (0.042282, 0.165625, 0.225478, 4476)}  # fmt: skip


def test_a_tree_by_hand():
    tree = parse("(and (twice (plain turn left)) jump)")
    assert tree.labels == ("and", "twice", "plain", "turn", "left", "jump")
    assert tree.parents == (-1, 0, 1, 2, 2, 0)
    assert tree.places == (0, 0, 0, 0, 1, 1)
    assert set(tree.compounds(2)) == {
        ("and", 0, "twice"), ("and", 1, "jump"), ("twice", 0, "plain"),
        ("plain", 0, "turn"), ("plain", 1, "left")}  # fmt: skip
    assert set(tree.compounds(3)) == {
        ("and", 0, "twice", 0, "plain"), ("twice", 0, "plain", 0, "turn"),
        ("twice", 0, "plain", 1, "left")}  # fmt: skip
    assert tree.template() == "( and ( twice ( plain _ _ ) ) _ )"
    assert tree.has("( plain turn left )")
    assert tree.has("jump")
    assert not tree.has("turn left twice")
    assert parse(["and", ["twice", ["plain", "turn", "left"]], "jump"]) == tree


def test_words_by_hand():
    row = parse('add 3 and 14.5 to "x y"')
    assert not row.tree
    assert row.compounds(2)[:2] == [("add", 0, "3"), ("3", 0, "and")]
    assert row.compounds(3)[0] == ("add", 0, "3", 0, "and")
    assert row.template() == "add _ and _ to _"
    assert parse(["add", 3]).text == parse("add 3").text == "add 3"
    assert parse(7).labels == ("7",)
    assert row.has("and 14.5")
    assert not row.has("and 14")


@pytest.mark.parametrize("text", ["(a b", "(a) (b)", "((a) b)", "()", "(a ())", "(a b) c (d)"])
def test_parentheses_that_are_no_tree_are_words(text):
    found = parse(text)
    assert not found.tree
    assert found.labels == tuple(text.split())


@pytest.mark.parametrize("value", ["", " ", None, True, {}, [], [[]], [["a"], "b"], ["a b"],
                                   ["a", [None]]])  # fmt: skip
def test_what_has_no_structure_is_refused(value):
    with pytest.raises(DataError):
        parse(value)


def test_normal_form():
    assert normal("(plain  turn left)") == "( plain turn left )"
    assert normal(" turn  left ") == "turn left"


def test_a_deep_tree_needs_no_stack():
    deep = parse("(a " * 5000 + "b" + ")" * 5000)
    assert len(deep.labels) == 5001
    assert len(deep.compounds(3)) == 4999
    nested = "b"
    for _ in range(3000):
        nested = ["a", nested]
    assert len(parse(nested).labels) == 3001


@pytest.mark.parametrize(
    ("train", "test", "alpha", "expected"),
    [
        ({"a": 3, "b": 1}, {"a": 6, "b": 2}, 0.1, 0.0),
        ({"a": 1}, {"b": 1}, 0.5, 1.0),
        ({"a": 1, "b": 1}, {"a": 1}, 0.5, 1 - 0.5**0.5),
        ({"a": 1, "b": 1}, {"a": 1}, 0.1, 1 - 0.5**0.1),  # train first: 0.5^α · 1^(1−α)
        ({"a": 1}, {"a": 1, "b": 1}, 0.1, 1 - 0.5**0.9),
        ({"a": 9, "b": 1}, {"a": 1, "b": 9}, 0.5, 1 - 2 * 0.09**0.5),
    ],
)
def test_divergences_by_hand(train, test, alpha, expected):
    assert divergence(train, test, alpha) == pytest.approx(expected, abs=1e-12)


counts = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1)


@given(counts, counts, st.sampled_from([0.1, 0.5]), st.integers(2, 7))
def test_divergence_is_bounded_scale_free_and_turns_with_alpha(train, test, alpha, times):
    keys = sorted(train | test)
    p, q = (np.array([one.get(k, 0) for k in keys], float) for one in (train, test))
    dense = 1 - ((p / p.sum()) ** alpha * (q / q.sum()) ** (1 - alpha)).sum()
    found = divergence(train, test, alpha)
    assert 0 <= found <= 1
    assert found == pytest.approx(dense, abs=1e-9)
    assert found == pytest.approx(divergence(test, train, 1 - alpha), abs=1e-9)
    more = {key: count * times for key, count in train.items()}
    assert found == pytest.approx(divergence(more, test, alpha), abs=1e-9)


def test_empty_parts_have_no_divergence():
    with pytest.raises(DataError):
        divergence({}, {"a": 1}, 0.5)
    one = parse("jump")
    assert measure([one], [one]).compounds2 is None


def check(found, tests, expected):
    atoms, pairs, triples, unseen = expected
    assert found.atoms == pytest.approx(atoms, abs=1e-6)
    assert found.compounds2 == pytest.approx(pairs, abs=1e-6)
    assert found.compounds3 == pytest.approx(triples, abs=1e-6)
    assert round(found.unseen * tests) == unseen


@pytest.mark.parametrize("name", PUBLISHED)
def test_divergences_of_published_splits(name):
    sides = [[parse(scan.structure(c)) for c, _ in public_data.scan_pairs(name.format(part))]
             for part in ("train", "test")]  # fmt: skip
    check(measure(*sides), len(sides[1]), PUBLISHED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_divergences_of_splits_by_rule(name):
    sides = [[parse(scan.structure(c)) for c in side]
             for side in scan.split(name, random.Random(0))]  # fmt: skip
    check(measure(*sides), len(sides[1]), RULES[name])
