"""String rewrites: rules replace the leftmost place they fit until none does.

    a b -> c ; c -> b b : a b a c = b b b b b

A set of rules is a Markov algorithm without terminal rules: at each step the first rule that fits
anywhere replaces the leftmost place where it does. Nothing says that this ends, so that steps and
length are bounded, and rules that run away are never asked.

Source: the rewriting tasks of Zhang, Wang & Charton 2024 (generalisation needs many different
rules, not many examples of each); Markov 1954.
"""

import random
from collections.abc import Sequence
from functools import partial

from cgmerge.errors import DataError, LimitExceeded
from cgmerge.evals.tasks.parts import Parts, Record, fill

STEPS = "-steps"
"""Ending of the splits whose answers show the string after every step."""
_RULES = ("iid", "rules", "length")
SPLITS = (*_RULES, *(name + STEPS for name in _RULES))
LETTERS = "abcde"
EMPTY = "_"
"""How a string without letters is written."""

MOST_STEPS = 1000
MOST_LETTERS = 10_000
_SHORT, _LONG = (2, 8), (9, 16)  # letters of the asked strings
_ASKED_STEPS, _ASKED_LETTERS = 24, 48  # more of them is not asked: it would be copying
_POOL = (10, 1000)  # sets of rules, at least and at most
_ROWS_OF_A_SET = 10
_HELD = 0.2  # of the sets
_PROBES = 20
_STILL = 0.1  # of the draws that no rule fits are kept

Rule = tuple[str, str]
Rules = tuple[Rule, ...]


def rewrite(
    rules: Sequence[Rule],
    text: str,
    *,
    most_steps: int = MOST_STEPS,
    most_letters: int = MOST_LETTERS,
) -> list[str]:
    """Apply rules until none fits.

    Args:
        rules: Left and right sides in order; left sides are not empty.
        text: What to start with.
        most_steps: Refuse to go on after so many.
        most_letters: Refuse a longer string.

    Returns:
        The string at the start and after every step.

    Raises:
        DataError: A rule with nothing on its left side, which would fit for ever.
        LimitExceeded: It does not end, or not within the bounds.

    Example:
        >>> rewrite([("ab", "c"), ("c", "bb")], "abac")
        ['abac', 'cac', 'bbac', 'bbabb', 'bbcb', 'bbbbb']
    """
    if not all(left for left, _ in rules):
        raise DataError("a rule has nothing on its left side", code="rule")
    strings = [text]
    while True:
        text = strings[-1]
        rule = next((one for one in rules if one[0] in text), None)
        if rule is None:
            return strings
        if len(strings) > most_steps:
            raise LimitExceeded(f"rules still apply after {most_steps:,} steps", code="rewrites")
        strings.append(text.replace(*rule, 1))
        if len(strings[-1]) > most_letters:
            raise LimitExceeded(
                f"after {len(strings) - 1:,} steps there are {len(strings[-1]):,} letters; at most"
                f" {most_letters:,} are allowed",
                code="rewrites",
            )


def example(rules: Rules, text: str, *, steps: bool = False) -> Record:
    """Write one row.

    Args:
        rules: In order.
        text: What to rewrite.
        steps: Show every string of the way, not only the last.

    Raises:
        LimitExceeded: The rules do not end on this text.

    Example:
        >>> example((("ab", "c"),), "aab")["prompt"]
        'a b -> c : a a b ='
    """
    strings = rewrite(rules, text, most_steps=_ASKED_STEPS, most_letters=_ASKED_LETTERS)
    shown = " ; ".join(f"{_spaced(left)} -> {_spaced(right)}" for left, right in rules)
    answer = " > ".join(map(_spaced, (strings[1:] or strings) if steps else strings[-1:]))
    return {
        "prompt": f"{shown} : {_spaced(text)} =",
        "completion": f" {answer}",
        "skill": f"rules{len(rules)}",
        "rules": shown,
        "size": len(text),
        "steps": len(strings) - 1,
    }


def make(split: str, rng: random.Random, count: int) -> Parts:
    """Draw rows whose rules or lengths are new in the test part.

    Args:
        split: `iid` any rules and strings anywhere; `rules` the test's sets of rules are in no
            other part; `length` its strings are longer; with `-steps`, answers show the way.
        rng: Source of the draws.
        count: Rows in all: 72 % train, 8 % validation, 20 % test.

    Raises:
        UsageError: More rows are wanted than there are.
    """
    kind, steps = split.removesuffix(STEPS), split.endswith(STEPS)
    pool = _pool(rng, min(max(count // _ROWS_OF_A_SET, _POOL[0]), _POOL[1]))
    cut = max(1, round(len(pool) * _HELD)) if kind == "rules" else 0
    known, asked = pool[cut:], pool[:cut] or pool
    tested, chosen = count // 5, round(count * 0.08)
    seen: set[str] = set()
    rows = {}
    for part, size in (
        ("test", tested),
        ("validation", chosen),
        ("train", count - tested - chosen),
    ):
        sets = asked if part == "test" else known
        lengths = _LONG if kind == "length" and part == "test" else _SHORT
        rows[part] = fill(partial(_row, sets, lengths, rng, steps), size, seen)
    return Parts(rows["train"], rows["validation"], rows["test"])


def _row(
    sets: Sequence[Rules],
    lengths: tuple[int, int],
    rng: random.Random,
    steps: bool,  # noqa: FBT001 (bound by position, as the place comes last)
    _place: int,
) -> Record:
    while True:
        try:
            row = example(rng.choice(sets), _text(rng, lengths), steps=steps)
        except LimitExceeded:  # rare: the probes of `_pool` all ended
            continue
        if row["steps"] or rng.random() < _STILL:
            return row


def _pool(rng: random.Random, count: int) -> list[Rules]:
    """Draw different sets of rules that end on short and long probes."""
    found: dict[Rules, None] = {}
    while len(found) < count:
        rules = tuple(
            (_text(rng, (1, 2)), _text(rng, (0, 2))) for _ in range(rng.choice((1, 2, 3)))
        )
        if len({left for left, _ in rules}) == len(rules) and _ends(rules, rng):
            found[rules] = None
    return list(found)


def _ends(rules: Rules, rng: random.Random) -> bool:
    try:
        for _ in range(_PROBES):
            example(rules, _text(rng, (_SHORT[0], _LONG[1])))
    except LimitExceeded:
        return False
    return True


def _text(rng: random.Random, lengths: tuple[int, int]) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(*lengths)))


def _spaced(text: str) -> str:
    return " ".join(text) or EMPTY
