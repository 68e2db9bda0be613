"""Input Grams of experts along their own merge, as RegMean++ needs them.

Layer after layer, from the first: every expert's data runs through the merged layers below and
that expert's own layer, whose inputs are collected; then the layer is merged, and the next one sees
what it makes of the data. The statistics therefore belong to one set of experts, weights and alpha.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cgmerge.errors import Incompatible
from cgmerge.merge import LowRank, Merger, make_rule, plan_rank
from cgmerge.modules.attach import attached
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.expert import Expert
from cgmerge.modules.loading import LoadedBase
from cgmerge.modules.stats import Statistics, check_finite, frozen, input_grams
from cgmerge.modules.statsfile import StatsFile

if TYPE_CHECKING:
    from cgmerge.merge import Rule

METHOD = "regmean++"
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_SAME_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class Along:
    """The merge that statistics belong to.

    Attributes:
        alpha: Parameter of the method.
        shares: Digest and relative weight of every expert, sorted.
    """

    alpha: float
    shares: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, rule: "Rule", digests: Sequence[str]) -> "Along":
        """Describe a rule for experts in the same order."""
        total = sum(rule.weights) or 1.0
        shares = sorted((d, w / total) for d, w in zip(digests, rule.weights, strict=True))
        return cls(asdict(rule.params)["alpha"], tuple(shares))

    def plain(self) -> dict[str, Any]:
        """Return what is stored."""
        return {"alpha": self.alpha, "shares": [list(pair) for pair in self.shares]}

    def check(self, file: StatsFile) -> None:
        """Refuse statistics of another merge.

        Raises:
            Incompatible: Other experts, weights or alpha.
        """
        stored = file.content.get("along")
        if not self._same(stored):
            raise Incompatible(
                f"{file.path} was collected along another merge: other experts, weights or alpha",
                code="stats",
                hint=f"collect them again for these experts: {file.command}",
                path=file.path,
                expected=self.plain(),
                found=stored,
            )

    def _same(self, stored: object) -> bool:
        if not isinstance(stored, Mapping) or stored.get("alpha") != self.alpha:
            return False
        shares = stored.get("shares")
        if not isinstance(shares, list) or len(shares) != len(self.shares):
            return False
        return all(
            isinstance(pair, list)
            and len(pair) == 2
            and pair[0] == digest
            and isinstance(pair[1], float | int)
            and abs(pair[1] - share) < _SAME_SHARE
            for pair, (digest, share) in zip(shares, self.shares, strict=True)
        )


def collect_layerwise(
    loaded: LoadedBase,
    experts: Sequence[Expert],
    rows: Sequence[Sequence[Encoded]],
    rule: "Rule",
    *,
    force_base: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Statistics]:
    """Merge experts layer by layer and collect the inputs on the way.

    Args:
        loaded: The base in memory; unchanged afterwards.
        experts: What is merged.
        rows: Each expert's own rows, from `encode_all`.
        rule: `regmean++` with weights in the order of the experts; its scale is taken as 1.
        force_base: Accept experts of another base fingerprint.
        progress: Called with the number of examples just finished; every expert's rows run once
            for every layer.

    Returns:
        One per expert, Grams of all modules that any expert adapts.

    Raises:
        Incompatible: A module that gets no input.
        Damaged: Values that are not finite.
    """
    params = asdict(rule.params) | {"scale": 1.0}
    unit = make_rule(METHOD, len(experts), weights=rule.weights, params=params)
    deltas = [expert.deltas(loaded.base, force_base=force_base) for expert in experts]
    found = [Statistics(rows=len(r), tokens=sum(map(len, r))) for r in rows]
    merged: dict[str, LowRank] = {}
    rank = plan_rank(unit, deltas, "exact")
    with frozen(loaded.model):
        for group in layers_of(loaded, sorted(set().union(*deltas)), rows[0][:1]):
            for own, data, result in zip(deltas, rows, found, strict=True):
                added = {name: own[name] for name in group if name in own}
                with attached(loaded.model, {**merged, **added}):
                    grams = input_grams(loaded.model, group, data, progress, last=group[-1])
                check_finite(grams)
                result.grams.update(grams)
            stats = [result.grams for result in found]
            merger = Merger(unit, deltas, stats=stats, names=sorted(group))
            merged |= {name: merger.factors(name, rank).delta for name in group}
    return found


def count_layers(experts: Sequence[Expert]) -> int:
    """Return how many layers will be merged one after the other."""
    return len({_layer(name) for expert in experts for name in expert.pairs})


def layers_of(loaded: LoadedBase, names: Sequence[str], row: Sequence[Encoded]) -> list[list[str]]:
    """Group modules by the block of the model they are in, in the order in which they run.

    Raises:
        Incompatible: A module that is never used.
    """
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _inputs: order.append(name)

    modules = dict(loaded.model.named_modules())
    handles = [modules[name].register_forward_pre_hook(note(name)) for name in names]
    try:
        input_grams(loaded.model, names, row, None)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(order):
        groups.setdefault(_layer(name), []).append(name)
    return list(groups.values())


def _layer(name: str) -> str:
    block = _BLOCK.match(name)
    return block[1] if block else name
