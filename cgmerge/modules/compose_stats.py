"""Statistics of the experts of a composition: found beside them, or asked for with the command."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from cgmerge.errors import NotFound, UsageError
from cgmerge.modules.expert import Expert
from cgmerge.modules.usage import base_names, base_word
from cgmerge.quoting import quoted
from cgmerge.shown import some_of

if TYPE_CHECKING:
    from cgmerge.merge import Rule
    from cgmerge.modules.fullmodel import AnyExpert
    from cgmerge.modules.stats import StatsFile


def open_stats(
    experts: "Sequence[AnyExpert]", rule: "Rule", base: str | None
) -> "list[StatsFile] | None":
    """Open what a method needs to know of the experts' data, in their order.

    Args:
        experts: In the order of the rule's weights.
        rule: Its method tells which statistics.
        base: For the command that is suggested.

    Returns:
        None for methods that need nothing.

    Raises:
        UsageError: Full models, which have no statistics.
        NotFound: An expert has none; the command is in the hint.
        Incompatible: Those of another expert, or collected along another merge.
    """
    kind = rule.spec.traits.stats
    if kind is None:
        return None
    adapters = [expert for expert in experts if isinstance(expert, Expert)]
    if len(adapters) < len(experts):
        full = [expert.name for expert in experts if not isinstance(expert, Expert)]
        raise UsageError(
            f"method `{rule.spec.name}` needs {kind} statistics, which full models do not have:"
            f" {some_of(full)}",
            code="method",
            hint="use another method, or make adapters of them with `cgmerge extract`",
            found=full,
        )
    from cgmerge.modules.stats import StatsFile, path_of

    found, missing = [], []
    for expert in adapters:
        try:
            found.append(StatsFile(path_of(expert, kind), expert, kind))
        except NotFound:
            missing.append(expert)
    if missing:
        _ask_for(missing, adapters, rule, base_word(base, base_names(adapters)))
    if kind == "layerwise":
        from cgmerge.modules.layerstats import Along

        along = Along.of(rule, [expert.digest for expert in adapters])
        for file in found:
            along.check(file.content.get("along"), file.path)
    return found


def _ask_for(
    missing: Sequence[Expert], experts: Sequence[Expert], rule: "Rule", base: str
) -> NoReturn:
    from cgmerge.modules.stats import path_of

    kind = rule.spec.traits.stats or ""
    lines = [
        f"cgmerge stats {quoted(expert.ref)} --base {base} --data FILE"
        + (" --overwrite" if path_of(expert, kind).exists() else "")
        for expert in missing
    ]
    if kind == "layerwise":  # one command for all of them
        equal = len(set(rule.weights)) == 1
        words = [
            quoted(expert.ref if equal else f"{expert.ref}={weight:g}")
            for expert, weight in zip(experts, rule.weights, strict=True)
        ]
        files = " ".join(["FILE"] * len(experts))
        lines = [f"cgmerge stats {' '.join(words)} --base {base} --data {files} --kind layerwise"]
        if len(missing) < len(experts):
            lines[0] += " --overwrite"
    commands = "\n  ".join(lines)
    raise NotFound(
        f"method `{rule.spec.name}` needs {kind} statistics; {len(missing)} of"
        f" {len(experts)} experts have none: {some_of(e.name for e in missing)}",
        code="stats",
        hint=f"compute them:\n  {commands}",
        found=[expert.ref for expert in missing],
    )
