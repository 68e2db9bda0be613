"""Weights and parameters that differ between modules: mergekit's gradients and filters, parts."""

import json
from pathlib import Path

import pytest
import support
import torch

from cgmerge import strictyaml
from cgmerge.errors import UsageError
from cgmerge.merge import merge_state_dicts
from cgmerge.modules import mergekit
from cgmerge.modules.compose_parts import count_layers, tensor_of

GOLDENS = json.loads((Path(__file__).parent / "mergekit_goldens.json").read_text())
CASES = GOLDENS["cases"]
VARIED = sorted(case for case in CASES if case.startswith("varied"))
LAYERS = 4
HEAD = "merge_method: ties\nbase_model: base\n"
Q0 = "model.layers.0.self_attn.q_proj"
EVERYTHING = {
    model: {name: torch.tensor(value) for name, value in values.items()}
    for model, values in GOLDENS["inputs"].items()
}


def read(text, tensor=mergekit.Tensor()):  # noqa: B008  (it is frozen)
    return mergekit.read(strictyaml.loads_mapping(text.encode(), source="r.yml"), "r.yml", tensor)


def written(folder, text):
    (folder / "merge.yml").write_text(text)
    return folder / "merge.yml"


def test_what_is_the_same_everywhere_does_not_vary():
    cases = [text["yaml"] for name, text in CASES.items() if name not in (*VARIED, "slerp")]
    assert len(cases) > 20
    assert not any(read(text).varies for text in cases)


@pytest.mark.parametrize("case", VARIED)
def test_gradients_and_filters_have_the_numbers_of_mergekit(case):
    text = CASES[case]["yaml"]
    assert read(text).varies
    seen = set()
    for name, value in CASES[case]["merged"].items():
        at = read(text, tensor_of(name, LAYERS))
        seen.add(str((at.experts, at.params)))
        delta = merge_state_dicts(
            at.method,
            [{name: EVERYTHING[ref][name] - EVERYTHING["base"][name]} for ref, _ in at.experts],
            weights=[weight for _, weight in at.experts],
            params=at.params,
        )[name]
        found = EVERYTHING["base"][name] + delta
        assert float((found - torch.tensor(value)).abs().max()) <= 1.2e-7, name
    assert len(seen) >= 4


def test_a_layer_is_the_first_number_of_a_name():
    assert tensor_of("model.layers.0.mlp.experts.7.w1.weight", 5) == mergekit.Tensor(
        "model.layers.0.mlp.experts.7.w1.weight", 0.0
    )
    assert tensor_of("model.layers.3.q.weight", 5).place == 0.75
    assert tensor_of("model.layers.0.q.weight", 1).place == 1.0  # as in mergekit
    assert tensor_of("lm_head.weight", 5).place == 0.0
    assert count_layers(["h.0.w", "h.11.w", "wte.weight"]) == 12
    assert count_layers(["wte.weight"]) == 0


@pytest.mark.parametrize(
    ("setting", "name", "place", "expected"),
    [
        ("[0.0, 1.0]", "x", 0.25, 0.25), ("[0, 1, 0]", "x", 0.75, 0.5), ("[2, 4]", "x", 1.0, 4.0),
        ("[{filter: mlp, value: [0, 1]}, {value: 3}]", "a.mlp.b", 0.5, 0.5),
        ("[{filter: mlp, value: [0, 1]}, {value: 3}]", "a.attn.b", 0.5, 3.0),
        ("[{filter: mlp, value: 1}, {filter: up, value: 2}, {filter: '*', value: 3}]",
         "mlp.up", 0, 1.0),
        ("{filter: mlp, value: 1}", "mlp", 0, 1.0),
        ("{filter: mlp, value: 1}", "attn", 0, 0.125),  # falls back to the shared value
    ],
)  # fmt: skip
def test_a_value_at_a_tensor(setting, name, place, expected):
    text = HEAD + "parameters: {weight: 0.125}\n"
    text += f"models: [{{model: a, parameters: {{weight: {setting}}}}}]"
    at = read(text, mergekit.Tensor(name, place))
    assert at.experts == (("a", expected),)
    assert read(text).varies


def test_a_tensor_that_no_filter_matches_is_named():
    text = HEAD + "models: [{model: a, parameters: {weight: {filter: mlp, value: 1}}}]"
    with pytest.raises(UsageError, match="`weight` of a: is missing for h.0.attn"):
        read(text, mergekit.Tensor("h.0.attn", 0.0))


VARYING = """merge_method: ties
base_model: {base}
models:
  - {{model: {one}, parameters: {{weight: [0.25, 1.0], density: [0.5, 0.8]}}}}
  - {{model: {two}, parameters: {{weight: [{{filter: q_proj, value: 0.75}}, {{value: 0.5}}],
                             density: [0.5, 0.8]}}}}
parameters: {{normalize: false, lambda: 0.8}}
dtype: float32
"""


def expected_varying(name, one, two, scale=0.8):
    """The rule of a tensor, spelled out, on the deltas of that tensor alone."""
    layer = 1.0 if ".1." in name else 0.0
    weights = [0.25 + 0.75 * layer, 0.75 if "q_proj" in name else 0.5]
    params = {
        "density": 0.5 + 0.3 * layer, "trim": "tensor", "tie": "positive", "normalize": False,
        "scale": scale,
    }  # fmt: skip
    return merge_state_dicts("ties", [{"w": one}, {"w": two}], weights=weights, params=params)["w"]


