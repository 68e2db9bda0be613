"""Score several models on several skills, side by side, and leave no number without its items."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

from cgmerge._version import __version__
from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.evals import scoring
from cgmerge.evals.chosen import tuned_warnings
from cgmerge.evals.columns import Question, check_metric, other_choices
from cgmerge.evals.ensemble import logits_of
from cgmerge.evals.items import Answers, make_items, warnings_of
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import (
    BaseInfo,
    Evaluation,
    Item,
    Metric,
    Record,
    RunSettings,
    TargetInfo,
)
from cgmerge.evals.scoring import TokenScore
from cgmerge.evals.suite import (
    Rows,
    SkillSet,
    check_names,
    describe,
    encode_questions,
    questions,
    warnings_about,
)
from cgmerge.evals.summary import summarise
from cgmerge.evals.targets import BASE_NAME, LoadOptions, Ready, Target, ready
from cgmerge.modules.encoding import Encoded, end_ids
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.teacher import Logits, position_limit

MOST_NEW_TOKENS = 256
"""Of an answer that is measured as a text, unless a setting says otherwise."""
PROBE = 8
"""Items that tell nearly every target from the base; all that is compared without the base."""


class Progress(Protocol):
    """What the runner calls while it works."""

    def __call__(self, done: int, *, note: str = "") -> None:
        """Report finished rows, of `count_rows` in all; `note` names the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to evaluate.

    Attributes:
        metric: What scores and intervals are about.
        batch_size: Most items in one forward pass.
        generates: Also generate greedily, and compare item by item; metrics of texts always do.
        max_new_tokens: Most tokens to generate; None for `MOST_NEW_TOKENS` with metrics of texts,
            else a little more than the target.
        keeps_base: Score the base first; otherwise it is only probed.
        expects_same: Allow targets that score exactly as the base.
        compare_to: Target for paired comparisons; the base where it is scored.
        by: Columns of numbers that scores are read over; kept with the items.
        limit: Recorded only: how many items of each skill were taken.
        seed: Of the bootstrap.
        loading: For targets that are models of their own.
    """

    metric: Metric = "exact_match"
    batch_size: int = 32
    generates: bool = False
    max_new_tokens: int | None = None
    keeps_base: bool = True
    expects_same: bool = False
    compare_to: str | None = None
    by: tuple[str, ...] = ()
    limit: int | None = None
    seed: int = 0
    loading: LoadOptions = field(default_factory=LoadOptions)

    @property
    def measures_texts(self) -> bool:
        """Whether the metric is about generated texts."""
        return METRICS[self.metric].needs == "answer"

    @property
    def offers_choices(self) -> bool:
        """Whether the metric is about choices that rows offer."""
        return METRICS[self.metric].needs == "choices"

    @property
    def writes(self) -> bool:
        """Whether answers are generated."""
        return self.generates or self.measures_texts

    @property
    def longest(self) -> int | None:
        """Most tokens of a generated answer; None for a little more than its target."""
        if self.max_new_tokens is None and self.measures_texts:
            return MOST_NEW_TOKENS
        return self.max_new_tokens


def evaluate_targets(
    loaded: LoadedBase,
    targets: Sequence[Target],
    skills: Sequence[SkillSet],
    settings: Settings | None = None,
    *,
    progress: Progress | None = None,
) -> Evaluation:
    """Score the base and targets on skills, one after the other, without changing the base.

    Args:
        loaded: The base in memory; the same bits before and after.
        targets: Adapters are attached by hooks, models are loaded one at a time.
        skills: From `read_skills`, or made in memory.
        settings: How; the defaults when left out.
        progress: Called after every batch.

    Returns:
        The record and its items: base first, then targets in order, skills in order.

    Raises:
        UsageError: Nothing to score, two of one name, or an unknown `compare_to`.
        DataError: An empty skill, targets longer than the model's positions, or rows without what
            the metric needs.
        Incompatible: Targets that score item by item as the base (`same_as_base`); all are named,
            adapters before the work begins.
        Damaged: A model that gives NaN.
    """
    chosen = settings or Settings()
    models = contenders(loaded, targets, chosen)
    against = reference_of(models, chosen)
    check_names([skill.name for skill in skills], what="skill", form="NAME=FILE")
    asked = questions(skills, chosen.by)
    check_metric(asked, chosen.metric)
    run = _Run(loaded, asked, chosen, progress)
    infos = [describe(skill, asked, run.rows) for skill in skills]
    run.refuse_same(targets)
    measured = [run.measure(target) for target in models]
    run.finish()
    items = tuple(item for _, part in measured for item in part)
    numbers = summarise(items, metric=chosen.metric, compare_to=against, seed=chosen.seed)
    record = Record(
        base=BaseInfo(base_name(loaded), loaded.base.fingerprint),
        settings=run_settings(loaded, chosen, against),
        targets=tuple(info for info, _ in measured),
        skills=tuple(infos),
        results=numbers.results,
        means=numbers.means,
        comparisons=numbers.comparisons,
        warnings=(
            *warnings_about(infos, run.rows),
            *tuned_warnings(models, skills),
            *run.warnings,
        ),
        versions=package_versions(),
    )
    return Evaluation(record, items)


def count_rows(targets: Sequence[Target], skills: Sequence[SkillSet], settings: Settings) -> int:
    """Return what the progress of `evaluate_targets` counts up to."""
    models = len(targets) + settings.keeps_base
    items = sum(len(skill.examples) for skill in skills) * (1 + settings.writes)
    others = other_choices(questions(skills)) if settings.offers_choices else ()
    return models * (items + len(others))


class _Run:
    """One evaluation: what its targets share, and what is collected on the way."""

    def __init__(
        self,
        loaded: LoadedBase,
        asked: Sequence[Question],
        settings: Settings,
        progress: Progress | None,
    ) -> None:
        self.loaded, self.asked, self.settings = loaded, asked, settings
        self.others = other_choices(asked) if settings.offers_choices else []
        self.progress, self.done = progress, 0
        self.rows = self.encode(loaded)
        self.warnings: list[str] = []
        self.base_logliks: list[float] = []
        self.same: list[Target] = []

    def encode(self, model: LoadedBase) -> Rows:
        """Turn the questions into tokens of a model."""
        limit = position_limit(model.model)
        rows = encode_questions(self.asked, model.tokenizer, limit)
        if not self.others:
            return rows
        others = encode_questions(self.others, model.tokenizer, limit)
        return replace(rows, others=others.encoded)

    def refuse_same(self, targets: Sequence[Target]) -> None:
        """Refuse, before the work, what scores bit for bit as the base: it is not really there.

        Models take long to load, so that they are compared when their turn comes, or here where
        an adapter is refused anyway and one message shall name them all.
        """
        if self.settings.expects_same:
            return
        names = {one.name for one in self._same([one for one in targets if one.model is None])}
        if names:
            models = [one for one in targets if one.model is not None]
            names |= {one.name for one in self._same(models)}
            self.same = [one for one in targets if one.name in names]
        self.finish()

    def finish(self) -> None:
        """Refuse the targets that turned out to be the base."""
        if self.same:
            compared = None if self.settings.keeps_base else PROBE
            raise same_as_base(self.same, len(self.rows.encoded[:compared]))

    def _same(self, targets: list[Target]) -> list[Target]:
        """Find those that score as the base; a probe spares most of them the whole comparison."""
        base = Target.of_base(self.loaded.base)
        for count in (PROBE, None) if self.settings.keeps_base else (PROBE,):
            if targets:
                expected = self._logliks(base, count)
                targets = [one for one in targets if self._logliks(one, count) == expected]
        return targets

    def _logliks(self, target: Target, count: int | None) -> list[float]:
        """Score the first rows out of turn: no progress, no warnings."""
        with ready(target, self.loaded, self.settings.loading) as there:
            rows = self.rows if target.model is None else self.encode(there.loaded)
            work = self._work(target, there, rows, count)
            return _logliks(_score(work, self._batch_size(count)))

    def _batch_size(self, count: int | None) -> int:
        # Batches decide the last bit, so that a probe is compared with a probe.
        return self.settings.batch_size if count is None else count

    def measure(self, target: Target) -> tuple[TargetInfo, list[Item]]:
        """Score one target on all questions."""
        self.warnings += target.warnings
        tokenizer: Literal["base", "own"] = "base"
        with ready(target, self.loaded, self.settings.loading) as there:
            rows = self.rows if target.model is None else self.encode(there.loaded)
            if rows.encoded != self.rows.encoded:
                tokenizer = "own"
                self.warnings.append(
                    f"{target.name} splits the items into other tokens than the base; it is scored "
                    "with its own tokenizer"
                )
            work = self._work(target, there, rows)
            scores = self._score(work)
            generates = self.settings.writes and not self.same  # else it is refused anyway
            answers = Answers(
                target.name,
                rows,
                scores,
                self._score_others(target, there, rows),
                self._generate(work) if generates else None,
                self.settings.measures_texts,
            )
            items = make_items(answers, self.asked, there.loaded.tokenizer)
        self.warnings += warnings_of(target.name, items)
        return TargetInfo(target.name, target.kind, target.digest, tokenizer, target.note), items

    def _work(self, target: Target, there: Ready, rows: Rows, count: int | None = None) -> "_Work":
        return _work_of(target, there, rows.encoded[:count], self.asked)

    def _score_others(self, target: Target, there: Ready, rows: Rows) -> list[TokenScore]:
        """Score the choices that are not the right ones."""
        if not rows.others:
            return []
        work = _work_of(target, there, rows.others, self.others)
        return _score(work, self.settings.batch_size, partial(self._advance, target.name))

    def _score(self, work: "_Work") -> list[TokenScore]:
        settings, target = self.settings, work.target
        advance = partial(self._advance, target.name)
        scores = _score(work, settings.batch_size, advance)
        if target.kind == "base":
            self.base_logliks = _logliks(scores)
        elif target.model is not None and not settings.expects_same:
            found, expected = _logliks(scores), self.base_logliks
            if not settings.keeps_base:
                found = _logliks(_score(work.first(PROBE), PROBE))
                expected = self._logliks(Target.of_base(self.loaded.base), PROBE)
            if found == expected:
                self.same.append(target)
        return scores

    def _generate(self, work: "_Work") -> list[tuple[int, ...]]:
        return scoring.generate(
            work.model.model,
            work.encoded,
            ends=end_ids(work.model.tokenizer),
            batch_size=self.settings.batch_size,
            longest=self.settings.longest,
            advance=partial(self._advance, work.target.name),
            prepare=work.prepare,
        )

    def _advance(self, note: str, rows: int) -> None:
        self.done += rows
        if self.progress is not None:
            self.progress(self.done, note=note)


@dataclass(frozen=True, slots=True)
class _Work:
    """Rows for one target that is in memory."""

    target: Target
    model: LoadedBase
    encoded: Sequence[Encoded]
    prepare: scoring.Prepare
    logits: Logits

    def first(self, count: int) -> "_Work":
        return replace(self, encoded=self.encoded[:count])


def _work_of(
    target: Target, there: Ready, encoded: Sequence[Encoded], asked: Sequence[Question]
) -> _Work:
    skills = [question.skill for question in asked]

    def prepare(batch: Sequence[int]) -> None:
        if there.routing is not None:
            there.routing.route([encoded[i].prompt_ids for i in batch], [skills[i] for i in batch])

    return _Work(target, there.loaded, encoded, prepare, logits_of(target))


def _score(
    work: _Work, batch_size: int, advance: Callable[[int], None] | None = None
) -> list[TokenScore]:
    with named(work.target.name):
        return scoring.score(
            work.model.model,
            work.encoded,
            batch_size=batch_size,
            advance=advance,
            prepare=work.prepare,
            logits=work.logits,
        )


@contextmanager
def named(target: str) -> Iterator[None]:
    """Name the target whose model gives NaN in the `with` block."""
    try:
        yield
    except Damaged as error:
        raise Damaged(
            f"target {target}: {error.message}",
            code="not_finite",
            hint=error.hint,
            target=target,
        ) from error


def same_as_base(same: Sequence[Target], count: int) -> Incompatible:
    """Say which targets score, bit for bit, as the base."""
    names = [target.name for target in same]
    several = len(same) > 1
    return Incompatible(
        f"{'targets' if several else 'target'} {', '.join(names)} "
        f"{'score' if several else 'scores'} exactly as the base on all {count} items",
        code="same_as_base",
        hint=(
            "such an adapter changes nothing, or is not what you meant: leave "
            f"{'them' if several else 'it'} out, or accept {'them' if several else 'it'} "
            "with --expect-same"
        ),
        target=names[0],
        digest=same[0].digest,
        targets=names,
        expected="log-likelihoods that differ on at least one item",
        found=f"{count} equal ones",
    )


def _logliks(scores: Sequence[TokenScore]) -> list[float]:
    return [one.loglik for one in scores]


def base_name(loaded: LoadedBase) -> str:
    """Name the base without the folders of this machine: a built-in or remote name stays."""
    base = loaded.base
    return base.folder.name if Path(base.ref).expanduser().is_dir() else base.ref


def package_versions() -> dict[str, str]:
    """Return the versions of what decides the numbers."""
    packages = ("torch", "transformers", "tokenizers")
    found = {name: version(name) for name in packages}
    return {"cgmerge": __version__, "python": platform.python_version(), **found}


def contenders(loaded: LoadedBase, targets: Sequence[Target], settings: Settings) -> list[Target]:
    """List what is scored, the base first."""
    everything = [Target.of_base(loaded.base), *targets]
    check_names([one.name for one in everything], what="target", form="NAME=PATH")
    found = everything if settings.keeps_base else everything[1:]
    if not found:
        raise UsageError("there is nothing to evaluate", code="targets", hint="name a target")
    return found


def reference_of(models: Sequence[Target], settings: Settings) -> str | None:
    """Name what others are compared to: as asked, else the base, else nothing."""
    names = [target.name for target in models]
    wanted = settings.compare_to
    if wanted is not None and wanted not in names:
        raise UsageError(
            f"no target to compare to is called {wanted!r}",
            code="compare_to",
            hint=f"targets are {', '.join(names)}",
        )
    if wanted is None and settings.keeps_base:
        wanted = BASE_NAME
    return wanted if len(names) > 1 else None


def run_settings(loaded: LoadedBase, settings: Settings, against: str | None) -> RunSettings:
    """Return what a record says of an evaluation."""
    return RunSettings(
        metric=settings.metric,
        compare_to=against,
        seed=settings.seed,
        batch_size=settings.batch_size,
        limit=settings.limit,
        by=settings.by,
        generate=settings.writes,
        max_new_tokens=settings.longest if settings.writes else None,
        device=loaded.model.device.type,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        load_in_4bit=settings.loading.load_in_4bit,
    )
