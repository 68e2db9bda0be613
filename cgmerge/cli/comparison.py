"""`cgmerge inspect A B C`: how experts relate, before they are merged."""

import math
import re
import statistics
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output

if TYPE_CHECKING:
    from torch import Tensor

    from cgmerge.merge.compare import ModuleComparison
    from cgmerge.modules.expert import Expert

SCHEMA = "cgmerge.comparison/1"
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
_SHADES = " ░▒▓█"
_OUTLIER = 3.0


def compare_experts(targets: list[str], base: str | None, output: Output) -> None:
    """Print norms, pairwise relations, a heat map, and what a rank would lose.

    Args:
        targets: Two or more adapters, `NAME` or `NAME=WEIGHT`.
        base: Also check that all of them fit this base.
        output: Where to print.

    Raises:
        CgmergeError: As `compose` would raise for the same experts.
    """
    from cgmerge.merge.compare import compare
    from cgmerge.modules.compose import make_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe
    from cgmerge.refs import parse_weighted

    refs = tuple(ExpertRef(*parse_weighted(text)) for text in targets)
    plan = make_plan(Recipe(experts=refs, method="task-arithmetic", base=base))
    order = plan.given
    experts = [plan.adapters[i] for i in order]
    weights = [plan.rule.weights[i] for i in order]
    modules = compare([plan.deltas[i] for i in order], weights)
    facts = _facts(experts, weights, modules) | {"warnings": plan.warnings}
    names = _labels([expert.name for expert in experts])
    for warning in (*plan.warnings, *facts["notes"]):
        output.warn(warning)
    _show(names, facts, output)
    output.result(SCHEMA, facts, short=f"{facts['exact_rank']}")


def _facts(
    experts: "list[Expert]", weights: list[float], modules: "dict[str, ModuleComparison]"
) -> dict[str, Any]:
    from cgmerge.merge.compare import cosines

    count = len(experts)
    whole = cosines(sum((m.gram for m in modules.values()), start=_zeros(count)))
    pairs = {
        "cosine": whole.tolist(),
        "sign_conflict": _conflict(modules),
        "output_overlap": _mean(modules, "left_overlap"),
        "input_overlap": _mean(modules, "right_overlap"),
    }
    norms = [math.sqrt(sum(m.norms[i] ** 2 for m in modules.values())) for i in range(count)]
    total = sum(m.lost(0) for m in modules.values())
    lost = {
        str(rank): math.sqrt(sum(m.lost(rank) for m in modules.values()) / total) if total else 0.0
        for rank in RANKS
    }
    return {
        "experts": [
            {
                "name": expert.name,
                "ref": expert.ref,
                "sha256": expert.digest,
                "weight": weight,
                "norm": norm,
                "ranks": expert.ranks,
                "effective_rank": _effective(modules, place),
                "modules": len(expert.pairs),
            }
            for place, (expert, weight, norm) in enumerate(
                zip(experts, weights, norms, strict=True)
            )
        ],
        "pairs": pairs,
        "exact_rank": max(m.exact_rank for m in modules.values()),
        "lost_at_rank": lost,
        "notes": _notes(experts, norms, modules),
        "modules": {
            name: {
                "norms": m.norms,
                "effective_ranks": m.effective_ranks,
                "cosine": _pairwise(cosines(m.gram)),
                "sign_conflict": _pairwise(m.conflicts),
                "exact_rank": m.exact_rank,
            }
            for name, m in modules.items()
        },
    }


def _zeros(count: int) -> "Tensor":
    import torch

    return torch.zeros(count, count, dtype=torch.float64)


def _mean(modules: "dict[str, ModuleComparison]", key: str) -> list[list[float | None]]:
    """Average a pairwise measure over the modules that both experts touch (None: there is none)."""
    import torch

    count = len(next(iter(modules.values())).norms)
    total, seen = _zeros(count), _zeros(count)
    for module in modules.values():
        touched = torch.tensor([float(norm > 0) for norm in module.norms]).double()
        both = touched[:, None] * touched
        total += getattr(module, key) * both
        seen += both
    return _shares(total, seen)


def _conflict(modules: "dict[str, ModuleComparison]") -> list[list[float | None]]:
    """Return the share of entries with opposite signs among all that both change (None: none)."""
    seen = [module.counted for module in modules.values()]
    count = len(seen[0])
    opposite = [module.conflicts * module.counted for module in modules.values()]
    return _shares(sum(opposite, start=_zeros(count)), sum(seen, start=_zeros(count)))


