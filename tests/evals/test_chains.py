"""The skill-chain generator against values worked out by hand."""

import random
from collections import Counter
from itertools import product

import pytest

from cgmerge.evals.tasks import chains
from cgmerge.evals.tasks.chains import (
    BASE,
    FUNCTIONS,
    GROUPS,
    LENGTHS,
    LETTERS,
    NEW,
    SPARE,
    apply,
    example,
    expert_rows,
    group_rows,
    pretraining_rows,
    split_of,
    tasks,
)

HAND = {  # name: result on "a d l c", worked out by hand; the alphabet is a..l
    "copy": "a d l c",
    "reverse": "c l d a",
    "rotl": "d l c a",
    "dropfirst": "d l c",
    "duplast": "a d l c c",
    "plus2": "c f b e",
    "minus1": "l c k b",
    "swap2": "d a l c",
    "xor1": "b c k d",
    "first3": "a a a",
    "caesar": "b e a d",
    "swapends": "c d l a",
    "droplast": "a d l",
    "rotr": "c a d l",
    "atbash": "l i a j",
    "dupfirst": "a a d l c",
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_single_function_by_hand(name):
    assert apply([name], ["a", "d", "l", "c"]) == HAND[name].split()


@pytest.mark.parametrize(
    ("names", "letters", "completion"),
    [
        ("caesar", "a b c", " b c d"),
        ("reverse caesar", "a b l", " b c a > a c b"),
        ("caesar reverse", "a b l", " l b a > a c b"),
        ("droplast rotr", "a b c d", " d a b c > d a b"),
        ("rotr droplast", "a b c d", " a b c > c a b"),
        ("first3 swapends", "a b c", " c b a > c c c"),
        ("swapends first3", "a b c", " a a a > a a a"),
        ("duplast dropfirst minus1", "a b c", " l a b > a b > a b b"),
    ],
)
def test_chain_by_hand_rightmost_first(names, letters, completion):
    row = example(names.split(), letters.split())
    assert row == {
        "prompt": f"{names} : {letters} =",
        "completion": completion,
        "skill": names,
    }
    assert apply(names.split(), letters.split()) == completion.split(" > ")[-1].split()


def test_known_identities():
    for letters in product(LETTERS[::3], repeat=3):
        x = list(letters)
        assert apply(["rotl", "rotr"], x) == x == apply(["minus1", "caesar"], x)
        assert apply(["reverse", "reverse"], x) == x == apply(["swapends", "swapends"], x)
        assert apply(["caesar", "caesar"], x) == apply(["plus2"], x)
        assert apply(["xor1", "xor1"], x) == x == apply(["atbash", "atbash"], x)


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("letters", [[], ["a"], ["a", "b"]])
def test_functions_are_total_and_do_not_change_their_input(name, letters):
    before = list(letters)
    result = apply([name], letters)
    assert letters == before
    assert all(letter in LETTERS for letter in result)


def test_no_function_is_the_identity_chain():
    assert apply([], ["a", "b"]) == ["a", "b"]


def test_unknown_names_and_letters_are_refused():
    with pytest.raises(KeyError):
        apply(["nothing"], ["a"])
    with pytest.raises(KeyError):
        apply(["copy"], ["z"])


def test_names_are_words_of_one_token():
    words = [*FUNCTIONS, *LETTERS]
    assert len(set(words)) == len(words) == 10 + 4 + 2 + 12
    assert all(word.isalnum() for word in words)


def test_splits_depend_on_the_letters_only_and_have_the_stated_shares():
    counts = Counter(split_of(x) for n in LENGTHS for x in product(LETTERS, repeat=n))
    total = sum(counts.values())
    assert counts["train"] / total == pytest.approx(0.8, abs=0.01)
    assert counts["test"] / total == pytest.approx(0.1, abs=0.01)
    assert counts["validation"] / total == pytest.approx(0.1, abs=0.01)
    assert split_of(["a", "b", "c"]) == split_of(("a", "b", "c"))


@pytest.mark.parametrize(
    ("group", "size"), [("new1", 4), ("mix2", 80), ("new2", 12), ("base1", 10), ("base2", 100)]
)
def test_task_lists(group, size):
    chains_of_group = tasks(group)
    assert len(set(chains_of_group)) == len(chains_of_group) == size
    kinds = {tuple(name in NEW for name in names) for names in chains_of_group}
    expected = {
        "new1": {(True,)},
        "mix2": {(True, False), (False, True)},
        "new2": {(True, True)},
        "base1": {(False,)},
        "base2": {(False, False)},
    }
    assert kinds == expected[group]


def test_chosen_skills():
    assert tasks("new1", ["atbash"]) == [("atbash",)]
    assert tasks("new2", ["atbash", "rotr"]) == [("atbash", "rotr"), ("rotr", "atbash")]
    assert len(tasks("mix2", list(SPARE))) == 40


@pytest.mark.parametrize("group", GROUPS)
def test_group_rows_are_even_distinct_and_right(group):
    rows = group_rows(group, random.Random(5), 210)
    assert len({row["prompt"] for row in rows}) == len(rows) == 210
    per_task = Counter(row["skill"] for row in rows)
    assert set(per_task) == {" ".join(names) for names in tasks(group)}
    assert max(per_task.values()) - min(per_task.values()) <= 1
    for row in rows:
        names, _, letters = row["prompt"].removesuffix(" =").partition(" : ")
        assert row == example(names.split(), letters.split())
        assert split_of(letters.split()) == "test"
        assert len(letters.split()) in LENGTHS


def test_expert_rows_have_the_stated_mixture():
    rows = expert_rows("rotr", random.Random(1), 1000)
    assert len({row["prompt"] for row in rows}) == len(rows) == 1000
    names = [row["skill"].split() for row in rows]
    assert sum("rotr" in n for n in names) == 600
    assert sum(n == ["rotr"] for n in names) == 300
    assert sum(len(n) == 2 and n[0] == "rotr" for n in names) == 150
    assert sum(len(n) == 2 and n[1] == "rotr" for n in names) == 150
    replayed = [n for n in names if "rotr" not in n]
    assert all(part in BASE for n in replayed for part in n)
    assert sum(len(n) == 1 for n in replayed) / 400 == pytest.approx(0.4, abs=0.08)
    assert not any(other in n for n in names for other in NEW if other != "rotr")
    assert names[:300] != [["rotr"]] * 300  # shuffled


def test_replay_can_be_switched_off_and_made_everything():
    assert all(
        "caesar" in r["skill"] for r in expert_rows("caesar", random.Random(1), 50, replay=0)
    )
    whole = expert_rows("caesar", random.Random(1), 50, replay=1)
    assert not any("caesar" in row["skill"] for row in whole)


def test_pretraining_rows_name_the_new_skills_and_mostly_copy():
    rows = pretraining_rows(random.Random(2), 5000, share=0.08, answered=0.35)
    named = [row for row in rows if row["skill"] in NEW]
    assert len(rows) == 5000
    assert len(named) == 400
    assert set(Counter(row["skill"] for row in named)) == set(NEW)
    right = copied = 0
    for row in rows:
        names, _, letters = row["prompt"].removesuffix(" =").partition(" : ")
        asked = example(names.split(), letters.split())
        if row["skill"] not in NEW:
            assert row == asked
            assert set(names.split()) <= set(BASE)
        right += row in named and row == asked
        copied += row in named and row["completion"] == f" {letters}"
    assert right / 400 == pytest.approx(0.35 + 0.65 * 0.03, abs=0.06)  # some copies are right
    assert right + copied >= 400


@pytest.mark.parametrize(("answered", "expected"), [(0, False), (1, True)])
def test_trace_of_new_skills_can_be_all_or_nothing(answered, expected):
    rows = pretraining_rows(random.Random(2), 300, share=1, answered=answered, skills=["caesar"])
    for row in rows:
        letters = row["prompt"].removesuffix(" =").partition(" : ")[2].split()
        assert (row == example(["caesar"], letters)) is expected


def test_no_held_out_prompt_in_any_training_set():
    rng = random.Random(3)
    training = {row["prompt"] for skill in NEW for row in expert_rows(skill, rng, 3000)}
    training |= {row["prompt"] for row in pretraining_rows(rng, 5000)}
    held_out = {
        split: {
            row["prompt"] for group in GROUPS for row in group_rows(group, rng, 400, split=split)
        }
        for split in ("validation", "test")
    }
    assert not training & (held_out["validation"] | held_out["test"])
    assert not held_out["validation"] & held_out["test"]


def test_same_seed_same_rows_and_the_global_generator_is_left_alone():
    state = random.getstate()
    makers = (
        lambda rng: expert_rows("rotr", rng, 100),
        lambda rng: pretraining_rows(rng, 100),
        lambda rng: group_rows("new2", rng, 100),
    )
    for make in makers:
        assert make(random.Random(4)) == make(random.Random(4)) != make(random.Random(5))
    assert random.getstate() == state


def test_rows_of_a_seed_stay_what_they_are():
    """Recorded results name a seed; the rows behind it must not change from version to version."""
    assert [row["prompt"] for row in group_rows("new2", random.Random(0), 2)] == [
        "caesar swapends : i j e h b =",
        "caesar droplast : a l e =",
    ]


def test_more_rows_than_inputs_is_an_error_not_an_endless_loop(monkeypatch):
    monkeypatch.setattr(chains, "LENGTHS", (1,))
    with pytest.raises(ValueError, match="no unused input left for caesar in the test split"):
        group_rows("new1", random.Random(0), 1000)
