"""Two targets, of one record or of two, item by item."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cgmerge.errors import Incompatible, NotFound, UsageError
from cgmerge.evals.checked import load_checked
from cgmerge.evals.metrics import METRICS, picked
from cgmerge.evals.record import Comparison, Evaluation, Item, Metric, Record, SkillInfo, TargetInfo
from cgmerge.evals.summary import Skills, by_target, compare_skills, corrected
from cgmerge.nearest import nearest


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two targets, with the record that it is from."""

    path: Path
    record: Record
    target: TargetInfo
    items: Skills


@dataclass(frozen=True, slots=True)
class Flip:
    """An item that one of the two has right and the other wrong."""

    skill: str
    id: str
    gained: bool
    expected: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Compared:
    """What changed from one target to another.

    Attributes:
        before: The first target.
        after: The second one, which is judged.
        metric: What the differences are about.
        overall: All skills, each weighing the same in the difference.
        skills: Each skill, Holm-corrected over the skills.
        scores: Skill to the two scores; the means are under None.
        flips: Items that one has right and the other wrong, in the order of the record.
        warnings: What differs between the two evaluations besides the targets.
    """

    before: Side
    after: Side
    metric: Metric
    overall: Comparison
    skills: tuple[Comparison, ...]
    scores: dict[str | None, tuple[float, float]]
    flips: tuple[Flip, ...]
    warnings: tuple[str, ...]


def open_side(spec: str) -> Side:
    """Open `RECORD` or `RECORD:TARGET`.

    Args:
        spec: Without a target the record must have one only, the base not counted.

    Raises:
        NotFound: No such record or target.
        UsageError: Several targets and none named.
        Damaged: As `load_checked`.
    """
    path, name = split_spec(spec)
    evaluation = load_checked(path)
    target = _target(evaluation.record, name, path)
    return Side(path, evaluation.record, target, by_target(evaluation.items)[target.name])


def split_spec(spec: str) -> tuple[Path, str | None]:
    """Split `RECORD:TARGET` at the first colon that has a file before it.

    Example:
        >>> split_spec("nowhere.json:ties")
        (PosixPath('nowhere.json'), 'ties')
    """
    whole = Path(spec).expanduser()
    if whole.is_file() or ":" not in spec:
        return whole, None
    parts = spec.split(":")
    for count in range(1, len(parts)):
        path = Path(":".join(parts[:count])).expanduser()
        if path.is_file():
            return path, ":".join(parts[count:])
    head, _, name = spec.rpartition(":")
    return Path(head).expanduser(), name


def _target(record: Record, name: str | None, path: Path) -> TargetInfo:
    there = [target.name for target in record.targets]
    listed = f"there are {', '.join(there)}"
    if name is None:
        others = [target for target in record.targets if target.kind != "base"]
        if len(others) == 1 or len(there) == 1:
            return (others or list(record.targets))[0]
        raise UsageError(
            f"{path} has {len(there)} targets and none is named",
            code="target",
            hint=f"write {path}:NAME; {listed}",
            found=there,
        )
    if name not in there:
        near = nearest(name, there)
        raise NotFound(
            f"{path} has no target {name!r}",
            code="target",
            hint=f"did you mean {near[0]}? {listed}" if near else listed,
            expected=there,
            found=name,
        )
    return record.targets[there.index(name)]


def compare_sides(before: Side, after: Side, *, seed: int = 0) -> Compared:
    """Compare two targets that were scored on the same items.

    Args:
        before: What `after` is compared to.
        after: The target that is judged: differences above zero are in its favour.
        seed: Of the bootstrap.

    Raises:
        Incompatible: Other metrics or items; says which, with both values.
    """
    if before.record.settings.metric != after.record.settings.metric:
        raise _incompatible(
            "metric",
            "the records have different metrics",
            before.record.settings.metric,
            after.record.settings.metric,
        )
    metric = after.record.settings.metric
    theirs = aligned(before, after)
    names = list(after.items)
    overall = compare_skills(after.items, theirs, metric=metric, seed=seed)
    each = [
        compare_skills(after.items, theirs, skill=name, metric=metric, seed=seed) for name in names
    ]
    scores: dict[str | None, tuple[float, float]] = {
        name: (_score(before, name), _score(after, name)) for name in names
    }
    scores[None] = _mean(before), _mean(after)
    return Compared(
        before, after, metric, overall, tuple(corrected(each)), scores,
        _flips(theirs, after.items, metric), _warnings(before, after),
    )  # fmt: skip


