"""Compressed full fine-tunes on validation data: tuned and scored in the base in memory.

A model is tried out as `decompress` would write it: the delta is added to the loaded base's own
weights in a stream, scored, and taken back.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.evals.compression import Kept, entry_of
from cgmerge.evals.runner import Settings, evaluate_targets
from cgmerge.evals.suite import SkillSet
from cgmerge.evals.summary import mean_scores
from cgmerge.modules.compose import make_plan
from cgmerge.modules.compress.modes import Options
from cgmerge.modules.compress.packfull import FullPlan, write_full
from cgmerge.modules.compress.tuning import ALPHAS, MOST_FACTORS, Trial, densities_of, search_factor
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.trialmodel import TrialModel

if TYPE_CHECKING:
    from cgmerge.evals.record import Record
    from cgmerge.modules.loading import LoadedBase


class FullCalibration:
    """The search for one full fine-tune, and what is kept of it.

    Args:
        plan: From `plan_full`.
        options: From `settle`: the density is fixed where one or a size was asked for.
        loaded: The base in memory; the same bits before and after.
        skills: Validation items.
        progress: Called with the number of finished trials.
    """

    def __init__(
        self,
        plan: FullPlan,
        options: Options,
        loaded: "LoadedBase",
        skills: Sequence[SkillSet],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.plan = plan
        self.options = options
        self.loaded = loaded
        self.skills = skills
        self.progress = progress
        self.trials: list[Trial] = []

    @staticmethod
    def count(plan: FullPlan, options: Options) -> int:
        """Return how many settings are scored at most; 0 where nothing is left to choose."""
        if plan.mode == "compeft":
            alphas = 1 if plan.request.alpha is not None else len(ALPHAS)
            choices = alphas * len(densities_of(options))
            return 0 if choices == 1 else choices
        return MOST_FACTORS if plan.request.multiplier is None else 0

    def tune(self) -> tuple[Options, Trial]:
        """Search strength (and, in mode compeft, density); return the best options."""
        if self.plan.mode == "compeft":
            return self._published()
        with self._written(self.options) as score:
            factor, tried = search_factor(score)
        return replace(self.options, multiplier=factor), tried[factor]

    def _published(self) -> tuple[Options, Trial]:
        given = self.plan.request.alpha
        best: tuple[Options, Trial] | None = None
        for density in densities_of(self.options):
            options = replace(self.options, density=density, alpha=1.0)
            with self._written(options) as score:
                for alpha in ALPHAS if given is None else (given,):
                    trial = score(alpha)
                    if best is None or trial.score > best[1].score:
                        best = replace(options, alpha=alpha), trial
        assert best is not None
        return best

    def compare(self, options: Options) -> Kept:
        """Score the base, the full fine-tune, and what `options` keep of it."""
        base = self._record()
        with self._model(self.plan.expert.ref) as merged, merged(1.0):
            before = self._record()
        with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
            file = Path(folder) / "final.cge"
            write_full(self.plan, file, options)
            with self._model(str(file)) as merged, merged(1.0):
                after = self._record()
        entries = []
        for place, skill in enumerate(self.skills):
            zero, one, two = (record.results[place] for record in (base, before, after))
            scores = (zero.score, one.score, one.low, one.high, two.score, two.low, two.high)
            entries.append(entry_of(skill, scores))
        return Kept(base.means[0], before.means[0], after.means[0], entries)

    @contextmanager
    def _written(self, options: Options) -> Iterator[Callable[[float], Trial]]:
        """Write a file at unit strength; yield what scores it at others."""
        unit = replace(options, multiplier=1.0, alpha=1.0)
        with tempfile.TemporaryDirectory(prefix="cgmerge-") as folder:
            file = Path(folder) / "trial.cge"
            density = write_full(self.plan, file, unit).measured.density
            with self._model(str(file)) as merged:

                def score(factor: float) -> Trial:
                    with merged(factor):
                        found = mean_scores(self._record().results)
                    self.trials.append(Trial(factor, density, found))
                    if self.progress:
                        self.progress(len(self.trials))
                    return self.trials[-1]

                yield score

    @contextmanager
    def _model(self, ref: str) -> Iterator[Callable[[float], Any]]:
        """Open a full model or its compressed delta; yield what puts it into the base."""
        recipe = Recipe(
            experts=(ExpertRef(ref),),
            base=self.plan.base.ref,
            method="task-arithmetic",
            form="model",
        )
        composed = make_plan(recipe)
        merger = composed.merger()
        trial = TrialModel(composed, self.loaded)
        yield lambda factor: trial.merged(merger, factor)

    def _record(self) -> "Record":
        """Score the model in memory as it is now."""
        return evaluate_targets(self.loaded, [], self.skills, Settings()).record
