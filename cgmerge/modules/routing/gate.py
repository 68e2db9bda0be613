"""A linear gate per module, layer or model: softmax(W·h), learned from a few examples per skill.

It starts at zero, where all experts say the same, and learns with all of them: pruned from the
start, ties would always fall to the same experts and the others would get no gradient. Keeping
only the best k of a gate that was learned with all is a gamble, so that k is chosen on the
examples. Examples that are named after experts can also say who should speak (`guide`). The same
seed gives the same gate on the same machine with as many threads.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.fitting import AutoTopK, FitInput, Fitted, counts
from cgmerge.modules.routing.learning import (
    Pruned,
    failure,
    learning,
    measure,
    parameters,
    penalised,
    places,
    prune,
    settled,
    zeros,
)
from cgmerge.modules.routing.router import TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate
from cgmerge.modules.routing.support import Descent, Mark, Steps, Support, descend
from cgmerge.shown import share_text


@dataclass(frozen=True, kw_only=True)
class GateParams(Checked):
    """Parameters of `gate`."""

    top_k: AutoTopK = param(
        AutoTopK("auto"), "experts per token; auto: the fewest that lose nothing on the examples"
    )
    scope: Literal["module", "layer", "model"] = param("module", "what decides for itself")
    steps: int = param(200, "gradient steps", low=0, high=100_000)
    lr: float = param(0.03, "step size of Adam, falling to 0 along a cosine", above=0, high=10)
    batch: int = param(64, "examples in a step", low=1, high=100_000)
    bias: bool = param(False, "also learn a constant for each expert")
    entropy: float = param(
        0.0, "factor on the mean entropy of the weights; above 0 few experts speak", low=0
    )
    guide: float = param(
        0.0,
        "factor on -log of the weight of the expert whose example it is, where files are named"
        " after experts; surer of single skills, and at times worse where one text needs two",
        low=0,
    )
    tolerance: float = param(0.01, "top_k=auto: nats per answer token that pruning may cost", low=0)


def make_gate(fit: FitInput) -> Fitted:
    """Learn a gate.

    Raises:
        UsageError: No base, or no examples.
        DataError: Examples that the base cannot read.
        Incompatible: Modules outside of layers, with scope=layer.
        Damaged: The loss is not finite from the start.
    """
    p = fit.params
    assert isinstance(p, GateParams)
    support = Support(fit.base, fit.given)
    fresh = _start(fit, p)
    with learning(fit.base, fit.stacks, fresh):
        start = support.mark()
    descent = _learn(fit, p, fresh, support)
    router = settled(fresh)
    dense = measure(fit.base, fit.stacks, router, support)
    warnings = failure(descent, p.steps)
    cut = _prune(fit, p, router, support, dense, warnings)
    record: dict[str, Any] = {
        "examples": counts(fit.given),
        "start": start.as_dict(),
        "dense": dense.as_dict(),
        "kept": (cut.mark or dense).as_dict(),
        "top_k": cut.router.choice.top_k,
        "pruning": cut.table(),
        "loss": descent.curve,
    }
    first = (
        f"loss on the examples {start.loss:.4f} → {dense.loss:.4f},"
        f" {share_text(dense.score)} of the answers right with all experts"
    )
    notes = [first]
    if cut.mark is not None:
        notes.append(_said(cut.router.choice.top_k, cut.mark, dense))
        if p.top_k != "auto" and cut.mark.score < dense.score:
            warnings.append(notes.pop())
    return Fitted(cut.router, record, warnings, notes)


def _start(fit: FitInput, p: GateParams) -> TokenRouter:
    count, rules = len(fit.names), {}
    for place, (width, device) in places(fit.stacks, fit.base, p.scope).items():
        bias = torch.zeros(count, device=device, requires_grad=True) if p.bias else None
        rules[place] = TokenRule(Gate(rows=zeros(count, width, device), bias=bias), Choice())
    return TokenRouter(rules, p.scope)


def _learn(fit: FitInput, p: GateParams, router: TokenRouter, support: Support) -> Descent:
    total = p.steps if len(fit.names) > 1 else 0  # one expert has all the weight anyway
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        fit.report(done, total)

    with (
        learning(fit.base, fit.stacks, router) as routing,
        penalised(routing, fit.names, entropy=p.entropy, guide=p.guide) as penalty,
    ):
        steps = Steps(
            count=total, lr=p.lr, batch=p.batch, seed=fit.seed, penalty=penalty, report=report
        )
        return descend(support, parameters(router), steps)


def _prune(
    fit: FitInput,
    p: GateParams,
    router: TokenRouter,
    support: Support,
    dense: Mark,
    warnings: list[str],
) -> Pruned:
    number = p.top_k.of(len(fit.names), warnings, default="auto")
    auto = p.top_k == "auto"
    candidates = range(1, len(fit.names)) if auto else [] if number is None else [number]
    least = Mark(dense.loss + p.tolerance, dense.score) if auto else None
    return prune(router, lambda r: measure(fit.base, fit.stacks, r, support), candidates, least)


def _said(top_k: int | None, mark: Mark, dense: Mark) -> str:
    return (
        f"top_k={top_k}: loss {mark.loss:.4f} (all experts: {dense.loss:.4f}),"
        f" {share_text(mark.score)} of the answers right (all experts: {share_text(dense.score)})"
    )
