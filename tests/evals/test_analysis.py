"""What a merge kept and lost, by hand on small evaluations, and the laws of the estimates."""

import numpy as np
import pytest
from record_support import make_evaluation

from cgmerge.evals.analysis import Estimate, effects_of, gain, ratio, recovered, roles_of
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import Item
from cgmerge.evals.stats import bootstrap_mean, bootstrap_sums
from cgmerge.evals.summary import by_target

EXACT, PERPLEXITY = METRICS["exact_match"], METRICS["perplexity"]
ANSWERS = {
    "base": {"copy": "0000000000", "sort": "1100000000", "old": "1111111110", "new": "0000000000"},
    "copy": {"copy": "1111111111", "sort": "1100000000", "old": "1111111111", "new": "0000000000"},
    "sort": {"copy": "0000000000", "sort": "1111111100", "old": "1111111110", "new": "0000000000"},
    "ties": {"copy": "1111111100", "sort": "1111100000", "old": "1110000000", "new": "1111000000"},
}


@pytest.fixture
def groups():
    return by_target(make_evaluation(ANSWERS).items)


@pytest.fixture
def effects(groups):
    roles = roles_of(groups, ["copy", "sort"], "base", EXACT)
    return effects_of(groups["ties"], groups, roles, "base", EXACT)


def rows(text, target="m", skill="s"):
    return by_target(make_evaluation({target: {skill: text}}).items)[target][skill]


def test_roles_follow_from_names_and_from_what_the_base_answers(groups):
    roles = roles_of(groups, ["copy", "sort"], "base", EXACT)
    assert dict(roles.experts) == {"copy": "copy", "sort": "sort"}
    assert (roles.had, roles.unseen) == (("old",), ("new",))
    named = roles_of(groups, ["copy", "sort"], "base", EXACT, trained=["old", "new"])
    assert dict(named.experts) == {"old": "copy", "new": "copy"}  # the best; the first of equals
    assert named.unseen == ("copy", "sort")
    alone = roles_of(groups, [], None, EXACT)
    assert (alone.experts, alone.had, len(alone.unseen)) == ({}, (), 4)


def test_half_of_the_items_are_had():
    for text, had in (("11000", ()), ("1100", ("s",))):
        groups = by_target(make_evaluation({"base": {"s": text}}).items)
        assert roles_of(groups, [], "base", EXACT).had == had


def test_effects_by_hand(effects):
    # copy: 0.8 of 0 to 1; sort: 0.5 of 0.2 to 0.8.
    assert effects.normalised.value == pytest.approx((0.8 / 1.0 + 0.5 / 0.8) / 2)
    assert effects.interference.value == pytest.approx((0.2 + 0.3) / 2)
    assert effects.forgetting.value == pytest.approx(0.9 - 0.3)
    assert effects.transfer.value == pytest.approx(0.4)
    # sort gained 6 items and lost none: p = 2/64, which is sure; copy is too.
    assert effects.recovered.value == pytest.approx((0.8 + 0.5) / 2)
    assert (effects.recovered.skills, effects.recovered.left_out) == (2, 0)
    # Against the base, where it is not 0: sort 0.5/0.2 and old 0.3/0.9.
    assert effects.relative_gain.value == pytest.approx((2.5 - 1 + 1 / 3 - 1) / 2)
    assert (effects.relative_gain.skills, effects.relative_gain.left_out) == (2, 2)
    for key in ("normalised", "interference", "forgetting", "transfer", "recovered"):
        one = getattr(effects, key)
        assert one.low <= one.value <= one.high


def test_an_expert_is_no_merge(groups):
    roles = roles_of(groups, ["copy", "sort"], "base", EXACT)
    found = effects_of(groups["copy"], groups, roles, "base", EXACT, merged=False)
    assert (found.normalised, found.recovered, found.interference) == (None, None, None)
    assert found.forgetting.value == pytest.approx(-0.1)  # it gained one
    assert found.transfer.value == 0.0


def test_without_a_base_only_experts_can_be_measured_by(groups):
    groups.pop("base")
    roles = roles_of(groups, ["copy", "sort"], None, EXACT)
    found = effects_of(groups["ties"], groups, roles, None, EXACT)
    assert found.normalised is not None
    assert (found.recovered, found.forgetting, found.transfer, found.relative_gain) == (None,) * 4


