"""Split makers: what each holds out, and that the search of mcd is exact."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.splits import makers, mcd
from cgmerge.evals.splits.divergence import measure
from cgmerge.evals.splits.structure import parse
from cgmerge.evals.tasks import scan


def structures(*texts):
    return [parse(text) for text in texts]


@pytest.fixture(scope="module")
def some_scan():
    """A tenth of SCAN: 2,091 commands."""
    chosen = random.Random(0).sample(list(scan.commands()), 2091)
    return [parse(scan.structure(command)) for command in chosen]


def held(items, made):
    return {item.text for item, test in zip(items, made.tests, strict=True) if test}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.floats(0.05, 0.95), st.integers(0))
def test_iid_never_exceeds_the_share_and_leaves_no_part_empty(rows, share, seed):
    items = structures(*(f"w{n}" for n in range(len(rows))))
    made = makers.split_iid(items, rows, share, random.Random(seed))
    assert any(made.tests)
    assert not all(made.tests)
    taken = [count for count, test in zip(rows, made.tests, strict=True) if test]
    assert sum(taken) <= share * sum(rows) + 1e-6 or len(taken) == 1
    again = makers.split_iid(items, rows, share, random.Random(seed))
    assert made == again


def test_length_takes_the_threshold_nearest_the_share():
    items = structures("a", "a b", "a b c", "a b c d", "a b c d e")
    for share, longest in ((0.1, 4), (0.25, 4), (0.45, 3), (0.9, 1)):
        made = makers.split_length(items, [1] * 5, share)
        assert made.facts == {"longest_train": longest, "longest": 5}
        assert made.tests == [n + 1 > longest for n in range(5)]
    weighed = makers.split_length(items, [1, 1, 1, 1, 16], 0.2)
    assert weighed.facts["longest_train"] == 4  # 16 of 20 rows, still nearer than 17
    with pytest.raises(DataError, match="all rows have 2"):
        makers.split_length(structures("a b", "c d"), [1, 1], 0.5)


def test_templates_stay_whole():
    items = structures(*(f"({f} {x})" for f in "fgh" for x in "abcd"))
    made = makers.split_template(items, [1] * 12, 0.4, random.Random(1))
    heads = {text.split()[1] for text in held(items, made)}
    assert len(heads) == 1
    assert sum(made.tests) == 4
    assert made.facts == {"templates": 3, "templates_test": 1}
    assert made.warnings == ()
    alone = makers.split_template(structures("a b", "c"), [1, 1], 0.5, random.Random(0))
    assert "random split" in alone.warnings[0]
    with pytest.raises(DataError, match="one template: add _"):
        makers.split_template(structures("add 1", "add 2"), [1, 1], 0.5, random.Random(0))


def test_a_primitive_is_held_out_in_context_only():
    items = structures("jump", "jump twice", "walk", "walk twice", "look and jump")
    made = makers.split_primitive(items, [3, 1, 1, 1, 1], 0.2, "jump")
    assert held(items, made) == {"jump twice", "look and jump"}
    assert made.facts == {"primitive": "jump", "alone": 3}
    chosen = makers.split_primitive(items, [1] * 5, 0.3, None)
    assert chosen.facts["primitive"] == "walk"  # 2 of 5 rows have it, 3 of 5 have jump
    new = makers.split_primitive(items, [1] * 5, 0.2, "twice")
    assert "no row is 'twice' alone" in new.warnings[0]
    with pytest.raises(UsageError, match="'jumpp' cannot be held out") as caught:
        makers.split_primitive(items, [1] * 5, 0.2, "jumpp")
    assert "jump" in caught.value.hint
    with pytest.raises(UsageError, match="every row"):
        makers.split_primitive(structures("a b", "a c"), [1, 1], 0.2, "a")
    with pytest.raises(DataError, match="no primitive can be chosen"):
        makers.split_primitive(structures("a b", "a c"), [1, 1], 0.2, None)


@pytest.mark.parametrize(
    ("primitive", "split"),
    [("jump", "addprim-jump"), ("(plain turn left)", "addprim-turn-left")],
)
def test_the_primitive_rule_makes_the_splits_of_scan(primitive, split):
    commands = list(scan.commands())
    items = [parse(scan.structure(command)) for command in commands]
    made = makers.split_primitive(items, [1] * len(items), 0.3, primitive)
    train, test = map(set, scan.split(split, random.Random(0)))
    assert {c for c, t in zip(commands, made.tests, strict=True) if t} == test
    assert {c for c, t in zip(commands, made.tests, strict=True) if not t} == train


trees = st.recursive(
    st.sampled_from("abcd"),
    lambda inner: st.tuples(st.sampled_from("fgh"), inner, inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=6,
).filter(lambda text: text.count("(") > 1)


@given(st.lists(trees, min_size=6, max_size=14, unique=True), st.integers(0, 99), st.data())
@settings(max_examples=60, deadline=None)
def test_the_search_knows_the_divergences_of_every_move(texts, seed, data):
    items = structures(*texts)
    rows = data.draw(st.lists(st.integers(1, 3), min_size=len(items), max_size=len(items)))
    search = mcd._Search(items, rows, random.Random(seed), 3)
    search.start(0.4, 0.2) if len(items) > 8 else search.start(0.5, 0.0)
    place = data.draw(st.integers(0, len(items) - 1))
    target = data.draw(st.sampled_from([mcd._TRAIN, mcd._TEST, mcd._OUT]))
    signs = mcd._signs(int(search.side[place]), target)
    told = [float(side.after(np.array([place]), *signs)[0])
            for side in (search.compounds, search.atoms)]  # fmt: skip
    search._move(place, target)
    placed = [
        (item, side)
        for item, count, side in zip(items, rows, search.side, strict=True)
        for _ in range(count)
    ]
    sides = [[item for item, side in placed if side == part] for part in (mcd._TRAIN, mcd._TEST)]
    if not all(any(i.compounds(3) for i in side) for side in sides):
        return
    found = measure(*sides)
    assert told[0] == pytest.approx(found.compounds3, abs=1e-9)
    assert told[1] == pytest.approx(found.atoms, abs=1e-9)
    assert search.compounds.divergence() == pytest.approx(found.compounds3, abs=1e-9)


def sides_of(items, made):
    out = set(made.left_out)
    return [[i for n, (i, t) in enumerate(zip(items, made.tests, strict=True))
             if t == side and n not in out] for side in (False, True)]  # fmt: skip


@pytest.mark.slow
def test_mcd_diverges_in_compounds_and_not_in_atoms(some_scan):
    rows = [1] * len(some_scan)
    at_random = makers.split_iid(some_scan, rows, 0.2, random.Random(0))
    made = mcd.split_mcd(some_scan, rows, 0.2, random.Random(0))
    plain, found = (measure(*sides_of(some_scan, one)) for one in (at_random, made))
    assert found.atoms <= mcd.MAX_ATOM
    assert plain.compounds3 < 0.02
    assert found.compounds3 > 0.25
    assert sum(made.tests) == sum(at_random.tests) == 418
    assert made == mcd.split_mcd(some_scan, rows, 0.2, random.Random(0))


@pytest.mark.slow
def test_mcd_diverges_more_where_items_may_be_left_out(some_scan):
    rows = [1] * len(some_scan)
    made = mcd.split_mcd(some_scan, rows, 0.11, random.Random(0), leave_out=0.55)
    train, test = sides_of(some_scan, made)
    assert len(made.left_out) == int(0.55 * 2091)
    assert len(test) == int(0.11 * 0.45 * 2091)
    assert len(train) + len(test) + len(made.left_out) == 2091
    found = measure(train, test)
    assert found.atoms <= mcd.MAX_ATOM
    assert found.compounds3 > 0.7


def test_mcd_refuses_what_has_no_compounds_or_no_room():
    with pytest.raises(DataError, match="no row has compounds"):
        mcd.split_mcd(structures("a", "b", "c"), [1] * 3, 0.3, random.Random(0))
    with pytest.raises(DataError, match="too few"):
        mcd.split_mcd(structures("a b c", "b c d"), [5, 5], 0.2, random.Random(0))
