"""The base as files: fingerprint, shapes, tied heads, and what is refused."""

import json
import shutil

import pytest
import support
import torch
from safetensors.torch import load_file, save_file

from cgmerge.errors import Damaged, Incompatible, NotFound, Unsafe
from cgmerge.modules.base import open_base


@pytest.fixture
def copy(models, tmp_path):
    shutil.copytree(models / "B", tmp_path / "B")
    return tmp_path / "B"


def fingerprint(folder):
    return open_base(str(folder)).fingerprint


def test_two_trainings_of_one_shape_differ(models):
    assert fingerprint(models / "B") != fingerprint(models / "B2")


def test_fingerprint_does_not_depend_on_sharding_or_float_type(models, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "B")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert fingerprint(tmp_path / "shards") == fingerprint(models / "B")
    # The same values in another type: half, then back to float32.
    model.half().save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "again")
    assert fingerprint(tmp_path / "half") == fingerprint(tmp_path / "again")
    assert fingerprint(tmp_path / "half") != fingerprint(models / "B")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_types_are_read_as_numbers(copy, kind):
    path = copy / "model.safetensors"
    tensors = {name: value.to(kind) for name, value in load_file(path).items()}
    save_file(tensors, path)
    halved = fingerprint(copy)
    save_file({name: value.float() for name, value in tensors.items()}, path)
    assert fingerprint(copy) == halved


def test_fingerprint_sees_one_changed_weight_matrix(copy):
    before = fingerprint(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"] += 0.01
    save_file(tensors, path)
    assert fingerprint(copy) != before


def test_fingerprint_sees_the_number_of_heads(copy):
    before = fingerprint(copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 8}))
    assert fingerprint(copy) != before


def test_labels_in_the_config_do_not_matter(copy):
    before = fingerprint(copy)
    path = copy / "config.json"
    extra = {"_name_or_path": "elsewhere", "transformers_version": "9.9", "use_cache": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **extra}))
    assert fingerprint(copy) == before


def test_a_tied_head_may_be_written_out_or_not(models, tmp_path):
    shutil.copytree(models / "Bt", tmp_path / "Bt")
    before = fingerprint(tmp_path / "Bt")
    path = tmp_path / "Bt" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert fingerprint(tmp_path / "Bt") == before


def test_shapes_of_modules(models):
    modules = open_base(str(models / "B")).modules
    for path, (out, into) in support.llama_shapes().items():
        shape = modules[path]
        assert (shape.out_features, shape.in_features, shape.transposed) == (out, into, False)
    assert open_base(str(models / "Bt")).modules["lm_head"].out_features == support.VOCAB


def test_gpt2_projections_are_transposed(models):
    base = open_base(str(models / "G"))
    shape = base.modules["transformer.h.0.attn.c_attn"]
    assert (shape.out_features, shape.in_features, shape.transposed) == (96, 32, True)
    assert not base.modules["transformer.wte"].transposed


def test_adapter_is_not_a_base(tmp_path, qv):
    support.make_expert(tmp_path / "E", qv)
    with pytest.raises(Incompatible, match="is a LoRA adapter"):
        open_base(str(tmp_path / "E"))


def test_pickle_weights_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(Unsafe) as caught:
        open_base(str(copy))
    assert caught.value.code == "unsafe.pickle"


def test_missing_pieces(copy, tmp_path):
    with pytest.raises(NotFound, match="no such base model"):
        open_base(str(tmp_path / "nothing"))
    (copy / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        open_base(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(NotFound, match=r"config\.json"):
        open_base(str(copy))


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        ({"a": "gone.safetensors"}, Damaged, "lacks gone"),
        ({"a": "../outside.safetensors"}, Unsafe, "outside"),
        ({"a": ".hidden.safetensors"}, Unsafe, "outside"),
        ({}, Damaged, "weight_map"),
        ([], Damaged, "weight_map"),
    ],
)
def test_index_that_lies(copy, names, kind, words):
    index = {"metadata": {}, "weight_map": names}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(kind, match=words):
        open_base(str(copy))


def test_one_weight_in_two_shards(copy):
    shutil.copy(copy / "model.safetensors", copy / "b.safetensors")
    index = {"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match="two files"):
        open_base(str(copy))


def test_opening_reads_headers_only(models, monkeypatch):
    from cgmerge.tensorfile import TensorFile

    monkeypatch.setattr(TensorFile, "read", None)
    monkeypatch.setattr(TensorFile, "read_rows", None)
    assert len(open_base(str(models / "B")).modules) == 16
