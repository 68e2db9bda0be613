"""Folds and what is measured on them."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.errors import DataError
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.learned.crossval import Candidate, Fitted, cross_validate, folds_of
from cgmerge.modules.learned.objectives import Outcome, Support


def support_of(*skills):
    rows = tuple(Encoded([1, number], [2]) for number in range(len(skills)))
    return Support(rows, skills, (True,) * len(skills))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(2, 12))
def test_folds_are_a_partition_with_every_skill_spread(skills, folds):
    support = support_of(*skills)
    parts = folds_of(support, folds)
    if len(skills) < 2:
        assert parts == []
        return
    assert sorted(i for part in parts for i in part) == list(range(len(skills)))
    assert len(parts) == min(folds, len(skills))
    for skill in set(skills):
        counts = [sum(skills[i] == skill for i in part) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_equal_rows_stay_together_and_the_order_does_not_matter():
    rows = [Encoded([1, n // 3], [2]) for n in range(12)]  # every row three times
    one = folds_of(Support(tuple(rows), ("s",) * 12, (True,) * 12), 5)
    assert len(one) == 4
    for part in one:
        assert len({tuple(rows[i].prompt_ids) for i in part}) == 1
    order = random.Random(0).sample(range(12), 12)
    other = folds_of(Support(tuple(rows[i] for i in order), ("s",) * 12, (True,) * 12), 5)
    found = [{tuple(rows[order[i]].prompt_ids) for i in part} for part in other]
    assert found == [{tuple(rows[i].prompt_ids) for i in part} for part in one]


def test_every_skill_counts_the_same():
    support = support_of("a", "a", "a", "b")
    assert support.weights().tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert support.weights([0, 1]).tolist() == pytest.approx([0.5, 0.5, 0, 0])
    with pytest.raises(DataError, match="no examples to learn from"):
        support_of()


def test_what_is_measured_was_not_seen():
    support = support_of("a", "a", "b", "b", "b")
    parts, asked = folds_of(support, 3), []

    def fit(weights):
        """Memorise: loss 0 on what was seen, 1 elsewhere."""
        asked.append(weights)
        unseen = (weights == 0).double()
        return Fitted(Outcome(unseen, unseen, 1 - unseen))

    rows = cross_validate([Candidate("memory", fit)], support, parts)
    assert len(asked) == 3
    assert rows[0].loss == pytest.approx(1.0)
    assert rows[0].score == 0.0
    seen = Counter(i for weights in asked for i in torch.nonzero(weights).flatten().tolist())
    assert set(seen.values()) == {2}


def test_what_learns_nothing_gets_its_plain_mean():
    support = support_of("a", "a", "a", "b")
    loss = torch.tensor([1.0, 2.0, 3.0, 10.0]).double()
    outcome = Outcome(loss, loss, (loss < 3).double())
    done = []
    fixed = Candidate("fixed", lambda _: Fitted(outcome))
    rows = cross_validate([fixed, fixed], support, folds_of(support, 4), done.append)
    assert rows[0] == rows[1]
    assert rows[0].loss == pytest.approx((2 + 10) / 2)
    assert rows[0].score == pytest.approx((2 / 3 + 0) / 2)
    assert done == list(range(1, 9))
