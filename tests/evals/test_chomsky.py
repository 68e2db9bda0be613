"""Tasks of the Chomsky hierarchy: the paper's examples, independent oracles, lengths."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.evals.tasks import chomsky


@pytest.mark.parametrize(
    ("task", "given_", "answer"),
    [
        # Appendix of the paper, tokens apart.
        ("even-pairs", "a a b b a", "yes"),
        ("even-pairs", "a a b", "no"),
        ("even-pairs", "b", "yes"),
        ("parity", "a a a b b a", "yes"),
        ("parity", "b a b b", "no"),
        ("modular-arithmetic", "1 + 2 - 4", "4"),
        ("modular-arithmetic", "3 - 2 * 4", "0"),
        ("modular-arithmetic-brackets", "- ( 1 - 2 ) * ( 4 - 3 * ( - 2 ) )", "0"),
        ("modular-arithmetic-brackets", "( 1 - - 2 )", "3"),
        ("cycle-navigation", "stay forward back forward forward stay", "2"),
        ("cycle-navigation", "back back", "3"),
        ("reverse-string", "a a b b a", "a b b a a"),
        ("stack-manipulation", "a b b a a pop push-a pop", "a b b a"),
        ("stack-manipulation", "a pop pop push-b", "b"),
        ("stack-manipulation", "a pop", "_"),
        ("duplicate-string", "a b a a b", "a b a a b a b a a b"),
        ("odds-first", "a a a b a a", "a a a a b a"),
        ("bucket-sort", "4 2 1 3 2 2 1 4", "1 1 2 2 2 3 4 4"),
        ("binary-addition", "1 0 0 1 0 + 1 0 1", "1 0 1 1 1"),
        ("binary-addition", "0 0 + 0", "0"),
    ],
)
def test_by_hand(task, given_, answer):
    row = chomsky.example(task, given_.split())
    assert row["prompt"] == f"{task} : {given_} ="
    assert row["completion"] == f" {answer}"
    assert row["size"] == len(given_.split())


def pairs(tokens):
    return sum(a != b for a, b in pairwise(tokens)) % 2 == 0


def machine(tokens):
    """Keep the stack as nested pairs: nothing of it is a list."""
    stack = None
    for token in tokens:
        stack = (stack and stack[1]) if token == "pop" else (token[-1], stack)
    found = []
    while stack:
        found.insert(0, stack[0])
        stack = stack[1]
    return " ".join(found) or "_"


def binary(tokens):
    """Add as on paper, from the right, with a carry."""
    one, other = ("".join(tokens)[::-1].split("+"))[::-1]
    carry, found = 0, ""
    for place in range(max(len(one), len(other)) + 1):
        carry += sum(int(side[place : place + 1] or 0) for side in (one, other))
        found += str(carry % 2)
        carry //= 2
    return " ".join(found[::-1].lstrip("0") or "0")


def odds(tokens):
    return " ".join([t for n, t in enumerate(tokens) if n % 2 == 0]
                    + [t for n, t in enumerate(tokens) if n % 2])  # fmt: skip


ORACLES = {
    "parity": lambda x: "no" if sum(t == "b" for t in x) & 1 else "yes",
    "even-pairs": lambda x: "yes" if pairs(x) else "no",
    "cycle-navigation": lambda x: str((x.count("forward") + 4 * x.count("back")) % 5),
    "modular-arithmetic": lambda x: str(eval(" ".join(x)) % 5),
    "reverse-string": lambda x: " ".join(reversed(x)),
    "stack-manipulation": machine,
    "modular-arithmetic-brackets": lambda x: str(eval(" ".join(x)) % 5),
    "duplicate-string": lambda x: " ".join(x * 2),
    "odds-first": odds,
    "bucket-sort": lambda x: " ".join(" ".join(d * x.count(d)) for d in "12345" if d in x),
    "binary-addition": binary,
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(chomsky.TASKS)), st.integers(1, 100), st.randoms(use_true_random=False)
)
def test_drawn_inputs_have_the_answer_of_an_oracle(name, length, rng):
    tokens = chomsky.TASKS[name].draw(rng, length)
    assert chomsky.example(name, tokens)["completion"] == f" {ORACLES[name](tokens)}"
    exact = {"modular-arithmetic": length - (length % 2 == 0), "binary-addition": max(length, 3)}
    assert len(tokens) == exact.get(name, length)


def test_the_length_split_asks_for_longer_inputs_of_every_task():
    parts = chomsky.make("length", random.Random(0), 1100)
    assert [len(rows) for _, rows in parts.items()] == [792, 88, 220]
    for name, rows in parts.items():
        assert {row["skill"] for row in rows} == set(chomsky.TASKS)
        sizes = [row["size"] for row in rows]
        assert (min(sizes) > 40, max(sizes) > 40) == (name == "test", name == "test")
    levels = {row["skill"]: row["level"] for row in parts.test}
    assert sorted(levels.values()) == (
        ["context-free"] * 3 + ["context-sensitive"] * 4 + ["regular"] * 4
    )


def test_one_task_alone_is_for_an_expert():
    for split, long in (("parity", False), ("parity-length", True)):
        parts = chomsky.make(split, random.Random(0), 200)
        assert all(row["skill"] == "parity" for _, rows in parts.items() for row in rows)
        assert (min(row["size"] for row in parts.test) > 40) == long
