"""What a score can be: one entry per metric, from an item to what is added up and divided.

A score is a ratio of sums over items, Σ total / Σ weight; most metrics weigh every item the same,
those per token weigh an item by its target tokens. Everything is computed from recorded items, so
that any number can be had again from a record.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cgmerge.errors import Incompatible, UsageError
from cgmerge.evals.answers import best_of, rouge_l, token_f1
from cgmerge.evals.record import Item, Metric

_LARGEST_EXPONENT = 700.0
"""exp of more leaves the range of a double; such a perplexity says no more than `hopeless`."""
_MOST_TOKENS = 1 << 31

Needs = Literal["", "tokens", "answer", "choices", "lm_eval"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """A metric: how items become a score, and what to call it.

    Attributes:
        name: In records.
        option: On the command line.
        title: At the head of a table.
        what: Completes “a score is the …”.
        part: Total and weight of an item; a score is Σ total / Σ weight.
        binary: Items are right or wrong: Wilson intervals and McNemar's test apply.
        weighted: Items weigh differently.
        lower_is_better: The score is exp(−Σ total / Σ weight).
        low: Lowest possible score.
        high: Highest possible score.
        needs: What items must hold beyond the teacher-forced answer.
    """

    name: Metric
    option: str
    title: str
    what: str
    part: Callable[[Item], tuple[float, float]]
    binary: bool = False
    weighted: bool = False
    lower_is_better: bool = False
    low: float = 0.0
    high: float = 1.0
    needs: Needs = ""

    @property
    def test(self) -> str:
        """Name the exact test of two models on the same items."""
        return "McNemar" if self.binary else "sign"

    def value(self, item: Item) -> float:
        """Return what an item contributes; more is better, whatever the score does."""
        total, weight = self.part(item)
        return total / weight

    def score(self, items: Sequence[Item]) -> float:
        """Return the score of items, at least one.

        Raises:
            Incompatible: Items without what the metric needs.
        """
        parts = [self.part(item) for item in items]
        ratio = sum(total for total, _ in parts) / sum(weight for _, weight in parts)
        return math.exp(min(-ratio, _LARGEST_EXPONENT)) if self.lower_is_better else ratio

    def scores(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the scores of ratios Σ total / Σ weight, any shape."""
        return np.exp(np.minimum(-ratios, _LARGEST_EXPONENT)) if self.lower_is_better else ratios

    def columns(self, items: Sequence[Item]) -> NDArray[np.float64]:
        """Return totals and weights, [2, items]."""
        return np.array([self.part(item) for item in items], dtype=np.float64).T

    def is_right(self, item: Item) -> bool:
        """Return whether an item is right; an exact answer where the metric knows shades."""
        return bool(self.part(item)[0]) if self.binary else item.correct

    def rank(self, score: float) -> float:
        """Return a number that is higher for a better score."""
        return -score if self.lower_is_better else score

    def gain(self, ours: float, theirs: float) -> float:
        """Return a difference of scores that is above zero where ours is better."""
        return theirs - ours if self.lower_is_better else ours - theirs


def _exact(item: Item) -> tuple[float, float]:
    return float(item.correct), 1.0


def _loglik(item: Item) -> tuple[float, float]:
    return _nats(item), 1.0


def _nats(item: Item) -> float:
    if item.loglik is None:
        raise _lacks(item, "log-likelihood", "evaluate with this metric")
    return item.loglik


def _token_accuracy(item: Item) -> tuple[float, float]:
    tokens = _tokens(item)
    return float(item.right or 0), tokens


def _token_loglik(item: Item) -> tuple[float, float]:
    tokens = _tokens(item)
    return _nats(item) * tokens, tokens


def _tokens(item: Item) -> float:
    if item.tokens is None or item.right is None or not _countable(item.right, item.tokens):
        raise _lacks(item, "number of target tokens", "evaluate again: older records have none")
    return float(item.tokens)


def _countable(right: int, tokens: int) -> bool:
    return 0 <= right <= tokens and 0 < tokens <= _MOST_TOKENS


