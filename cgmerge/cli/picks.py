"""Columns of `eval` that are made of experts: one of them picked, or all asked together."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cgmerge.errors import UsageError

if TYPE_CHECKING:
    from cgmerge.cli.evaluate import Call
    from cgmerge.evals.record import Evaluation
    from cgmerge.evals.runner import Settings
    from cgmerge.evals.suite import SkillSet
    from cgmerge.evals.targets import Target
    from cgmerge.modules.loading import LoadedBase


@dataclass(frozen=True)
class Picks:
    """Columns of picked experts that were asked for."""

    validation: "list[SkillSet]"
    oracle: bool
    ensemble: bool

    def check(
        self, targets: "list[Target]", skills: "list[SkillSet]", settings: "Settings"
    ) -> None:
        """Refuse before any work what cannot be picked."""
        from cgmerge.evals.baselines import CHOSEN, ORACLE, check_picks
        from cgmerge.evals.columns import check_metric
        from cgmerge.evals.ensemble import ENSEMBLE, STACKED
        from cgmerge.evals.suite import check_names, questions

        if not self.validation and not self.oracle and not self.ensemble:
            return
        check_picks(targets, self.validation, skills)
        taken = [CHOSEN, ORACLE, ENSEMBLE, STACKED]
        check_names([*taken, *(one.name for one in targets)], what="target", form=_NAMED)
        if self.ensemble and settings.writes:
            raise UsageError(
                "--ensemble is scored by likelihood; it does not write texts",
                code="ensemble",
                hint="leave out --generate, and choose exact, loglik or a metric of tokens",
            )
        if self.validation:
            check_metric(questions(self.validation), settings.metric)

    def settings(self, settings: "Settings") -> "Settings":
        """Return how experts are scored on validation data."""
        return replace(settings, keeps_base=False, expects_same=True, compare_to=None, by=())


_NAMED = "NAME=PATH"


def measure(
    call: "Call", targets: "list[Target]", skills: "list[SkillSet]", picks: Picks
) -> "Evaluation":
    """Score targets, and what is made of experts beside them."""
    from cgmerge.evals.baselines import with_baselines
    from cgmerge.evals.runner import count_rows, evaluate_targets

    settings, output = call.settings, call.output
    experts = [one for one in targets if one.kind == "expert"]
    other = picks.settings(settings)
    loaded = call.load(with_encoder=True)
    if picks.ensemble:
        targets = [*targets, *_ensembles(loaded, experts, picks, call)]
    with output.progress("eval", count_rows(targets, skills, settings)) as advance:
        found = evaluate_targets(loaded, targets, skills, settings, progress=advance)
    validation = None
    if picks.validation:
        with output.progress("validate", count_rows(experts, picks.validation, other)) as advance:
            validation = evaluate_targets(
                loaded, experts, picks.validation, other, progress=advance
            )
    if validation is None and not picks.oracle:
        return found
    return with_baselines(found, oracle=picks.oracle, validation=validation)


def _ensembles(
    loaded: "LoadedBase", experts: "list[Target]", picks: Picks, call: "Call"
) -> "list[Target]":
    """Make the columns of all experts together; weights are learned here and now."""
    from cgmerge.evals.ensemble import ensemble_of, stack

    made = [ensemble_of(experts)]
    if picks.validation:
        count = len(experts) * sum(len(skill.examples) for skill in picks.validation)
        done = 0
        with call.output.progress("stack", count) as advance:

            def more(rows: int) -> None:
                nonlocal done
                done += rows
                advance(done)

            size = call.settings.batch_size
            made.append(stack(loaded, experts, picks.validation, batch_size=size, advance=more))
    for one in made:
        call.output.line("ensemble", f"{one.name}: {one.note}")
    return made
