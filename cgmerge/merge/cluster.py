"""Group experts that change the base in the same way.

Experts are alike where their deltas are: cos(ΔW_i, ΔW_j) over all modules at once, from the
factors, never from A and B apart, whose angles say nothing where training began from different A.
Groups are found by k-means on the rows of that matrix: two experts belong together where they
are alike to the same others.

Source: model-based clustering (MBC, arXiv:2405.11157), which zeroes small entries of the
flattened factors and reduces them by SVD first; here the cosines are exact and nothing is drawn
from a global generator.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.compare import cosines
from cgmerge.merge.deltas import LowRank, sizes_of
from cgmerge.merge.engine import one_thread

_ENTRIES = 1 << 22  # of the products of factors that are held at once
_ROUNDS = 100
_STARTS = 10


def similarity(
    experts: Sequence[Mapping[str, LowRank]],
) -> Float[Tensor, "experts experts"]:
    """Return cos(ΔW_i, ΔW_j) of whole task vectors, float64; 0 where one of them is zero.

    Args:
        experts: Ranks and modules may differ; read one module at a time.
    """
    count = len(experts)
    gram = torch.zeros(count, count, dtype=torch.float64)
    names = dict.fromkeys(name for expert in experts for name in sizes_of(expert))
    with one_thread():
        for name in names:
            present = [i for i, expert in enumerate(experts) if name in expert]
            deltas = [experts[i][name] for i in present]
            gram[torch.tensor(present)[:, None], torch.tensor(present)] += _gram(deltas)
        return cosines(gram)


def _gram(deltas: Sequence[LowRank]) -> Float[Tensor, "experts experts"]:
    """Return ⟨ΔW_i, ΔW_j⟩ = Σ (A_i·A_jᵀ) ⊙ (B_iᵀ·B_j) of one module, some rows at a time."""
    count = len(deltas)
    a = torch.cat([delta.a for delta in deltas]).double()
    b = torch.cat([delta.b for delta in deltas], dim=1).double()
    ranks = torch.tensor([delta.rank for delta in deltas])
    owner = torch.repeat_interleave(torch.arange(count), ranks)
    found = torch.zeros(count, count, dtype=torch.float64)
    step = max(1, _ENTRIES // max(1, a.shape[0]))
    for first in range(0, a.shape[0], step):
        part = slice(first, first + step)
        products = (a[part] @ a.T) * (b[:, part].T @ b)  # [step, Σr]
        columns = products.new_zeros(products.shape[0], count).index_add_(1, owner, products)
        found.index_add_(0, owner[part], columns)
    return found


def cluster(rows: Float[Tensor, "items features"], count: int, *, seed: int = 0) -> list[int]:
    """Group rows by k-means; the same rows give the same groups on every machine.

    Args:
        rows: E.g. from `similarity`.
        count: Number of groups, at most that of the rows.
        seed: Of the beginnings, of which the best of ten counts.

    Returns:
        The group of each row; groups are numbered in the order they appear.

    Raises:
        UsageError: No such number of groups.
    """
    if not 1 <= count <= len(rows):
        raise UsageError(
            f"{len(rows)} experts cannot make {count} groups",
            code="clusters",
            hint=f"a number from 1 to {len(rows)}",
            expected=[1, len(rows)],
            found=count,
        )
    points = rows.double()
    generator = torch.Generator().manual_seed(seed)
    with one_thread():
        tries = [_settle(points, _spread(points, count, generator)) for _ in range(_STARTS)]
    labels, _ = min(tries, key=lambda found: found[1])  # the first of equals
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [order[label] for label in labels]


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    """Return squared distances, [points, centres]."""
    return (points[:, None, :] - centres).square().sum(dim=-1)


def _spread(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose far apart rows to begin with (k-means++)."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < count:
        distance = _distances(points, points[chosen]).amin(dim=1)
        if float(distance.sum()) <= 0.0:  # fewer different rows than groups
            chosen.append(next(i for i in range(len(points)) if i not in chosen))
        else:
            chosen.append(int(torch.multinomial(distance, 1, generator=generator)))
    return points[chosen]


def _settle(points: Tensor, centres: Tensor) -> tuple[list[int], float]:
    """Move centres to the means of their rows until nothing changes; no group is left empty."""
    labels: list[int] = []
    for _ in range(_ROUNDS):
        distance = _distances(points, centres)
        found = distance.argmin(dim=1)
        nearest = distance.gather(1, found[:, None])[:, 0]
        for empty in sorted(set(range(len(centres))) - set(found.tolist())):
            sizes = torch.bincount(found, minlength=len(centres))
            loner = int(torch.where(sizes[found] > 1, nearest, -1.0).argmax())
            found[loner], nearest[loner] = empty, 0.0
        if labels == found.tolist():
            break
        labels = found.tolist()
        centres = torch.stack([points[found == g].mean(dim=0) for g in range(len(centres))])
    return labels, float(_distances(points, centres).gather(1, torch.tensor(labels)[:, None]).sum())
