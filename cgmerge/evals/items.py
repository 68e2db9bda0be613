"""What a target said, put into words: one item for each question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cgmerge.evals.columns import Question, choices_of, references_of
from cgmerge.evals.record import Choice, Item
from cgmerge.evals.scoring import TokenScore
from cgmerge.evals.suite import Rows
from cgmerge.modules.encoding import end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Answers:
    """What one target said to all questions.

    Attributes:
        name: Of the target.
        rows: The questions as its tokenizer sees them.
        scores: Of the right answers.
        others: Of the other choices, where items offer any.
        written: What it generated, if that was asked for.
        texts: Whether generated texts are measured, not only compared.
    """

    name: str
    rows: Rows
    scores: Sequence[TokenScore]
    others: Sequence[TokenScore] = ()
    written: Sequence[tuple[int, ...]] | None = None
    texts: bool = False


def make_items(
    answers: Answers, asked: Sequence[Question], tokenizer: "PreTrainedTokenizerBase"
) -> list[Item]:
    """Put scores into words.

    Args:
        answers: Of one target.
        asked: The questions, in order.
        tokenizer: Of the target.
    """
    rows, scores = answers.rows, answers.scores
    wrong = [i for i, one in enumerate(scores) if not one.correct]  # the others need no decoding
    texts = _decode([scores[i].predicted for i in wrong], tokenizer)
    predictions = dict(zip(wrong, texts, strict=True))
    items = [
        Item(
            id=question.id,
            skill=question.skill,
            target=answers.name,
            correct=one.correct,
            loglik=one.loglik,
            prediction=predictions.get(i, rows.expected[i]),
            expected=rows.expected[i],
            tied=one.tied,
            tokens=one.tokens,
            right=one.right,
            parts=question.parts or None,
            at=dict(question.at) or None,
        )
        for i, (question, one) in enumerate(zip(asked, scores, strict=True))
    ]
    if answers.others:
        items = _with_choices(items, answers, asked)
    if answers.written is not None:
        items = _with_written(items, answers, tokenizer)
    if answers.texts and answers.written is not None:
        items = _with_texts(items, answers.written, asked, tokenizer)
    return items


def _with_choices(items: list[Item], answers: Answers, asked: Sequence[Question]) -> list[Item]:
    others = iter(answers.others)
    found = []
    for item, question, right in zip(items, asked, answers.scores, strict=True):
        wanted = question.example.completion
        choices = tuple(
            _choice(text, right if text == wanted else next(others))
            for text in choices_of(question)
        )
        place = next(i for i, one in enumerate(choices) if one.text == wanted)
        found.append(replace(item, choices=choices, choice=place))
    return found


def _choice(text: str, score: TokenScore) -> Choice:
    return Choice(text, score.loglik * score.tokens, score.tokens)


def _with_written(
    items: list[Item], answers: Answers, tokenizer: "PreTrainedTokenizerBase"
) -> list[Item]:
    written = answers.written or ()
    wanted = [tuple(row.target_ids) for row in answers.rows.encoded]
    return [
        replace(item, generated=text, generated_correct=tokens == target)
        for item, text, tokens, target in zip(
            items, _decode(written, tokenizer), written, wanted, strict=True
        )
    ]


def _with_texts(
    items: list[Item],
    written: Sequence[tuple[int, ...]],
    asked: Sequence[Question],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Item]:
    ends = end_ids(tokenizer)
    plain: list[str] = tokenizer.batch_decode(list(map(list, written)), skip_special_tokens=True)
    return [
        replace(
            item,
            answer=text.strip(),
            references=references_of(question),
            stopped=not tokens or tokens[-1] not in ends,
        )
        for item, text, tokens, question in zip(items, plain, written, asked, strict=True)
    ]


def _decode(ids: Sequence[tuple[int, ...]], tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    if not ids:
        return []
    texts: list[str] = tokenizer.batch_decode(list(map(list, ids)), skip_special_tokens=False)
    return texts


def warnings_of(name: str, items: Sequence[Item]) -> list[str]:
    """Say on how many items of a target its numbers are not the whole story."""
    found = []
    tied = sum(item.tied for item in items)
    if tied:
        found.append(
            f"{name}: on {tied} of {len(items)} items tokens share the highest value exactly; "
            "the first of them counts"
        )
    written = [item for item in items if item.generated_correct is not None and not item.tied]
    differ = sum(item.generated_correct != item.correct for item in written)
    if differ:
        found.append(
            f"{name}: generation and teacher forcing disagree on {differ} of {len(items)} items"
        )
    stopped = sum(item.stopped is True for item in items)
    if stopped:
        found.append(
            f"{name}: {stopped} of {len(items)} generated answers had no end when the most tokens"
            " were written (--max-new-tokens); they are measured as they are"
        )
    return found
