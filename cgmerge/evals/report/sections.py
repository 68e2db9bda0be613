"""What a report says: records joined where their items agree, and every comparison in them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cgmerge.errors import UsageError
from cgmerge.evals.checked import load_checked
from cgmerge.evals.comparing import evaluations_agree, in_order
from cgmerge.evals.metrics import METRICS, MetricInfo
from cgmerge.evals.record import Comparison, Evaluation, Mean, Metric, Record, Result, TargetInfo
from cgmerge.evals.report.labels import labels
from cgmerge.evals.summary import GroupScore, Skills, by_target, compare_skills, corrected, pooled
from cgmerge.nearest import nearest
from cgmerge.tensorfile import file_sha256

SURE = 0.05
"""Below this corrected p-value a difference is called significant."""

Key = tuple[str, str | None]
"""A column and a skill; None for the mean over skills."""


@dataclass(frozen=True, slots=True)
class Source:
    """A record that is reported.

    Attributes:
        name: Of its file, without the folder.
        sha256: Of the record's file.
        evaluation: Its numbers and items.
    """

    name: str
    sha256: str
    evaluation: Evaluation

    @property
    def record(self) -> Record:
        """Return the numbers."""
        return self.evaluation.record


@dataclass(frozen=True, slots=True)
class Column:
    """A target as it stands in the tables of a section.

    Attributes:
        name: Unique in the section.
        target: As recorded.
        source: Its record.
        base: Name of the column of its base; None where the base was not scored.
        items: In the order of the section's first record.
        results: By skill.
        mean: Over skills.
    """

    name: str
    target: TargetInfo
    source: Source
    base: str | None
    items: Skills = field(repr=False)
    results: Mapping[str, Result] = field(repr=False)
    mean: Mean


@dataclass(frozen=True, slots=True)
class Group:
    """Skills that are read together; `guessed` where nobody named them."""

    name: str
    skills: tuple[str, ...]
    guessed: bool = False


@dataclass(frozen=True)
class Section:
    """Targets that were scored on the same items.

    Attributes:
        metric: What scores are about.
        sources: Where the numbers are from.
        skills: Names, in the order of the first record.
        columns: Targets, in the order of the records.
        groups: Of skills; the first holds those that experts were trained on.
        base: Comparison of each model with its base; baselines are no models.
        expert: Comparison of each merge with the best expert of the skill.
        experts: The best expert of each skill, and of the mean.
        top: The model with the best mean.
        others: All other models compared with it.
    """

    metric: Metric
    sources: tuple[Source, ...]
    skills: tuple[str, ...]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    base: Mapping[Key, Comparison]
    expert: Mapping[Key, Comparison]
    experts: Mapping[str | None, str]
    top: Column
    others: Mapping[str, Comparison]

    @property
    def info(self) -> MetricInfo:
        """Return what is known about the metric."""
        return METRICS[self.metric]

    @property
    def models(self) -> list[Column]:
        """Return the columns that are models, not picked from them; all, if none is."""
        return models_of(self.columns)

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return next(one for one in self.columns if one.name == name)

    def shares(self, group: Group) -> dict[str, GroupScore]:
        """Return the share of right items of every column on a group of skills."""
        return {
            one.name: pooled([one.results[skill] for skill in group.skills]) for one in self.columns
        }


def open_source(path: Path) -> Source:
    """Read a record and check it; see `load_checked`."""
    evaluation = load_checked(path)
    return Source(path.name, file_sha256(path), evaluation)


def source_of(name: str, evaluation: Evaluation, content: bytes) -> Source:
    """Make a source of an evaluation in memory and the bytes of its record."""
    return Source(name, hashlib.sha256(content).hexdigest(), evaluation)


def make_sections(
    sources: Sequence[Source], groups: Mapping[str, Sequence[str]] | None = None
) -> list[Section]:
    """Join records of the same items, compare what can be compared.

    Args:
        sources: At least one.
        groups: Names to skills; guessed from the experts' names where left out.

    Raises:
        UsageError: A group with a skill that no record has, or that is in none completely.
    """
    parts: list[list[Source]] = []
    for source in sources:
        for part in parts:
            if evaluations_agree(part[0].evaluation, source.evaluation):
                part.append(source)
                break
        else:
            parts.append([source])
    known = list(dict.fromkeys(s.name for one in sources for s in one.record.skills))
    _check_groups(groups or {}, known)
    sections = [_section(part, groups or {}) for part in parts]
    for name in groups or {}:
        if all(name not in {group.name for group in one.groups} for one in sections):
            raise UsageError(
                f"--group {name}: its skills are in different records that cannot be joined",
                code="group",
                hint="name skills of one evaluation in each group",
            )
    return sections


def _check_groups(groups: Mapping[str, Sequence[str]], known: Sequence[str]) -> None:
    for name, skills in groups.items():
        if not skills or len(set(skills)) < len(skills):
            raise UsageError(
                f"--group {name} must name at least one skill, each once", code="group"
            )
        for skill in skills:
            if skill not in known:
                near = nearest(skill, known)
                meant = f"did you mean {near[0]}? " if near else ""
                raise UsageError(
                    f"--group {name}: no record has a skill {skill!r}",
                    code="group",
                    hint=f"{meant}there are {', '.join(known)}",
                    found=skill,
                )


def _section(sources: Sequence[Source], groups: Mapping[str, Sequence[str]]) -> Section:
    columns: list[Column] = []
    for source in sources:
        columns += _columns(source, columns)
    skills = tuple(one.name for one in sources[0].record.skills)
    metric = sources[0].record.settings.metric
    seed = sources[0].record.settings.seed
    rank = METRICS[metric].rank
    models = models_of(columns)
    top = max(models, key=lambda one: rank(one.mean.score))
    rest = [one for one in models if one is not top]
    others = [compare_skills(one.items, top.items, metric=metric, seed=seed) for one in rest]
    names = [one.name for one in rest]
    best = _best_experts(columns, skills, rank)
    judge = _Judge({one.name: one for one in columns}, skills, metric, seed)
    merges = [one.name for one in models if one.target.kind not in ("base", "expert")]
    return Section(
        metric=metric,
        sources=tuple(sources),
        skills=skills,
        columns=tuple(columns),
        groups=_groups(columns, skills, groups),
        base=judge.family({one.name: one.base for one in models if one.base is not None}),
        expert=judge.best(dict.fromkeys(merges, best) if best else {}),
        experts=best,
        top=top,
        others=dict(zip(names, corrected(others), strict=True)),
    )


def models_of(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that are models, not picked from them; all, if none is."""
    return [one for one in columns if one.target.kind != "baseline"] or list(columns)


