"""Suggestions: slips of the keyboard are found, other words are left alone."""

import pytest

from cgmerge.nearest import nearest

METHODS = ["ties", "dare", "dare-ties", "linear", "task-arithmetic", "slerp", "tsv", "mats"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("tise", "ties"), ("TIES", "ties"), ("tiess", "ties"), ("dare_ties", "dare-ties"),
        ("linaer", "linear"), ("task_arithmetic", "task-arithmetic"), ("slrp", "slerp"),
    ],
)  # fmt: skip
def test_slips_are_found(word, meant):
    assert nearest(word, METHODS) == [meant]


@pytest.mark.parametrize("word", ["average", "tune", "fish", "x", "", "tasks", "lines"])
def test_other_words_are_left_alone(word):
    assert nearest(word, METHODS) == []


def test_the_nearest_come_first_in_their_own_spelling():
    assert nearest("Expert1", ["expert2", "EXPERT1", "base"], count=3) == ["EXPERT1", "expert2"]
    assert nearest("expert1", ["expert2", "expert3", "expert4"], count=2) != []