def aligned(before: Side, after: Side) -> Skills:
    """Return the items of `before` in the order of those of `after`.

    Raises:
        Incompatible: They are not the same items.
    """
    if set(before.items) != set(after.items):
        raise _incompatible(
            "skills",
            "the records have different skills",
            ", ".join(before.items),
            ", ".join(after.items),
        )
    found: Skills = {}
    for name, items in after.items.items():
        same = in_order(before.items[name], items)
        if same is None:
            raise _other_items(name, before, after)
        found[name] = same
    return found


def in_order(items: Sequence[Item], wanted: Sequence[Item]) -> list[Item] | None:
    """Return items in the order of others with the same ids; None where they are not the same."""
    if [item.id for item in items] == [item.id for item in wanted]:
        return list(items)
    places: dict[str, list[Item]] = {}
    for item in reversed(items):
        places.setdefault(item.id, []).append(item)
    found = [places[item.id].pop() for item in wanted if places.get(item.id)]
    return found if len(found) == len(wanted) == len(items) else None


def _other_items(skill: str, before: Side, after: Side) -> Incompatible:
    sides = (before, after)
    ids = [[item.id for item in side.items[skill]] for side in sides]
    infos = [next(one for one in side.record.skills if one.name == skill) for side in sides]
    shared = set(ids[0]) & set(ids[1])
    only = [next((one for one in part if one not in shared), "none") for part in ids]
    return _incompatible(
        "items",
        f"{skill}: the records have different items ({len(shared)} are in both)",
        _describe(infos[0], only[0]),
        _describe(infos[1], only[1]),
    )


def _describe(info: SkillInfo, only: str) -> str:
    digest = f"sha256 {info.sha256[:16]}…" if info.sha256 else "no digest"
    return f"{info.n} items of {info.source or 'memory'} ({digest}), first only here: {only}"


def _incompatible(code: str, what: str, expected: str, found: str) -> Incompatible:
    return Incompatible(
        f"{what}\n  first   {expected}\n  second  {found}",
        code=code,
        hint="evaluate both on the same data files, with the same --limit and --metric",
        expected=expected,
        found=found,
    )


def _score(side: Side, skill: str) -> float:
    return next(
        one.score
        for one in side.record.results
        if one.target == side.target.name and one.skill == skill
    )


def _mean(side: Side) -> float:
    return next(one.score for one in side.record.means if one.target == side.target.name)


def _flips(before: Skills, after: Skills, metric: Metric) -> tuple[Flip, ...]:
    right = METRICS[metric].is_right
    return tuple(
        Flip(name, new.id, right(new), *_said(new, old, metric))
        for name, items in after.items()
        for old, new in zip(before[name], items, strict=True)
        if right(old) != right(new)
    )


def _said(new: Item, old: Item, metric: Metric) -> tuple[str, str, str]:
    """Return what was expected, and what was said before and after."""
    if new.choices is None or old.choices is None or new.choice is None:
        return new.expected, old.prediction, new.prediction
    normalised = metric == "choice_norm"
    places = [picked(item, normalised=normalised) for item in (old, new)]
    texts = [one.text for one in new.choices]
    said = ["undecided" if place is None else texts[place] for place in places]
    return texts[new.choice], said[0], said[1]


def _warnings(before: Side, after: Side) -> tuple[str, ...]:
    """Say what else differs; the items are the same by now."""
    first, second = before.record, after.record
    found = [
        f"the records differ in {name}: {a} and {b}"
        for name, a, b in (
            ("base", first.base.fingerprint, second.base.fingerprint),
            ("device", first.settings.device, second.settings.device),
            ("dtype", first.settings.dtype, second.settings.dtype),
            ("load_in_4bit", first.settings.load_in_4bit, second.settings.load_in_4bit),
        )
        if a != b
    ]
    digests = {one.name: one.sha256 for one in first.skills}
    found += [
        f"{one.name}: the items are the same, the data files differ:"
        f" sha256 {digests[one.name][:16]}… and {one.sha256[:16]}…"
        for one in second.skills
        if digests[one.name] != one.sha256
    ]
    return tuple(found)


def dropped(compared: Compared, most: float) -> list[Comparison]:
    """List the skills whose score fell by more than `most`.

    The rule is about what was observed: the difference itself, not an end of its interval, and
    each skill for itself, so that a gain elsewhere hides nothing.
    """
    return [one for one in compared.skills if -one.difference > most + 1e-12]


def evaluations_agree(first: Evaluation, second: Evaluation) -> bool:
    """Whether two records are about the same items and the same metric."""
    if first.record.settings.metric != second.record.settings.metric:
        return False
    ours, theirs = (next(iter(by_target(one.items).values())) for one in (first, second))
    return set(ours) == set(theirs) and all(
        in_order(theirs[name], items) is not None for name, items in ours.items()
    )
