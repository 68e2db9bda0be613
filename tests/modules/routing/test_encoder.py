"""Retrieval by a sentence encoder, with a stand-in for the package: its class has the real one's
constructor and `encode`."""

import json
import sys
import types
from typing import ClassVar

import numpy as np
import pytest
import routing_support as rs
import support
import torch
from case_support import done, refused
from composition_support import make_experts, tiny
from safetensors.numpy import save_file

from cgmerge.errors import Damaged, Incompatible, MissingExtra, Unsafe
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.routing import encoder as module
from cgmerge.modules.routing.encoder import Encoder, embed_by, find_encoder, open_encoder
from cgmerge.modules.routing.fitting import FitInput, Labelled
from cgmerge.modules.routing.methods import find_routed
from cgmerge.modules.routing.router import RetrievalRouter
from cgmerge.modules.routing.stack import stacks

TASKS = ("sort", "reverse", "count")
EXPERTS = tuple(f"experts/{task}" for task in TASKS)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SentenceTransformer:
    """Counts letters; a text is as long as its letters are many."""

    made: ClassVar[list[tuple[str, str]]] = []
    seen: ClassVar[list[str]] = []

    def __init__(self, model_name_or_path, *, device=None):
        self.made.append((model_name_or_path, device))

    def encode(self, sentences, *, convert_to_numpy, normalize_embeddings):
        assert convert_to_numpy
        assert not normalize_embeddings
        assert isinstance(sentences, list)
        self.seen.extend(sentences)
        return np.array([[text.count(c) for c in LETTERS] for text in sentences], dtype=np.float32)


@pytest.fixture
def package(monkeypatch):
    """The package as it looks when it is installed."""
    found = types.ModuleType("sentence_transformers")
    found.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", found)
    module._model.cache_clear()
    SentenceTransformer.made.clear()
    SentenceTransformer.seen.clear()
    yield SentenceTransformer
    module._model.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """An encoder's files as the package saves them."""
    place = tmp_path / "enc"
    (place / "1_Pooling").mkdir(parents=True)
    write_modules(place, "Transformer", "Pooling")
    (place / "config.json").write_text("{}")
    (place / "1_Pooling/config.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, place / "model.safetensors")
    return place


def write_modules(place, *kinds, prefix="sentence_transformers.models."):
    rows = [{"idx": i, "name": str(i), "path": "", "type": prefix + k} for i, k in enumerate(kinds)]
    (place / "modules.json").write_text(json.dumps(rows))


def test_texts_are_prompts_without_special_tokens(package, folder):
    base, encoder = tiny(), open_encoder(str(folder))
    ids = base.tokenizer("sort : b a =")["input_ids"]
    ids = [base.tokenizer.bos_token_id or ids[0], *ids]
    found = embed_by(encoder, base, [ids, ids[:3]])
    assert found.dtype == torch.float32
    assert found.shape == (2, 26)
    assert package.seen[0] == base.tokenizer.decode(ids, skip_special_tokens=True)
    assert float(found[0, 18]) == package.seen[0].count("s")
    assert package.made == [(str(folder), "cpu")]
    embed_by(encoder, base, [ids])
    assert len(package.made) == 1  # in memory once
    assert torch.equal(embed_by(None, base, [ids]), module.embed(base, [ids]))


def test_the_digest_is_of_what_is_loaded(package, folder, tmp_path):
    first = open_encoder(str(folder))
    for name in ("README.md", ".git/x.json", "onnx/model.bin", "openvino/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / "pytorch_model.bin").write_bytes(b"beside safetensors, and not read")
    assert open_encoder(str(folder)) == first
    assert find_encoder(first) == folder
    folder.rename(tmp_path / "other")
    assert open_encoder(str(tmp_path / "other")).sha256 == first.sha256
    (tmp_path / "other/1_Pooling/config.json").write_text("{ }")
    assert open_encoder(str(tmp_path / "other")).sha256 != first.sha256


def test_folders_that_are_not_loaded(package, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Incompatible, match="is no sentence encoder: neither modules.json"):
        open_encoder(str(tmp_path / "empty"))
    write_modules(folder, "Thing", prefix="evil.")
    with pytest.raises(Unsafe, match="asks for 'evil.Thing'"):
        open_encoder(str(folder))
    (folder / "modules.json").write_text("{}")
    with pytest.raises(Damaged, match="no list of modules"):
        open_encoder(str(folder))
    write_modules(folder, "Transformer", "Dense")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Unsafe, match=r"beside 2_Dense/pytorch_model.bin, and pickles"):
        open_encoder(str(folder))
    (folder / "2_Dense/pytorch_model.bin").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(Unsafe, match="no weights in safetensors"):
        open_encoder(str(folder))


def test_too_many_files_are_not_hashed(package, folder, monkeypatch):
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    with pytest.raises(Incompatible, match="more than 3 files"):
        open_encoder(str(folder))


def test_without_the_package_the_command_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match="needs the package sentence-transformers") as caught:
        open_encoder(str(folder))
    assert caught.value.hint == 'pip install "cgmerge[encoder]"'
    with pytest.raises(MissingExtra, match=f"the encoder {folder}, which needs the package"):
        find_encoder(Encoder(str(folder), "0" * 64))


