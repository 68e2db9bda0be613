"""Measures of written answers against published values and a plain table of subsequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.evals.answers import best_of, common_subsequence, rouge_l, token_f1

few_words = st.lists(st.sampled_from("abcde"), max_size=14)


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        # Lin 2004, section 3: the two candidates that ROUGE-2 cannot tell apart.
        ("police kill the gunman", "police killed the gunman", 0.75),
        ("the gunman kill police", "police killed the gunman", 0.5),
        ("the gunman police killed", "police killed the gunman", 0.5),
        # The example of the package rouge-score: precision 0.625, recall 0.5556.
        (
            "The quick brown dog jumps on the log.",
            "The quick brown fox jumps over the lazy dog",
            2 * 0.625 * (5 / 9) / (0.625 + 5 / 9),
        ),
        ("Same, words!", "same words", 1.0),
        ("snake_case", "snake case", 1.0),  # as rouge-score: an underscore parts words
        ("übung", "ubung", 0.0),
        ("a b", "c d", 0.0),
        ("", "a", 0.0),
        ("...", "...", 0.0),
    ],
)
def test_rouge_l_reference_values(answer, expected, value):
    assert rouge_l(answer, expected) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("The cat sat.", "a cat sat down", 0.8),
        ("b a", "a b", 1.0),  # `a` is an article on both sides
        ("dog dog", "dog", 2 / 3),  # repetitions count
        ("down sat cat", "cat sat down", 1.0),
        ("The", "", 1.0),
        ("", "cat", 0.0),
        ("it's", "its", 1.0),
        ("snake_case", "snake case", 0.0),  # SQuAD removes punctuation without a space
    ],
)
def test_token_f1_reference_values(answer, expected, value):
    assert token_f1(answer, expected) == pytest.approx(value, abs=1e-12)


def table(first, second):
    """Fill the textbook table of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for a in first:
        before, row = row, [0]
        for place, b in enumerate(second):
            row.append(before[place] + 1 if a == b else max(before[place + 1], row[-1]))
    return row[-1]


@given(few_words, few_words)
def test_subsequences_equal_the_textbook_table(first, second):
    found = common_subsequence(first, second)
    assert found == table(first, second) == common_subsequence(second, first)


def test_long_texts_carry_over_no_bits():
    words = [str(n) for n in range(3000)]
    assert common_subsequence(words, words) == 3000
    assert common_subsequence(words, words[::-1]) == 1
    assert common_subsequence(words[:2999:2], words) == 1500


@given(few_words, few_words)
def test_measures_are_symmetric_shares(first, second):
    a, b = " ".join(first), " ".join(second)
    for measure in (rouge_l, token_f1):
        assert 0.0 <= measure(a, b) == measure(b, a) <= 1.0


def test_the_best_reference_counts():
    assert best_of(rouge_l, "x y", ["a", "x z", "x"]) == pytest.approx(2 / 3)
