"""One gate per layer, shared by its modules: softmax(W·h/T) + b, learned from a few examples.

The weights need not sum to 1, so that an expert can also be turned up or down as a whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgmerge.errors import UsageError
from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.choice import LEAST, MOST, Choice
from cgmerge.modules.routing.fitting import FitInput, Fitted, counts
from cgmerge.modules.routing.learning import (
    failure,
    learning,
    measure,
    parameters,
    places,
    settled,
    zeros,
)
from cgmerge.modules.routing.router import TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate
from cgmerge.modules.routing.support import Mark, Steps, Support, descend
from cgmerge.shown import share_text, some_of

_BEST, _EVEN = "best", "even"


@dataclass(frozen=True, kw_only=True)
class FlowParams(Checked):
    """Parameters of `lora-flow`."""

    start: str = param(
        _BEST, "the expert that speaks alone at first: a name, `best` on the examples, or `even`"
    )
    temperature: float = param(1.0, "T: scores are divided by it", low=LEAST, high=MOST)
    steps: int = param(200, "gradient steps", low=0, high=100_000)
    lr: float = param(0.01, "step size of Adam, falling to 0 along a cosine", above=0, high=10)
    batch: int = param(64, "examples in a step", low=1, high=100_000)


def make_flow(fit: FitInput) -> Fitted:
    """Learn the gates and their biases.

    Raises:
        UsageError: No base, no examples, or a start that is no expert.
        DataError: Examples that the base cannot read.
        Incompatible: Modules outside of layers.
        Damaged: The loss is not finite from the start.
    """
    p = fit.params
    assert isinstance(p, FlowParams)
    count = len(fit.names)
    support = Support(fit.base, fit.given)
    rules = {}
    for place, (width, device) in places(fit.stacks, fit.base, "layer").items():
        after = torch.zeros(count, device=device, requires_grad=True)
        scorer = Gate(rows=zeros(count, width, device))
        rules[place] = TokenRule(scorer, Choice(None, p.temperature), after)
    router = TokenRouter(rules, "layer")
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        fit.report(done, p.steps)

    with learning(fit.base, fit.stacks, router):
        starts = _starts(fit.names, p.start)
        marks = {}
        for name, weights in starts.items():
            _begin(router, weights)
            marks[name] = support.mark()
        chosen = min(marks, key=lambda name: _rank(marks[name]))
        _begin(router, starts[chosen])
        steps = Steps(count=p.steps, lr=p.lr, batch=p.batch, seed=fit.seed, report=report)
        descent = descend(support, parameters(router), steps)
    found = settled(router)
    reached = measure(fit.base, fit.stacks, found, support)
    record = {
        "examples": counts(fit.given),
        "starts": {name: mark.as_dict() for name, mark in marks.items()},
        "start": chosen,
        "kept": reached.as_dict(),
        "loss": descent.curve,
    }
    note = (
        f"loss on the examples {marks[chosen].loss:.4f} ({chosen}) → {reached.loss:.4f},"
        f" {share_text(reached.score)} of the answers right"
    )
    return Fitted(found, record, failure(descent, p.steps), [note])


def _starts(names: Sequence[str], wanted: str) -> dict[str, Tensor]:
    """Return the weights that may be begun with, by name."""
    count = len(names)
    known = {_EVEN: torch.full((count,), 1.0 / count)}
    known |= dict(zip(names, torch.eye(count), strict=True))
    if wanted == _BEST:
        return known
    if wanted not in known:
        raise UsageError(
            f"parameter `start` of `lora-flow` is {wanted!r}, which is no expert",
            code="parameter",
            hint=f"one of {some_of([_BEST, *known], 11)}",
            expected=[_BEST, *known],
            found=wanted,
        )
    return {wanted: known[wanted]}


def _begin(router: TokenRouter, weights: Tensor) -> None:
    """Set b so that the weights are these, as long as W is zero."""
    with torch.no_grad():
        for rule in router.rules.values():
            assert rule.after is not None
            rule.after.copy_(weights - 1.0 / weights.numel())


def _rank(mark: Mark) -> float:
    return mark.loss if math.isfinite(mark.loss) else math.inf