def _columns(source: Source, there: Sequence[Column]) -> list[Column]:
    """Make columns of a record; what an earlier record has with the same answers is left out."""
    record, groups = source.record, by_target(source.evaluation.items)
    bases = [one.name for one in record.targets if one.kind == "base"]
    results: dict[str, dict[str, Result]] = {}
    for result in record.results:
        results.setdefault(result.target, {})[result.skill] = result
    found: list[Column] = []
    called: dict[str, str] = {}
    for target, mean in zip(record.targets, record.means, strict=True):
        items = groups[target.name]
        if there:
            order = there[0].items
            items = {name: in_order(items[name], order[name]) or [] for name in order}
        same = next((one for one in there if _is_same(one, target, items)), None)
        called[target.name] = (
            same.name if same else _new_name(target.name, source, [*there, *found])
        )
        if same is None:
            found.append(
                Column(called[target.name], target, source, None, items, results[target.name], mean)
            )
    bases = [called[name] for name in bases]
    return [
        replace(one, base=bases[0]) if bases and one.target.kind != "base" else one for one in found
    ]


def _is_same(column: Column, target: TargetInfo, items: Skills) -> bool:
    """Whether a column is the same model with the same answers under the same name."""
    known = column.target
    if (known.name, known.kind, known.digest) != (target.name, target.kind, target.digest):
        return False
    return all(
        [(i.correct, i.loglik, i.value) for i in items[name]]
        == [(i.correct, i.loglik, i.value) for i in group]
        for name, group in column.items.items()
    )


