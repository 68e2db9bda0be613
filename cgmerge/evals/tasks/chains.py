"""Skill chains: small string edits, alone and composed, that a model of half a million
parameters learns in a minute.

One text reads `f2 f1 : x1 .. xn = f1(x) > f2(f1(x))`: the names stand as in mathematics, so the
rightmost is applied first, and the result of every step is written out. Ten base functions are
what the base model knows, the new skills are what experts are trained for, and pairs of two new
skills are what no expert has seen: the question is whether a composition of experts can do them.

Letters belong to splits by their checksum, so that no prompt of the validation or test part can
occur in training data, whatever the seed, the function names and the number of rows.

Source: the task family follows PCFG SET (Hupkes et al. 2020, "Compositionality decomposed") and
the string rewrites of Zhang, Wang & Charton 2024, cut down to lists of three to five letters.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Literal, TypedDict

LETTERS = tuple("abcdefghijkl")
LENGTHS = (3, 4, 5)

Split = Literal["train", "validation", "test"]
Group = Literal["new1", "mix2", "new2", "base1", "base2"]
GROUPS: tuple[Group, ...] = ("new1", "mix2", "new2", "base1", "base2")

_TRIES = 1000  # draws in a row that are all taken: the split is used up
_Indices = list[int]
_INDEX = {letter: index for index, letter in enumerate(LETTERS)}
_SIZE = len(LETTERS)


class Row(TypedDict):
    """One example of a data file in the prompt/completion format."""

    prompt: str
    completion: str
    skill: str


# Every function is total: on lists shorter than it needs it does what is left to do, so that
# chains of any depth have a defined result.
BASE: dict[str, Callable[[_Indices], _Indices]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[::-1],
    "rotl": lambda x: x[1:] + x[:1],
    "dropfirst": lambda x: x[1:],
    "duplast": lambda x: x + x[-1:],
    "plus2": lambda x: [(i + 2) % _SIZE for i in x],
    "minus1": lambda x: [(i - 1) % _SIZE for i in x],
    "swap2": lambda x: x[1::-1] + x[2:],
    "xor1": lambda x: [i ^ 1 for i in x],
    "first3": lambda x: x[:1] * 3,
}
NEW: dict[str, Callable[[_Indices], _Indices]] = {
    "caesar": lambda x: [(i + 1) % _SIZE for i in x],
    "swapends": lambda x: x if len(x) < 2 else [x[-1], *x[1:-1], x[0]],
    "droplast": lambda x: x[:-1],
    "rotr": lambda x: x[-1:] + x[:-1],
}
# Words in the vocabulary of the built-in base that its training never shows: the control for
# "a skill that the base has no trace of".
SPARE: dict[str, Callable[[_Indices], _Indices]] = {
    "atbash": lambda x: [_SIZE - 1 - i for i in x],
    "dupfirst": lambda x: x[:1] + x,
}
FUNCTIONS = BASE | NEW | SPARE


def apply(names: Sequence[str], letters: Sequence[str]) -> list[str]:
    """Apply a chain of functions, the rightmost first.

    Args:
        names: Function names in reading order, e.g. `["reverse", "caesar"]`.
        letters: Input, each one of `LETTERS`.

    Returns:
        The letters after the last step.

    Raises:
        KeyError: A name is not in `FUNCTIONS`, or a letter not in `LETTERS`.
    """
    return _steps(names, letters)[-1]


def example(names: Sequence[str], letters: Sequence[str]) -> Row:
    """Write one example: the prompt ends with `=`, the completion shows every step.

    Args:
        names: Function names in reading order.
        letters: Input letters.

    Returns:
        `prompt + completion` is the whole text; `skill` is the names joined by a space.

    Raises:
        KeyError: A name is not in `FUNCTIONS`, or a letter not in `LETTERS`.

    Example:
        >>> example(["reverse", "caesar"], ["a", "b", "c"])["completion"]
        ' b c d > d c b'
    """
    steps = " > ".join(" ".join(step) for step in _steps(names, letters))
    return {
        "prompt": f"{' '.join(names)} : {' '.join(letters)} =",
        "completion": f" {steps}",
        "skill": " ".join(names),
    }


def split_of(letters: Sequence[str]) -> Split:
    """Tell which split a list of letters belongs to: 80 % train, 10 % validation, 10 % test.

    Args:
        letters: Input letters of an example.

    Returns:
        The split; it depends on nothing but the letters.
    """
    bucket = zlib.crc32(" ".join(letters).encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def tasks(group: Group, skills: Sequence[str] = tuple(NEW)) -> list[tuple[str, ...]]:
    """List the chains of a test group, in a fixed order.

    Args:
        group: `new1` new skills alone; `mix2` a new skill with a base function, in both orders;
            `new2` ordered pairs of two different new skills, which no expert has seen; `base1`
            base functions alone; `base2` ordered pairs of base functions, equal ones included.
        skills: The new skills.

    Returns:
        Tuples of function names in reading order.
    """
    if group == "new1":
        return [(skill,) for skill in skills]
    if group == "mix2":
        return [pair for s, f in product(skills, BASE) for pair in ((s, f), (f, s))]
    if group == "new2":
        return list(permutations(skills, 2))
    if group == "base1":
        return [(name,) for name in BASE]
    return list(product(BASE, repeat=2))


def group_rows(
    group: Group,
    rng: random.Random,
    count: int,
    *,
    split: Split = "test",
    skills: Sequence[str] = tuple(NEW),
) -> list[Row]:
    """Make a test or validation set whose rows are spread evenly over the tasks of a group.

    Args:
        group: See `tasks`.
        rng: Source of all randomness.
        count: Rows wanted.
        split: Which letters may occur.
        skills: The new skills.

    Returns:
        `count` rows with different prompts, task after task.

    Raises:
        ValueError: More rows of a task are wanted than there are inputs in the split.
    """
    chains = tasks(group, skills)
    seen: set[str] = set()
    rows = []
    for index, names in enumerate(chains):
        share = count // len(chains) + (index < count % len(chains))
        rows += _distinct((names for _ in range(share)), rng, split, seen)
    return rows


def expert_rows(skill: str, rng: random.Random, count: int, *, replay: float = 0.4) -> list[Row]:
    """Make the training set of one expert: its own skill, and replay of what the base knows.

    Half of the own rows show the skill alone, a quarter each the skill before and after a random
    base function. Without the pairs the expert could not use its skill inside a chain; without
    the replay it would learn to apply its skill whatever the instruction says.

    Args:
        skill: A new skill.
        rng: Source of all randomness.
        count: Rows wanted.
        replay: Share of base rows, 0 to 1.

    Returns:
        `count` rows with different prompts from the training split, shuffled.

    Raises:
        ValueError: More rows are wanted than there are inputs.
    """
    replayed = round(count * replay)
    own = count - replayed
    base = list(BASE)
    chains: list[tuple[str, ...]] = [(skill,)] * (own - own // 2)
    chains += [
        (skill, rng.choice(base)) if index % 2 else (rng.choice(base), skill)
        for index in range(own // 2)
    ]
    chains += [_base_chain(rng) for _ in range(replayed)]
    rng.shuffle(chains)
    return _distinct(iter(chains), rng, "train", set())


def pretraining_rows(
    rng: random.Random,
    count: int,
    *,
    share: float = 0.08,
    answered: float = 0.35,
    skills: Sequence[str] = tuple(NEW),
) -> list[Row]:
    """Make what a base model is trained on: base functions, and a trace of the new skills.

    The trace matters: when the base has no notion of a skill, the deltas of separately trained
    experts do not add up to anything. Here the name of a new skill is mostly followed by a plain
    copy and sometimes by the skill, so that the base could do it but, asked for its best answer,
    does not; like a language model that has seen an instruction without learning to follow it.
    (A few fixed examples per skill do not serve: this model generalises from as few as eight.)

    Args:
        rng: Source of all randomness.
        count: Rows wanted.
        share: Share of rows that name a new skill, alone.
        answered: Share of those whose completion is what the skill asks for.
        skills: The new skills.

    Returns:
        `count` rows from the training split, shuffled.
    """
    named = round(count * share)
    rows = []
    for _ in range(named):
        row = example([rng.choice(skills)], letters := _letters(rng, "train"))
        if rng.random() >= answered:
            row["completion"] = example(["copy"], letters)["completion"]
        rows.append(row)
    rows += [example(_base_chain(rng), _letters(rng, "train")) for _ in range(count - named)]
    rng.shuffle(rows)
    return rows


def _steps(names: Sequence[str], letters: Sequence[str]) -> list[list[str]]:
    indices = [_INDEX[letter] for letter in letters]
    steps = [list(letters)] if not names else []
    for name in reversed(names):
        indices = FUNCTIONS[name](indices)
        steps.append([LETTERS[i] for i in indices])
    return steps


def _base_chain(rng: random.Random) -> tuple[str, ...]:
    """Draw 40 % single base functions and 60 % pairs."""
    return tuple(rng.choice(list(BASE)) for _ in range(1 if rng.random() < 0.4 else 2))


def _letters(rng: random.Random, split: Split) -> list[str]:
    while True:
        letters = [rng.choice(LETTERS) for _ in range(rng.choice(LENGTHS))]
        if split_of(letters) == split:
            return letters


def _distinct(
    chains: Iterator[tuple[str, ...]], rng: random.Random, split: Split, seen: set[str]
) -> list[Row]:
    """Write one example for each chain, none with a prompt that is in `seen` already."""
    rows = []
    for names in chains:
        for _ in range(_TRIES):
            row = example(names, _letters(rng, split))
            if row["prompt"] not in seen:
                break
        else:
            raise ValueError(f"no unused input left for {' '.join(names)} in the {split} split")
        seen.add(row["prompt"])
        rows.append(row)
    return rows
