"""SCAN: the language, its meaning and its splits, against the published files."""

import random
import time
from collections import Counter

import public_data
import pytest

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.tasks import scan

COUNTS = {
    "simple": (16728, 4182),
    "length": (16990, 3920),
    "addprim-jump": (14670, 7706),
    "addprim-turn-left": (21890, 1208),
    "template-around-right": (15225, 4476),
    "template-opposite-right": (15225, 4476),
    "template-right": (15225, 4476),
    "template-jump-around-right": (18528, 1173),
    "filler-0": (15225, 1173),
    "filler-1": (16290, 1173),
    "filler-2": (17391, 1173),
    "filler-3": (18528, 1173),
    "few-shot-1": (15226, 1173),
    "few-shot-1024": (16249, 1173),
}
PUBLISHED = {
    "addprim-jump": ("add_prim_split", "addprim_jump"),
    "addprim-turn-left": ("add_prim_split", "addprim_turn_left"),
    "template-opposite-right": ("template_split", "template_opposite_right"),
    "filler-1": ("filler_split", "filler_num1"),
}


@pytest.mark.parametrize(
    ("command", "actions"),
    [
        ("jump", "I_JUMP"),
        ("turn left", "I_TURN_LEFT"),
        ("walk right", "I_TURN_RIGHT I_WALK"),
        ("look opposite left", "I_TURN_LEFT I_TURN_LEFT I_LOOK"),
        ("turn opposite right", "I_TURN_RIGHT I_TURN_RIGHT"),
        ("run around left", " ".join(["I_TURN_LEFT I_RUN"] * 4)),
        ("turn around right twice", " ".join(["I_TURN_RIGHT"] * 8)),
        ("walk thrice and run", "I_WALK I_WALK I_WALK I_RUN"),
        ("walk left after run twice", "I_RUN I_RUN I_TURN_LEFT I_WALK"),
    ],
)
def test_meaning_by_hand(command, actions):
    assert scan.interpret(command) == actions


@pytest.mark.parametrize(
    "command",
    ["", "turn", "hop", "jump and", "and jump", "jump twice twice", "jump left right",
     "walk and run and look", "turn around", "jump around up"],
)  # fmt: skip
def test_other_words_are_refused(command):
    with pytest.raises(DataError, match="not a SCAN command"):
        scan.interpret(command)


def test_structures_by_hand():
    assert scan.structure("jump") == "jump"
    assert scan.structure("turn left twice and jump") == "(and (twice (plain turn left)) jump)"
    assert scan.structure("run after look around right") == "(after run (around look right))"


def test_the_language_has_its_published_sizes():
    commands = list(scan.commands())
    assert len(commands) == len(set(commands)) == 20910
    words = Counter(command.count(" ") + 1 for command in commands)
    assert [words[n] for n in range(1, 10)] == [4, 18, 72, 328, 1288, 3520, 6080, 6400, 3200]
    lengths = [scan.interpret(command).count(" ") + 1 for command in commands]
    assert (min(lengths), max(lengths)) == (1, 48)
    assert round(sum(lengths) / len(lengths), 4) == 14.3179


@pytest.mark.parametrize("name", COUNTS)
def test_splits_have_their_published_sizes_and_share_no_command(name):
    train, test = scan.split(name, random.Random(1))
    assert (len(train), len(test)) == COUNTS[name]
    assert not set(train) & set(test)
    assert len(set(test)) == len(test)


def test_length_and_few_shot_are_what_they_say():
    train, test = scan.split("length", random.Random(0))
    sizes = {len(scan.interpret(command).split()) for command in test}
    assert sizes == {24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48}
    assert max(len(scan.interpret(command).split()) for command in train) == 22
    none, one = (set(scan.split(f"filler-{n}", random.Random(0))[0]) for n in (0, 1))
    few, again = (set(scan.split("few-shot-8", random.Random(s))[0]) for s in (0, 1))
    assert none < few < one
    assert len(few - none) == 8
    assert few != again


def test_draws_follow_the_seed():
    assert scan.split("simple", random.Random(3)) == scan.split("simple", random.Random(3))
    assert scan.split("simple", random.Random(3)) != scan.split("simple", random.Random(4))


def test_no_such_split():
    with pytest.raises(UsageError, match="few-shot-3"):
        scan.split("few-shot-3", random.Random(0))


def test_all_published_pairs_are_made():
    published = dict(public_data.scan_pairs("tasks"))
    assert published == {command: scan.interpret(command) for command in scan.commands()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_splits_are_the_published_ones_with_their_repeats(name):
    folder, file = PUBLISHED[name]
    ours = scan.split(name, random.Random(0))
    for part, commands in zip(("train", "test"), ours, strict=True):
        published = public_data.scan_pairs(f"{folder}/tasks_{part}_{file}")
        assert Counter(command for command, _ in published) == Counter(commands)


def test_the_published_few_shot_split_lies_between_the_same_two_sets():
    published = {c for c, _ in public_data.scan_pairs(
        "few_shot_split/tasks_train_fewshot_num32_rep1")}  # fmt: skip
    none, one = (set(scan.split(f"filler-{n}", random.Random(0))[0]) for n in (0, 1))
    assert none < published < one
    assert len(published - none) == 32


@pytest.mark.slow
def test_all_splits_take_seconds():
    start = time.process_time()
    for name in scan.SPLITS:
        scan.split(name, random.Random(0))
    assert time.process_time() - start < 10