def _of_answer(measure: Callable[[str, str], float]) -> Callable[[Item], tuple[float, float]]:
    def part(item: Item) -> tuple[float, float]:
        if item.answer is None or not item.references:
            raise _lacks(item, "generated answer", "evaluate with this metric")
        return best_of(measure, item.answer, item.references), 1.0

    return part


def picked(item: Item, *, normalised: bool = False) -> int | None:
    """Return the choice that a model prefers.

    Args:
        item: With choices.
        normalised: By log-likelihood per token instead of in all.

    Returns:
        Its place; None where several share the highest log-likelihood exactly.
    """
    values = [one.loglik / (one.tokens if normalised else 1) for one in item.choices or ()]
    best = max(values, default=0.0)
    return values.index(best) if values.count(best) == 1 else None


def _choice(item: Item) -> tuple[float, float]:
    _check_choices(item)
    return float(picked(item) == item.choice), 1.0


def _choice_norm(item: Item) -> tuple[float, float]:
    _check_choices(item)
    return float(picked(item, normalised=True) == item.choice), 1.0


def _check_choices(item: Item) -> None:
    if (
        not item.choices
        or item.choice is None
        or any(not _countable(0, one.tokens) for one in item.choices)
    ):
        raise _lacks(item, "choices", "evaluate with this metric on rows that have `choices`")


def _value(item: Item) -> tuple[float, float]:
    if item.value is None:
        raise _lacks(item, "score of lm-evaluation-harness", "evaluate with --lm-eval")
    return item.value, 1.0


def _lacks(item: Item, what: str, hint: str) -> Incompatible:
    return Incompatible(
        f"item {item.id} of {item.skill} holds no {what}", code="metric", hint=hint, found=item.id
    )


_INFINITE = float("inf")
METRICS: dict[Metric, MetricInfo] = {
    info.name: info
    for info in (
        MetricInfo(
            "exact_match", "exact", "Share of exact answers",
            "share of items answered exactly, end included", _exact, binary=True,
        ),
        MetricInfo(
            "loglik", "loglik", "Mean log-likelihood",
            "mean log-likelihood of a target token", _loglik, low=-_INFINITE, high=0.0,
        ),
        MetricInfo(
            "token_accuracy", "token-accuracy", "Share of tokens right",
            "share of target tokens that are the first choice after the right ones before them",
            _token_accuracy, weighted=True, needs="tokens",
        ),
        MetricInfo(
            "perplexity", "perplexity", "Perplexity",
            "perplexity of a target token (lower is better)", _token_loglik,
            weighted=True, lower_is_better=True, low=1.0, high=_INFINITE, needs="tokens",
        ),
        MetricInfo(
            "rouge_l", "rouge-l", "ROUGE-L",
            "mean ROUGE-L of generated answers", _of_answer(rouge_l), needs="answer",
        ),
        MetricInfo(
            "token_f1", "token-f1", "Word F1",
            "mean F1 of the words of generated answers (as SQuAD)", _of_answer(token_f1),
            needs="answer",
        ),
        MetricInfo(
            "choice", "choice", "Share of right choices",
            "share of items whose right choice has the highest log-likelihood, end included",
            _choice, binary=True, needs="choices",
        ),
        MetricInfo(
            "choice_norm", "choice-norm", "Share of right choices per token",
            "share of items whose right choice has the highest log-likelihood per token",
            _choice_norm, binary=True, needs="choices",
        ),
        MetricInfo(
            "lm_eval", "lm-eval", "Score of lm-evaluation-harness",
            "mean of what lm-evaluation-harness gives an item", _value, needs="lm_eval",
        ),
        MetricInfo(
            "lm_eval_right", "lm-eval-right", "Share right by lm-evaluation-harness",
            "share of items that lm-evaluation-harness counts as right", _value, binary=True,
            needs="lm_eval",
        ),
    )
}  # fmt: skip


def metric_of(option: str) -> MetricInfo:
    """Return the metric that the command line calls `option`.

    Raises:
        UsageError: There is none; lists those that there are.
    """
    here = [info for info in METRICS.values() if info.needs != "lm_eval"]  # those have their flag
    for info in here:
        if info.option == option:
            return info
    known = ", ".join(info.option for info in here)
    raise UsageError(
        f"no metric is called {option!r}", code="metric", hint=f"there are {known}", found=option
    )
