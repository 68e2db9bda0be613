"""Terms of all modules for one size: a common knob, and where sizes jump, terms are dropped.

One slope for all modules is the best allocation, but sizes can jump with it: the directions of a
flat spectrum pay equally and come or go together. Where the knob alone cannot come close to the
size, whole terms go from the result just above it, the lowest gain for their bits first.
"""

from collections.abc import Callable, Mapping, Sequence

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.budget import CLOSE, Found, fit
from cgmerge.modules.compress.rate import SCALE_BITS, entropy_bits
from cgmerge.modules.compress.sections import Coded
from cgmerge.modules.compress.terms import Terms, solve_weights

Decompose = Callable[[LowRank, float], Terms]
Measure = Callable[[Sequence[Coded]], float]


class Decomposer:
    """Decomposes all modules with one knob, as often as a size takes.

    Args:
        exact: Module path to delta.
        decompose: Terms of one module for a knob; more terms and levels for a lower knob.
        progress: Called with the number of modules done and the number of the pass.
    """

    def __init__(
        self,
        exact: Mapping[str, LowRank],
        decompose: Decompose,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.exact = exact
        self.decompose = decompose
        self.progress = progress
        self._passes = 0

    def __call__(self, knob: float) -> dict[str, Terms]:
        """Return the terms of every module."""
        self._passes += 1
        found: dict[str, Terms] = {}
        for name, delta in self.exact.items():
            found[name] = self.decompose(delta, knob)
            if self.progress:
                self.progress(len(found), self._passes)
        return found


def fit_terms(
    make: Decomposer,
    measure: Measure,
    target: float,
    knobs: tuple[float, float, float],
) -> Found[dict[str, Terms]]:
    """Decompose all modules so that the result measures at most `target`.

    Args:
        make: Terms of all modules for a knob.
        measure: Size of coded tensors.
        target: In the same unit.
        knobs: Lowest, highest and first knob to try.

    Returns:
        Module path to terms, as large as whole terms allow, and the next result above; none
        there where the lowest knob gives no more, the same one where the size is met.
    """
    low, high, start = knobs
    found = fit(
        make,
        lambda terms: measure(coded_terms(terms)),
        (CLOSE * target, target),
        (low, high),
        start,
    )
    if found.above is None or found.above is found.below:
        return found
    pruned, above = _pruned(make.exact, found.above, measure, target)
    if found.below is None or measure(coded_terms(pruned)) > measure(coded_terms(found.below)):
        return Found(pruned, above)
    return Found(found.below, above)


def coded_terms(terms: Mapping[str, Terms]) -> list[Coded]:
    """Return the tensors of all modules as they are stored, names sorted."""
    return [part for name in sorted(terms) for part in terms[name].coded(name)]


def _pruned(
    exact: Mapping[str, LowRank], terms: Mapping[str, Terms], measure: Measure, target: float
) -> tuple[dict[str, Terms], dict[str, Terms]]:
    """Drop as few terms as the size asks for, those of the lowest gain for their bits.

    Returns:
        What is left, and what would be with one term more.
    """
    order = sorted(
        (worth, name, place)
        for name, module in terms.items()
        for place, worth in enumerate(_worth(module))
    )

    def without(count: int) -> dict[str, Terms]:
        gone = {(name, place) for _, name, place in order[:count]}
        return {
            name: module.only([i for i in range(module.d.numel()) if (name, i) not in gone])
            for name, module in terms.items()
        }

    low, high = 0, len(order)  # dropping `high` is enough, or nothing is
    while low < high:
        middle = (low + high) // 2
        if measure(coded_terms(without(middle))) <= target:
            high = middle
        else:
            low = middle + 1
    left, more = (
        {name: _again(exact[name], module) for name, module in without(count).items()}
        for count in (low, max(low - 1, 0))
    )
    return left, more


def _worth(terms: Terms) -> list[float]:
    """Return the squared norm of each term for one of its bits."""
    worth = []
    for x, y, d in zip(terms.x, terms.y, terms.d, strict=True):
        gain = float(d) ** 2 * float(x.double().square().sum()) * float(y.double().square().sum())
        worth.append(gain / (entropy_bits(x.numpy()) + entropy_bits(y.numpy()) + SCALE_BITS))
    return worth


def _again(delta: LowRank, terms: Terms) -> Terms:
    pairs = [(x, y) for x, y in zip(terms.x.double(), terms.y.double(), strict=True)]
    return solve_weights(delta, pairs) if pairs else terms
