"""A grid of skills and alphabets: experts know the cells of the diagonal, the rest is unseen.

Every expert learns one skill on the letters of one alphabet. A cell off the diagonal asks for the
skill of one expert on the letters of another's, a combination that is in nobody's training data.

Source: the design is that of Tam et al. (arXiv:2409.18314), object categories by drawing styles
there, cut down to the string edits of `chains` and to four alphabets of three letters.
"""

import random
from collections.abc import Sequence
from itertools import product

from cgmerge.evals.tasks import chains
from cgmerge.evals.tasks.parts import Parts, Record

SKILLS = tuple(chains.NEW)
SPLITS = ("unseen", *SKILLS)
REPLAY = 0.4

Alphabet = tuple[str, ...]


def alphabets(seed: int) -> tuple[Alphabet, ...]:
    """Deal the letters into one alphabet for each skill, in the order of `SKILLS`."""
    letters = list(chains.LETTERS)
    random.Random(f"grid {seed}").shuffle(letters)
    size = len(letters) // len(SKILLS)
    return tuple(
        tuple(sorted(letters[first : first + size])) for first in range(0, len(letters), size)
    )


def cell(skill: str, alphabet: Alphabet, split: chains.Split) -> list[Record]:
    """List all rows of one cell that belong to a split; `skill` names the cell."""
    name = f"{skill}-{''.join(alphabet)}"
    lists = (letters for size in chains.LENGTHS for letters in product(alphabet, repeat=size))
    return [
        {**chains.example([skill], letters), "skill": name}
        for letters in lists
        if chains.split_of(letters) == split
    ]


def make(split: str, seed: int, rng: random.Random) -> Parts:
    """Make the rows of one expert, or those that measure what a merge of all of them can do.

    Args:
        split: A skill: training, validation and test are its cell of the diagonal, training with
            replay of what the base knows. `unseen`: training and validation are the whole
            diagonal, so that a scale is chosen on what experts know; the test is every other cell.
        seed: Deals the alphabets; experts and tests of one grid need the same.
        rng: Source of the replay and of the order of training rows.
    """
    dealt = dict(zip(SKILLS, alphabets(seed), strict=True))
    known = SKILLS if split == "unseen" else (split,)
    held = {
        part: [row for skill in known for row in cell(skill, dealt[skill], part)]
        for part in ("train", "validation", "test")
    }
    train = held["train"]
    train += _replay(round(len(train) * REPLAY / (1 - REPLAY)), rng)
    rng.shuffle(train)
    test = held["test"] if split != "unseen" else _others(dealt)
    return Parts(train, held["validation"], test)


def _replay(count: int, rng: random.Random) -> list[Record]:
    return [{**row} for row in chains.expert_rows(SKILLS[0], rng, count, replay=1.0)]


def _others(dealt: dict[str, Alphabet]) -> Sequence[Record]:
    return [
        row
        for skill, own in dealt.items()
        for alphabet in dealt.values()
        if alphabet != own
        for row in cell(skill, alphabet, "test")
    ]
