"""Reading experts: the right ΔW, or a refusal that names what is wrong."""

import json
import os

import pytest
import support
import torch
from safetensors.torch import load_file

from cgmerge.errors import Damaged, Incompatible, LimitExceeded, NotFound, Unsafe
from cgmerge.modules.base import open_base
from cgmerge.modules.expert import check_modules, open_expert


@pytest.fixture
def e1(tmp_path, qv):
    return support.make_expert(tmp_path / "E1", qv)


@pytest.mark.parametrize(
    "config",
    [
        {"rank": 4, "alpha": 8},
        {"rank": 4, "alpha": 4},
        {"rank": 16, "alpha": 16, "use_rslora": True},
        {"rank": 4, "alpha": 3, "ranks": {"v_proj": 2}},
        {"rank": 4, "alpha": 8, "alpha_pattern": {"layers.1.self_attn.q_proj": 2}},
        {"rank": 4, "alpha": 8.5},
    ],
)
@pytest.mark.fault("F19")
def test_delta_equals_an_independent_reading(tmp_path, qv, config):
    folder = support.make_expert(tmp_path / "e", qv, **config)
    deltas = open_expert(str(folder)).deltas()
    found = {path: deltas[path].dense() for path in deltas}
    assert support.relative(found, support.dense_deltas(folder)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(tmp_path, qv, dtype):
    folder = support.make_expert(tmp_path / "e", qv, dtype=dtype)
    deltas = open_expert(str(folder)).deltas()
    assert deltas[next(iter(deltas))].a.dtype == torch.float32
    found = {path: deltas[path].dense() for path in deltas}
    assert support.relative(found, support.dense_deltas(folder)) < 1e-6


def test_suffix_keys_as_peft_writes_them(tmp_path, qv):
    folder = support.make_expert(
        tmp_path / "e", qv, alpha_pattern={"^model\\.layers\\.0\\.self_attn\\.q_proj$": 16}
    )
    pairs = open_expert(str(folder)).pairs
    assert pairs["model.layers.0.self_attn.q_proj"].scaling == 4.0
    assert pairs["model.layers.1.self_attn.q_proj"].scaling == 2.0


def test_opening_reads_no_weights(e1, monkeypatch):
    from cgmerge.tensorfile import TensorFile

    monkeypatch.setattr(TensorFile, "read", None)
    assert open_expert(str(e1)).ranks == [4]


def test_fits_its_base(e1, models):
    base = open_base(str(models / "B"))
    expert = open_expert(str(e1))
    assert set(check_modules(expert, base)) == set(expert.pairs)
    assert len(expert.deltas(base)) == 4


def test_card_names_skill_and_base(e1, models):
    from cgmerge.modules.card import BaseId, ExpertCard, write_card

    fingerprint = open_base(str(models / "B")).fingerprint
    write_card(e1, ExpertCard(skill="sorting", base=BaseId(name="B", fingerprint=fingerprint)))
    expert = open_expert(str(e1))
    assert expert.name == "sorting"
    expert.deltas(open_base(str(models / "B")))
    with pytest.raises(Incompatible) as caught:
        expert.deltas(open_base(str(models / "B2")))
    assert caught.value.code == "incompatible.base"
    assert fingerprint in caught.value.message
    expert.deltas(open_base(str(models / "B2")), force_base=True)
    data = bytearray((e1 / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (e1 / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(Damaged, match="not what its card says"):
        open_expert(str(e1))


REFUSED = [
    ("use_dora", True, Incompatible, "use_dora"),
    ("lora_bias", True, Incompatible, "lora_bias"),
    ("bias", "all", Incompatible, "bias"),
    ("modules_to_save", ["lm_head"], Incompatible, "modules_to_save"),
    ("trainable_token_indices", [1, 2], Incompatible, "trainable_token_indices"),
    ("target_parameters", ["experts.w"], Incompatible, "target_parameters"),
    ("layer_replication", [[0, 20000]], Incompatible, "layer_replication"),
    ("alora_invocation_tokens", [1], Incompatible, "alora"),
    ("megatron_config", {"a": 1}, Incompatible, "megatron_config"),
    ("kasa_config", {"a": 1}, Incompatible, "kasa"),
    ("peft_type", "LOHA", Incompatible, "LOHA"),
    ("peft_type", None, Incompatible, "peft_type"),
    ("foo_config", {"k": 1}, Incompatible, "foo_config"),
    ("target_modules", "(.*)*(.*)*q_proj", Unsafe, "target_modules"),
    ("target_modules", ["q_proj", ".*"], Unsafe, "target_modules"),
    ("exclude_modules", "(a+)+", Unsafe, "exclude_modules"),
    ("layers_pattern", "(.*)*", Unsafe, "layers_pattern"),
    ("rank_pattern", {"(.*)*q": 4}, Unsafe, "rank_pattern"),
    ("alpha_pattern", {"[": 4}, Unsafe, "alpha_pattern"),
    ("init_lora_weights", "pissa", Unsafe, "pissa"),
    ("init_lora_weights", "pissa_niter_4", Unsafe, "pissa"),
    ("init_lora_weights", "olora", Unsafe, "olora"),
    ("auto_mapping", {"parent_library": "evil"}, Unsafe, "auto_mapping"),
    ("megatron_core", "evil", Unsafe, "megatron_core"),
    ("r", 100_000_000, LimitExceeded, "limit"),
    ("r", 4.0, Damaged, "r must be"),
    ("r", "4", Damaged, "r must be"),
    ("r", 0, Damaged, "r must be"),
    ("r", True, Damaged, "r must be"),
    ("lora_alpha", 0, Damaged, "lora_alpha"),
    ("lora_alpha", -1, Damaged, "lora_alpha"),
    ("lora_alpha", 1e30, Damaged, "lora_alpha"),
    ("lora_alpha", "8", Damaged, "lora_alpha"),
    ("use_rslora", "yes", Damaged, "use_rslora"),
    ("layers_to_transform", [0, "1"], Damaged, "layer numbers"),
    ("rank_pattern", [1], Damaged, "rank_pattern"),
    ("base_model_name_or_path", 5, Damaged, "base_model_name_or_path"),
]


@pytest.mark.parametrize(("field", "value", "kind", "words"), REFUSED)
@pytest.mark.fault("F10")
def test_config_field_is_refused_by_name(e1, field, value, kind, words):
    support.edit_config(e1, **{field: value})
    with pytest.raises(kind, match=words) as caught:
        open_expert(str(e1))
    assert "adapter_config.json" in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("foo_config", None),
        ("foo_flag", False),
        ("foo_list", []),
        ("bias", "none"),
        ("auto_mapping", {"parent_library": "transformers.models.llama.modeling_llama"}),
        ("megatron_core", "megatron.core"),
        ("target_modules", "all-linear"),
        ("layers_to_transform", [0, 1]),
        ("init_lora_weights", "gaussian"),
        ("base_model_name_or_path", "../../etc/passwd"),
        ("peft_version", "9.9"),
    ],
)
def test_harmless_fields_are_accepted(e1, field, value):
    support.edit_config(e1, **{field: value})
    assert len(open_expert(str(e1)).pairs) == 4


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.fault("F08")
def test_alpha_that_is_no_number(e1, literal):
    path = e1 / "adapter_config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw).replace('"lora_alpha": 8', f'"lora_alpha": {literal}'))
    with pytest.raises(Damaged):
        open_expert(str(e1))


def rename(change):
    return lambda tensors: {change(name): value for name, value in tensors.items()}


def test_names_without_the_prefix_are_explained(e1):
    support.edit_tensors(e1, rename(lambda n: n.replace("base_model.model.", "model.")))
    with pytest.raises(Incompatible) as caught:
        open_expert(str(e1))
    assert "`base_model.model.`" in caught.value.hint


def test_adapter_name_left_in_the_tensors_is_explained(e1):
    support.edit_tensors(e1, rename(lambda n: n.replace(".weight", ".default.weight")))
    with pytest.raises(Incompatible) as caught:
        open_expert(str(e1))
    assert "adapter name" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda n: n.replace("model.model.layers", "model.layers"), "lack `model.`"),
        (lambda n: n.replace("model.model.layers", "model.x.model.layers"), "have `x.` too much"),
    ],
)
@pytest.mark.fault("F17")
def test_wrong_module_prefix_lists_both_sides(e1, models, change, hint):
    support.edit_tensors(e1, rename(change))
    with pytest.raises(Incompatible) as caught:
        open_expert(str(e1)).deltas(open_base(str(models / "B")))
    assert caught.value.code == "incompatible.modules"
    assert len(caught.value.details["found"]) == 4
    assert "only in the base" in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.fault("F17")
