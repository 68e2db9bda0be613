"""Experts of a library in groups of those that change the base alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from cgmerge.errors import Incompatible
from cgmerge.modules.expert import open_expert
from cgmerge.shown import some_of


@dataclass(frozen=True, slots=True)
class Group:
    """Experts that belong together.

    Attributes:
        number: From 1, in the order of the experts.
        names: Of its experts, as they were given.
        likeness: Mean cosine of their deltas; 1 for a single expert.
    """

    number: int
    names: tuple[str, ...]
    likeness: float


def group_experts(refs: Sequence[str], count: int) -> list[Group]:
    """Group experts by the cosines of their deltas (see `cgmerge.merge.cluster`).

    Args:
        refs: Adapters, at least `count`.
        count: Number of groups.

    Returns:
        The groups, in the order of their first experts.

    Raises:
        UsageError: More groups than experts.
        Incompatible: Experts of different bases.
        InputError: One that cannot be read.
    """
    from cgmerge.merge.cluster import cluster, similarity

    experts = [open_expert(ref) for ref in refs]
    known = sorted({e.base_fingerprint for e in experts if e.base_fingerprint})
    if len(known) > 1:
        raise Incompatible(
            f"these experts are of {len(known)} bases: {some_of(known, 3)}",
            code="base",
            hint="give those of one base a tag, and list that: --tag WORD",
            found=known[:10],
        )
    cosines = similarity([expert.deltas() for expert in experts])
    labels = cluster(cosines, count)
    names = [ref.rsplit("/", 1)[-1] for ref in refs]
    found = []
    for number in range(count):
        members = [i for i, label in enumerate(labels) if label == number]
        pairs = [float(cosines[i, j]) for i in members for j in members if i < j]
        likeness = sum(pairs) / len(pairs) if pairs else 1.0
        found.append(Group(number + 1, tuple(names[i] for i in members), likeness))
    return found