def test_a_repository_has_to_be_in_the_cache_when_offline(package, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Exception, match="not in the cache of the hub") as caught:
        open_encoder("hf://someone/encoder")
    assert caught.value.code == "environment.offline"


@pytest.mark.parametrize("setting", [
    {"name": "x"}, {"name": "x", "sha256": 1}, {"name": "", "sha256": "y"}, "x", 5,
    {"name": "x", "sha256": "y", "more": "z"},
])  # fmt: skip
def test_records_of_other_forms_are_damaged(setting):
    plain = RetrievalRouter(torch.eye(2, 4), torch.zeros(4))
    assert "encoder" not in plain.settings()
    with pytest.raises(Damaged, match="a retrieval router with encoder"):
        RetrievalRouter.restore({**plain.settings(), "encoder": setting}, plain.tensors())


def test_a_router_is_made_in_the_encoders_embedding(package, folder):
    base, method = tiny(), find_routed("retrieval")
    texts = {"copy": ("x x x", "x x y x"), "sort": ("a b", "b b a b")}
    given = [Labelled(name, [Encoded(base.tokenizer(text)["input_ids"], [4]) for text in own])
             for name, own in texts.items()]  # fmt: skip
    deltas = stacks([rs.expert(support.llama_shapes(), 2, seed) for seed in (1, 2)])
    fitted = method.make(
        FitInput(names=["copy", "sort"], stacks=deltas, loaded=base, examples=given,
                 params=method.make_params({"encoder": str(folder)}))
    )  # fmt: skip
    router = fitted.router
    assert router.encoder == open_encoder(str(folder))
    assert router.centre.shape == (26,)
    again = RetrievalRouter.restore(router.settings(), router.tensors())
    assert again.encoder == router.encoder
    new = embed_by(again.encoder, base, [base.tokenizer("y x x")["input_ids"]])
    assert again.weights(new).tolist() == [[1.0, 0.0]]


@pytest.fixture
def shelf(tmp_path, monkeypatch, folder):
    make_experts(tmp_path / "experts")
    for task, letters in zip(TASKS, ("a a", "h h", "k k"), strict=True):
        rows = [{"prompt": f"{letters} {x} =", "completion": f" {x}"} for x in ("a", "b", "c d")]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compose(run, out):
    return run("compose", *EXPERTS, "-m", "retrieval", "--base", "tiny", "--set", "encoder=enc",
               "-o", out, "--json",
               "--examples", *(f"{task}={task}.jsonl" for task in TASKS))  # fmt: skip


def test_from_the_command_line_and_from_the_record(package, shelf, run):
    done(compose(run, "a"))
    record = json.loads((shelf / "a/cgmerge.json").read_text())
    identity = open_encoder("enc")
    assert record["router"]["settings"]["encoder"] == identity.as_dict()
    assert record["params"]["encoder"] == "enc"
    assert "the sentence-transformers model `enc`" in (shelf / "a/README.md").read_text()
    done(run("compose", "a/cgmerge.json", "-o", "b", "--json"))
    for name in ("cgmerge.json", "router.safetensors"):
        assert (shelf / "a" / name).read_bytes() == (shelf / "b" / name).read_bytes()
    found = done(run("route", "a", "--base", "tiny", "--explain", "k b k =", "--json"))
    shares = found["explained"][0]["overall"]
    assert max(shares, key=shares.get) == "count"
    done(run("export", "a", "--to", "vllm", "-o", "v", "--json"))
    table = json.loads((shelf / "v/routing.json").read_text())
    assert table["encoder"] == identity.as_dict()
    assert "sentence-transformers model in `encoder`" in table["rule"]
    code, out, _ = run("inspect", "a")
    assert code == 0
    assert f"encoder   enc   {identity.sha256[:12]}" in out


def test_opening_it_without_the_encoder_names_it(package, shelf, run, monkeypatch):
    done(compose(run, "a"))
    words = ("generate", "a", "--base", "tiny", "-p", "sort : a =", "--json")
    done(run(*words, "--max-new-tokens", "2"))
    (shelf / "enc/config.json").write_text('{"other": 1}')
    refused(run(*words), 3, "incompatible.encoder", "the encoder enc of sha256", "compose again")
    (shelf / "enc").rename(shelf / "away")
    refused(run(*words), 3, "incompatible.encoder", "the encoder enc, which is not here")
    done(run("inspect", "a", "--json"))  # looking at it needs none
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    refused(run(*words), 4, "missing.sentence_transformers", "cgmerge[encoder]")