def test_unknown_module_is_listed(e1, models, tmp_path, qv):
    shapes = {**qv, "model.layers.0.mlp.nope": (8, 32)}
    folder = support.make_expert(tmp_path / "odd", shapes)
    with pytest.raises(Incompatible, match=r"mlp\.nope"):
        open_expert(str(folder)).deltas(open_base(str(models / "B")))


@pytest.mark.fault("F17")
def test_more_layers_than_the_base(models, tmp_path):
    folder = support.make_expert(tmp_path / "deep", support.pick(support.llama_shapes(3), "q_proj"))
    with pytest.raises(Incompatible, match=r"layers\.2"):
        open_expert(str(folder)).deltas(open_base(str(models / "B")))


@pytest.mark.fault("F17")
def test_other_shapes_are_listed(models, tmp_path):
    folder = support.make_expert(tmp_path / "w", {"model.layers.0.self_attn.q_proj": (16, 16)})
    with pytest.raises(Incompatible, match="expert 16×16, base 32×32"):
        open_expert(str(folder)).deltas(open_base(str(models / "B")))


def test_a_module_called_weighted_and_an_expert_called_lora(tmp_path):
    folder = support.make_expert(tmp_path / "lora", {"weighted.lin": (5, 3)})
    expert = open_expert(str(folder))
    assert expert.name == "lora"
    assert list(expert.pairs) == ["weighted.lin"]


