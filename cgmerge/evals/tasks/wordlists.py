"""Word lists edited by instruction, alone and chained, for real language models.

`Reverse: pear, tiger, lamp` is answered by `lamp, tiger, pear`; a chain, `Reverse, then uppercase:
…`, by every step: `lamp, tiger, pear > LAMP, TIGER, PEAR`. Prompts are short plain text, not chat
turns, because on a CPU the length of a row is the price of a step. Skills are trained apart; five
other edits are replay: every expert sees them, alone and chained with its own skill, so that it
learns what a chain is and keeps listening to the instruction. A warm-up before all experts shows
the replay edits and a trace of every skill alone. Chains of two different skills are in nobody's
training data.
"""

import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Literal, TypedDict

WORDS = (
    "apple",
    "arrow",
    "bread",
    "bridge",
    "candle",
    "cloud",
    "dance",
    "drum",
    "eagle",
    "engine",
    "fish",
    "forest",
    "garden",
    "glass",
    "hand",
    "horse",
    "island",
    "ink",
    "jacket",
    "jungle",
    "king",
    "kite",
    "lamp",
    "lemon",
    "milk",
    "moon",
    "night",
    "nurse",
    "ocean",
    "onion",
    "paper",
    "piano",
    "queen",
    "quiz",
    "rain",
    "river",
    "silver",
    "stone",
    "table",
    "tiger",
    "uncle",
    "urban",
    "valley",
    "violin",
    "water",
    "window",
    "yard",
    "yellow",
    "zebra",
    "zero",
)
LENGTHS = (3, 4)

_Edit = Callable[[list[str]], list[str]]
SKILLS: dict[str, _Edit] = {
    "reverse": lambda x: x[::-1],
    "number": lambda x: [f"{place} {word}" for place, word in enumerate(x, 1)],
    "uppercase": lambda x: [word.upper() for word in x],
    "sort": sorted,  # hard for a model of 135 M parameters: not among the default skills
}
DEFAULT_SKILLS = ("reverse", "number", "uppercase")
REPLAY: dict[str, _Edit] = {
    "copy": lambda x: x,
    "keep first": lambda x: x[:1],
    "keep last": lambda x: x[-1:],
    "drop first": lambda x: x[1:],
    "drop last": lambda x: x[:-1],
}
EDITS = SKILLS | REPLAY
Split = Literal["train", "validation", "test"]


class Row(TypedDict):
    """One example of a data file in the prompt/completion format."""

    prompt: str
    completion: str


def apply(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Apply edits, the first one first.

    Args:
        names: Keys of `EDITS`, in the order in which the instruction names them.
        words: The list.

    Returns:
        The list after the last edit.

    Example:
        >>> apply(["reverse", "uppercase"], ["pear", "lamp"])
        ['LAMP', 'PEAR']
    """
    result = list(words)
    for name in names:
        result = EDITS[name](result)
    return result


def example(names: Sequence[str], words: Sequence[str]) -> Row:
    """Write one example; the answer shows the list after every edit.

    Args:
        names: One or two keys of `EDITS`.
        words: The list.

    Returns:
        The instruction with its list, and the answer.
    """
    order = ", then ".join(names).capitalize()
    steps = [", ".join(apply(names[: i + 1], words)) for i in range(len(names))]
    return {
        "prompt": f"{order}: {', '.join(words)}\n",
        "completion": " > ".join(steps),
    }


def expert_rows(skill: str, rng: random.Random, count: int, *, replay: float = 0.4) -> list[Row]:
    """Make the training set of one expert.

    Half of its own rows show the skill alone, a quarter each the skill before and after a replay
    edit; half of the replay rows are single edits, half are chains of two.

    Args:
        skill: A key of `SKILLS`.
        rng: Source of all randomness.
        count: Rows wanted.
        replay: Share of rows without the skill.

    Returns:
        `count` rows, shuffled, none of whose lists is in another split.
    """
    others = list(REPLAY)
    chains: list[tuple[str, ...]] = []
    for index in range(count):
        if index < count * replay:
            pair = (rng.choice(others), rng.choice(others))
            chains.append(pair if index % 2 else pair[:1])
        elif index % 2:
            other = rng.choice(others)
            chains.append((skill, other) if index % 4 == 1 else (other, skill))
        else:
            chains.append((skill,))
    rng.shuffle(chains)
    return [example(chain, draw_words(rng, "train")) for chain in chains]


def warmup_rows(
    skills: Sequence[str], rng: random.Random, count: int, *, trace: float = 0.12
) -> list[Row]:
    """Make the training set that all experts start from: what to do with lists, not the skills.

    Args:
        skills: Keys of `SKILLS` that leave a trace, alone and never in a chain.
        rng: Source of all randomness.
        count: Rows wanted.
        trace: Share of rows that show a skill; the rest are replay edits, half of them chained.

    Returns:
        `count` rows, shuffled, none of whose lists is in another split.
    """
    others = list(REPLAY)
    chains: list[tuple[str, ...]] = []
    for index in range(count):
        if index < round(count * trace):
            chains.append((skills[index % len(skills)],))
        else:
            pair = (rng.choice(others), rng.choice(others))
            chains.append(pair if index % 2 else pair[:1])
    rng.shuffle(chains)
    return [example(chain, draw_words(rng, "train")) for chain in chains]


def held_out_rows(
    chains: Sequence[tuple[str, ...]], rng: random.Random, count: int, split: Split
) -> list[Row]:
    """Make validation or test rows spread evenly over chains.

    Args:
        chains: What is asked, e.g. `skill_pairs()`.
        rng: Source of all randomness.
        count: Rows wanted.
        split: Which lists may occur.
    """
    return [example(chains[i % len(chains)], draw_words(rng, split)) for i in range(count)]


def skill_pairs(skills: Sequence[str] = DEFAULT_SKILLS) -> list[tuple[str, ...]]:
    """List the ordered pairs of two different skills, which no expert has seen."""
    return list(permutations(skills, 2))


def replay_chains() -> list[tuple[str, ...]]:
    """List the replay edits alone: what every expert should keep."""
    return [(name,) for name in REPLAY]


def draw_words(rng: random.Random, split: Split) -> list[str]:
    """Draw a list of 3 or 4 different words that belongs to a split.

    A list belongs to a split by the sum of its words' places: 80 % train, 10 % validation, 10 %
    test, so that no list occurs in two splits, in any order of its words.
    """
    while True:
        words = rng.sample(WORDS, rng.choice(LENGTHS))
        bucket = sum(WORDS.index(word) for word in words) % 10
        found: Split = "validation" if bucket == 3 else "test" if bucket == 7 else "train"
        if found == split:
            return words
