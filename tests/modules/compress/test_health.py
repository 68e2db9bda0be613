"""What a file's own numbers say against it: dead modules, gains that are gone."""

import pytest

from cgmerge.modules.compress.health import lost_gains, warnings_of


def test_dead_modules_are_named_from_the_index():
    modules = {"a": [1.0, 0.0], "b": [0.5, 0.9], "zero": [0.0, 1.0], "grown": [None, 0.0]}
    (found,) = warnings_of({"emptied": 1}, modules, [])
    assert found == "1 of 4 modules have no effect any more: a"


def test_their_number_is_known_without_an_index():
    assert warnings_of({"emptied": 3}, {"a": (None, None)}, []) == [
        "3 modules have no effect any more"
    ]
    for fidelity in (None, {}, {"emptied": 0}, {"emptied": "many"}, {"emptied": True}):
        assert warnings_of(fidelity, {"a": (None, None)}, []) == []


@pytest.mark.parametrize(
    ("base", "before", "after", "told"),
    [(0.0, 1.0, 0.0, True), (0.2, 1.0, 0.59, True), (0.25, 1.0, 0.625, False),
     (0.0, 1.0, 1.0, False), (0.5, 0.4, 0.0, False), (0.5, 0.5, 0.5, False), (0, 1, 0, True)],
)  # fmt: skip
def test_less_than_half_of_the_gain(base, before, after, told):
    entry = {"suite": "s", "base": base, "original": before, "compressed": after}
    found = list(lost_gains([entry]))
    assert len(found) == told
    if told:
        assert f"{before:.3f} before and {after:.3f} after on s" in found[0]


@pytest.mark.parametrize("entry", [{}, {"base": "x", "original": 1.0, "compressed": 0.0}])
def test_what_others_write_is_left_out(entry):
    assert list(lost_gains([entry])) == []
