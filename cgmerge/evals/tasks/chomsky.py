"""Tasks by the automaton that they need: a finite one, a stack, a bounded tape.

Training strings have up to 40 tokens, those of the length splits' tests 41 to 100: what was learned
as a rule goes on, what was learned as a table does not. One token is one word.

Source: Delétang et al. 2023, "Neural networks and the Chomsky hierarchy", with its tasks and its
training lengths (its tests go to 500); the modulus is 5 as there.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cgmerge.evals.tasks.parts import Parts, Record, fill

MODULUS = 5
SHORT, LONG = (1, 40), (41, 100)
EMPTY = "_"
"""How an empty stack is written."""
_LENGTH = "-length"
_BITS = ("a", "b")
_ODD = ("yes", "no")  # is it even?
_MOVES = {"stay": 0, "forward": 1, "back": -1}
_ACTIONS = ("pop", "push-a", "push-b")
_OPERATORS = ("+", "-", "*")

Tokens = list[str]


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        level: `regular`, `context-free` or `context-sensitive`.
        draw: Makes an input of so many tokens; sums have an odd number (one less where it is
            even), additions at least three.
        solve: Returns the answer.
    """

    level: str
    draw: Callable[[random.Random, int], Tokens]
    solve: Callable[[Sequence[str]], Tokens]


def example(name: str, tokens: Sequence[str]) -> Record:
    """Write one row.

    Example:
        >>> example("reverse-string", ["a", "a", "b"])["completion"]
        ' b a a'
    """
    task = TASKS[name]
    return {
        "prompt": f"{name} : {' '.join(tokens)} =",
        "completion": f" {' '.join(task.solve(tokens))}",
        "skill": name,
        "level": task.level,
        "size": len(tokens),
    }


def make(split: str, rng: random.Random, count: int) -> Parts:
    """Draw rows of all tasks or of one, evenly; no input is in two parts.

    Args:
        split: `iid`, or `length`: the test's inputs are longer than any other; the name of a task
            or this with `-length` has this task alone, to train an expert on.
        rng: Source of the draws.
        count: Rows in all: 72 % train, 8 % validation, 20 % test.
    """
    by_length = split.endswith("length")
    name = split.removesuffix(_LENGTH)
    names = (name,) if name in TASKS else tuple(TASKS)
    tested, chosen = count // 5, round(count * 0.08)
    seen: set[str] = set()

    def rows(size: int, lengths: tuple[int, int]) -> list[Record]:
        def draw(place: int) -> Record:
            task = names[place % len(names)]
            return example(task, TASKS[task].draw(rng, rng.randint(*lengths)))

        return fill(draw, size, seen)

    test = rows(tested, LONG if by_length else SHORT)
    validation = rows(chosen, SHORT)
    return Parts(rows(count - tested - chosen, SHORT), validation, test)


def _words(*words: str) -> Callable[[random.Random, int], Tokens]:
    return lambda rng, length: rng.choices(words, k=length)


def _cycle(tokens: Sequence[str]) -> Tokens:
    return [str(sum(_MOVES[token] for token in tokens) % MODULUS)]


def _draw_sum(rng: random.Random, length: int) -> Tokens:
    """Draw digits with operators between them, an odd number of tokens."""
    tokens = [_digit(rng)]
    for _ in range((length - 1) // 2):
        tokens += [rng.choice(_OPERATORS), _digit(rng)]
    return tokens


def _draw_brackets(rng: random.Random, length: int) -> Tokens:
    """Draw an expression of exactly so many tokens."""
    if length == 1:
        return [_digit(rng)]
    if length == 2:
        return ["-", _digit(rng)]
    if length < 5:
        return ["(", *_draw_brackets(rng, length - 2), ")"]
    left = rng.randint(1, length - 4)
    right = length - 3 - left
    sides = _draw_brackets(rng, left), _draw_brackets(rng, right)
    return ["(", *sides[0], rng.choice(_OPERATORS), *sides[1], ")"]


def _digit(rng: random.Random) -> str:
    return str(rng.randrange(MODULUS))


def _evaluate(tokens: Sequence[str]) -> Tokens:
    """Return the value mod 5 of digits, + − *, signs and brackets."""
    rest = list(reversed(tokens))
    value = _total(rest)
    return [str(value % MODULUS)]


def _total(rest: Tokens) -> int:
    value = _product(rest)
    while rest and rest[-1] in "+-":
        sign = 1 if rest.pop() == "+" else -1
        value += sign * _product(rest)
    return value % MODULUS


def _product(rest: Tokens) -> int:
    value = _factor(rest)
    while rest and rest[-1] == "*":
        rest.pop()
        value *= _factor(rest)
    return value


def _factor(rest: Tokens) -> int:
    word = rest.pop()
    if word == "-":
        return -_factor(rest)
    if word != "(":
        return int(word)
    value = _total(rest)
    rest.pop()
    return value


def _draw_stack(rng: random.Random, length: int) -> Tokens:
    held = rng.randint(1, length)
    return [*rng.choices(_BITS, k=held), *rng.choices(_ACTIONS, k=length - held)]


def _stack(tokens: Sequence[str]) -> Tokens:
    """Return what is on the stack, bottom first; `pop` leaves an empty one as it is."""
    stack: Tokens = []
    for word in tokens:
        if word == "pop":
            del stack[-1:]
        else:
            stack.append(word.removeprefix("push-"))
    return stack or [EMPTY]


def _draw_addition(rng: random.Random, length: int) -> Tokens:
    length = max(length, 3)
    first = rng.randint(1, length - 2)
    digits = rng.choices(("0", "1"), k=length - 1)
    return [*digits[:first], "+", *digits[first:]]


def _addition(tokens: Sequence[str]) -> Tokens:
    one, other = "".join(tokens).split("+")
    return list(f"{int(one, 2) + int(other, 2):b}")


_REGULAR, _FREE, _SENSITIVE = "regular", "context-free", "context-sensitive"
TASKS = {
    "parity": Task(_REGULAR, _words(*_BITS), lambda x: [_ODD[x.count("b") % 2]]),
    "even-pairs": Task(_REGULAR, _words(*_BITS), lambda x: [_ODD[x[0] != x[-1]]]),
    "cycle-navigation": Task(_REGULAR, _words(*_MOVES), _cycle),
    "modular-arithmetic": Task(_REGULAR, _draw_sum, _evaluate),
    "reverse-string": Task(_FREE, _words(*_BITS), lambda x: list(x[::-1])),
    "stack-manipulation": Task(_FREE, _draw_stack, _stack),
    "modular-arithmetic-brackets": Task(_FREE, _draw_brackets, _evaluate),
    "duplicate-string": Task(_SENSITIVE, _words(*_BITS), lambda x: [*x, *x]),
    "odds-first": Task(_SENSITIVE, _words(*_BITS), lambda x: [*x[::2], *x[1::2]]),
    "bucket-sort": Task(_SENSITIVE, _words(*"12345"), sorted),
    "binary-addition": Task(_SENSITIVE, _draw_addition, _addition),
}
"""`parity`: is the number of b even; `even-pairs`: is that of ab and ba, which is the case where
the first letter is the last; the others are what their names say."""
SPLITS = ("iid", "length", *TASKS, *(name + _LENGTH for name in TASKS))
