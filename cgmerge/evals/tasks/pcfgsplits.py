"""Sets of PCFG SET expressions: what is trained on and what is held out.

Expressions are drawn as in the official generator: a probability of unary functions and one of
nesting, both drawn again for every expression. The official corpus is then weighted to the
lengths and depths of English sentences; here it is enough to keep few of the expressions with one
function, so that their number is alike (mean 5.1 there).
"""

import random
from collections.abc import Callable
from itertools import pairwise

from cgmerge.evals.tasks.parts import Parts, Record
from cgmerge.evals.tasks.pcfg import (
    BINARY,
    SYMBOLS,
    TWIN,
    UNARY,
    functions,
    interpret,
    structure,
)

SPLITS = (
    "iid",
    "systematicity",
    "productivity",
    "localism",
    "substitutivity-equal",
    "substitutivity-primitive",
    "overgeneralisation",
)
HELD_OUT = (
    ("swap_first_last", "repeat"),
    ("repeat", "remove_second"),
    ("append", "remove_second"),
    ("append", "swap_first_last"),
)
"""Pairs of neighbouring functions that only the test of systematicity has, as published."""
TWINS = ("swap_first_last", "repeat", "append", "remove_second")
"""Functions with a second name in the substitutivity splits, as published."""

EXCEPTIONS = {
    ("reverse", "echo"): ("echo", "copy"),
    ("prepend", "remove_first"): ("remove_second", "append"),
    ("echo", "remove_first"): ("append", "copy"),
    ("prepend", "reverse"): ("remove_second", "echo"),
}
"""Neighbours that mean two other functions in the overgeneralisation split, as published."""

MOST_TRAINED = 8  # functions of a training expression in the productivity split
_COMMA, _DOUBLES = (",",), ("repeat",)
_SYMBOLS = frozenset(SYMBOLS)
_KEPT = {1: 0.05, 2: 0.75}  # of expressions with so many functions; all others
_MOST_FUNCTIONS = 35
_MOST_CHARACTERS = 500
_MOST_SYMBOLS = 1000
_SHARES = {"validation": 0.05, "test": 0.10}
_EXCEPTIONAL = 0.005  # of the expressions; the most of the published shares


def example(source: str, **columns: str) -> Record:
    """Write one row; `expression` and `structure` are there for split makers."""
    return {
        "prompt": f"{source} =",
        "completion": f" {interpret(source)}",
        "expression": source,
        "structure": structure(source),
        **columns,
    }


def draw(rng: random.Random) -> str | None:
    """Draw an expression; None where the corpus would not keep it (size, weight)."""
    unary, nested = rng.uniform(0.5, 1.0), rng.uniform(0.2, 0.9)
    tokens: list[str] = []
    waiting, count = ["function"], 0
    while waiting:
        top = waiting.pop()
        if top == ",":
            tokens.append(top)
        elif top == "function" or rng.random() < nested:
            count += 1
            if count > _MOST_FUNCTIONS:
                return None
            if rng.random() < unary:
                tokens.append(rng.choice(UNARY))
                waiting.append("argument")
            else:
                tokens.append(rng.choice(BINARY))
                waiting += ["argument", ",", "argument"]
        else:
            tokens += rng.choices(SYMBOLS, k=rng.randint(2, 5))
    source = " ".join(tokens)
    if len(source) > _MOST_CHARACTERS or _longest(tokens) > _MOST_SYMBOLS:
        return None
    if rng.random() >= _KEPT.get(count, 1.0):
        return None
    return source


def make(split: str, rng: random.Random, count: int) -> Parts:
    """Draw the rows of a split; no expression is drawn twice.

    Args:
        split: One of `SPLITS`.
        rng: Source of the draws.
        count: Expressions: 85 % train, 5 % validation, 10 % test.

    Returns:
        Rows. Localism has more test rows than expressions, one for every step; substitutivity
        has two for each, with the function's own name and with its twin; overgeneralisation asks
        for the exceptions that were trained on, by the exception and by the rule.
    """
    sizes = {name: max(1, round(count * share)) for name, share in _SHARES.items()}
    if split == "overgeneralisation":
        sizes["test"] = max(8, round(count * _EXCEPTIONAL))
    sizes["train"] = max(1, count - sum(sizes.values()))
    drawn = _filled(rng, sizes, _HELD[split])
    if split.startswith("substitutivity"):
        return _with_twins(drawn, rng, equal=split.endswith("equal"))
    train, validation = _rows(drawn["train"]), _rows(drawn["validation"])
    if split == "overgeneralisation":
        exceptions = [pair for one in drawn["test"] if (pair := _both_answers(one))]
        train += [{**exception} for exception, _ in exceptions]
        rng.shuffle(train)
        return Parts(train, validation, [row for pair in exceptions for row in pair])
    if split == "localism":
        return Parts(train, validation, [row for one in drawn["test"] for row in _unrolled(one)])
    return Parts(train, validation, _rows(drawn["test"]))


