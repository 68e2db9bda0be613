"""How different two sets are in what they are made of: Chernoff divergences of atoms and compounds.

Source: Keysers et al. 2020, "Measuring compositional generalization". D = 1 − Σ_k p_k^α q_k^(1−α)
with p the distribution in training, q the one in test; α = 0.5 for atoms, which should be as
frequent on both sides, and 0.1 for compounds, where it matters whether training has one at all.
Compounds here are chains of two or three nodes, counted in every row and not weighted; there they
are weighted sub-graphs.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from cgmerge.errors import DataError
from cgmerge.evals.splits.structure import Structure

ATOM_ALPHA = 0.5
COMPOUND_ALPHA = 0.1


@dataclass(frozen=True)
class Divergences:
    """Divergences of a test set from its training set, each from 0 (alike) to 1 (disjoint).

    Attributes:
        atoms: Of node labels or words.
        compounds2: Of (parent, which child, child), or of neighbouring words.
        compounds3: Of three generations, or of three words in a row; None where there are none.
        unseen: Share of test rows with a pair that no training row has.
    """

    atoms: float
    compounds2: float | None
    compounds3: float | None
    unseen: float


def divergence(
    train: Mapping[Hashable, float], test: Mapping[Hashable, float], alpha: float
) -> float:
    """Return 1 − Σ p^α q^(1−α) of two frequency tables.

    Args:
        train: Counts, all above 0; normalised here to p.
        test: Counts, likewise q.
        alpha: Above 0 and below 1.

    Raises:
        DataError: A table is empty.

    Example:
        >>> round(divergence({"a": 1, "b": 1}, {"a": 1}, 0.5), 6)
        0.292893
    """
    if not train or not test:
        raise DataError("a part without any atoms or compounds has no divergence", code="empty")
    p_sum, q_sum = sum(train.values()), sum(test.values())
    alike: float = sum(
        (train[key] / p_sum) ** alpha * (count / q_sum) ** (1 - alpha)
        for key, count in test.items()
        if key in train
    )
    return min(1.0, max(0.0, 1.0 - alike))


def measure(train: Iterable[Structure], test: Iterable[Structure]) -> Divergences:
    """Measure a split; rows that repeat count as often as they occur.

    Raises:
        DataError: A part has no rows.
    """
    sides = (list(train), list(test))
    atoms = [_counted(one.atoms() for one in side) for side in sides]
    pairs = [_counted(one.compounds(2) for one in side) for side in sides]
    triples = [_counted(one.compounds(3) for one in side) for side in sides]
    unseen = sum(any(pair not in pairs[0] for pair in one.compounds(2)) for one in sides[1])
    both = [
        divergence(found[0], found[1], COMPOUND_ALPHA) if all(found) else None
        for found in (pairs, triples)
    ]
    atom = divergence(atoms[0], atoms[1], ATOM_ALPHA)
    return Divergences(atom, both[0], both[1], unseen / max(1, len(sides[1])))


def _counted(things: Iterable[Iterable[Hashable]]) -> Counter[Hashable]:
    return Counter(chain.from_iterable(things))
