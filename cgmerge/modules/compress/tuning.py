"""Choose scalars of a compressed expert on validation data; the score is the caller's.

One factor on the whole delta decides as much as the mode does: what was dropped weakens the
expert, and how much it must be raised again depends on the skill. For the published mode the grid
is the paper's, over density and α.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.modes import Encoded, Options, decode, encode

FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0)
"""Tried on top of the data-free multiplier."""

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
ALPHAS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""The grids of the paper."""

_REFINEMENTS = 2

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
    tried: dict[float, Trial] = {}

    def attempt(factor: float) -> None:
        if factor not in tried:
            scaled = encoded.times(factor)
            found = score(decode(scaled.coded))
            tried[factor] = Trial(scaled.multiplier, scaled.density, found)

    for factor in FACTORS:
        attempt(factor)
    for _ in range(_REFINEMENTS):
        grid = sorted(tried)
        place = grid.index(_best(tried))
        for neighbour in (place - 1, place + 1):
            if 0 <= neighbour < len(grid):
                attempt(round((grid[place] * grid[neighbour]) ** 0.5, 4))
    best = _best(tried)
    return Tuned(encoded.times(best), tried[best], tuple(tried.values()))


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
    trials: list[Trial] = []
    for density in densities:
        asked = None if options.target is not None else density
        unit = encode("compeft", factors, replace(options, density=asked, alpha=1.0))
        for alpha in alphas:
            # α is on both factors, so that it acts on the delta squared.
            scaled = with_alpha(unit, alpha)
            trial = Trial(alpha, scaled.density, score(decode(scaled.coded)))
            trials.append(trial)
            if best is None or trial.score > best[0].score:
                best = trial, scaled
    assert best is not None
    return Tuned(best[1], best[0], tuple(trials))


def with_alpha(unit: Encoded, alpha: float) -> Encoded:
    """Return the published mode at another α, from its result at α = 1."""
    coded = [
        replace(part, scales=part.scales * part.scales.dtype.type(alpha)) for part in unit.coded
    ]
    return replace(unit, coded=coded, fidelity=unit.fidelity.scaled(alpha**2), alpha=alpha)


def _best(tried: Mapping[float, Trial]) -> float:
    return max(sorted(tried), key=lambda factor: tried[factor].score)
