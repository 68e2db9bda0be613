"""One gate vector per expert and module, learned on the expert's own examples alone.

Every owner of an expert can learn its vectors without knowing the others: the module's output
becomes W·h + σ(vᵀh)·ΔW·h, and v learns when the expert helps. Side by side the vectors are
compared after standardising, LN(v)·LN(h)/√in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cgmerge.merge.params import Checked, param
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.routing.choice import LEAST, MOST, Choice, Sigmoid
from cgmerge.modules.routing.fitting import FitInput, Fitted, Labelled, TopK, of_experts
from cgmerge.modules.routing.learning import failure, learning, parameters, places, zeros
from cgmerge.modules.routing.router import TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate, Standardised
from cgmerge.modules.routing.support import Descent, Steps, Support, descend

_TOP_K = TopK("2")


@dataclass(frozen=True, kw_only=True)
class PhatgooseParams(Checked):
    """Parameters of `phatgoose`."""

    top_k: TopK = param(_TOP_K, "experts per token and module, or `all`")
    temperature: float = param(1.0, "scores are divided by it", low=LEAST, high=MOST)
    steps: int = param(100, "gradient steps for each expert", low=0, high=100_000)
    lr: float = param(0.005, "step size of Adam, falling to 0 along a cosine", above=0, high=10)
    batch: int = param(64, "examples in a step", low=1, high=100_000)


def make_phatgoose(fit: FitInput) -> Fitted:
    """Learn the gate vectors of every expert.

    Raises:
        UsageError: No base, or no examples.
        Incompatible: Examples that are no expert's, or an expert without.
        DataError: Examples that the base cannot read.
        Damaged: The loss is not finite from the start.
    """
    p = fit.params
    assert isinstance(p, PhatgooseParams)
    examples = of_experts(fit.names, fit.given)
    vectors: list[dict[str, Tensor]] = []
    learned, warnings = [], []
    for expert, rows in enumerate(examples):
        gates, descent = _learn(fit, p, expert, rows)
        vectors.append(gates)
        warnings += [f"{fit.names[expert]}: {text}" for text in failure(descent, p.steps)]
        first = descent.curve[0] if descent.curve else descent.best
        learned.append(
            {"name": fit.names[expert], "rows": len(rows), "start": first, "kept": descent.best}
        )
    choice = Choice(p.top_k.of(len(fit.names), warnings, default=_TOP_K), p.temperature)
    rules = {}
    for path, stack in fit.stacks.items():
        none = torch.zeros(stack.a.shape[1])
        scorer = Standardised.of(
            torch.stack([own.get(path, none) for own in vectors]), stack.present
        )
        rules[path] = TokenRule(scorer, choice)
    record: dict[str, Any] = {"experts": learned}
    return Fitted(TokenRouter(rules), record, warnings)


def _learn(
    fit: FitInput, p: PhatgooseParams, expert: int, rows: Sequence[Encoded]
) -> tuple[dict[str, Tensor], Descent]:
    """Return one expert's vectors by module."""
    own = {path: s.only([expert]) for path, s in fit.stacks.items() if s.ranks[expert]}
    rules = {
        path: TokenRule(Gate(rows=zeros(1, width, device)), Sigmoid())
        for path, (width, device) in places(own, fit.base, "module").items()
    }
    router, total = TokenRouter(rules), p.steps * len(fit.names)
    done = p.steps * expert

    def report() -> None:
        nonlocal done
        done += 1
        fit.report(done, total)

    support = Support(fit.base, [Labelled(fit.names[expert], rows)])
    steps = Steps(count=p.steps, lr=p.lr, batch=p.batch, seed=fit.seed, report=report)
    with learning(fit.base, own, router):
        descent = descend(support, parameters(router), steps)
    found = {}
    for path, rule in rules.items():
        assert rule.scorer.rows is not None
        found[path] = rule.scorer.rows[0].detach().cpu()
    return found, descent
