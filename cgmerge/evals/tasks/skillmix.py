"""Mixed skills: two or three string edits in one row, with the questions for its parts beside it.

Training shows every skill alone and some tuples of different skills; the test asks for tuples that
it never shows. A row of the validation and test parts names in `part_ids` the rows that ask for
its steps one by one, each on the true intermediate string, so that `cgmerge eval` on one of these
files can tell a whole that fails from a part that fails (the compositionality gap).

Letters belong to parts by their checksum, as in `chains`; here the intermediate strings do too, so
that no question for a step can occur in training data, of this suite or of experts of `chains`.

Source: tuples and held-out groups of skills after SKILL-MIX (Yu et al. 2023) and Zhao et al. 2024,
where a grader reads texts; here a program knows the answer. Questions for steps after Press et al.
2023.
"""

import random
from collections.abc import Sequence
from itertools import permutations

from cgmerge.errors import UsageError
from cgmerge.evals.tasks import chains
from cgmerge.evals.tasks.parts import Parts, Record, fill

SPLITS = ("tuples", "skills", "depth")
SKILLS = tuple(name for name in chains.FUNCTIONS if name not in ("copy", "first3"))
"""`copy` is no edit, and what `first3` gives is too little to be divided among the parts."""
_ALONE = 0.4  # of the training rows
_HELD_TUPLES = 0.2
_HELD_SKILLS = 4
_MOST = 100_000

Chain = tuple[str, ...]


def with_parts(names: Chain, letters: Sequence[str], suite: str) -> list[Record]:
    """Write a row and the rows that ask for its steps, in the order in which they are done.

    Args:
        names: Functions of `chains` in reading order, the rightmost is applied first.
        letters: Input.
        suite: Goes into the ids, so that files of several suites can be evaluated together.

    Example:
        >>> [row["prompt"] for row in with_parts(("reverse", "caesar"), "abc", "x")]
        ['reverse caesar : a b c =', 'caesar : a b c =', 'reverse : b c d =']
    """
    whole, steps = _row(names, letters, suite), []
    for name in reversed(names):
        steps.append(_row((name,), letters, suite))
        letters = chains.apply([name], letters)
    return [{**whole, "part_ids": [one["id"] for one in steps]}, *steps]


def asked(
    tuples: Sequence[Chain], rng: random.Random, count: int, split: chains.Split, *, suite: str
) -> list[Record]:
    """Make rows of tuples, evenly over these, together with the rows for their steps.

    Args:
        tuples: Chains of different functions; taken in turn.
        rng: Source of the letters.
        count: Rows in all, those for steps included: at most so many, but at least one whole.
        split: Whose letters all questions are about.
        suite: See `with_parts`.

    Returns:
        Rows with different prompts and ids, wholes before their new steps.
    """
    rows: dict[str, Record] = {}
    wholes = 0
    while True:
        names = tuples[wholes % len(tuples)]
        family = with_parts(names, _closed(names, rng, split), suite)
        new = {row["id"]: row for row in family if row["id"] not in rows}
        if family[0]["id"] not in new:
            continue
        if rows and len(rows) + len(new) > count:
            return list(rows.values())
        rows |= new
        wholes += 1


def make(split: str, rng: random.Random, count: int) -> Parts:
    """Draw rows whose tuples are new in the test part.

    Args:
        split: `tuples` a fifth of the pairs and triples is only in the test; `skills` four skills
            occur in training alone, and every tuple of the test has one of them; `depth` training
            has pairs, the test triples.
        rng: Source of the draws.
        count: Rows in all: 80 % train, a tenth each validation (tuples that training shows, on
            other letters) and test.

    Raises:
        UsageError: More rows are wanted than can be drawn.
    """
    if count > _MOST:
        raise UsageError(f"{count:,} rows are wanted; skillmix has at most {_MOST:,}", code="n")
    known, held = _tuples(split, rng)
    tenth = count // 10
    validation = asked(known, rng, tenth, "validation", suite="skillmix")
    test = asked(held, rng, tenth, "test", suite="skillmix")
    own = count - 2 * tenth
    alone = round(own * _ALONE)
    mixed = [SKILLS[place % len(SKILLS)] for place in range(alone)]
    chosen = [*((name,) for name in mixed), *(rng.choice(known) for _ in range(own - alone))]
    rng.shuffle(chosen)
    train = fill(lambda place: _row(chosen[place], _letters(rng, "train"), "skillmix"), own, set())
    return Parts(train, validation, test)


def _tuples(split: str, rng: random.Random) -> tuple[list[Chain], list[Chain]]:
    """Return the tuples that training shows and those that the test asks for, mixed."""
    pairs, triples = (list(permutations(SKILLS, size)) for size in (2, 3))
    for some in (pairs, triples):
        rng.shuffle(some)
    if split == "depth":
        return list(pairs), list(triples)
    new = set(rng.sample(SKILLS, _HELD_SKILLS))
    known: list[list[Chain]] = []
    held: list[list[Chain]] = []
    for some in (pairs, triples):
        cut = round(len(some) * _HELD_TUPLES)
        if split == "skills":
            held.append([one for one in some if new & set(one)])
            known.append([one for one in some if not new & set(one)])
        else:
            held.append(some[:cut])
            known.append(some[cut:])
    return _in_turn(*known), _in_turn(*held)


def _in_turn(pairs: list[Chain], triples: list[Chain]) -> list[Chain]:
    """Alternate: there are many more triples, and small files would have no pairs."""
    return [
        one for place, triple in enumerate(triples) for one in (pairs[place % len(pairs)], triple)
    ]


def _row(names: Chain, letters: Sequence[str], suite: str) -> Record:
    row = chains.example(names, letters)
    skill = names[0] if len(names) == 1 else f"mix{len(names)}"
    if suite == "chains":
        skill = row["skill"]  # few enough to be told apart
    return {
        **row,
        "skill": skill,
        "skills": row["skill"],
        "k": len(names),
        "id": f"{suite} {row['prompt']}",
    }


def _letters(rng: random.Random, split: chains.Split) -> list[str]:
    while True:
        letters = rng.choices(chains.LETTERS, k=rng.choice(chains.LENGTHS))
        if chains.split_of(letters) == split:
            return letters


def _closed(names: Chain, rng: random.Random, split: chains.Split) -> list[str]:
    """Draw letters that are in a split, as is what every step but the last makes of them."""
    while True:
        found = now = _letters(rng, split)
        for name in names[:0:-1]:
            now = chains.apply([name], now)
            if chains.split_of(now) != split:
                break
        else:
            return found
