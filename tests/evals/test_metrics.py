"""Metrics of hand-made items: every score, interval and test by its own formula."""

import math
from typing import get_args

import numpy as np
import pytest

from cgmerge.cli.evaluate import MetricOption
from cgmerge.errors import Incompatible, UsageError
from cgmerge.evals.metrics import METRICS, metric_of, picked
from cgmerge.evals.record import Choice, Item, Metric
from cgmerge.evals.stats import bootstrap_mean, bootstrap_sums, macro_wilson, mcnemar, wilson
from cgmerge.evals.summary import compare_skills, summarise


def item(number, target="m", skill="s", **more):
    fields = {"correct": False, "loglik": -1.0, "prediction": "p", "expected": "e"}
    return Item(f"{number:016x}", skill, target, **{**fields, **more})


def by_tokens(target, rows, skill="s"):
    """Items of (right tokens, tokens, mean log-likelihood)."""
    return [
        item(n, target, skill, right=right, tokens=tokens, loglik=loglik, correct=right == tokens)
        for n, (right, tokens, loglik) in enumerate(rows)
    ]


def with_choices(target, rows):
    """Items of (place of the right one, [(log-likelihood, tokens)])."""
    return [
        item(n, target, choices=tuple(Choice(str(i), *c) for i, c in enumerate(made)), choice=place)
        for n, (place, made) in enumerate(rows)
    ]


LONG_AND_SHORT = [(1, 1, -0.5), (1, 3, -2.0), (8, 8, -0.25)]


def only(numbers):
    (result,) = numbers.results
    return result


def test_the_command_line_names_every_metric():
    assert list(METRICS) == list(get_args(Metric))
    here = [info for info in METRICS.values() if info.needs != "lm_eval"]
    assert [info.option for info in here] == list(get_args(MetricOption))
    assert all(metric_of(info.option) is info for info in here)
    for info in METRICS.values():  # those of another harness are reached by its own option
        if info not in here:
            with pytest.raises(UsageError):
                metric_of(info.option)
    with pytest.raises(UsageError) as error:
        metric_of("bleu")
    assert "exact, loglik, token-accuracy" in error.value.hint


def test_token_accuracy_weighs_tokens():
    result = only(summarise(by_tokens("m", LONG_AND_SHORT), metric="token_accuracy"))
    assert result.score == pytest.approx(10 / 12)  # the mean of shares would be 7/9
    assert (result.correct, result.n) == (2, 3)
    assert result.low <= result.score <= result.high <= 1.0


def test_perplexity_is_that_of_all_tokens():
    result = only(summarise(by_tokens("m", LONG_AND_SHORT), metric="perplexity"))
    assert result.score == pytest.approx(math.exp((0.5 + 6.0 + 2.0) / 12))
    assert 1.0 < result.low < result.score < result.high
    same = by_tokens("m", [(1, 1, -0.5), (3, 3, -0.5)])
    found = only(summarise(same, metric="perplexity"))
    assert (found.low, found.high) == pytest.approx((math.exp(0.5),) * 2)
    hopeless = only(summarise(by_tokens("m", [(0, 2, -5000.0)]), metric="perplexity"))
    assert hopeless.score == hopeless.high == math.exp(700)


def test_a_lower_perplexity_is_a_gain():
    ours, theirs = [(0, 2, -1.0), (0, 2, -1.0)], [(0, 2, -2.0), (0, 2, -0.5)]
    items = by_tokens("a", ours) + by_tokens("base", theirs)
    numbers = summarise(items, metric="perplexity", compare_to="base")
    (one, _) = numbers.comparisons
    assert one.difference == pytest.approx(math.exp(1.25) - math.exp(1.0))
    assert (one.wins, one.losses, one.p) == (1, 1, 1.0)
    assert one.low < one.difference < one.high
    info = METRICS["perplexity"]
    assert max([3.0, 1.5, 2.0], key=info.rank) == 1.5
    assert info.gain(2.0, 3.0) == 1.0


def test_metrics_of_texts_take_the_best_reference():
    items = [
        item(0, answer="police kill the gunman", references=("no", "police killed the gunman")),
        item(1, answer="x", references=("x",)),
    ]
    assert only(summarise(items, metric="rouge_l")).score == pytest.approx(0.875)
    result = only(summarise(items, metric="token_f1"))
    assert result.score == pytest.approx((2 * 2 / 6 + 1) / 2)  # `the` does not count: 2 of 3
    interval = bootstrap_mean([[2 / 3, 1.0]], seed=0)
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high))


