"""Splits of maximum compound divergence: the same atoms on both sides, other compounds.

A random split is improved by swaps: of a sample of training items the best goes to the test, then
of a sample of test items the best goes back, and the swap is kept when it raises

    D_compound − 10 · max(0, D_atom − limit)

Where items may be left out, those in no part are swapped with both sides in the same way.
Both divergences are exact at every move: Σ p^α q^(1−α) = Σ a^α b^(1−α) / (A^α B^(1−α)) changes only
in the compounds of the item that moves.

Source: Keysers et al. 2020. There items are added to the parts one by one, and more than half of
SCAN is in no part; here all items are in a part, unless the user allows otherwise.
"""

import random
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from cgmerge.errors import DataError
from cgmerge.evals.splits.divergence import ATOM_ALPHA, COMPOUND_ALPHA
from cgmerge.evals.splits.makers import Made
from cgmerge.evals.splits.structure import Structure

MAX_ATOM = 0.02
MOVES = 10_000  # swaps at most
_PENALTY = 10.0
_SAMPLE = 192  # candidates of a move
_PATIENCE = 60  # swaps in a row that do not help
_TRAIN, _TEST, _OUT = 0, 1, 2
_PAIRS = ((_TRAIN, _TEST), (_OUT, _TEST), (_OUT, _TRAIN))
_Floats = NDArray[np.float64]
_Places = NDArray[np.int64]


def split_mcd(
    items: Sequence[Structure],
    rows: Sequence[int],
    share: float,
    rng: random.Random,
    *,
    size: int = 3,
    leave_out: float = 0.0,
    progress: Callable[[int], object] = lambda _: None,
) -> Made:
    """Make a split whose compounds diverge as far as the atoms stay alike.

    Args:
        items: Distinct structures.
        rows: Of each.
        share: Of test rows among those in a part; never more.
        rng: Source of the start and of the samples.
        size: Of the compounds that count: 2 or 3 nodes.
        leave_out: Share of all rows that is in no part.
        progress: Told the number of swaps, at most `MOVES`.

    Raises:
        DataError: No item has compounds of that size, or the items are too few.
    """
    search = _Search(items, rows, rng, size)
    search.start(share, leave_out)
    pairs = _PAIRS if leave_out else _PAIRS[:1]
    tried = failed = 0
    while tried < MOVES and failed < _PATIENCE * len(pairs):
        failed = 0 if search.swap(*pairs[tried % len(pairs)]) else failed + 1
        tried += 1
        progress(tried)
    if tried < MOVES:
        progress(MOVES)
    return Made(
        (search.side == _TEST).tolist(),
        {"compound_size": size, "max_atom": MAX_ATOM, "swaps": tried},
        left_out=tuple(np.flatnonzero(search.side == _OUT).tolist()),
    )


class _Side:
    """Sums of one kind of feature (atoms or compounds) in training and test.

    Attributes:
        columns: [items, most features of an item] feature numbers; the last number is a blank.
        counts: The same shape, how often; 0 for blanks.
    """

    def __init__(
        self, found: Sequence[Sequence[Hashable]], rows: Sequence[int], alpha: float
    ) -> None:
        numbers: dict[Hashable, int] = {}
        bags: list[dict[int, int]] = []
        for features, count in zip(found, rows, strict=True):
            bag: dict[int, int] = {}
            for feature in features:
                number = numbers.setdefault(feature, len(numbers))
                bag[number] = bag.get(number, 0) + count
            bags.append(bag)
        width = max(map(len, bags), default=0)
        if not width:
            raise DataError("no row has compounds of that size", code="mcd")
        self.alpha = alpha
        self.columns = np.full((len(bags), width), len(numbers), dtype=np.int64)
        self.counts = np.zeros((len(bags), width))
        for place, bag in enumerate(bags):
            self.columns[place, : len(bag)] = list(bag.keys())
            self.counts[place, : len(bag)] = list(bag.values())
        self.sizes = self.counts.sum(axis=1)
        self.train = np.zeros(len(numbers) + 1)
        self.test = np.zeros(len(numbers) + 1)

    def put(self, place: int, train: int, test: int) -> None:
        """Add an item to the sums (1), take it out (-1), or leave a sum alone (0)."""
        columns, counts = self.columns[place], self.counts[place]
        np.add.at(self.train, columns, train * counts)
        np.add.at(self.test, columns, test * counts)

    def divergence(self) -> float:
        """Return the divergence as it is."""
        total = self._mixed(self.train, self.test).sum()
        return 1.0 - float(total / self._scale(self.train.sum(), self.test.sum()))

    def after(self, places: _Places, train: int, test: int) -> _Floats:
        """Return the divergences after `put` of each of these items alone; [len(places)]."""
        columns, counts = self.columns[places], self.counts[places]
        old_train, old_test = self.train[columns], self.test[columns]
        total = self._mixed(self.train, self.test).sum()
        # A count can come out a rounding below 0, whose power would be no number.
        new = (np.maximum(old + sign * counts, 0.0)
               for old, sign in ((old_train, train), (old_test, test)))  # fmt: skip
        changed = self._mixed(*new) - self._mixed(old_train, old_test)
        sizes = self.sizes[places]
        scale = self._scale(self.train.sum() + train * sizes, self.test.sum() + test * sizes)
        result: _Floats = 1.0 - (total + changed.sum(axis=1)) / scale
        return result

    def _mixed(self, train: _Floats, test: _Floats) -> _Floats:
        return np.asarray(train**self.alpha * test ** (1 - self.alpha))

    def _scale(self, train: _Floats, test: _Floats) -> _Floats:
        return np.maximum(self._mixed(np.asarray(train), np.asarray(test)), 1e-300)


