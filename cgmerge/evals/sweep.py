"""Try many scales of a merge in memory, on validation data, without writing anything.

The scale matters more than the merge rule, so it is chosen on held-in validation items, never on
the reported ones. A method's result is merged once and then multiplied: scale is a plain factor
of every method (the conformance tests hold them to it).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgmerge.evals.record import Evaluation
from cgmerge.evals.runner import Progress, Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import group_scores
from cgmerge.evals.targets import Target

if TYPE_CHECKING:
    from cgmerge.merge import LowRank
    from cgmerge.modules.loading import LoadedBase


@dataclass(frozen=True, slots=True)
class Candidate:
    """One merge to try: a method with its parameters (scale left out), and a scale."""

    method: str
    params: tuple[tuple[str, object], ...]
    scale: float

    @property
    def name(self) -> str:
        """Return how tables call it, e.g. `ties density=0.2 x0.8`."""
        settings = "".join(f" {key}={value}" for key, value in self.params)
        return f"{self.method}{settings} x{self.scale:g}"


def sweep(
    loaded: "LoadedBase",
    experts: Sequence[Mapping[str, "LowRank"]],
    candidates: Sequence[Candidate],
    skills: Sequence[SkillSet],
    *,
    ids: Sequence[str],
    progress: Progress | None = None,
) -> Evaluation:
    """Score every candidate merge on validation skills.

    Args:
        loaded: The base; not changed.
        experts: Task vectors of the experts, read once per method.
        candidates: What to try.
        skills: Validation items.
        ids: The experts' digests: with them a merge is what `compose` makes, random rules included.
        progress: Called after every batch.

    Returns:
        Record and items with one target per candidate, named `Candidate.name`.
    """
    merged: dict[tuple[str, tuple[tuple[str, object], ...]], dict[str, LowRank]] = {}
    targets = []
    for candidate in candidates:
        key = candidate.method, candidate.params
        if key not in merged:
            merged[key] = merge_in_memory(
                experts, candidate.method, dict(candidate.params), ids=ids
            )
        deltas = {path: _scaled(delta, candidate.scale) for path, delta in merged[key].items()}
        digest = hashlib.sha256(candidate.name.encode()).hexdigest()
        targets.append(Target.of_deltas(candidate.name, deltas, digest))
    settings = Settings(keeps_base=False, expects_same=True)
    return evaluate_targets(loaded, targets, skills, settings, progress=progress)


def merge_in_memory(
    experts: Sequence[Mapping[str, "LowRank"]],
    method: str,
    params: Mapping[str, object],
    *,
    ids: Sequence[str],
) -> dict[str, "LowRank"]:
    """Merge experts to factors of automatic rank, bit for bit as `compose` would write them.

    Args:
        experts: Task vectors, in any order.
        method: Name or alias.
        params: Its parameters.
        ids: The experts' digests, which decide random draws and the order of additions.
    """
    from cgmerge.merge import Merger, make_rule, plan_rank

    rule = make_rule(method, len(experts), params=params)
    order = rule.order(ids)
    experts, ids = [experts[i] for i in order], [ids[i] for i in order]
    rank = plan_rank(rule, experts, "auto")
    merger = Merger(rule, experts, ids=ids)
    return {path: merger.factors(path, rank).delta for path in merger.names}


def best(
    evaluation: Evaluation,
    candidates: Sequence[Candidate],
    groups: Mapping[str, Sequence[str]],
) -> Candidate:
    """Choose the candidate with the highest mean over groups of skills.

    Args:
        evaluation: From `sweep`.
        candidates: The same, in the same order; the first of equals wins.
        groups: Group name to the skills in it; every group counts the same.
    """
    scored = {c.name: group_scores(evaluation, c.name, groups) for c in candidates}
    return max(candidates, key=lambda c: sum(s.score for s in scored[c.name].values()))


def _scaled(delta: "LowRank", scale: float) -> "LowRank":
    from cgmerge.merge import LowRank

    return LowRank(delta.a, delta.b * scale)
