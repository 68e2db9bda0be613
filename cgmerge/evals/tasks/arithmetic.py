"""Modular arithmetic: z = a·x + b·y mod p, one task for each pair (a, b).

Tasks are vectors that add up like experts should: what (1, 0) and (0, 1) answer gives every other
task. Held out are tasks, inputs, or both, so that the four cells seen/unseen task × seen/unseen
input can be scored apart.

Source: He et al. 2024, "Learning to grok"; there 32 examples in the context tell the task, here
the prompt names it.
"""

import random
from itertools import product

from cgmerge.errors import UsageError
from cgmerge.evals.tasks.parts import Parts, Record

SPLITS = ("iid", "tasks", "inputs", "both")
MODULUS = 29
_SHARE = 0.2  # of the tasks, or of the inputs, that is held out
_VALIDATION = 0.1  # of what is left for training


_Pair = tuple[int, int]


def example(a: int, b: int, x: int, y: int, modulus: int) -> Record:
    """Write one row.

    Example:
        >>> example(2, 3, 4, 5, 7)["completion"]
        ' 2'
    """
    return {
        "prompt": f"{a} * {x} + {b} * {y} mod {modulus} =",
        "completion": f" {(a * x + b * y) % modulus}",
        "task": f"{a},{b}",
        "input": f"{x},{y}",
    }


def make(split: str, rng: random.Random, count: int, modulus: int = MODULUS) -> Parts:
    """Draw rows whose tasks or inputs are new in the test part.

    Args:
        split: `iid` any row anywhere; `tasks` the test's (a, b) are in no other part; `inputs`
            its (x, y) are; `both` neither its tasks nor its inputs are.
        rng: Source of the draws.
        count: Rows in all: 72 % train, 8 % validation, 20 % test.
        modulus: p, a prime or not, at least 3.

    Raises:
        UsageError: More rows are wanted than there are.
    """
    pairs: list[_Pair] = list(product(range(modulus), range(modulus)))
    tasks, inputs = _halves(pairs, rng), _halves(pairs, rng)
    tested = count // 5
    if split == "iid":
        drawn = _drawn(pairs, pairs, rng, count)
        rng.shuffle(drawn)
        test, rest = drawn[:tested], drawn[tested:]
    else:
        by_task, by_input = split in ("tasks", "both"), split in ("inputs", "both")
        seen, held = (
            (tasks[part] if by_task else pairs, inputs[part] if by_input else pairs)
            for part in (0, 1)
        )
        test, rest = _drawn(*held, rng, tested), _drawn(*seen, rng, count - tested)
    rows = [[example(*task, *given, modulus) for task, given in part] for part in (rest, test)]
    cut = round(len(rest) * _VALIDATION)
    return Parts(rows[0][cut:], rows[0][:cut], rows[1])


def _halves(pairs: list[_Pair], rng: random.Random) -> tuple[list[_Pair], list[_Pair]]:
    """Deal pairs into those of training and those held out."""
    mixed = rng.sample(pairs, len(pairs))
    cut = max(1, round(len(pairs) * _SHARE))
    return mixed[cut:], mixed[:cut]


def _drawn(
    tasks: list[_Pair], inputs: list[_Pair], rng: random.Random, count: int
) -> list[tuple[_Pair, _Pair]]:
    total = len(tasks) * len(inputs)
    if count > total:
        raise UsageError(
            f"{count:,} rows are wanted, there are {total:,}",
            code="n",
            hint="a smaller --n, or a larger --modulus",
            found=count,
        )
    places = rng.sample(range(total), count)
    return [(tasks[place // len(inputs)], inputs[place % len(inputs)]) for place in places]
