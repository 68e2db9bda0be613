"""Make a routed composition: open and check, learn from examples where the method does, write."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.evals.suite import (
    SkillSet,
    encode_questions,
    questions,
    read_examples,
    split_name,
)
from cgmerge.inputs import refuse_inputs
from cgmerge.modules.base import Base
from cgmerge.modules.card import BaseId
from cgmerge.modules.compose import check_outputs, make_plan
from cgmerge.modules.composition import Composition
from cgmerge.modules.expert import Expert
from cgmerge.modules.modular import METHOD as MODULAR
from cgmerge.modules.recipe import RECORD, ExpertRef, Recipe
from cgmerge.modules.routing.files import (
    Contents,
    Member,
    is_routed,
    safe_names,
    save_composition,
)
from cgmerge.modules.routing.fitting import FitInput, Labelled, Progress
from cgmerge.modules.routing.methods import RoutedMethod, find_routed
from cgmerge.modules.routing.router import is_weight
from cgmerge.modules.routing.stack import stacks
from cgmerge.modules.routing.transform import subtract
from cgmerge.modules.teacher import position_limit
from cgmerge.modules.usage import base_names, base_word
from cgmerge.tensorfile import read_small

if TYPE_CHECKING:
    from cgmerge.merge import LowRank
    from cgmerge.modules.compose import Plan
    from cgmerge.modules.loading import LoadedBase

_REQUEST = "request"
_TUNING = "tuning"


@dataclass(frozen=True)
class Subtraction:
    """A general expert that is taken from all others in delta space (GenKnowSub).

    Attributes:
        ref: The general expert.
        strength: Factor on its delta.
        rank: Rank that the others are cut back to; None keeps the exact result.
        space: `delta`, or `factors` for parity with the papers' code.
    """

    ref: str
    strength: float = 1.0
    rank: int | None = None
    space: str = "delta"


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        method: Name of a routed method.
        experts: References, with digests where a record pins them.
        params: Parameters by name.
        base: Reference of the base, where given.
        examples: Data files, `[NAME=]FILE`.
        subtraction: What is taken from the experts first.
        seed: Of everything random.
        force_base: Accept experts of another base.
        pinned: SHA-256 of the data files, where a record pins them.
        base_fingerprint: What the base must be, where a record pins it.
        folder: Of a record: where references are looked up when they are not here.
        tuning: How the method was chosen, where it was; kept in the record, never acted upon.
    """

    method: str
    experts: tuple[ExpertRef, ...]
    params: Mapping[str, Any]
    base: str | None = None
    examples: tuple[str, ...] = ()
    subtraction: Subtraction | None = None
    seed: int = 0
    force_base: bool = False
    pinned: tuple[str, ...] = ()
    base_fingerprint: str | None = None
    folder: Path | None = None
    tuning: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RoutedPlan:
    """A checked request.

    Attributes:
        request: What was asked for.
        spec: The method.
        params: Its parameters, checked.
        base: The base, where given.
        members: The experts in order of their names, changed where something was subtracted.
        skills: The examples by skill.
        example_digests: SHA-256 of every file of examples.
        transforms: What was done to the experts.
        warnings: What the user should know.
    """

    request: Request
    spec: RoutedMethod
    params: Any
    base: Base | None
    members: tuple[Member, ...]
    skills: tuple[SkillSet, ...]
    example_digests: tuple[str, ...]
    transforms: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]
    static: "Plan"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the parameters as JSON values."""
        return asdict(self.params)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the experts' names in the composition."""
        return tuple(member.name for member in self.members)

    def deltas(self) -> "list[Mapping[str, LowRank]]":
        """Read every expert's deltas, changed where something was subtracted."""
        return [
            dict(member.expert.deltas()) if member.deltas is None else member.deltas
            for member in self.members
        ]


def plan_routed(request: Request) -> RoutedPlan:
    """Open and check everything that a routed composition is made of; nothing is computed.

    Raises:
        UsageError: An unknown method or parameter, or examples or base that the method needs.
        CgmergeError: As for `make_plan`: experts that do not belong together.
    """
    spec = find_routed(request.method)
    assert spec is not None
    params = spec.make_params(request.params)
    _refuse_weights(request)
    _require(spec, request)
    # A sum of the same experts has to pass the same checks: base, shapes, digests, sound files.
    static = make_plan(
        Recipe(
            experts=request.experts,
            method="task-arithmetic",
            base=request.base,
            base_fingerprint=request.base_fingerprint,
            rank="exact",
            force_base=request.force_base,
            folder=request.folder,
        )
    )
    if "base" in spec.needs and request.base is None:
        word = base_word(None, base_names(static.experts))
        raise UsageError(
            f"method `{spec.name}` needs the base in memory", code="base", hint=f"add --base {word}"
        )
    experts = sorted(static.adapters, key=lambda expert: (expert.name, expert.digest))
    _refuse_twice(experts)
    members, transforms = _transformed(experts, request, static)
    skills, digests = _examples(request) if request.examples else ([], [])
    return RoutedPlan(
        request, spec, params, static.base, members, tuple(skills), tuple(digests), transforms,
        tuple(static.warnings), static,
    )  # fmt: skip