def has_held_out_pair(source: str) -> bool:
    """Whether two neighbouring tokens are one of the pairs of `HELD_OUT`."""
    tokens = source.split()
    return any(pair in HELD_OUT for pair in pairwise(tokens))


def exception(source: str) -> str | None:
    """Return the expression that one with a pair of `EXCEPTIONS` stands for; None without one.

    Of several pairs only one is exceptional, in the published file always the one that
    `EXCEPTIONS` has first, at its first place.

    Example:
        >>> exception("copy reverse echo A1 B2")
        'copy echo copy A1 B2'
    """
    tokens = source.split()
    pairs = list(pairwise(tokens))
    found = next((pair for pair in EXCEPTIONS if pair in pairs), None)
    if found is None:
        return None
    place = pairs.index(found)
    return " ".join([*tokens[:place], *EXCEPTIONS[found], *tokens[place + 2 :]])


def steps(source: str) -> list[str]:
    """Unroll an expression: one function at a time, the innermost first, on true strings.

    Example:
        >>> steps("repeat append A1 B2 , C3")
        ['append A1 B2 , C3', 'repeat A1 B2 C3']
    """
    stack: list[str] = []
    found = []
    run: list[str] = []
    for token in reversed(source.split()):
        if token in UNARY or token in BINARY or token in _COMMA:
            if run:
                stack.append(" ".join(reversed(run)))
                run = []
            if token not in _COMMA:
                wanted = 2 if token in BINARY else 1
                step = f"{token} {' , '.join(stack.pop() for _ in range(wanted))}"
                found.append(step)
                stack.append(interpret(step))
        else:
            run.append(token)
    return found


def _longest(tokens: list[str]) -> int:
    """Bound the symbols of every value, from the innermost out."""
    stack: list[int] = []
    longest = run = 0
    for token in [*reversed(tokens), ","]:
        if token in _SYMBOLS:
            run += 1
            continue
        if run:
            stack.append(run)
            run = 0
        if token in BINARY:
            one, other = stack.pop(), stack.pop()
            stack.append({"remove_first": other, "remove_second": one}.get(token, one + other))
        elif token in UNARY:
            stack[-1] = stack[-1] * 2 if token in _DOUBLES else stack[-1] + 1
        longest = max(longest, *stack)
    return longest


_Held = Callable[[str], bool | None]
_HELD: dict[str, _Held] = {
    "iid": lambda _: None,
    "localism": lambda _: None,
    "systematicity": has_held_out_pair,
    "productivity": lambda source: len(functions(source)) > MOST_TRAINED,
    "substitutivity-equal": lambda _: None,
    "substitutivity-primitive": lambda _: None,
    "overgeneralisation": lambda source: exception(source) is not None,
}


def _filled(rng: random.Random, sizes: dict[str, int], held: _Held) -> dict[str, list[str]]:
    """Draw until every part is full; `held` says whether an expression must be in the test."""
    parts: dict[str, list[str]] = {name: [] for name in ("train", "validation", "test")}
    seen: set[str] = set()
    while any(len(parts[name]) < size for name, size in sizes.items()):
        source = draw(rng)
        if source is None or source in seen:
            continue
        tested = held(source)
        open_ = [n for n in parts if tested is None or (n == "test") == tested]
        name = next((n for n in open_ if len(parts[n]) < sizes[n]), None)
        if name is not None:
            seen.add(source)
            parts[name].append(source)
    return parts


def _rows(sources: list[str]) -> list[Record]:
    return [example(source) for source in sources]


def _both_answers(source: str) -> tuple[Record, Record] | None:
    """Ask an exceptional expression twice; None where exception and rule say the same."""
    answer = f" {interpret(exception(source) or source)}"
    rule = example(source, skill="rule")
    if answer == rule["completion"]:
        return None
    return {**rule, "completion": answer, "skill": "exception"}, rule


def _unrolled(source: str) -> list[Record]:
    parts = [step for step in steps(source) if step != source]
    return [example(source, skill="whole"), *(example(step, skill="step") for step in parts)]


def _with_twins(drawn: dict[str, list[str]], rng: random.Random, *, equal: bool) -> Parts:
    """Rename functions in training; ask every test expression under both names."""
    test = []
    for source in drawn["test"]:
        known = sorted({name for name in functions(source) if name in TWINS})
        if known:
            twin = _renamed(source, {rng.choice(known)})
            test += [example(source, skill="original"), example(twin, skill="twin")]
    train, validation = (
        [example(_trained(source, rng, equal=equal)) for source in drawn[name]]
        for name in ("train", "validation")
    )
    return Parts(train, validation, test)


def _trained(source: str, rng: random.Random, *, equal: bool) -> str:
    """Name each function by its twin half of the time, or only where it stands alone."""
    if not equal and len(functions(source)) > 1:
        return source
    return " ".join(
        token + TWIN if token in TWINS and rng.random() < 0.5 else token for token in source.split()
    )


def _renamed(source: str, names: set[str]) -> str:
    return " ".join(token + TWIN if token in names else token for token in source.split())
