"""What is scored: the base itself, adapters attached to it, or models of their own."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cgmerge import strictjson
from cgmerge.errors import CgmergeError, NotFound, UsageError
from cgmerge.evals.chosen import data_of
from cgmerge.evals.record import Kind
from cgmerge.evals.suite import check_name, check_names, split_name
from cgmerge.modules.attach import Factors, attached
from cgmerge.modules.base import Base, open_base
from cgmerge.modules.builtin import builtin_base
from cgmerge.modules.composition import Composition
from cgmerge.modules.expert import COMPRESSED, is_adapter, open_expert
from cgmerge.modules.loading import LoadedBase, load_base
from cgmerge.modules.recipe import RECORD
from cgmerge.modules.routing.files import is_routed, open_composition
from cgmerge.refs import label, local_place
from cgmerge.shown import some_of
from cgmerge.tensorfile import file_sha256, read_small

if TYPE_CHECKING:
    from cgmerge.modules.routing.attach import Routing

BASE_NAME = "base"
"""The base's name in tables and records; no other target may use it."""


@dataclass(frozen=True)
class Target:
    """A model to score, not yet in memory.

    Attributes:
        name: Unique in an evaluation.
        kind: Where it comes from.
        digest: SHA-256 of its weights, or the fingerprint of the base.
        deltas: What is attached to the base, module path to low-rank delta; may read lazily.
        model: Files of a model of its own, loaded in place of the base.
        composition: Experts with a router, attached to the base.
        members: Of an ensemble, adapters with their weights, asked together.
        note: What it is made of, where its name does not say.
        warnings: What the user should know about it.
        tuned_on: SHA-256 of the data files that it was tuned on or learned from.
    """

    name: str
    kind: Kind
    digest: str
    deltas: Mapping[str, Factors] | None = field(default=None, repr=False)
    model: Base | None = None
    composition: Composition | None = field(default=None, repr=False)
    members: "tuple[tuple[Target, float], ...]" = field(default=(), repr=False)
    note: str = ""
    warnings: tuple[str, ...] = ()
    tuned_on: frozenset[str] = frozenset()

    @classmethod
    def of_deltas(cls, name: str, deltas: Mapping[str, Factors], digest: str) -> "Target":
        """Make a target of deltas in memory, e.g. one point of a sweep of scales."""
        return cls(name, "deltas", digest, deltas)

    @classmethod
    def of_base(cls, base: Base) -> "Target":
        """Make the target that is the base itself."""
        return cls(BASE_NAME, "base", base.fingerprint)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a full model is brought into memory, as for the base."""

    device: str = "auto"
    dtype: str = "auto"
    load_in_4bit: bool = False


def open_targets(specs: Sequence[str], base: Base, *, force_base: bool = False) -> list[Target]:
    """Open adapters and models and check all of them before any is scored.

    Args:
        specs: `PATH` (named after its folder) or `NAME=PATH`.
        base: What adapters must fit.
        force_base: Accept adapters that were made for another base of the same shapes.

    Raises:
        NotFound: No such folder, or nothing in it that can be scored.
        UsageError: Two targets of one name.
        InputError: A damaged adapter, or one that was made for another base.
    """
    targets = [_open(spec, base, force_base=force_base) for spec in specs]
    names = [BASE_NAME, *(target.name for target in targets)]
    check_names(names, what="target", form="NAME=PATH")
    return targets


def check_tasks(targets: Sequence[Target], skills: Sequence[str]) -> None:
    """Check that compositions by task know every skill, whose name is the task's.

    Raises:
        UsageError: One that is not in a table.
    """
    for target in targets:
        tasks = () if target.composition is None else target.composition.tasks
        strange = [skill for skill in skills if tasks and skill not in tasks]
        if strange:
            raise UsageError(
                f"{target.name} routes by task, and {strange[0]!r} is not in its table",
                code="task",
                hint=f"name data after tasks: --data {sorted(tasks)[0]}=FILE"
                f" (there are {some_of(sorted(tasks), 10)})",
                expected=sorted(tasks),
                found=strange[0],
            )


@dataclass(frozen=True, slots=True)
class Ready:
    """A target in memory.

    Attributes:
        loaded: The base with the target attached, or the target's own model and tokenizer.
        routing: For compositions with a router: what is told about prompts.
    """

    loaded: LoadedBase
    routing: "Routing | None" = None


@contextmanager
def ready(target: Target, loaded: LoadedBase, options: LoadOptions) -> Iterator[Ready]:
    """Bring a target into memory for the length of a `with` block."""
    if target.model is not None:
        own = load_base(
            target.model,
            device=options.device,
            dtype=options.dtype,
            load_in_4bit=options.load_in_4bit,
            with_encoder=True,
        )
        yield Ready(own)
    elif target.composition is not None:
        with target.composition.attach(loaded) as routing:
            yield Ready(loaded, routing)
    elif target.deltas is not None:
        with attached(loaded.model, target.deltas):
            yield Ready(loaded)
    else:
        yield Ready(loaded)


def _open(spec: str, base: Base, *, force_base: bool) -> Target:
    name, ref = split_name(spec)
    built_in = builtin_base(ref)
    folder = built_in or local_place(ref, what="target", suffix=COMPRESSED)
    name = name or (ref if built_in else label(ref, folder))
    check_name(name, "give it a name of its own: NAME=PATH")
    if is_adapter(folder):
        return _with_record(_open_adapter(name, ref, base, force_base=force_base), folder)
    if is_routed(folder):
        routed = open_composition(folder, base, force_base=force_base)
        opened = Target(name, "routed", routed.digest, composition=routed, warnings=routed.warnings)
        return _with_record(opened, folder)
    if (folder / "config.json").exists():
        model = open_base(ref)
        return _with_record(Target(name, "model", _weights_digest(model), model=model), folder)
    inside = sorted(entry.name for entry in folder.iterdir())
    raise NotFound(
        f"{ref} holds neither an adapter (adapter_config.json), nor a composition"
        " (cgmerge.json), nor a model (config.json)",
        code="target",
        hint=f"it holds {some_of(inside, 8)}" if inside else "it is empty",
        path=folder,
        found=inside[:8],
    )


def _with_record(target: Target, folder: Path) -> Target:
    """Add what the record of a composition says that it was tuned on."""
    path = folder / RECORD
    if not path.is_file():
        return target
    try:
        content = read_small(path, follow_links=True)
        data = data_of(strictjson.loads_object(content, source=str(path)))
    except CgmergeError as error:
        text = f"{target.name}: what it was tuned on is not known: {error.message}"
        return replace(target, warnings=(*target.warnings, text))
    return replace(target, tuned_on=frozenset(digest for _, digest in data if digest))


def _open_adapter(name: str, ref: str, base: Base, *, force_base: bool) -> Target:
    expert = open_expert(ref, base=base)
    warnings = list(expert.warnings)
    if expert.base_fingerprint not in (None, base.fingerprint) and force_base:
        warnings.append(
            f"{name} was made for the base {expert.base_fingerprint}, not for {base.fingerprint}"
        )
    kind: Kind = "merged" if (expert.folder / "cgmerge.json").exists() else "expert"
    deltas = expert.deltas(base, force_base=force_base)
    return Target(name, kind, expert.digest, deltas, warnings=tuple(warnings))


def _weights_digest(model: Base) -> str:
    """Hash all weight files: one file as `sha256sum` does, several as the hash of their hashes."""
    digests = [file_sha256(path) for path in sorted(set(model.files.values()))]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
