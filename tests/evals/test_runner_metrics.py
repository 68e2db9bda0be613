"""What the runner records for metrics of tokens, texts and choices, with a random tiny model."""

import pytest
import tiny_model as tiny
import torch

from cgmerge.errors import DataError
from cgmerge.evals import scoring
from cgmerge.evals.checked import load_checked
from cgmerge.evals.record import write_record
from cgmerge.evals.runner import MOST_NEW_TOKENS, Settings, count_rows, evaluate_targets
from cgmerge.evals.suite import SkillSet, encode_questions, questions, read_skills
from cgmerge.modules.base import open_base
from cgmerge.modules.data import Example
from cgmerge.modules.loading import load_base

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "mine"
    tiny.save(folder, tiny.make_model(3), tiny.make_tokenizer())
    return load_base(open_base(str(folder)), device="cpu", dtype="float32")


def skill(rows):
    made = [Example(p, c, n + 1, extra) for n, (p, c, extra) in enumerate(rows)]
    return [SkillSet("s", tuple(made))]


CHOICES = ["a b", "c", "d e f g"]
OFFERED = skill([("copy : a b =", one, {"choices": CHOICES}) for one in CHOICES])


def test_tokens_are_counted(loaded):
    (one,) = evaluate_targets(loaded, [], skill([("copy : a b =", "a b", {})])).items
    row = encode_questions(questions(skill([("copy : a b =", "a b", {})])), loaded.tokenizer, None)
    (score,) = scoring.score(loaded.model, row.encoded, batch_size=1)
    assert (one.tokens, one.right) == (3, score.right)  # with the end token
    wanted = row.encoded[0].target_ids
    assert score.right == sum(a == b for a, b in zip(score.predicted, wanted, strict=True))


def test_choices_are_scored_as_answers_of_their_own(loaded, tmp_path):
    done = []

    def advance(count, *, note=""):
        done.append(count)

    found = evaluate_targets(loaded, [], OFFERED, Settings(metric="choice"), progress=advance)
    assert done[-1] == count_rows([], OFFERED, Settings(metric="choice")) == 9
    alone = {one.expected: one for one in evaluate_targets(loaded, [], OFFERED).items}
    for place, item in enumerate(found.items):
        assert item.choice == place
        assert [one.text for one in item.choices] == CHOICES
        assert [one.tokens for one in item.choices] == [3, 2, 5]
        for one in item.choices:
            same = alone[f"{one.text} <eos>"]
            assert one.loglik == pytest.approx(same.loglik * same.tokens, abs=1e-4)
    # Three times the same question with another right answer: one of three is right.
    (result,) = found.record.results
    assert (result.metric, result.score) == ("choice", pytest.approx(1 / 3))
    write_record(tmp_path / "r.json", found)
    assert load_checked(tmp_path / "r.json").items == found.items


@pytest.mark.parametrize(
    ("prompt", "completion", "extra", "says"),
    [
        ("copy", "a", {}, "no choices"),
        (None, "a b", {"choices": ["a b", "b"]}, "no choices"),
        ("copy", "a", {"choices": ["b", "c"]}, "'a' is not among"),
        ("copy", "a", {"choices": ["a"]}, "at least two"),
        ("copy", "a", {"choices": ["a", "a"]}, "twice"),
        ("copy", "a", {"choices": ["a", 3]}, "must hold texts"),
        ("copy", "a", {"choices": "a b"}, "must be a list"),
    ],
)
def test_rows_that_offer_no_choice_are_refused(loaded, prompt, completion, extra, says):
    rows = skill([("copy", "a", {"choices": ["a", "b"]}), (prompt, completion, extra)])
    with pytest.raises(DataError, match=says) as error:
        evaluate_targets(loaded, [], rows, Settings(metric="choice_norm"))
    assert "row 2" in error.value.message


def test_choices_do_not_matter_to_other_metrics(loaded):
    rows = skill([("copy : a =", "a", {"choices": "broken", "references": 3})])
    assert evaluate_targets(loaded, [], rows).items[0].choices is None


def test_texts_are_generated_at_length(loaded, tmp_path):
    rows = skill([("copy : a b =", "a b", {"references": ["b", "a b"]})])
    settings = Settings(metric="rouge_l", max_new_tokens=20)
    found = evaluate_targets(loaded, [], rows, settings)
    (item,) = found.items
    encoded = encode_questions(questions(rows), loaded.tokenizer, None).encoded
    (written,) = scoring.generate(loaded.model, encoded, ends=[1], batch_size=1, longest=20)
    assert item.answer == loaded.tokenizer.decode(written, skip_special_tokens=True).strip()
    assert "<eos>" not in item.answer
    assert item.references == ("a b", "b")
    assert item.stopped == (written[-1] != 1)
    assert found.record.settings.generate
    assert found.record.settings.max_new_tokens == 20
    write_record(tmp_path / "r.json", found)
    assert load_checked(tmp_path / "r.json").record.results == found.record.results


@pytest.mark.fault("F40")
def test_answers_without_an_end_are_counted(loaded):
    rows = skill([(f"copy : {x} =", x, {}) for x in "abcdefgh"])
    found = evaluate_targets(loaded, [], rows, Settings(metric="token_f1", max_new_tokens=1))
    stopped = sum(item.stopped for item in found.items)
    assert stopped == sum("<eos>" not in item.generated for item in found.items) > 0
    assert any(f"base: {stopped} of 8 generated answers had no end" in w
               for w in found.record.warnings)  # fmt: skip


def test_the_positions_of_the_model_end_an_answer(loaded):
    """64 positions, a prompt of 5 tokens: at most 59 more, whatever was asked for."""
    rows = skill([("copy : a b =", "a b", {})])
    assert Settings(metric="rouge_l").longest == MOST_NEW_TOKENS > 64
    encoded = encode_questions(questions(rows), loaded.tokenizer, 64).encoded
    (written,) = scoring.generate(loaded.model, encoded, ends=[99], batch_size=1, longest=500)
    assert len(written) == 59


def test_references_that_are_none_are_refused(loaded):
    rows = skill([("copy", "a", {"references": "a"})])
    with pytest.raises(DataError, match="'references' must be a list"):
        evaluate_targets(loaded, [], rows, Settings(metric="rouge_l"))


def test_rows_of_multiple_choice_are_read(tmp_path):
    path = tiny.write_jsonl(
        tmp_path / "mc.jsonl",
        [
            {"prompt": "p", "choices": ["x", "y"], "answer": 1},
            {"prompt": "p", "choices": ["x", "y"], "answer": "x", "id": "q2"},
        ],
    )
    (found,) = read_skills([str(path)])
    assert [one.completion for one in found.examples] == ["y", "x"]
    assert dict(found.examples[1].extra) == {"choices": ["x", "y"], "id": "q2"}