def test_no_tensors(e1):
    support.edit_tensors(e1, lambda tensors: {})
    with pytest.raises(Damaged, match="contains no tensors"):
        open_expert(str(e1))


def test_one_factor_missing(e1):
    support.edit_tensors(e1, lambda t: dict(list(t.items())[1:]))
    with pytest.raises(Damaged, match="lora_B only"):
        open_expert(str(e1))


def test_rank_of_the_config_must_be_that_of_the_tensors(e1):
    support.edit_config(e1, r=8)
    with pytest.raises(Incompatible, match="says rank 8"):
        open_expert(str(e1))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["model.layers.0.self_attn.v_proj", "q_proj"]},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": [0]},
        {"layers_to_transform": 0},
    ],
)
def test_weights_that_peft_would_leave_out(e1, models, fields):
    """The oracle is PEFT: what it loads from such a folder lacks some of the file's tensors."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    support.edit_config(e1, **fields)
    model = AutoModelForCausalLM.from_pretrained(models / "B")
    loaded = PeftModel.from_pretrained(model, str(e1))
    kept = {n for n, _ in loaded.named_parameters() if "lora_A" in n}
    assert len(kept) < sum("lora_A" in name for name in load_file(e1 / "adapter_model.safetensors"))
    with pytest.raises(Incompatible, match="modules that adapter_config.json rules out"):
        open_expert(str(e1))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["self_attn.q_proj", "v_proj", "never_there"]},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"layers_to_transform": [0, 1], "exclude_modules": ["proj"]},
        {"layers_to_transform": []},
    ],
)
def test_lists_that_hold_every_weight(e1, fields):
    before = open_expert(str(e1)).pairs
    support.edit_config(e1, **fields)
    assert open_expert(str(e1)).pairs == before


def test_integer_tensors(e1):
    support.edit_tensors(e1, lambda t: {n: v.to(torch.int8) for n, v in t.items()})
    with pytest.raises(Incompatible, match="I8"):
        open_expert(str(e1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.fault("F08")
def test_not_finite_names_the_tensor(e1, bad):
    def poison(tensors):
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
        tensors[name][2, 3] = bad
        return tensors

    support.edit_tensors(e1, poison)
    deltas = open_expert(str(e1)).deltas()
    with pytest.raises(Damaged, match=r"layers\.1\.self_attn\.v_proj\.lora_A.*1 value that is"):
        deltas["model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize(
    ("name", "shape", "kind", "code"),
    [
        ("base_model.model.model.embed_tokens.weight", (132, 32), Unsafe, "unsafe.full_weights"),
        ("foo.bar", (2,), Unsafe, "unsafe.full_weights"),
        ("base_model.model.l.lora_magnitude_vector", (2,), Incompatible, "incompatible.dora"),
        ("base_model.model.l.lora_B.bias", (2,), Incompatible, "incompatible.lora_bias"),
        (
            "base_model.model.e.lora_embedding_A",
            (2, 2),
            Incompatible,
            "incompatible.embedding_lora",
        ),
        (
            "base_model.model.model.embed_tokens.lora_A.weight",
            (2, 2),
            Incompatible,
            "incompatible.embedding_lora",
        ),
        (
            "base_model.model.e.token_adapter.trainable_tokens_delta",
            (2, 2),
            Incompatible,
            "incompatible.tokens",
        ),
    ],
)
@pytest.mark.fault("F09")
def test_other_tensors_are_refused(e1, name, shape, kind, code):
    support.edit_tensors(e1, lambda t: {**t, name: torch.ones(shape)})
    with pytest.raises(kind) as caught:
        open_expert(str(e1))
    assert caught.value.code == code
    assert name in caught.value.message


@pytest.mark.fault("F11")
def test_pickle_weights_are_refused(e1):
    (e1 / "adapter_model.safetensors").rename(e1 / "adapter_model.bin")
    with pytest.raises(Unsafe) as caught:
        open_expert(str(e1))
    assert caught.value.code == "unsafe.pickle"


def test_pickle_beside_safetensors_is_reported(e1):
    (e1 / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "is ignored" in open_expert(str(e1)).warnings[0]


@pytest.mark.fault("F12")
def test_links_and_pipes_are_not_followed(e1, tmp_path):
    weights = e1 / "adapter_model.safetensors"
    moved = tmp_path / "elsewhere.safetensors"
    weights.rename(moved)
    weights.symlink_to(moved)
    with pytest.raises(Unsafe):
        open_expert(str(e1))
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(Unsafe):
        open_expert(str(e1))


def test_misspelt_folder_suggests_neighbours(e1):
    with pytest.raises(NotFound) as caught:
        open_expert(str(e1.parent / "E11"))
    assert "E1" in caught.value.hint


def test_folder_without_an_expert_lists_what_is_there(tmp_path, qv):
    support.make_expert(tmp_path / "outer" / "default", qv)
    with pytest.raises(NotFound) as caught:
        open_expert(str(tmp_path / "outer"))
    assert "default" in caught.value.hint


def test_hub_style_name_is_not_looked_up():
    with pytest.raises(NotFound) as caught:
        open_expert("user/repo")
    assert "hf://user/repo" in caught.value.hint


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1, -100])
def test_truncated_file(e1, cut):
    path = e1 / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(Damaged, match="bytes"):
        open_expert(str(e1))


def test_appended_bytes(e1):
    path = e1 / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 16)
    with pytest.raises(Damaged, match="its tensors need"):
        open_expert(str(e1))


def test_gpt2_conv1d_is_read_in_its_own_orientation(models, tmp_path):
    shapes = {"transformer.h.0.attn.c_attn": (96, 32), "transformer.h.1.attn.c_proj": (32, 32)}
    folder = support.make_expert(tmp_path / "g", shapes, fan_in_fan_out=True)
    matched = check_modules(open_expert(str(folder)), open_base(str(models / "G")))
    assert all(shape.transposed for shape in matched.values())


def test_tied_head_may_be_adapted(models, tmp_path):
    folder = support.make_expert(tmp_path / "h", {"lm_head": (128, 32)})
    base = open_base(str(models / "Bt"))
    assert base.ties_head
    assert check_modules(open_expert(str(folder)), base)["lm_head"].out_features == 128
