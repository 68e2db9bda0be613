"""SCAN: simple navigation commands and the actions that they ask for.

    command -> S | S "and" S | S "after" S     20,910      V -> U | X dir | X "opposite" dir
    S -> V | V "twice" | V "thrice"                102          | X "around" dir            34
    U -> walk | look | run | jump              X -> U | "turn"         dir -> left | right

Source: Lake & Baroni 2018, "Generalization without systematicity"; the template, filler and
few-shot splits are those of Loula, Baroni & Lake 2018. Every split that a rule defines is equal as
a set to the published files; `simple` and `few-shot-N` are random draws of the published sizes.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.tasks.parts import Record

VERBS = ("walk", "look", "run", "jump")
DIRECTIONS = ("left", "right")
_REPEATS = {"twice": 2, "thrice": 3}
_LONGEST = 22  # actions of a training command in the length split
_SHARE_ALONE = 0.1  # of the training rows in the addprim splits, which repeat the primitive
_FILLERS = ("look", "walk", "run")

SPLITS = (
    "simple",
    "length",
    "addprim-jump",
    "addprim-turn-left",
    "template-around-right",
    "template-opposite-right",
    "template-right",
    "template-jump-around-right",
    *(f"filler-{count}" for count in range(4)),
    *(f"few-shot-{2**power}" for power in range(11)),
)

_Parts = tuple[list[str], list[str]]


def commands() -> Iterator[str]:
    """List all commands, in a fixed order."""
    whole = [f"{phrase}{often}" for phrase in _phrases() for often in ("", " twice", " thrice")]
    yield from whole
    for word in ("and", "after"):
        yield from (f"{one} {word} {other}" for one in whole for other in whole)


def interpret(command: str) -> str:
    """Return the actions that a command asks for, separated by spaces.

    Raises:
        DataError: Not a command of the grammar.

    Example:
        >>> interpret("jump opposite left after walk")
        'I_WALK I_TURN_LEFT I_TURN_LEFT I_JUMP'
    """
    return _read(command)[0]


def structure(command: str) -> str:
    """Write the derivation of a command as nested parentheses.

    `and` and `after` have two children, `twice` and `thrice` one; `plain`, `around` and
    `opposite` have a verb and a direction. The leaves are words.

    Example:
        >>> structure("turn left twice and jump")
        '(and (twice (plain turn left)) jump)'
    """
    return _read(command)[1]


def example(command: str) -> Record:
    """Write one row; `command` and `structure` are there for split makers."""
    actions, structure_ = _read(command)
    return {
        "prompt": f"IN: {command} OUT:",
        "completion": f" {actions}",
        "command": command,
        "structure": structure_,
    }


def split(name: str, rng: random.Random) -> _Parts:
    """Return training and test commands of a split.

    Args:
        name: One of `SPLITS`.
        rng: Source of the draws, where there are any.

    Returns:
        Commands to train on, repeated as published, and commands to test on.

    Raises:
        UsageError: No such split.
    """
    family, _, what = name.partition("-")
    if name not in SPLITS:
        raise UsageError(f"SCAN has no split {name!r}", code="split")
    if family == "few":
        return _few_shot(int(name.rpartition("-")[2]), rng)
    return _FAMILIES[family](what, rng)


def _simple(_what: str, rng: random.Random) -> _Parts:
    mixed = list(commands())
    rng.shuffle(mixed)
    count = len(mixed) * 8 // 10
    return mixed[:count], mixed[count:]


def _length(_what: str, _rng: random.Random) -> _Parts:
    return _parted(commands(), lambda command: interpret(command).count(" ") >= _LONGEST)


def _addprim(what: str, _rng: random.Random) -> _Parts:
    alone = what.replace("-", " ")
    train, test = _parted(commands(), lambda command: _has(command, alone))
    test.remove(alone)
    repeats = round(len(train) * _SHARE_ALONE / (1 - _SHARE_ALONE))
    return train + [alone] * repeats, test


def _template(what: str, _rng: random.Random) -> _Parts:
    words = what.replace("-", " ")
    pattern = words.removeprefix("jump ")
    held = (words,) if words != pattern else tuple(f"{verb} {pattern}" for verb in VERBS)
    return _parted(_pool(pattern), lambda command: any(_has(command, one) for one in held))


def _filler(what: str, _rng: random.Random) -> _Parts:
    kept = _FILLERS[: int(what)]
    dropped = [f"{verb} around right" for verb in _FILLERS if verb not in kept]
    train, test = _template("jump-around-right", _rng)
    return [one for one in train if not any(_has(one, words) for words in dropped)], test


def _few_shot(count: int, rng: random.Random) -> _Parts:
    train, test = _filler("0", rng)
    known = set(train)
    more = [command for command in _filler("1", rng)[0] if command not in known]
    return train + rng.sample(more, count), test


_FAMILIES: dict[str, Callable[[str, random.Random], _Parts]] = {
    "simple": _simple,
    "length": _length,
    "addprim": _addprim,
    "template": _template,
    "filler": _filler,
}


def _pool(pattern: str) -> list[str]:
    """List commands without `turn <pattern>`, which the published splits leave out altogether."""
    return [command for command in commands() if not _has(command, f"turn {pattern}")]


def _parted(all_: Iterator[str] | list[str], tests: Callable[[str], bool]) -> _Parts:
    train: list[str] = []
    test: list[str] = []
    for command in all_:
        (test if tests(command) else train).append(command)
    return train, test


def _has(command: str, words: str) -> bool:
    return f" {words} " in f" {command} "


def _phrases() -> list[str]:
    ways = [f"{way}{where}" for way in ("", "opposite ", "around ") for where in DIRECTIONS]
    return [*VERBS, *(f"{verb} {way}" for verb in (*VERBS, "turn") for way in ways)]


def _read(command: str) -> tuple[str, str]:
    """Return the actions and the structure of a command."""
    for word in ("and", "after"):
        one, found, other = command.partition(f" {word} ")
        if found:
            halves = _sentence(one), _sentence(other)
            first, second = halves if word == "and" else reversed(halves)
            return f"{first[0]} {second[0]}", f"({word} {halves[0][1]} {halves[1][1]})"
    return _sentence(command)


@cache
def _sentence(text: str) -> tuple[str, str]:
    """Read what stands on one side of `and`; there are 102 such texts."""
    words = text.split(" ")
    if words[-1] in _REPEATS:
        actions, structure_ = _phrase(words[:-1], text)
        return " ".join([actions] * _REPEATS[words[-1]]), f"({words[-1]} {structure_})"
    return _phrase(words, text)


def _phrase(words: list[str], text: str) -> tuple[str, str]:
    if len(words) == 1 and words[0] in VERBS:
        return f"I_{words[0].upper()}", words[0]
    if len(words) in (2, 3) and words[0] in (*VERBS, "turn") and words[-1] in DIRECTIONS:
        way = words[1] if len(words) == 3 else "plain"
        if len(words) == 2 or way in ("opposite", "around"):
            done = [] if words[0] == "turn" else [f"I_{words[0].upper()}"]
            turn = f"I_TURN_{words[-1].upper()}"
            actions = [turn, *done] * (4 if way == "around" else 1)
            if way == "opposite":
                actions.insert(0, turn)
            return " ".join(actions), f"({way} {words[0]} {words[-1]})"
    raise DataError(f"not a SCAN command: {text!r}", code="scan")
