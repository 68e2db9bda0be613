"""U35: learning a mix works for one class of models only, and for experts from the hub."""

import json
import sys

import case_support as cases
import learned_support as ls
import pytest
import support
import torch
import train_support

from cgmerge.evals.scoring import generate, score
from cgmerge.modules.attach import attached
from cgmerge.modules.base import open_base
from cgmerge.modules.encoding import encode_all, end_ids
from cgmerge.modules.expert import open_expert
from cgmerge.modules.formats import Example
from cgmerge.modules.loading import load_base

HUB = ("-m", "lorahub", "--set", "evaluations=8", "--set", "folds=2")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return ls.make_place(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A tiny T5, two adapters as PEFT leaves them, and examples that one of them answers."""
    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("t5")
    tokenizer = train_support.make_tokenizer()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, dropout_rate=0.1,
        initializer_factor=2.0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    shapes = {
        f"{side}.block.{i}.layer.{place}.{kind}.{leaf}": (32, 32)
        for i in range(2)
        for side, place, kind in (
            ("encoder", 0, "SelfAttention"), ("decoder", 0, "SelfAttention"),
            ("decoder", 1, "EncDecAttention"),
        )
        for leaf in ("q", "v")
    }  # fmt: skip
    for seed in (1, 2):
        place = folder / f"e{seed}"
        support.make_expert(place, shapes, seed=seed, std=0.4, task_type="SEQ_2_SEQ_LM")
    rows = train_support.make_rows(6)
    loaded = load(folder)
    with attached(loaded.model, open_expert(str(folder / "e1")).deltas()):
        written = answers(loaded, rows)
    for row, ids in zip(rows, written, strict=True):
        row["completion"] = loaded.tokenizer.decode(ids, skip_special_tokens=True) or "a"
    train_support.write_rows(folder / "rows.jsonl", rows)
    return folder


def load(folder):
    return load_base(
        open_base(str(folder / "base")), device="cpu", dtype="float32", with_encoder=True
    )


def encoded(loaded, rows):
    return encode_all([Example(r["prompt"], r["completion"]) for r in rows], loaded.tokenizer)


def answers(loaded, rows, **options):
    options = {"batch_size": 4, "longest": 4, **options}
    return generate(loaded.model, encoded(loaded, rows), ends=end_ids(loaded.tokenizer), **options)


def read_rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_causal_with_plain_folders_of_this_machine(run, causal, tmp_path):
    assert not (causal / "e1" / "expert.json").exists()  # PEFT's own files, nothing of ours
    words = ["compose", causal / "e1", causal / "e2", "--base", causal / "base", *HUB, "--json"]
    found = cases.done(run(*words, "-o", tmp_path / "o", "--examples", causal / "first.jsonl"))
    assert found["tuning"]["method"] == "lorahub"
    assert found["truncation_error"] < 1e-6


def test_encoder_and_decoder(run, t5, tmp_path):
    words = ["compose", t5 / "e1", t5 / "e2", "--base", t5 / "base", *HUB, "--json"]
    found = cases.done(run(*words, "-o", tmp_path / "o", "--examples", t5 / "rows.jsonl"))
    weights = {expert["name"]: expert["weight"] for expert in found["experts"]}
    assert weights["e1"] > 0.5 > abs(weights["e2"])  # whose answers the examples are
    config = json.loads((tmp_path / "o" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_2_SEQ_LM"
    # What was learned is there for everybody: plain transformers and PEFT.
    from peft import PeftModel
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(t5 / "base", dtype=torch.float32).eval()
    ids = {
        "input_ids": torch.tensor([[4, 6, 8, 9, 1]]),
        "decoder_input_ids": torch.tensor([[0, 8]]),
    }
    with torch.no_grad():
        for path, delta in support.dense_deltas(tmp_path / "o").items():
            model.get_submodule(path).weight += delta.float()
        expected = model(**ids).logits
        plain = AutoModelForSeq2SeqLM.from_pretrained(t5 / "base", dtype=torch.float32)
        peft = PeftModel.from_pretrained(plain, tmp_path / "o").eval()
        assert torch.allclose(peft(**ids).logits, expected, atol=1e-5)
    scores = cases.done(
        run("eval", tmp_path / "o", "--base", t5 / "base", "--data", t5 / "rows.jsonl", "--json")
    )
    assert len(scores["targets"]) == 2


def test_scores_are_those_of_the_models_own_loss(t5):
    loaded, rows = load(t5), encoded(load(t5), read_rows(t5))
    for size in (1, 3, 6):
        found = score(loaded.model, rows, batch_size=size)
        for row, item in zip(rows, found, strict=True):
            with torch.no_grad():
                loss = loaded.model(
                    input_ids=torch.tensor([[*row.prompt_ids, 1]]),
                    labels=torch.tensor([row.target_ids]),
                ).loss
            assert item.loglik == pytest.approx(-float(loss), abs=1e-5)


def test_generation_and_scores_agree(t5):
    loaded, rows = load(t5), read_rows(t5)
    items = encoded(loaded, rows)
    with attached(loaded.model, open_expert(str(t5 / "e1")).deltas()):
        found = score(loaded.model, items, batch_size=4)
        written = answers(loaded, rows, longest=None)
        assert written == answers(loaded, rows, longest=None, batch_size=1)
    right = [list(ids) == row.target_ids for ids, row in zip(written, items, strict=True)]
    assert [item.correct for item in found] == right


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "e1", "--base", "base", "--prompt", "copy : a ="),
        ("train", "--base", "base", "--data", "rows.jsonl", "--skill", "s", "-o", "x"),
        ("stats", "e1", "--base", "base", "--data", "rows.jsonl", "-o", "x"),
        ("compose", "e1", "e2", "--base", "base", "-m", "gate", "-o", "x", "--examples",
         "e1=rows.jsonl", "e2=rows.jsonl"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_what_such_models_cannot_do_is_refused_by_name(run, t5, monkeypatch, words):
    monkeypatch.chdir(t5)
    before = cases.tree(t5)
    error = cases.refused(run(*words, "--json"), 3, "incompatible.encoder", "with an encoder")
    assert error["hint"]
    assert cases.tree(t5) == before
    assert "sentencepiece" not in sys.modules


def test_a_router_is_refused_where_it_would_be_used(run, t5, monkeypatch, tmp_path):
    monkeypatch.chdir(t5)
    cases.done(run("compose", "e1", "e2", "-m", "arrow", "-o", tmp_path / "c", "--json"))
    words = ("eval", tmp_path / "c", "--base", "base", "--data", "rows.jsonl", "--json")
    cases.refused(run(*words), 3, "incompatible.encoder", "routers take causal")
