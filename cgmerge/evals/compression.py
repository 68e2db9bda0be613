"""Scores of compressed experts: what tuning maximises, and before against after."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgmerge.evals.record import Mean
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import mean_scores
from cgmerge.evals.targets import BASE_NAME, Target

if TYPE_CHECKING:
    from cgmerge.merge.deltas import LowRank
    from cgmerge.modules.compress.tuning import Scorer
    from cgmerge.modules.loading import LoadedBase

_NO_DIGEST = "0" * 64
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Kept:
    """An expert before and after compression on the calibration data.

    Attributes:
        base: Mean over skills of the base alone.
        before: Of the expert.
        after: Of the compressed expert.
        entries: One item for each skill, as they stand in the manifest.
    """

    base: Mean
    before: Mean
    after: Mean
    entries: list[dict[str, Any]]

    @property
    def share(self) -> float | None:
        """Return the share of the gain over the base that is kept; None where there was none."""
        gain = self.before.score - self.base.score
        return (self.after.score - self.base.score) / gain if gain > 0 else None


def make_scorer(
    loaded: "LoadedBase",
    skills: Sequence[SkillSet],
    progress: Callable[[int], None] | None = None,
) -> "Scorer":
    """Return a function from factors to (share of items right, mean log-likelihood).

    Args:
        loaded: The base in memory; not changed.
        skills: Validation items, never those that are reported later.
        progress: Called with the number of finished calls.
    """
    done = 0

    def score(factors: "Mapping[str, LowRank]") -> tuple[float, float]:
        nonlocal done
        target = Target.of_deltas("trial", factors, _NO_DIGEST)
        settings = Settings(keeps_base=False, expects_same=True)
        results = evaluate_targets(loaded, [target], skills, settings).record.results
        done += 1
        if progress:
            progress(done)
        return mean_scores(results)

    return score


def compare(
    loaded: "LoadedBase",
    skills: Sequence[SkillSet],
    before: "Mapping[str, LowRank]",
    after: "Mapping[str, LowRank]",
) -> Kept:
    """Score base, expert and compressed expert on the same items."""
    targets = [
        Target.of_deltas("before", before, _NO_DIGEST),
        Target.of_deltas("after", after, _NO_DIGEST),
    ]
    record = evaluate_targets(loaded, targets, skills, Settings(expects_same=True)).record
    found = {(result.target, result.skill): result for result in record.results}
    entries = []
    for skill in skills:
        base, one, two = (found[name, skill.name] for name in (BASE_NAME, "before", "after"))
        scores = (base.score, one.score, one.low, one.high, two.score, two.low, two.high)
        entries.append(entry_of(skill, scores))
    means = {mean.target: mean for mean in record.means}
    return Kept(means[BASE_NAME], means["before"], means["after"], entries)


def longest_entries(skills: Sequence[SkillSet]) -> list[dict[str, Any]]:
    """Return entries as long as any that `compare` makes, to know what they take in a file."""
    return [entry_of(skill, (1 / 3,) * 7) for skill in skills]


def entry_of(skill: SkillSet, scores: Sequence[float]) -> dict[str, Any]:
    """Return what the manifest says of one skill.

    Args:
        skill: The items.
        scores: Base; expert with its interval; compressed expert with its interval.
    """
    base, one, one_low, one_high, two, two_low, two_high = (_short(score) for score in scores)
    return {
        "suite": skill.name,
        "sha256": skill.sha256,
        "role": "calibration",
        "metric": "exact_match",
        "n": len(skill.examples),
        "base": base,
        "original": one,
        "original_interval": [one_low, one_high],
        "compressed": two,
        "compressed_interval": [two_low, two_high],
    }


def _short(value: float) -> float:
    return round(value, _DIGITS)