class _Search:
    """Sides of all items, their divergences, and swaps that improve them.

    Attributes:
        side: [items] training, test, or out.
        rows: [items] rows of each.
    """

    def __init__(
        self, items: Sequence[Structure], rows: Sequence[int], rng: random.Random, size: int
    ) -> None:
        self.rng = rng
        self.atoms = _Side([item.atoms() for item in items], rows, ATOM_ALPHA)
        self.compounds = _Side([item.compounds(size) for item in items], rows, COMPOUND_ALPHA)
        self.rows = np.asarray(rows, dtype=np.int64)
        self.side = np.full(len(items), _OUT)
        self.score = -np.inf
        self.room = np.zeros(3)  # rows that each side may have at most

    def start(self, share: float, leave_out: float) -> None:
        """Deal the items at random.

        Raises:
            DataError: A side would be empty.
        """
        total = int(self.rows.sum())
        test = share * (1 - leave_out) * total
        self.room[:] = total, test, leave_out * total
        free = {_TEST: test, _OUT: self.room[_OUT]}
        for place in self.rng.sample(range(len(self.rows)), len(self.rows)):
            size = int(self.rows[place])
            side = next((side for side, room in free.items() if size <= room + 1e-9), _TRAIN)
            if side != _TRAIN:
                free[side] -= size
            self._move(place, side)
        if not all((self.side == side).any() for side in (_TRAIN, _TEST)):
            raise DataError("too few different rows for a split", code="mcd")
        self.score = self._now()

    def swap(self, one: int, other: int) -> bool:
        """Swap the best item of one side with the best of another; undone if that is worse."""
        if not (self.side == one).any():
            return False
        there = self._best(one, other)
        self._move(there, other)
        back = self._best(other, one)
        self._move(back, one)
        score = self._now()
        fits = all(self.rows[self.side == side].sum() <= self.room[side] + 1e-9 for side in (1, 2))
        if score > self.score + 1e-12 and fits:
            self.score = score
            return True
        self._move(back, other)
        self._move(there, one)
        return False

    def _best(self, source: int, target: int) -> int:
        """Return the item of a sample of one side that is best moved to another."""
        places = np.flatnonzero(self.side == source)
        if len(places) > _SAMPLE:
            places = places[self.rng.sample(range(len(places)), _SAMPLE)]
        signs = _signs(source, target)
        found = _scored(self.compounds.after(places, *signs), self.atoms.after(places, *signs))
        return int(places[int(np.argmax(found))])

    def _move(self, place: int, target: int) -> None:
        signs = _signs(int(self.side[place]), target)
        self.side[place] = target
        self.atoms.put(place, *signs)
        self.compounds.put(place, *signs)

    def _now(self) -> float:
        found = [np.asarray([side.divergence()]) for side in (self.compounds, self.atoms)]
        return float(_scored(*found)[0])


def _signs(source: int, target: int) -> tuple[int, int]:
    """Return what a move adds to the sums of training and test."""
    train, test = ((target == side) - (source == side) for side in (_TRAIN, _TEST))
    return train, test


def _scored(compound: _Floats, atom: _Floats) -> _Floats:
    return np.asarray(compound - _PENALTY * np.maximum(0.0, atom - MAX_ATOM))
