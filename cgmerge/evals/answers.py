"""How near a written answer comes to the expected one: words in common, in order or not.

For answers that may be right in more than one wording. Both measures are 1 for equal texts and 0
for texts without a common word; neither knows what the words mean.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_WORD = re.compile(r"[^\W_]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def rouge_l(answer: str, expected: str) -> float:
    """Return the F-measure of the longest common subsequence of words.

    Args:
        answer: What was written.
        expected: What was wanted.

    Returns:
        2·P·R / (P + R), with P and R the subsequence's share of the words of `answer` and of
        `expected`; 0 where either has no words.

    Source:
        Lin 2004, with the words and the equal weights of the package `rouge-score` (without its
        stemmer). It differs on letters outside ASCII: they are kept here, `rouge-score` drops
        them. A text without spaces is one word.

    Example:
        >>> rouge_l("The quick brown dog jumps on the log.",
        ...         "The quick brown fox jumps over the lazy dog")  # 5 of 8, 5 of 9
        0.5882352941176471
    """
    ours, theirs = _WORD.findall(answer.lower()), _WORD.findall(expected.lower())
    return _f_measure(common_subsequence(ours, theirs), len(ours), len(theirs))


def token_f1(answer: str, expected: str) -> float:
    """Return the F-measure of the words in common, whatever their order, as SQuAD counts it.

    Case, ASCII punctuation and the articles a, an, the do not count.

    Args:
        answer: What was written.
        expected: What was wanted.

    Returns:
        2·P·R / (P + R) over words with their repetitions. Where either has no words left: 1 if
        both have none, else 0.

    Source:
        Rajpurkar et al. 2016, the evaluation script of SQuAD 2.0.

    Example:
        >>> token_f1("The cat sat.", "a cat sat down")  # 2 of 2, 2 of 3
        0.8
    """
    ours, theirs = _plain_words(answer), _plain_words(expected)
    if not ours or not theirs:
        return float(ours == theirs)
    return _f_measure((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def best_of(measure: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """Return the highest of an answer's measures against several references, at least one."""
    return max(measure(answer, reference) for reference in references)


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence.

    Source:
        Hyyrö 2004: a row of the table as the bits of one number, so that a word of `second` costs
        a few operations on numbers of `len(first)` bits.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    row = everything = (1 << len(first)) - 1
    for word in second:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & everything
    return len(first) - row.bit_count()


def _plain_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f_measure(common: int, ours: int, theirs: int) -> float:
    if not common:
        return 0.0
    # 2·P·R / (P + R) in one division
    return 2 * common / (ours + theirs)