def test_a_gain_that_may_be_noise_is_left_out():
    # Five items gained and none lost: p = 2/32 = 0.0625.
    base, expert = rows("00000" + "1" * 5), rows("1" * 10)
    assert recovered([(expert, base, expert)], EXACT) is None
    sure = (rows("1" * 3 + "0" * 7), rows("0" * 10), rows("1" * 10))
    found = recovered([sure, (expert, base, expert)], EXACT)
    assert (found.value, found.skills, found.left_out) == (pytest.approx(0.3), 1, 1)
    worse = (rows("0" * 10), rows("1" * 10), rows("0" * 10))
    assert recovered([worse], EXACT) is None


def test_recovered_is_1_for_the_expert_and_0_for_the_base():
    base, expert = rows("0000000011"), rows("1111111100")
    assert recovered([(expert, base, expert)], EXACT) is None  # 8 : 2 is p = 0.109
    base, expert = rows("0000000000"), rows("1111111100")
    for model, value in ((expert, 1.0), (base, 0.0)):
        found = recovered([(model, base, expert)], EXACT)
        assert (found.value, found.low, found.high) == (value, value, value)


def test_arg_of_crossfit_by_hand():
    # Mean of (0.6 − 0.4)/0.4 and (0.3 − 0.5)/0.5: 0.05; the ratio of the means would say 0.
    pairs = [(rows("1" * 6 + "0" * 4), rows("1" * 4 + "0" * 6)),
             (rows("1" * 3 + "0" * 7), rows("1" * 5 + "0" * 5))]  # fmt: skip
    assert ratio(pairs, EXACT, relative=True).value == pytest.approx(0.05)
    assert ratio(pairs, EXACT).value == pytest.approx(1.05)
    assert ratio([(pairs[0][0], rows("0000"))], EXACT) is None
    assert ratio(pairs, METRICS["loglik"]) is None


def test_gains_have_the_interval_of_the_paired_bootstrap():
    ours, theirs = rows("1" * 12 + "0" * 8), rows("0" * 3 + "1" * 4 + "0" * 13)
    found = gain([(ours, theirs)], EXACT, seed=3)
    differences = [float(a.correct) - float(b.correct) for a, b in zip(ours, theirs, strict=True)]
    plain = bootstrap_mean([differences], seed=4)
    assert found.value == pytest.approx(0.4)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.051)
    assert gain([], EXACT) is None


def test_a_lower_perplexity_is_gained():
    def of(loglik):
        return [Item("i", "s", "t", correct=False, loglik=loglik, prediction="", expected="",
                     tokens=2, right=0)] * 9  # fmt: skip

    found = gain([(of(-1.0), of(-2.0))], PERPLEXITY)
    assert found.value == pytest.approx(np.exp(2) - np.exp(1))
    share = recovered([(of(-1.5), of(-2.0), of(-1.0))], PERPLEXITY)
    e = np.exp
    assert share.value == pytest.approx((e(1.5) - e(2)) / (e(1) - e(2)))
    assert ratio([(of(-1.0), of(-2.0))], PERPLEXITY) is None


def test_few_distinct_items_are_drawn_as_all_of_them_are():
    """The same distribution, whether items are drawn or only counted."""
    rng = np.random.default_rng(5)
    columns = np.vstack([rng.integers(0, 2, 60), rng.integers(0, 2, 60)]).astype(float)
    shaken = np.vstack([columns, rng.normal(size=60)])  # all distinct

    def difference(sums):
        return sums[0][0] - sums[0][1]

    few = bootstrap_sums([columns], difference, seed=1, draws=20_000)
    many = bootstrap_sums([shaken], difference, seed=1, draws=20_000)
    assert (few.low, few.high) == pytest.approx((many.low, many.high), abs=1.01)


def test_an_estimate_says_when_it_has_no_interval():
    # One expert item in ten thousand draws is often none: a ratio over zero.
    found = ratio([(rows("10"), rows("10"))], EXACT)
    assert isinstance(found, Estimate)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