def test_choices_raw_and_per_token():
    # Raw picks the short one; per token the long one wins: −4/4 against −2/1.
    items = with_choices("m", [(0, [(-4.0, 4), (-2.0, 1)]), (1, [(-9.0, 1), (-1.0, 1)])])
    raw, per_token = (only(summarise(items, metric=name)) for name in ("choice", "choice_norm"))
    assert (raw.score, per_token.score) == (0.5, 1.0)
    assert (raw.low, raw.high) == (wilson(1, 2).low, wilson(1, 2).high)
    assert [picked(one) for one in items] == [1, 1]
    assert [picked(one, normalised=True) for one in items] == [0, 1]


def test_a_tie_between_choices_is_not_right():
    items = with_choices("m", [(0, [(-1.0, 1), (-1.0, 1)]), (0, [(-1.0, 1), (-2.0, 1), (-2.0, 1)])])
    assert [picked(one) for one in items] == [None, 0]
    assert only(summarise(items, metric="choice")).score == 0.5


def test_choices_are_compared_by_mcnemar():
    good, bad = (0, [(-1.0, 1), (-2.0, 1)]), (1, [(-1.0, 1), (-2.0, 1)])
    items = with_choices("a", [good] * 6) + with_choices("base", [bad] * 6)
    numbers = summarise(items, metric="choice", compare_to="base")
    (overall, _) = numbers.comparisons
    assert (overall.wins, overall.losses, overall.p) == (6, 0, mcnemar(6, 0))
    assert overall.difference == 1.0


def test_means_weigh_skills_the_same():
    items = by_tokens("m", [(1, 1, -1.0)], "a") + by_tokens("m", [(0, 4, -2.0)] * 3, "b")
    for metric, value in (
        ("token_accuracy", 0.5),
        ("perplexity", (math.e + math.e**2) / 2),
        ("loglik", -1.5),
        ("exact_match", 0.5),
    ):
        (mean,) = summarise(items, metric=metric).means
        assert mean.score == pytest.approx(value)
        assert mean.low <= mean.score <= mean.high
    (mean,) = summarise(items).means
    interval = macro_wilson([(1, 1), (0, 3)])
    assert (mean.low, mean.high) == (interval.low, interval.high)


@pytest.mark.parametrize("metric", [name for name, info in METRICS.items() if info.needs])
def test_items_without_what_a_metric_needs_are_refused(metric):
    with pytest.raises(Incompatible) as error:
        summarise([item(0)], metric=metric)
    assert error.value.code == "incompatible.metric"
    assert "0000000000000000 of s holds no" in error.value.message


@pytest.mark.parametrize(
    ("metric", "fields"),
    [
        ("perplexity", {"right": 0, "tokens": 0}),
        ("token_accuracy", {"right": 3, "tokens": 2}),
        ("token_accuracy", {"right": -1, "tokens": 2}),
        ("choice_norm", {"choices": (Choice("a", -1.0, 0), Choice("b", -2.0, 1)), "choice": 0}),
        ("choice", {"choices": (), "choice": 0}),
    ],
)
def test_numbers_that_cannot_be_are_refused(metric, fields):
    with pytest.raises(Incompatible):
        summarise([item(0, **fields)], metric=metric)


def test_the_paired_interval_of_equal_models_has_no_width():
    items = by_tokens("m", LONG_AND_SHORT)
    found = compare_skills({"s": items}, {"s": items}, metric="token_accuracy")
    assert (found.low, found.difference, found.high) == (0.0, 0.0, 0.0)


def test_bootstrap_of_sums_is_that_of_means():
    values = np.random.default_rng(0).normal(size=(2, 40))
    ones = np.ones(40)

    def mean(sums):
        return sum(one[0] / one[1] for one in sums) / len(sums)

    found = bootstrap_sums([np.vstack([row, ones]) for row in values], mean, seed=1)
    plain = bootstrap_mean(list(values), seed=1)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high))


def test_a_ratio_over_zero_has_no_interval():
    zero = np.zeros((2, 5))
    assert bootstrap_sums([zero], lambda sums: sums[0][0] / sums[0][1], seed=0) is None
    with pytest.raises(UsageError):
        bootstrap_sums([np.zeros((2, 0))], lambda sums: sums[0][0], seed=0)
