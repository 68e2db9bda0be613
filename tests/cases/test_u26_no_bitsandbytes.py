"""U26: bitsandbytes is missing or useless here, and everything fails with the wrong reason."""

import sys

import case_support as cases
import pytest
import support
import train_support

from cgmerge.modules.training import quantized


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A base, data and an expert, where bitsandbytes cannot be imported."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.chdir(tmp_path)
    train_support.make_base(tmp_path / "base")
    train_support.write_rows(tmp_path / "d.jsonl", train_support.make_rows(8))
    shapes = {"model.layers.0.self_attn.q_proj": (32, 32)}
    support.make_expert(tmp_path / "e", shapes, rank=2)
    return tmp_path


TRAIN = ("train", "--base", "base", "--data", "d.jsonl", "--skill", "s", "--steps", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "e", "--base", "base"),
        ("compose", "e", "-m", "linear", "-o", "adapter"),
        ("compose", "e", "-m", "linear", "--base", "base", "--as", "model", "-o", "model"),
        ("compress", "e", "--lossless", "-o", "e.cge"),
        ("eval", "e", "--base", "base", "--data", "d.jsonl"),
        ("generate", "e", "--base", "base", "--prompt", "reverse : a b ="),
        (*TRAIN, "--rank", "2", "--device", "cpu", "-o", "trained"),
        ("doctor",),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.fault("F34")
def test_what_does_not_need_it_works(run, place, words):
    assert cases.done(run(*words, "--json"))


@pytest.mark.fault("F34")
def test_four_bit_says_why_not(run, place):
    before = cases.tree(place)
    words = (*TRAIN, "--load-in-4bit", "--device", "cpu", "-o", "trained", "--json")
    error = cases.refused(run(*words), 4, "missing.bitsandbytes", "cannot be imported")
    assert "train without --load-in-4bit" in error["hint"]
    assert "accelerate" not in error["message"]
    assert cases.tree(place) == before


def test_a_set_up_that_fails_is_quoted(monkeypatch):
    """An installation that is there and breaks: its own words, in one line."""

    def broken(_name):
        raise RuntimeError("CUDA Setup failed\n  despite GPU being available")

    monkeypatch.setattr(quantized.importlib, "import_module", broken)
    with pytest.raises(quantized.MissingExtra, match="CUDA Setup failed despite GPU"):
        quantized.settle_bitsandbytes(needed=True)


@pytest.mark.fault("F34")
def test_no_gpu_is_the_reason_that_is_given(run, place):
    words = ("eval", "e", "--base", "base", "--data", "d.jsonl", "--device", "cuda:99", "--json")
    error = cases.refused(run(*words), 4, "environment.device", "cuda:99", "--device cpu")
    assert "bitsandbytes" not in error["message"]