def test_gradients_and_filters_on_full_models(models, tmp_path, run):
    folders = [support.make_full(tmp_path / f"ft{i}", models / "B", seed=i) for i in (1, 2)]
    words = VARYING.format(base=models / "B", one=folders[0], two=folders[1])
    (tmp_path / "r.yml").write_text(words)
    code, _, err = run("compose", tmp_path / "r.yml", "-o", tmp_path / "out", "--json")
    assert code == 0, err
    assert "groups of modules" in err
    before, one, two = (support.load_tensors(f) for f in (models / "B", *folders))
    after = support.load_tensors(tmp_path / "out")
    for name, value in before.items():
        wanted = value + expected_varying(name, one[name] - value, two[name] - value)
        assert (after[name] - wanted).abs().max() < 1e-6, name
    parts = json.loads((tmp_path / "out" / "cgmerge.json").read_text())["parts"]
    assert sorted(name for part in parts for name in part["modules"]) == sorted(before)
    assert len(parts) == 4
    for again in ("again", "same"):
        record = tmp_path / "out" / "cgmerge.json"
        assert run("compose", record, "-o", tmp_path / again)[0] == 0
        assert support.folder_bytes(tmp_path / again) == support.folder_bytes(tmp_path / "out")


def test_gradients_and_filters_on_adapters(experts, models, run):
    words = VARYING.format(base=models / "B", one="E1", two="E2")
    path = written(experts, words)
    code, _, err = run(
        "compose", path, "--as", "adapter", "--rank", 32, "--scale", 0.5, "-o", experts / "out"
    )
    assert code == 0, err
    one, two = (support.dense_deltas(experts / name) for name in ("E1", "E2"))
    expected = {name: expected_varying(name, one[name], two[name], 0.5) for name in one}
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-5
    # A record can be changed as a whole, too.
    record = experts / "out" / "cgmerge.json"
    code, _, err = run("compose", record, "--scale", 1.0, "-o", experts / "double")
    assert code == 0, err
    doubled = {name: 2 * delta for name, delta in expected.items()}
    assert support.relative(support.dense_deltas(experts / "double"), doubled) < 1e-5


def test_what_varies_is_neither_tuned_nor_given_to_another_method(experts, models, run):
    path = written(experts, VARYING.format(base=models / "B", one="E1", two="E2"))
    (experts / "v.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    more = ("--as", "adapter", "-o", experts / "out")
    code, _, err = run("compose", path, *more, "-m", "linear")
    assert code == 2
    assert "for its own method only" in err
    code, _, err = run("compose", path, *more, "--tune", experts / "v.jsonl")
    assert code == 2
    assert "one value for all modules" in err
    assert not (experts / "out").exists()


def test_gradients_need_the_base(experts, run):
    text = "merge_method: linear\nmodels:\n"
    text += "  - {model: E1, parameters: {weight: [1, 2]}}\n"
    path = written(experts, text)
    code, _, err = run("compose", path, "-o", experts / "out")
    assert code == 2
    assert "need the base" in err
    assert "base_model" in err


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"modules": ["no.such"], "weights": [1, 1]}, "not merged here or named twice: no.such"),
        ({"modules": [Q0, Q0], "weights": [1, 1]}, "named twice"),
        ({"modules": [Q0], "weights": [1]}, "one finite weight for each of 2 experts"),
        ({"modules": [Q0], "weights": [1, "x"]}, "one finite weight for each of 2 experts"),
        ({"modules": [], "weights": [1, 1]}, "names its modules"),
        ({"modules": [Q0], "weights": [1, 1], "params": {"densty": 1}}, "no parameter `densty`"),
        ({"modules": [Q0], "weights": [1, 1], "other": 1}, "unknown key `other`"),
        ("x", "a part is a mapping"),
    ],
)
def test_parts_of_a_recipe_are_checked(experts, run, part, words):
    recipe = {"experts": ["E1", "E2"], "method": "ties", "parts": [part]}
    (experts / "r.json").write_text(json.dumps(recipe))
    code, _, err = run("compose", experts / "r.json", "-o", experts / "out")
    assert code == 2
    assert words in err


def test_the_other_modules_of_a_recipe_with_parts_follow_the_whole(experts, run):
    """Weights of a part are in the order of the experts as they are listed."""
    for name, listed, weights in (("a", ["E1", "E2"], [2, 3]), ("b", ["E2", "E1"], [3, 2])):
        part = {"modules": [Q0], "weights": weights}
        recipe = {"experts": listed, "method": "task-arithmetic", "parts": [part]}
        (experts / "r.json").write_text(json.dumps(recipe))
        assert run("compose", experts / "r.json", "-o", experts / name)[0] == 0
        found = support.dense_deltas(experts / name)
        one, two = (support.dense_deltas(experts / e) for e in ("E1", "E2"))
        expected = {n: one[n] + two[n] if n != Q0 else 2 * one[n] + 3 * two[n] for n in one}
        assert support.relative(found, expected) < 1e-6
