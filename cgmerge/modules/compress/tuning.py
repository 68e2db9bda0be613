"""Choose scalars of a compressed expert on validation data; the score is the caller's.

One factor on the whole delta decides as much as the mode does: what was dropped weakens the
expert, and how much it must be raised again depends on the skill. For the published mode the grid
is the paper's, over density and α.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cgmerge.errors import Incompatible
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.modes import Encoded, Mode, Options, decode, encode

FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0)
"""Tried on top of the data-free multiplier."""

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
ALPHAS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""The grids of the paper."""

_REFINEMENTS = 2
MOST_FACTORS = len(FACTORS) + 2 * _REFINEMENTS

Score = tuple[float, ...]
"""Compared entry by entry; larger is better."""

Scorer = Callable[[Mapping[str, LowRank]], Score]


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting that was scored."""

    multiplier: float
    density: float
    score: Score


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best setting and all that were tried.

    Attributes:
        encoded: With the best scalars in its scales.
        best: The trial it comes from, the first of equals.
        trials: In the order they were made.
    """

    encoded: Encoded
    best: Trial
    trials: tuple[Trial, ...]


def tune_multiplier(encoded: Encoded, score: Scorer) -> Tuned:
    """Search the factor on the delta: a grid, then between the best and its neighbours.

    Args:
        encoded: With any multiplier; the grid is relative to it.
        score: Of factors; called once for each trial, about a dozen times.
    """

    def attempt(factor: float) -> Trial:
        scaled = encoded.times(factor)
        return Trial(scaled.multiplier, scaled.density, score(decode(scaled.coded)))

    best, trials = search_factor(attempt)
    return Tuned(encoded.times(best), trials[best], tuple(trials.values()))


def search_factor(attempt: Callable[[float], Trial]) -> tuple[float, dict[float, Trial]]:
    """Search one factor: a grid, then between the best and its neighbours.

    Args:
        attempt: Scores a factor; called at most `MOST_FACTORS` times, never twice for one.

    Returns:
        The best factor, the smallest of equals, and all that were tried in their order.
    """
    tried = {factor: attempt(factor) for factor in FACTORS}
    for _ in range(_REFINEMENTS):
        grid = sorted(tried)
        place = grid.index(_best(tried))
        for neighbour in (place - 1, place + 1):
            if 0 <= neighbour < len(grid):
                factor = round((grid[place] * grid[neighbour]) ** 0.5, 4)
                if factor not in tried:
                    tried[factor] = attempt(factor)
    return _best(tried), tried


def tune_published(
    factors: Mapping[str, LowRank],
    options: Options,
    score: Scorer,
    *,
    densities: Sequence[float] = DENSITIES,
    alphas: Sequence[float] = ALPHAS,
) -> Tuned:
    """Search density and α of the published mode on a grid.

    Args:
        factors: As for `encode`.
        options: Everything but density and α.
        score: Of factors; called `len(densities) · len(alphas)` times.
        densities: Where the caller fixes the density (or a size), one entry.
        alphas: Factors on σ.

    Raises:
        Incompatible: Nothing is left of the expert at any of the densities.
    """
    best: tuple[Trial, Encoded] | None = None
    emptied: Incompatible | None = None
    trials: list[Trial] = []
    for density in densities:
        asked = None if options.target is not None else density
        try:
            unit = encode("compeft", factors, replace(options, density=asked, alpha=1.0))
        except Incompatible as error:  # nothing is left at this density; a higher one may do
            emptied = error
            continue
        for alpha in alphas:
            # α is on both factors, so that it acts on the delta squared.
            scaled = with_alpha(unit, alpha)
            trial = Trial(alpha, scaled.density, score(decode(scaled.coded)))
            trials.append(trial)
            if best is None or trial.score > best[0].score:
                best = trial, scaled
    if best is None:
        assert emptied is not None
        raise emptied
    return Tuned(best[1], best[0], tuple(trials))


def with_alpha(unit: Encoded, alpha: float) -> Encoded:
    """Return the published mode at another α, from its result at α = 1."""
    coded = [
        replace(part, scales=part.scales * part.scales.dtype.type(alpha)) for part in unit.coded
    ]
    return replace(unit, coded=coded, fidelity=unit.fidelity.scaled(alpha**2), alpha=alpha)


class Search:
    """The search for one expert: made once, applied to whatever size it is asked for later.

    Args:
        mode: Of the compression.
        factors: As for `encode`.
        alpha: Where the caller fixes it (mode compeft).
        multiplier: Where the caller fixes it (the other modes).
    """

    def __init__(
        self,
        mode: Mode,
        factors: Mapping[str, LowRank],
        alpha: float | None = None,
        multiplier: float | None = None,
    ) -> None:
        self.mode = mode
        self.factors = factors
        self.alphas = ALPHAS if alpha is None else (alpha,)
        self.multiplier = multiplier
        self.found: Tuned | None = None
        self._factor = 1.0

    def count(self, options: Options) -> int:
        """Return how many settings `tune` scores at most; 0 where nothing is left to choose."""
        if self.mode == "compeft":
            choices = len(self.alphas) * len(densities_of(options))
            return 0 if choices == 1 else choices
        return MOST_FACTORS if self.multiplier is None else 0

    def tune(self, options: Options, score: Scorer) -> Tuned:
        """Search, and remember what was found."""
        if self.mode == "compeft":
            found = tune_published(
                self.factors, options, score, densities=densities_of(options), alphas=self.alphas
            )
        else:
            plain = encode(self.mode, self.factors, options)
            found = tune_multiplier(plain, score)
            self._factor = found.best.multiplier / plain.multiplier
        self.found = found
        return found

    def make(self, options: Options) -> Encoded:
        """Encode with what was found (or fixed), without scoring anything."""
        if self.mode != "compeft":
            return encode(self.mode, self.factors, options).times(self._factor)
        alpha, density = self.alphas[0], options.density
        if self.found is not None:
            alpha = self.found.best.multiplier
            density = None if options.target is not None else self._density
        unit = encode("compeft", self.factors, replace(options, density=density, alpha=1.0))
        return with_alpha(unit, alpha)

    @property
    def _density(self) -> float:
        assert self.found is not None
        return self.found.best.density


def densities_of(options: Options) -> Sequence[float]:
    """Return what is tried: one density where the caller fixed it or a size."""
    if options.target is not None or options.density is not None:
        return (options.density or 1.0,)
    return DENSITIES


def _best(tried: Mapping[float, Trial]) -> float:
    return max(sorted(tried), key=lambda factor: tried[factor].score)
