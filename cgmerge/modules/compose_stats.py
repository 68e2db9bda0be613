"""Statistics of the experts of a composition: found beside them, or asked for with the command."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgmerge.errors import NotFound, UsageError
from cgmerge.inputs import real_path
from cgmerge.modules.base import Base
from cgmerge.modules.compose_checks import check_digest
from cgmerge.modules.expert import Expert
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.usage import base_names, base_word, stats_command
from cgmerge.shown import some_of

if TYPE_CHECKING:
    from cgmerge.merge import Rule
    from cgmerge.modules.fullmodel import AnyExpert
    from cgmerge.modules.statsfile import StatsFile


def open_stats(
    experts: "Sequence[AnyExpert]",
    items: Sequence[ExpertRef],
    rule: "Rule",
    recipe: Recipe,
    base: Base | None,
) -> "list[StatsFile] | None":
    """Open what a method needs to know of the experts' data, in their order, and check all of it.

    Args:
        experts: In the order of the rule's weights.
        items: What the recipe says of each; a record pins the statistics that were used.
        rule: Its method tells which statistics.
        recipe: Tells what to call the base, and whether another one is accepted.
        base: What the statistics must be of, where there is one.

    Returns:
        None for methods that need nothing.

    Raises:
        UsageError: Full models, which have no statistics; one expert twice along a merge.
        NotFound: An expert has none; the command is in the hint.
        Incompatible: Those of another expert or base, or collected along another merge.
        Damaged: A file that cannot be right, or not the one that the recipe names.
    """
    kind = rule.spec.traits.stats
    if kind is None:
        return None
    adapters = _only_adapters(experts, rule)
    found = _Finder(adapters, rule, base_word(recipe.base, base_names(adapters))).open_all()
    if not recipe.force_base:
        _check_bases(found, base)
    if kind == "layerwise":
        from cgmerge.modules.layerstats import Along

        along = Along.of(rule, [expert.digest for expert in adapters])
        for file in found:
            along.check(file)
    for file, item in zip(found, items, strict=True):
        _check_content(file, item)
    return found


class _Finder:
    """Looks for the files of one kind, and knows the commands that compute them."""

    def __init__(self, experts: Sequence[Expert], rule: "Rule", base: str) -> None:
        from cgmerge.modules.statsfile import path_of

        self.experts = experts
        self.rule = rule
        self.base = base
        self.kind = rule.spec.traits.stats
        self.paths = [path_of(expert, self.kind or "") for expert in experts]

    def open_all(self) -> "list[StatsFile]":
        """Open the files in the order of the experts."""
        from cgmerge.modules.statsfile import StatsFile

        assert self.kind is not None
        along = self.kind == "layerwise"
        if along:
            refuse_twice(self.experts)
        sizes = {n: size for expert in self.experts for n, size in expert.sizes.items()}
        found, missing = [], []
        for expert, path in zip(self.experts, self.paths, strict=True):
            needed = sizes if along else expert.sizes
            command = self._command([expert], overwrite=True)
            try:
                found.append(StatsFile(path, expert, self.kind, sizes=needed, command=command))
            except NotFound:
                missing.append(expert)
        if missing:
            raise self._absent(missing)
        return found

    def _command(self, experts: Sequence[Expert], *, overwrite: bool) -> str:
        if self.kind == "layerwise":  # one command for all of them
            rule, everyone = self.rule, self.experts
            return stats_command(everyone, self.base, overwrite=overwrite, along=rule)
        return stats_command(experts, self.base, overwrite=overwrite)

    def _absent(self, missing: Sequence[Expert]) -> NotFound:
        there = {id(e): path.exists() for e, path in zip(self.experts, self.paths, strict=True)}
        if self.kind == "layerwise":
            commands = [self._command(missing, overwrite=any(there.values()))]
        else:
            commands = [self._command([e], overwrite=there[id(e)]) for e in missing]
        lines = "\n  ".join(commands)
        return NotFound(
            f"method `{self.rule.spec.name}` needs {self.kind} statistics; {len(missing)} of"
            f" {len(self.experts)} experts have none: {some_of(e.name for e in missing)}",
            code="stats",
            hint=f"compute them:\n  {lines}",
            found=[expert.ref for expert in missing],
        )


def refuse_twice(experts: Sequence[Expert]) -> None:
    """Refuse experts whose layerwise statistics would be one file.

    Raises:
        UsageError: The same expert is named twice.
    """
    from cgmerge.modules.statsfile import path_of

    seen: dict[str, Expert] = {}
    for expert in experts:
        first = seen.setdefault(str(real_path(path_of(expert, "layerwise"))), expert)
        if first is not expert:
            raise UsageError(
                f"{first.ref} and {expert.ref} are the same expert: its layerwise statistics are"
                " one file, which belongs to one place in a merge",
                code="experts",
                hint="name it once, with the sum of the weights",
                found=[first.ref, expert.ref],
            )


def _only_adapters(experts: "Sequence[AnyExpert]", rule: "Rule") -> list[Expert]:
    adapters = [expert for expert in experts if isinstance(expert, Expert)]
    if len(adapters) < len(experts):
        full = [expert.name for expert in experts if not isinstance(expert, Expert)]
        raise UsageError(
            f"method `{rule.spec.name}` needs {rule.spec.traits.stats} statistics, which full"
            f" models do not have: {some_of(full)}",
            code="method",
            hint="use another method, or make adapters of them with `cgmerge extract`",
            found=full,
        )
    return adapters


def _check_bases(files: "Sequence[StatsFile]", base: Base | None) -> None:
    """Compare the base of statistics with the one that is given, else the card's, else the first's.

    Without any name for the base, statistics of several bases still cannot be of one merge.
    """
    for file in files:
        card = file.expert.base_fingerprint
        if base is not None:
            file.check_base(base.fingerprint, f"{base.ref} is")
        elif card is not None:
            file.check_base(card, f"{file.expert.name} was trained on")
        else:
            file.check_base(files[0].content["base"], f"{files[0].path} on")


def _check_content(file: "StatsFile", item: ExpertRef) -> None:
    """Read a file once: its values, and its digest where a record of these statistics has it."""
    found, pin = file.sha256, item.stats
    if pin is not None and (pin.kind == "layerwise") == (file.kind == "layerwise"):
        check_digest(
            f"{file.path} is not the file of statistics that the recipe names",
            found,
            pin.sha256,
            "they were computed again since; remove `stats` there to take them as they are",
        )