def run_routed(
    plan: RoutedPlan,
    out: Path,
    *,
    overwrite: bool = False,
    loaded: "LoadedBase | None" = None,
    progress: Progress | None = None,
) -> Composition:
    """Learn the router and write the composition.

    Args:
        plan: From `plan_routed`.
        out: The folder; appears complete or not at all.
        overwrite: Replace an existing composition.
        loaded: The base in memory, where the method needs it.
        progress: Called with the number of finished steps and of all steps.

    Raises:
        UsageError: `out` exists, or lies inside an input.
        Incompatible: No expert changes anything.
    """
    out = fs.absolute(out)
    check_routed_out(plan, out, overwrite=overwrite)
    deltas = plan.deltas()
    idle = _idle(plan.names, deltas)
    fitted = plan.spec.make(
        FitInput(
            names=plan.names,
            stacks=stacks(deltas),
            loaded=loaded,
            examples=_labelled(plan.skills, loaded) if plan.skills and loaded else None,
            params=plan.params,
            seed=plan.request.seed,
            progress=progress,
        )
    )
    chosen = {} if plan.request.tuning is None else {_TUNING: dict(plan.request.tuning)}
    contents = Contents(
        method=plan.spec.name,
        params=plan.settings,
        members=plan.members,
        router=fitted.router,
        base=_base_id(plan),
        transforms=plan.transforms,
        fit={**fitted.record, "notes": fitted.notes, _REQUEST: _request_record(plan), **chosen},
        warnings=[*plan.warnings, *idle, *fitted.warnings],
    )
    return save_composition(out, contents, overwrite=overwrite)


def _idle(names: Sequence[str], deltas: "Sequence[Mapping[str, LowRank]]") -> list[str]:
    """Return a warning for each expert whose delta is zero; refuse experts of which all are."""
    idle = [
        name
        for name, own in zip(names, deltas, strict=True)
        if not any(bool(delta.a.any() and delta.b.any()) for delta in own.values())
    ]
    if len(idle) == len(names):
        raise Incompatible(
            "no expert changes anything: every delta is zero",
            code="no_effect",
            hint="an untrained expert has B = 0",
        )
    return [f"{name}: changes nothing (its delta is zero)" for name in idle]


def check_routed_out(plan: RoutedPlan, out: Path, *, overwrite: bool) -> None:
    """Refuse an unusable result folder before any work is done."""
    out = fs.absolute(out)
    if not is_routed(out):
        check_outputs(plan.static, out, overwrite=overwrite)
    members = [member.expert.folder for member in plan.members]
    files = [Path(split_name(spec)[1]) for spec in plan.request.examples]
    refuse_inputs(out, [*members, *files])
    fs.check_target(out, overwrite=overwrite)


def read_request(path: Path) -> Request | None:
    """Read the record of an earlier routed composition as a request that repeats it.

    Returns:
        The request, or None where the file is something else.

    Raises:
        Damaged: A record without what is needed.
    """
    if path.name != RECORD or not is_routed(path.parent):
        return None
    raw = strictjson.loads_object(read_small(path), source=str(path))
    if raw.get("method") == MODULAR:
        raise UsageError(
            f"{path}: these modules were trained with their table; nothing composes them anew",
            code="trained",
            hint="repeat `cgmerge train SKILLS.yml --modular …`; for a new task:"
            f" cgmerge compose {path.parent}/experts/* -m atlas --examples NEW.jsonl",
        )
    try:
        asked = raw["fit"][_REQUEST]
        pinned = {entry["source"]["ref"]: entry["source"]["sha256"] for entry in raw["experts"]}
        taken = asked["subtraction"]
        return Request(
            method=_known(raw["method"]),
            experts=tuple(ExpertRef(str(ref), None, str(sha)) for ref, sha in pinned.items()),
            params=_of(dict, raw["params"]),
            base=_of(str | None, asked["base"]),
            examples=tuple(_of(str, e["ref"]) if e["name"] is None
                           else f"{_of(str, e['name'])}={_of(str, e['ref'])}"
                           for e in asked["examples"]),
            subtraction=_subtraction(taken) if taken else None,
            seed=_of(int, asked["seed"]),
            force_base=bool(asked["force_base"]),
            pinned=tuple(str(entry["sha256"]) for entry in asked["examples"]),
            base_fingerprint=raw["base"]["fingerprint"] if asked["base"] else None,
            folder=path.parent,
            tuning=_of(dict | None, raw["fit"].get(_TUNING)),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"{path} does not say how it was made: {error}",
            code="composition",
            hint="compose it again from its experts",
        ) from error


