"""Names in an adapter_config.json, against PEFT's own functions as the oracle."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from cgmerge.modules.module_names import Selection, is_key, key_fits

MODULES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.10.mlp.down_proj",
    "model.layers.1.experts.0.up_proj",
    "layers.1.self_attn.q_proj",
    "transformer.h.0.attn.c_attn",
    "h.0.attn.c_attn",
    "vision.blocks.2.model.layers.0.self_attn.q_proj",
    "q_proj",
    "lm_head",
]
KEYS = [
    "q_proj", "^q_proj", "q_proj$", "^q_proj$", "self_attn.q_proj", "self.attn.q_proj",
    r"self_attn\.q_proj", r"self\.attn\.q_proj", r"^model\.layers\.0\.self_attn\.q_proj$",
    "layers.1.self_attn.q_proj", ".", "..", "x.", "_proj", "attn", "0.attn.c_attn",
    "h.0.attn.c_attn",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("module", MODULES)
def test_keys_mean_what_they_mean_to_peft(key, module):
    assert is_key(key)
    assert key_fits(key, module) == (get_pattern_key([key], module) == key)


PARTS = st.lists(st.sampled_from(["a", "ab", "0", "12", "q_proj", "b-c"]), min_size=1, max_size=5)


@given(PARTS, PARTS, st.booleans(), st.booleans(), st.booleans())
def test_keys_of_any_kind(module, key, start, end, escaped):
    dot = r"\." if escaped else "."
    text = ("^" if start else "") + dot.join(key) + ("$" if end else "")
    path = ".".join(module)
    assert key_fits(text, path) == (get_pattern_key([text], path) == text)


@pytest.mark.parametrize("key", ["", "^", "a|b", "a*", "(a)", "a\\d", "[ab]", "a^b", "a$b", "é\n"])
def test_what_is_no_plain_name_is_no_key(key):
    assert not is_key(key)


SELECTIONS = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "c_attn"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 10},
    {"target_modules": ["q_proj", "c_attn"], "layers_to_transform": [0], "layers_pattern": "h"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": ["layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": ["blocks"]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": "model.layers.0.self_attn.q_proj"},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": "q_proj"},
    {"target_modules": "model.layers.1.self_attn...proj"},
]


@pytest.mark.parametrize("fields", SELECTIONS)
def test_the_modules_are_those_of_peft(fields):
    config = SimpleNamespace(
        **{"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None, **fields}
    )
    layers, names = config.layers_to_transform, config.layers_pattern or ()
    selection = Selection(
        config.target_modules,
        config.exclude_modules,
        None
        if layers in (None, [])
        else frozenset([layers] if isinstance(layers, int) else layers),
        (names,) if isinstance(names, str) else tuple(names),
    )
    expected = {}
    for module in MODULES:
        found = check_target_module_exists(config, module)
        expected[module] = bool(found) and type(found).__name__ != "_ExcludedModule"
    assert {module: selection.has(module) for module in MODULES} == expected


def test_all_linear_leaves_the_head_out():
    chosen = [module for module in MODULES if Selection("all-linear").has(module)]
    assert chosen == MODULES[:-1]


def test_nothing_said_is_everything():
    assert all(Selection().has(module) and Selection([]).has(module) for module in MODULES)
