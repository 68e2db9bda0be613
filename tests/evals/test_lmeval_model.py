"""Requests of lm-evaluation-harness, answered by a target: tokens, sums, stops, limits."""

from types import SimpleNamespace

import pytest
import tiny_model as tiny
import torch
from lmeval_support import Request

from cgmerge.errors import DataError, UsageError
from cgmerge.evals.lmeval.model import HarnessModel
from cgmerge.evals.targets import Ready
from cgmerge.modules.loading import LoadedBase

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return tiny.make_model(3)


def harness_model(model, tokenizer=None, **more):
    loaded = LoadedBase(None, model, tokenizer or tiny.make_tokenizer())
    return HarnessModel(Ready(loaded, **more), batch_size=4)


def ask(context, answer, task="t"):
    return Request((context, answer), task)


def by_hand(model, ids, start):
    """Sum of log-softmax of the tokens from `start` on, and whether each is the arg-max."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    places = range(start, len(ids))
    total = sum(logits[i - 1, ids[i]].item() for i in places)
    return total, all(logits[i - 1].argmax().item() == ids[i] for i in places)


def test_loglikelihood_is_a_sum_over_the_continuation(model):
    tokenizer = tiny.make_tokenizer()
    asked = [ask("copy : a b =", " a b"), ask("reverse : c =", " c <eos>"), ask("copy :", " a")]
    found = harness_model(model).loglikelihood(asked)
    for one, (total, greedy) in zip(asked, found, strict=True):
        context, answer = one.args
        ids = tokenizer(context + answer)["input_ids"]
        start = len(tokenizer(context)["input_ids"])
        assert (total, greedy) == (pytest.approx(by_hand(model, ids, start)[0], abs=1e-5),
                                   by_hand(model, ids, start)[1])  # fmt: skip


def test_greedy_continuations_are_told_from_others(model):
    tokenizer = tiny.make_tokenizer()
    ids = tokenizer("copy : a =")["input_ids"]
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0, -1].argmax().item()
    other = next(i for i in range(3, len(tiny.WORDS)) if i != best)
    found = harness_model(model).loglikelihood(
        [ask("copy : a =", f" {tiny.WORDS[i]}") for i in (best, other)]
    )
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_spaces_at_the_end_of_a_context_are_no_part_of_it(model):
    whole = harness_model(model).loglikelihood([ask("copy : a =  ", "a"), ask("copy : a =", " a")])
    assert whole[0] == whole[1]


def test_without_a_context_the_end_token_stands_there(model):
    (found,) = harness_model(model).loglikelihood([ask("", "copy : a")])
    ids = [1, *tiny.make_tokenizer()("copy : a")["input_ids"]]
    assert found[0] == pytest.approx(by_hand(model, ids, 1)[0], abs=1e-5)
    (found,) = harness_model(model).loglikelihood([ask("", "<eos> copy : a")])  # not twice
    assert found[0] == pytest.approx(by_hand(model, ids, 1)[0], abs=1e-5)


def test_a_begin_token_is_put_before_contexts_once(model):
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<pad>"})
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    asked = [ask("copy : a =", " a"), ask("<pad> copy : a =", " a"), ask("", "copy")]
    found = harness_model(model, tokenizer).loglikelihood(asked)
    ids = [0, *tiny.make_tokenizer()("copy : a = a")["input_ids"]]
    assert found[0][0] == pytest.approx(by_hand(model, ids, len(ids) - 1)[0], abs=1e-5)
    assert found[1] == found[0]
    assert found[2][0] == pytest.approx(by_hand(model, [0, 3], 1)[0], abs=1e-5)


def test_long_contexts_lose_their_left(model):
    there = harness_model(model)
    words = ["a", "b"] * 40
    (found,) = there.loglikelihood([ask(" ".join(words), " c d")])
    ids = tiny.make_tokenizer()(" ".join(words[-63:]) + " c d")["input_ids"]
    assert len(ids) == tiny.POSITIONS + 1  # the last token is asked for and needs no position
    assert found[0] == pytest.approx(by_hand(model, ids, 63)[0], abs=1e-4)
    assert there.cut == 1
    with pytest.raises(DataError) as error:
        there.loglikelihood([ask("a", " " + " ".join(words))])
    assert error.value.code == "data.too_long"
    with pytest.raises(DataError) as error:
        there.loglikelihood([ask("a", "")])
    assert error.value.code == "data.empty_target"


def texts(model, context, **options):
    return harness_model(model).generate_until([Request((context, options), "t")])[0]


def greedy(model, context, count):
    ids = tiny.make_tokenizer()(context)["input_ids"]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == 1:
            break
    return tiny.make_tokenizer().decode(ids[start:], skip_special_tokens=True)


CONTEXTS = ["copy : a b =", "reverse : c d e f =", "copy :", "h g f e d c b a"]


def test_generation_is_greedy_and_stops_at_texts(model):
    for context in CONTEXTS:
        whole = greedy(model, context, 12)
        assert texts(model, context, until=[], max_gen_toks=12) == whole
        for stop in set(whole.split()):
            found = texts(model, context, until=[stop], max_gen_toks=12)
            assert found == whole.split(stop)[0]


def test_texts_do_not_depend_on_the_batch(model):
    options = {"until": ["a", "c"], "do_sample": False, "max_gen_toks": 9}
    asked = [Request((context, dict(options)), "t") for context in CONTEXTS * 2]
    asked[1].args[1]["max_gen_toks"] = 3
    together = harness_model(model).generate_until(asked)
    assert together == [texts(model, one.args[0], **one.args[1]) for one in asked]


def test_a_stop_ends_the_work(model, monkeypatch):
    whole = greedy(model, "copy :", 40)
    stop = whole.split()[0]
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    assert texts(model, "copy :", until=stop, max_gen_toks=40) == ""
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"do_sample": True}, "sampling"),
        ({"temperature": 0.7}, "sampling"),
        ({"num_beams": 4}, "num_beams = 4"),
        ({"max_gen_toks": 64}, "positions for 64"),
        ({"max_gen_toks": 0}, "0 tokens"),
        ({"until": [3]}, "until [3]"),
        ({}, "up to 256 tokens"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(model, options, says):
    with pytest.raises(UsageError) as error:
        texts(model, "copy :", **options)
    assert says in error.value.message


def test_a_temperature_without_sampling_is_greedy(model):
    found = texts(model, "copy :", do_sample=False, temperature=0.7, max_new_tokens=5)
    assert found == greedy(model, "copy :", 5)


def test_whole_texts_are_refused_by_name(model):
    with pytest.raises(UsageError, match="wiki measures the perplexity"):
        harness_model(model).loglikelihood_rolling([Request(("a b",), "wiki")])


def test_routers_hear_prompts_and_tasks(model):
    heard = []
    routing = SimpleNamespace(route=lambda prompts, tasks: heard.append((prompts, tasks)))
    there = harness_model(model, routing=routing)
    there.loglikelihood([ask("copy :", " a", "first"), ask("reverse : a", " b", "second")])
    there.generate_until([Request(("copy :", {"max_gen_toks": 2}), "third")])
    ids = tiny.make_tokenizer()
    expected = {("first", "copy :"), ("second", "reverse : a"), ("third", "copy :")}
    assert {(t, ids.decode(p)) for prompts, tasks in heard
            for p, t in zip(prompts, tasks, strict=True)} == expected  # fmt: skip


def test_fingerprints_tell_models_apart(model):
    asked = [ask("copy : a =", " a"), ask("copy", " a")]
    found = harness_model(model).fingerprint(asked)
    assert len(found) == 1  # a single token was asked of nothing
    assert found != harness_model(tiny.make_model(4)).fingerprint(asked)
    assert found == harness_model(model).fingerprint(asked)