def _of(kind: Any, value: Any) -> Any:
    """Return a value of a record that has a certain type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"found {value!r}"[:100])
    return value


def _known(method: object) -> str:
    if find_routed(str(method)) is None:
        raise TypeError(f"this version knows no method {method!r}"[:100])
    return str(method)


def _subtraction(taken: Mapping[str, Any]) -> Subtraction:
    found = Subtraction(**taken)
    _of(str, found.ref), _of(int | None, found.rank)
    if not is_weight(found.strength):
        raise TypeError(f"strength {found.strength!r}"[:100])
    if found.space not in ("delta", "factors"):
        raise TypeError(f"space {found.space!r}")
    return found


def _require(spec: RoutedMethod, request: Request) -> None:
    if "examples" in spec.needs and not request.examples:
        raise UsageError(
            f"method `{spec.name}` learns from examples",
            code="examples",
            hint="add --examples FILE.jsonl with rows like"
            ' {"prompt": …, "completion": …}, or NAME=FILE for each expert',
        )
    if request.examples and "examples" not in spec.needs:
        raise UsageError(
            f"method `{spec.name}` learns nothing from examples",
            code="examples",
            hint="leave out --examples, or choose gate or retrieval",
        )


def _refuse_weights(request: Request) -> None:
    weighted = [item.ref for item in request.experts if item.weight is not None]
    if weighted:
        raise UsageError(
            f"a router decides the weights of experts, so that {weighted[0]} cannot have one",
            code="weights",
            hint="leave out `=WEIGHT`",
        )


def _refuse_twice(experts: Sequence[Expert]) -> None:
    seen: dict[str, Expert] = {}
    for expert in experts:
        if expert.digest in seen:
            raise UsageError(
                f"{expert.ref} is the same expert as {seen[expert.digest].ref}; a router cannot"
                " tell them apart",
                code="experts",
                hint="name each expert once",
            )
        seen[expert.digest] = expert


def _transformed(
    experts: Sequence[Expert], request: Request, static: "Plan"
) -> tuple[tuple[Member, ...], tuple[Mapping[str, Any], ...]]:
    names = safe_names(experts)
    asked = request.subtraction
    if asked is None:
        return tuple(map(Member, names, experts)), ()
    recipe = replace(static.recipe, experts=(ExpertRef(asked.ref),))
    general = make_plan(recipe).adapters[0]
    members, lost = [], {}
    for name, expert in zip(names, experts, strict=True):
        if expert.digest == general.digest:
            raise UsageError(
                f"{expert.ref} is the general expert itself; nothing would be left of it",
                code="experts",
                hint="leave it out of the experts",
            )
        changed, share = _subtracted(expert, general, asked)
        members.append(Member(name, expert, changed))
        lost[name] = share
    record = {
        "transform": "subtract",
        "general": {"ref": asked.ref, "name": general.name, "sha256": general.digest},
        "strength": asked.strength,
        "space": asked.space,
        "rank": asked.rank,
        "truncation_error": lost,
    }
    return tuple(members), (record,)


def _subtracted(
    expert: Expert, general: Expert, asked: Subtraction
) -> "tuple[dict[str, LowRank], float]":
    found = subtract(
        dict(expert.deltas()),
        dict(general.deltas()),
        strength=asked.strength,
        space=asked.space,  # type: ignore[arg-type]
        rank=asked.rank,
    )
    return dict(found.deltas), found.lost


def _examples(request: Request) -> tuple[list[SkillSet], list[str]]:
    """Return the examples by skill, and the SHA-256 of every file."""
    skills, found = read_examples(request.examples)
    expected = list(request.pinned)
    if expected and found != expected:
        raise Incompatible(
            "the examples are not those that the record names",
            code="digest",
            hint="pass --examples to learn from others",
            expected=expected,
            found=found,
        )
    return skills, found


def _labelled(skills: Sequence[SkillSet], loaded: "LoadedBase") -> list[Labelled]:
    limit = position_limit(loaded.model)
    return [
        Labelled(skill.name, encode_questions(questions([skill]), loaded.tokenizer, limit).encoded)
        for skill in skills
    ]


def _base_id(plan: RoutedPlan) -> BaseId:
    known = {member.expert.base_fingerprint for member in plan.members} - {None}
    names = {m.expert.card.base.name for m in plan.members if m.expert.card}
    names |= {m.expert.config.base_name for m in plan.members if m.expert.config.base_name}
    if plan.base is not None:
        return BaseId(name=plan.base.ref, fingerprint=plan.base.fingerprint)
    return BaseId(name=min(names, default=""), fingerprint=known.pop() if known else None)


def _request_record(plan: RoutedPlan) -> dict[str, Any]:
    asked = plan.request
    taken = asked.subtraction
    return {
        "base": asked.base,
        "examples": [
            {
                "name": split_name(spec)[0],
                "ref": split_name(spec)[1],
                "sha256": digest,
            }
            for spec, digest in zip(asked.examples, plan.example_digests, strict=True)
        ],
        "subtraction": None if taken is None else dict(vars(taken)),
        "seed": asked.seed,
        "force_base": asked.force_base,
    }