def _shares(parts: "Tensor", wholes: "Tensor") -> list[list[float | None]]:
    return [
        [part / whole if whole else None for part, whole in zip(*row, strict=True)]
        for row in zip(parts.tolist(), wholes.tolist(), strict=True)
    ]


def _effective(modules: "dict[str, ModuleComparison]", place: int) -> float:
    found = [m.effective_ranks[place] for m in modules.values() if m.norms[place] > 0]
    return statistics.fmean(found) if found else 0.0


def _pairwise(matrix: "Tensor") -> float:
    """Average over the pairs of different experts."""
    count = len(matrix)
    return float((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1)))


def _notes(
    experts: "list[Expert]", norms: list[float], modules: "dict[str, ModuleComparison]"
) -> list[str]:
    """Say what stands out: sizes far from the others', odd deltas, modules of a few."""
    from cgmerge.merge.outliers import unusual

    notes = []
    middle = statistics.median(norms)
    for expert, norm in zip(experts, norms, strict=True):
        if norm == 0.0:
            notes.append(f"{expert.name} is zero: it changes nothing")
        elif norm > _OUTLIER * middle or norm < middle / _OUTLIER:
            notes.append(
                f"{expert.name} is an outlier: ‖ΔW‖ {norm:.4g}, the median is {middle:.4g};"
                " consider a weight"
            )
        notes += [f"{expert.name}: unusual: {note}" for note in unusual(expert.deltas())]
    partial = [name for name, m in modules.items() if 0.0 in m.norms and max(m.norms) > 0]
    if partial:
        notes.append(
            f"{len(partial)} of {len(modules)} modules are changed by some experts only, e.g."
            f" {partial[0]}"
        )
    return notes


def _show(names: list[str], facts: dict[str, Any], output: Output) -> None:
    output.table(
        ["expert", "weight", "‖ΔW‖", "ranks", "effective", "modules"],
        [
            [
                name, f"{e['weight']:g}", f"{e['norm']:.4g}", "/".join(map(str, e["ranks"])),
                f"{e['effective_rank']:.1f}", str(e["modules"]),
            ]
            for name, e in zip(names, facts["experts"], strict=True)
        ],
    )  # fmt: skip
    pairs = facts["pairs"]
    rows = [
        [names[i], names[j], *(_number(pairs[key][i][j]) for key in pairs)]
        for i in range(len(names))
        for j in range(i + 1, len(names))
    ]
    output.text("")
    output.table(["expert", "and", *(key.replace("_", " ") for key in pairs)], rows)
    output.text("")
    output.table(["module", *_leaves(facts)], _heat(facts))
    output.text(f"mean cosine of the pairs: {_SHADES[1]} below 0.05 … {_SHADES[-1]} above 0.5")
    output.text("")
    shown = ", ".join(
        f"{int(rank)}: {lost:.1%}"
        for rank, lost in facts["lost_at_rank"].items()
        if int(rank) < facts["exact_rank"]
    )
    output.line("rank", f"{facts['exact_rank']} holds the weighted sum exactly")
    if shown:
        output.line("lost", f"at rank {shown} of ‖ΔW‖")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _place(module: str) -> tuple[str, str]:
    """Split a path into its layer and what it is there: (`layers.3`, `q_proj`)."""
    match = re.search(r"\.(\d+)\.", f".{module}.")
    return (match.group(1) if match else "-"), module.rsplit(".", 1)[-1]


def _leaves(facts: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_place(module)[1] for module in facts["modules"]))


def _heat(facts: dict[str, Any]) -> list[list[str]]:
    cells: dict[str, dict[str, float]] = {}
    for module, found in facts["modules"].items():
        layer, leaf = _place(module)
        cells.setdefault(layer, {})[leaf] = found["cosine"]
    layers = sorted(cells, key=lambda layer: int(layer) if layer.isdigit() else -1)
    return [
        [layer, *(_cell(cells[layer].get(leaf)) for leaf in _leaves(facts))] for layer in layers
    ]


def _cell(cosine: float | None) -> str:
    if cosine is None:
        return "·"
    steps = sum(abs(cosine) >= bound for bound in (0.05, 0.2, 0.5))
    return f"{_SHADES[1 + steps] * 2}{'-' if cosine < -0.05 else ''}"


def _labels(names: list[str]) -> list[str]:
    """Make equal names different."""
    return [
        name if names.count(name) == 1 else f"{name} ({place + 1})"
        for place, name in enumerate(names)
    ]
