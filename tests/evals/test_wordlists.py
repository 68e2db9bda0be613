"""The word-list task: right answers, no leakage between splits, no pair of skills in training."""

import random

import pytest

from cgmerge.evals.tasks import wordlists

X = ["pear", "tiger", "lamp"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["reverse"], ["lamp", "tiger", "pear"]),
        (["sort"], ["lamp", "pear", "tiger"]),
        (["uppercase"], ["PEAR", "TIGER", "LAMP"]),
        (["number"], ["1 pear", "2 tiger", "3 lamp"]),
        (["number", "reverse"], ["3 lamp", "2 tiger", "1 pear"]),
        (["copy"], X),
        (["keep first"], ["pear"]),
        (["keep last"], ["lamp"]),
        (["drop first"], ["tiger", "lamp"]),
        (["drop last"], ["pear", "tiger"]),
        (["sort", "reverse"], ["tiger", "pear", "lamp"]),
        (["reverse", "uppercase"], ["LAMP", "TIGER", "PEAR"]),
    ],
)
def test_edits(names, expected):
    assert wordlists.apply(names, X) == expected


def test_example_shows_every_step():
    row = wordlists.example(["reverse", "uppercase"], X)
    assert row["prompt"] == "Reverse, then uppercase: pear, tiger, lamp\n"
    assert row["completion"] == "lamp, tiger, pear > LAMP, TIGER, PEAR"


def chain_of(row):
    """Read the edits back from the instruction."""
    order, _, _ = row["prompt"].partition(":")
    return tuple(order.lower().split(", then "))


def test_an_expert_never_sees_another_skill():
    rows = wordlists.expert_rows("sort", random.Random(0), 400)
    chains = [chain_of(row) for row in rows]
    assert not any(name in ("reverse", "uppercase") for chain in chains for name in chain)
    alone = sum(chain == ("sort",) for chain in chains)
    within = sum("sort" in chain and len(chain) == 2 for chain in chains)
    assert len(rows) == 400
    assert alone + within == 240
    assert alone == 120


def test_the_warm_up_shows_skills_alone_and_no_more_than_the_trace():
    skills = ("reverse", "number", "uppercase")
    rows = wordlists.warmup_rows(skills, random.Random(0), 800, trace=0.12)
    chains = [chain_of(row) for row in rows]
    with_skill = [chain for chain in chains if set(chain) & set(wordlists.SKILLS)]
    assert len(rows) == 800
    assert sorted(with_skill) == sorted([(skill,) for skill in skills] * 32)
    assert sum(len(chain) == 2 for chain in chains) == 352


def test_splits_share_no_list():
    seen = {}
    for split in ("train", "validation", "test"):
        rng = random.Random(1)
        seen[split] = {frozenset(wordlists.draw_words(rng, split)) for _ in range(300)}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_pairs_are_all_ordered_pairs():
    assert len(wordlists.skill_pairs()) == 6
    rows = wordlists.held_out_rows(wordlists.skill_pairs(), random.Random(0), 12, "test")
    assert [chain_of(row) for row in rows[:6]] == wordlists.skill_pairs()


def test_words_are_different_and_plain():
    assert len(set(wordlists.WORDS)) == len(wordlists.WORDS) >= 50
    assert all(word.isalpha() and word.islower() for word in wordlists.WORDS)


def test_the_same_seed_gives_the_same_rows():
    once = wordlists.expert_rows("reverse", random.Random(3), 20)
    assert once == wordlists.expert_rows("reverse", random.Random(3), 20)
