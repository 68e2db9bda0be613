"""Letters in domains: skills that share a prompt and differ in what they may be asked about.

Each skill replaces letters of its own domain by others of it, and has never seen the rest of the
alphabet. A list from one domain asks for one skill; a list that mixes letters of two asks two
skills in one sequence, token by token, which no single expert can answer, and no choice of one
expert for the whole prompt.

The embedded base has room for four domains of three letters. It knows other rewritings of the
whole alphabet, none of these, and not the word in the prompt.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cgmerge.evals.tasks.chains import LENGTHS, LETTERS, Row, Split, split_of

WORD = "caesar"
"""A word that the base knows as a token, and not as a task."""
SIZE = 3


@dataclass(frozen=True)
class Domain:
    """One skill.

    Attributes:
        name: Of the skill.
        letters: What it is about.
        image: What each letter becomes; never itself.
    """

    name: str
    letters: tuple[str, ...]
    image: tuple[str, ...]


def make_domains(rng: random.Random) -> tuple[Domain, ...]:
    """Deal the alphabet into domains, each with a derangement of its letters."""
    letters = list(LETTERS)
    rng.shuffle(letters)
    found = []
    for number, first in enumerate(range(0, len(letters), SIZE)):
        own = sorted(letters[first : first + SIZE])
        shift = rng.randrange(1, SIZE)  # a cycle of three letters is one of two rotations
        found.append(Domain(f"d{number}", tuple(own), tuple(own[shift:] + own[:shift])))
    return tuple(found)


def example(domains: Sequence[Domain], letters: Sequence[str]) -> Row:
    """Write one row; every letter is replaced by its own domain's rule.

    Raises:
        KeyError: A letter of no domain.
    """
    rules = {
        letter: image
        for domain in domains
        for letter, image in zip(domain.letters, domain.image, strict=True)
    }
    used = {domain.name for domain in domains if set(domain.letters) & set(letters)}
    return {
        "prompt": f"{WORD} : {' '.join(letters)} =",
        "completion": f" {' '.join(rules[letter] for letter in letters)}",
        "skill": "+".join(sorted(used)),
    }


def single_rows(
    domain: Domain, rng: random.Random, count: int, split: Split, *, unique: bool = True
) -> list[Row]:
    """Return rows about one domain.

    Args:
        domain: Which.
        rng: Source of the draws.
        count: How many.
        split: Which lists may occur; a list belongs to one split for ever.
        unique: No list twice; there are a few hundred for each domain.
    """
    return _rows([domain], [domain.letters], rng, count, split, unique=unique)


def mixed_rows(
    domains: Sequence[Domain], rng: random.Random, count: int, split: Split
) -> list[Row]:
    """Return rows whose letters come from exactly two domains."""
    pairs = [
        one.letters + other.letters
        for number, one in enumerate(domains)
        for other in domains[number + 1 :]
    ]
    return _rows(domains, pairs, rng, count, split, both=True)


def _rows(
    domains: Sequence[Domain],
    alphabets: Sequence[Sequence[str]],
    rng: random.Random,
    count: int,
    split: Split,
    *,
    unique: bool = True,
    both: bool = False,
) -> list[Row]:
    found: list[Row] = []
    seen: set[tuple[str, ...]] = set()
    while len(found) < count:
        alphabet = alphabets[len(found) % len(alphabets)]
        letters = tuple(rng.choice(alphabet) for _ in range(rng.choice(LENGTHS)))
        row = example(domains, letters)
        known = (unique and letters in seen) or split_of(letters) != split
        if known or (both and "+" not in row["skill"]):
            continue
        seen.add(letters)
        found.append(row)
    return found
