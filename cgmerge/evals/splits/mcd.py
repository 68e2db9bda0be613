"""Splits of maximum compound divergence: the same atoms on both sides, other compounds.

A random split is improved by moves: the best of a sample of training items goes to the test, then
the best of a sample of test items goes back, and the pair of moves is kept when it raises

    D_compound − 10 · max(0, D_atom − limit)

Both divergences are exact at every move: Σ p^α q^(1−α) = Σ a^α b^(1−α) / (A^α B^(1−α)) changes only
in the compounds of the item that moves.

Source: Keysers et al. 2020. There items are added one by one and many are left out altogether
(half of SCAN); here every item is in one of the two parts, so that divergences are smaller.
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
_PENALTY = 10.0
_SAMPLE = 192  # candidates of a move
_PATIENCE = 60  # pairs of moves in a row that do not help
_Floats = NDArray[np.float64]


def split_mcd(
    items: Sequence[Structure],
    rows: Sequence[int],
    share: float,
    rng: random.Random,
    *,
    size: int = 3,
    max_atom: float = MAX_ATOM,
    progress: Callable[[int], object] = lambda _: None,
    moves: int = 20_000,
) -> Made:
    """Make a split whose compounds diverge as far as its atoms may not.

    Args:
        items: Distinct structures.
        rows: Of each.
        share: Of test rows; kept to within the largest item.
        rng: Source of the start and of the samples.
        size: Of the compounds that count: 2 or 3 nodes.
        max_atom: Atom divergence that costs nothing.
        progress: Told the number of moves.
        moves: At most so many pairs of moves.

    Raises:
        DataError: No item has compounds of that size.
    """
    search = _Search(items, rows, share, rng, size=size, max_atom=max_atom)
    tried = failed = 0
    while tried < moves and failed < _PATIENCE:
        failed = 0 if search.step() else failed + 1
        tried += 1
        progress(tried)
    return Made(search.tests.tolist(), {"compound_size": size, "max_atom": max_atom})


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

    def put(self, place: int, sign: int) -> None:
        """Move an item to the test (1) or back (-1)."""
        columns, counts = self.columns[place], sign * self.counts[place]
        np.add.at(self.test, columns, counts)
        np.add.at(self.train, columns, -counts)

    def start(self, tests: NDArray[np.bool_]) -> None:
        """Sum up a split."""
        for sums, chosen in ((self.train, ~tests), (self.test, tests)):
            np.add.at(sums, self.columns[chosen].ravel(), self.counts[chosen].ravel())

    def divergence(self) -> float:
        """Return the divergence as it is."""
        total = self._mixed(self.train, self.test).sum()
        return 1.0 - float(total / self._scale(self.train.sum(), self.test.sum()))

    def after(self, places: NDArray[np.int64], sign: int) -> _Floats:
        """Return the divergences after moving each of these items alone; [len(places)]."""
        columns, counts = self.columns[places], sign * self.counts[places]
        train, test = self.train[columns], self.test[columns]
        total = self._mixed(self.train, self.test).sum()
        changed = self._mixed(train - counts, test + counts) - self._mixed(train, test)
        sizes = sign * self.sizes[places]
        scale = self._scale(self.train.sum() - sizes, self.test.sum() + sizes)
        result: _Floats = 1.0 - (total + changed.sum(axis=1)) / scale
        return result

    def _mixed(self, train: _Floats, test: _Floats) -> _Floats:
        return np.asarray(train**self.alpha * test ** (1 - self.alpha))

    def _scale(self, train: _Floats, test: _Floats) -> _Floats:
        return np.maximum(self._mixed(np.asarray(train), np.asarray(test)), 1e-300)


class _Search:
    def __init__(
        self,
        items: Sequence[Structure],
        rows: Sequence[int],
        share: float,
        rng: random.Random,
        *,
        size: int,
        max_atom: float,
    ) -> None:
        self.rng, self.max_atom = rng, max_atom
        self.atoms = _Side([item.atoms() for item in items], rows, ATOM_ALPHA)
        self.compounds = _Side([item.compounds(size) for item in items], rows, COMPOUND_ALPHA)
        self.rows = np.asarray(rows, dtype=np.int64)
        self.tests = np.zeros(len(items), dtype=np.bool_)
        room = share * int(self.rows.sum())
        for place in rng.sample(range(len(items)), len(items)):
            if self.rows[place] <= room:
                self.tests[place] = True
                room -= int(self.rows[place])
        if not self.tests.any() or self.tests.all():
            raise DataError("too few different rows for a split", code="mcd")
        self.most = int(self.rows[self.tests].sum())
        for side in (self.atoms, self.compounds):
            side.start(self.tests)
        self.score = self._scored(self.compounds.divergence(), self.atoms.divergence())

    def step(self) -> bool:
        """Try one pair of moves; returns whether it was kept."""
        there = self._best(sign=1)
        self._put(there, 1)
        back = []
        while self.rows[self.tests].sum() > self.most:
            back.append(self._best(sign=-1))
            self._put(back[-1], -1)
        score = self._scored(self.compounds.divergence(), self.atoms.divergence())
        if score > self.score + 1e-12:
            self.score = score
            return True
        for place in reversed(back):
            self._put(place, 1)
        self._put(there, -1)
        return False

    def _best(self, sign: int) -> int:
        """Return the best of a sample of training (1) or test (-1) items to move."""
        pool = np.flatnonzero(self.tests if sign < 0 else ~self.tests)
        if len(pool) > _SAMPLE:
            pool = pool[self.rng.sample(range(len(pool)), _SAMPLE)]
        scores = self._scored(self.compounds.after(pool, sign), self.atoms.after(pool, sign))
        return int(pool[int(np.argmax(scores))])

    def _put(self, place: int, sign: int) -> None:
        self.tests[place] = sign > 0
        self.atoms.put(place, sign)
        self.compounds.put(place, sign)

    def _scored(self, compound: object, atom: object) -> float:
        return np.subtract(compound, _PENALTY * np.maximum(0.0, np.subtract(atom, self.max_atom)))  # type: ignore[no-any-return, call-overload]