def _new_name(name: str, source: Source, there: Sequence[Column]) -> str:
    taken = {one.name for one in there}
    stem = source.name.removesuffix(".json")
    wanted, count = name, 1
    while wanted in taken:
        wanted = f"{name} ({stem}{f' {count}' if count > 1 else ''})"
        count += 1
    return wanted


def _best_experts(
    columns: Sequence[Column], skills: Sequence[str], rank: Callable[[float], float]
) -> dict[str | None, str]:
    """Name the best expert of each skill and of the mean; the first of equals."""
    experts = [one for one in columns if one.target.kind == "expert"]
    if not experts:
        return {}
    best: dict[str | None, str] = {
        skill: max(experts, key=lambda one: rank(one.results[skill].score)).name for skill in skills
    }
    best[None] = max(experts, key=lambda one: rank(one.mean.score)).name
    return best


@dataclass(frozen=True, slots=True)
class _Judge:
    """Compares columns; means and single skills are corrected each for themselves."""

    columns: Mapping[str, Column]
    skills: Sequence[str]
    metric: Metric
    seed: int

    def family(self, against: Mapping[str, str]) -> dict[Key, Comparison]:
        """Compare each column with one other."""
        places: list[str | None] = [None, *self.skills]
        return self.best({name: dict.fromkeys(places, other) for name, other in against.items()})

    def best(self, against: Mapping[str, Mapping[str | None, str]]) -> dict[Key, Comparison]:
        """Compare each column with another one on each skill."""
        means: list[Key] = [(name, None) for name in against]
        cells: list[Key] = [(name, skill) for name in against for skill in self.skills]
        found: dict[Key, Comparison] = {}
        for keys in (means, cells):
            ones = [self._compare(key, against[key[0]][key[1]]) for key in keys]
            found |= dict(zip(keys, corrected(ones), strict=True))
        return found

    def _compare(self, key: Key, other: str) -> Comparison:
        name, skill = key
        return compare_skills(
            self.columns[name].items,
            self.columns[other].items,
            skill=skill,
            metric=self.metric,
            seed=self.seed,
        )


def _groups(
    columns: Sequence[Column], skills: Sequence[str], given: Mapping[str, Sequence[str]]
) -> tuple[Group, ...]:
    """Take the groups that this section has whole; guess from experts' names if none are given."""
    if given:
        return tuple(
            Group(name, tuple(parts)) for name, parts in given.items() if set(parts) <= set(skills)
        )
    experts = {one.target.name for one in columns if one.target.kind == "expert"}
    own = tuple(skill for skill in skills if skill in experts)
    rest = tuple(skill for skill in skills if skill not in experts)
    if not own or not rest:
        return ()
    return (
        Group("skills with an expert", own, guessed=True),
        Group("other skills", rest, guessed=True),
    )


def significant(one: Comparison) -> int:
    """Return 1 for surely better, -1 for surely worse, 0 for a difference that may be chance.

    A mean over skills and the pooled test may point different ways; that is no sure difference.
    """
    if one.p_holm >= SURE or one.wins == one.losses:
        return 0
    sign = 1 if one.wins > one.losses else -1
    return sign if one.difference * sign > 0 else 0


def best_expert(section: Section, skill: str | None) -> str:
    """Say which expert a skill is compared with, and where none is better than another."""
    shown = column_labels(section)[section.experts[skill]]
    experts = [one for one in section.columns if one.target.kind == "expert"]
    scores = {(one.mean if skill is None else one.results[skill]).score for one in experts}
    return f"{shown}; no expert is better" if len(experts) > 1 and len(scores) == 1 else shown


def column_labels(section: Section) -> dict[str, str]:
    """Return what tables call the columns."""
    return labels(one.name for one in section.columns)
