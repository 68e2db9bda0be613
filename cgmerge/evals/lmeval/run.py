"""Score several models on tasks of lm-evaluation-harness, side by side, as one record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cgmerge.evals.lmeval.harness import Harness
from cgmerge.evals.lmeval.model import HarnessModel
from cgmerge.evals.lmeval.translate import Measure, choose_measure, is_right_or_wrong, items_of
from cgmerge.evals.record import BaseInfo, Evaluation, Item, Metric, Record, SkillInfo, TargetInfo
from cgmerge.evals.runner import (
    PROBE,
    Progress,
    Settings,
    base_name,
    contenders,
    named,
    package_versions,
    reference_of,
    run_settings,
    same_as_base,
)
from cgmerge.evals.summary import summarise
from cgmerge.evals.targets import Target, check_tasks, ready
from cgmerge.modules.loading import LoadedBase


@dataclass(slots=True)
class _Done:
    """What is known of the targets that were asked."""

    infos: list[TargetInfo]
    items: list[Item]
    warnings: list[str]


def evaluate_tasks(
    loaded: LoadedBase,
    targets: Sequence[Target],
    harness: Harness,
    settings: Settings,
    *,
    measure: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score the base and targets on tasks; every task is a skill.

    Args:
        loaded: The base in memory; the same bits before and after.
        targets: As for `evaluate_targets`.
        harness: The tasks.
        settings: Of these the batch size, limit, seed and what is compared.
        measure: The tasks' metric that is the score, `METRIC` or `METRIC,FILTER`; None for the
            first that fits.
        progress: Called with the number of requests that were answered.

    Raises:
        UsageError: Nothing to score, a task that cannot be asked or has no such score.
        Incompatible: Targets that are the base (`same_as_base`).
        InputError: As the harness and the models say.
    """
    models = contenders(loaded, targets, settings)
    against = reference_of(models, settings)
    check_tasks(targets, [one.name for one in harness.tasks])
    if not settings.expects_same:
        _refuse_same(loaded, targets, harness, settings)
    done, measures = _Done([], [], []), dict[str, Measure]()
    answered = 0
    for target in models:

        def advance(count: int, name: str = target.name) -> None:
            nonlocal answered
            answered += count
            if progress is not None:
                progress(answered, note=name)

        with ready(target, loaded, settings.loading) as there, named(target.name):
            model = HarnessModel(there, batch_size=settings.batch_size, advance=advance)
            found = harness.ask(model, settings.limit)
        for task in harness.tasks:
            wanted = str(measures[task.name]) if task.name in measures else measure
            measures[task.name] = choose_measure(task.name, found, wanted)
        _add(done, target, found, measures, model)
    return _evaluation(loaded, harness, settings, done, measures, against)


def count_requests(targets: Sequence[Target], harness: Harness, settings: Settings) -> int:
    """Return what the progress of `evaluate_tasks` counts up to."""
    return len(harness.requests(settings.limit)) * (len(targets) + settings.keeps_base)


def _add(
    done: _Done, target: Target, found: Any, measures: dict[str, Measure], model: HarnessModel
) -> None:
    done.infos.append(TargetInfo(target.name, target.kind, target.digest))
    done.warnings += target.warnings
    for task, one in measures.items():
        done.items += items_of(target.name, task, found["samples"][task], one)
    if model.cut:
        done.warnings.append(
            f"{target.name}: {model.cut} prompts were cut on the left to fit the model"
        )


def _evaluation(
    loaded: LoadedBase,
    harness: Harness,
    settings: Settings,
    done: _Done,
    measures: dict[str, Measure],
    against: str | None,
) -> Evaluation:
    metric: Metric = "lm_eval_right" if is_right_or_wrong(list(measures.values())) else "lm_eval"
    numbers = summarise(done.items, metric=metric, compare_to=against, seed=settings.seed)
    sizes = {one.skill: one.n for one in numbers.results}
    skills = [
        SkillInfo(one.name, sizes[one.name], one.source, one.sha256,
                  measure=str(measures[one.name]))
        for one in harness.tasks
    ]  # fmt: skip
    record = Record(
        base=BaseInfo(base_name(loaded), loaded.base.fingerprint),
        settings=replace(run_settings(loaded, settings, against), metric=metric),
        targets=tuple(done.infos),
        skills=tuple(skills),
        results=numbers.results,
        means=numbers.means,
        comparisons=numbers.comparisons,
        warnings=tuple(done.warnings),
        versions={**package_versions(), "lm_eval": harness.version},
    )
    return Evaluation(record, tuple(done.items))


def _refuse_same(
    loaded: LoadedBase, targets: Sequence[Target], harness: Harness, settings: Settings
) -> None:
    """Refuse, before the work, targets that give every prompt exactly the base's values."""
    asked = harness.requests(settings.limit)

    def values(target: Target, count: int | None) -> list[float]:
        with ready(target, loaded, settings.loading) as there, named(target.name):
            return HarnessModel(there, batch_size=PROBE).fingerprint(asked[:count])

    base, same = Target.of_base(loaded.base), list(targets)
    for count in (PROBE, None):
        if same and (expected := values(base, count)):
            same = [one for one in same if values(one, count) == expected]
        else:
            same = []
    if same:
        raise same_as_base(same, len(asked))
