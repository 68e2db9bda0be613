"""mergekit's files: the numbers of mergekit 0.1.5 itself, and a name for all that is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from safetensors.torch import load_file

from cgmerge import strictyaml
from cgmerge.errors import UsageError
from cgmerge.merge import merge_state_dicts
from cgmerge.modules import mergekit
from cgmerge.modules.recipe import read_recipe

GOLDENS = json.loads((Path(__file__).parent / "mergekit_goldens.json").read_text())
CASES = GOLDENS["cases"]
REFUSED = {"slerp"}
VARIED = {case for case in CASES if case.startswith("varied")}  # see test_parts.py
SEEDS = 600


def tensors(values):
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}


KEPT = list(CASES["ties"]["merged"])
INPUTS = {
    model: tensors({name: values[name] for name in KEPT})
    for model, values in GOLDENS["inputs"].items()
}
BASE = INPUTS["base"]


def read(text):
    return mergekit.read(strictyaml.loads_mapping(text.encode(), source="r.yml"), "r.yml")


def deltas(*models):
    return [{name: INPUTS[m][name] - BASE[name] for name in BASE} for m in models]


def merged(reading, **changes):
    """Merge the deltas of the fine-tunes by the rule that a file was read as."""
    return merge_state_dicts(
        reading.method,
        deltas(*(ref for ref, _ in reading.experts)),
        weights=[weight for _, weight in reading.experts],
        params={**reading.params, **changes},
    )


def gap(delta, values):
    """Largest difference between base + delta, added in float32, and a golden model."""
    return max(float((BASE[n] + delta[n] - v).abs().max()) for n, v in tensors(values).items())


PLAIN = sorted(set(CASES) - VARIED - REFUSED - {"dare_one", "dare_ties_one"})


@pytest.mark.parametrize("case", PLAIN)
def test_numbers_are_those_of_mergekit(case):
    reading = read(CASES[case]["yaml"])
    assert reading.base in ("base", None)
    # Weights below 0.7: one unit in the last place of float32 is at most 6e-8.
    assert gap(merged(reading), CASES[case]["merged"]) <= 1.2e-7


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("ties", {"trim": "global"}),
        ("ties", {"normalize": False}),
        ("ties", {"scale": 1.0}),
        ("ties_sum", {"normalize": True}),
        ("ties_sum", {"density": 0.4}),
        ("dare_nothing_dropped", {"normalize": True}),
        ("dare_nothing_dropped", {"density": 0.9}),
        ("breadcrumbs", {"scope": "row"}),
        ("breadcrumbs", {"gamma": 0.05}),
        ("task_arithmetic", {"scale": 1.0}),
    ],
)
def test_every_parameter_of_the_reading_matters(case, change):
    reading = read(CASES[case]["yaml"])
    assert gap(merged(reading, **change), CASES[case]["merged"]) > 1e-4


def test_weights_take_part_in_the_vote_and_the_mean():
    reading = read(CASES["ties"]["yaml"])
    even = merge_state_dicts("ties", deltas("ft0", "ft1"), params=reading.params)
    assert gap(even, CASES["ties"]["merged"]) > 1e-3


def test_slerp_of_whole_weights_is_another_rule():
    """The reason of its refusal, in numbers."""
    case = CASES["slerp"]
    with pytest.raises(UsageError, match="merge_method `slerp`: it works on whole weights"):
        read(case["yaml"])
    ours = merge_state_dicts("slerp", deltas("ft0", "ft1"), params={"t": 0.3})
    assert gap(ours, case["merged"]) > 1e-3


@pytest.mark.parametrize(("case", "scale"), [("dare_one", 0.4), ("dare_ties_one", 0.8)])
def test_dare_restores_the_norm_of_what_it_keeps(case, scale):
    """What mergekit kept tells the mask; the factor is then that of `rescale=norm`."""
    reading = read(CASES[case]["yaml"])
    assert reading.params["rescale"] == "norm"
    assert reading.experts[0][1] * reading.params.get("scale", 1.0) == pytest.approx(scale)
    (delta,) = deltas("ft0")
    for name, value in tensors(CASES[case]["merged"]).items():
        found = (value - BASE[name]) / scale
        kept = found != 0
        assert 0 < kept.sum() < kept.numel()
        factor = delta[name].abs().sum() / delta[name].abs()[kept].sum()
        assert torch.allclose(found[kept], factor * delta[name][kept], atol=3e-7)
        # The paper's factor would be 2.
        assert abs(float(factor) - 2) > 0.01


@pytest.fixture(scope="module")
def moments():
    """Mean and variance over our seeds, for both methods of DARE and both ways to rescale."""
    found = {}
    for method, golden in GOLDENS["random"].items():
        given = golden["given"]
        lines = [f"merge_method: {method}", "base_model: base", "models:"]
        for place, weight in enumerate(given["weight"]):
            own = f"{{weight: {weight}, density: {given['density']}}}"
            lines.append(f"  - {{model: ft{place}, parameters: {own}}}")
        lines.append(f"parameters: {{lambda: {given.get('lambda', 1.0)}}}")
        reading = read("\n".join(lines))
        for rescale in ("norm", "share"):
            rows = []
            for seed in range(SEEDS):
                made = merged(reading, seed=seed, rescale=rescale)
                rows.append(np.concatenate([made[n].double().flatten() for n in sorted(made)]))
            found[method, rescale] = np.mean(rows, axis=0), np.var(rows, axis=0)
    return found


def standardized(method, found):
    """Return z-scores of the difference of means, and the ratio of total variances."""
    golden = GOLDENS["random"][method]
    mean, variance = (
        np.concatenate([np.ravel(golden[key][n]) for n in sorted(golden[key])])
        for key in ("mean", "variance")
    )
    error = np.sqrt(found[1] / SEEDS + variance / golden["seeds"])
    return (found[0] - mean) / error, found[1].sum() / variance.sum()


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_agrees_in_distribution(moments, method):
    z, ratio = standardized(method, moments[method, "norm"])
    assert np.abs(z).max() < 4.5  # 40 entries; the seeds are fixed
    assert 0.6 < (z**2).mean() < 1.5
    assert ratio == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_the_papers_rescaling_has_another_distribution(moments, method):
    _, ratio = standardized(method, moments[method, "share"])
    assert abs(ratio - 1) > 0.06


HEAD = "merge_method: ties\nbase_model: base\n"
ONE = "models: [{model: a, parameters: {weight: 0.5}}]\n"


def test_ties_is_read_with_mergekits_meaning():
    reading = read(HEAD + ONE)
    assert reading == mergekit.Reading(
        method="ties",
        params={"trim": "tensor", "tie": "positive", "density": 1.0, "normalize": True},
        experts=(("a", 0.5),),
        base="base",
        dtype="auto",
        notes=(),
    )


def test_a_parameter_of_a_model_comes_before_the_shared_one():
    reading = read(
        HEAD + "parameters: {weight: 0.25, density: 0.3}\n"
        "models: [{model: a, parameters: {weight: 2}}, {model: b}, {model: base}]"
    )
    assert reading.experts == (("a", 2.0), ("b", 0.25))
    assert reading.params["density"] == 0.3


@pytest.mark.parametrize(
    "weight", ["[0.5, 0.5, 0.5]", "[{value: 0.5}]", "[{value: 0.5}, {filter: mlp, value: 3}]",
               "[{filter: mlp, value: 0.5}, {value: 0.5}]", "[{filter: null, value: [0.5, 0.5]}]"],
)  # fmt: skip
def test_lists_that_say_one_number_are_that_number(weight):
    text = HEAD + f"models: [{{model: a, parameters: {{weight: {weight}}}}}]"
    assert read(text).experts == (("a", 0.5),)


@pytest.mark.parametrize(
    ("model", "ref"),
    [("base+a", "a"), ("a", "a"), ("{model: {path: base}, lora: {path: a+b@c}}", "a+b@c"),
     ("{model: base, lora: a}", "a"), ("{model: {path: x@y}}", "x@y"),
     ("base+hf://user/repo@main", "hf://user/repo@main")],
)  # fmt: skip
def test_spellings_of_a_model(model, ref):
    text = HEAD + f"models: [{{model: {model}, parameters: {{weight: 1}}}}]"
    assert read(text).experts == ((ref, 1.0),)


def test_the_base_of_the_adapters_is_the_base():
    text = "merge_method: linear\nmodels:\n" + "".join(
        f"  - {{model: {m}, parameters: {{weight: {w}}}}}\n"
        for m, w in (("b", 4), ("b+x", 1), ("b+y", 3))
    )
    reading = read(text)
    assert reading.base == "b"
    # The base counts in the average and has no delta.
    assert reading.experts == (("x", 0.125), ("y", 0.375))


def test_the_base_of_an_average_has_a_weight_as_in_mergekit():
    text = file(merge_method="linear", models=models({"weight": 1}, {"weight": 3}))
    with pytest.raises(UsageError, match="is missing: mergekit averages `base_model`"):
        read(text)
    listed = text.replace("[{", "[{model: base, parameters: {weight: 0}}, {")
    assert [weight for _, weight in read(listed).experts] == [0.25, 0.75]
    shared = read(text + "\nparameters: {weight: 4}")  # for every model that has none of its own
    assert [weight for _, weight in shared.experts] == [0.125, 0.375]
    alone = mergekit.Tensor("model.layers.0.mlp.up_proj.weight")
    part = text + "\nparameters: {weight: [{filter: attn, value: 1}]}"
    with pytest.raises(UsageError, match=r"missing for model\.layers\.0\.mlp\.up_proj"):
        mergekit.read(strictyaml.loads_mapping(part.encode(), source="r.yml"), "r.yml", alone)


@pytest.mark.parametrize(
    ("lines", "dtype", "noted"),
    [("", "auto", False), ("dtype: float32", "float32", False),
     ("dtype: bfloat16", "bfloat16", True),
     ("dtype: float32\nout_dtype: float16", "float16", False),
     ("dtype: bfloat16\nout_dtype: float32", "float32", True)],
)  # fmt: skip
def test_dtype_is_what_is_written(lines, dtype, noted):
    reading = read(HEAD + ONE + lines)
    assert reading.dtype == dtype
    assert any("computed in float32" in note for note in reading.notes) == noted


def test_what_has_no_effect_is_said():
    reading = read(
        HEAD + "parameters: {int8_mask: true}\ntokenizer_source: base\nmodels:\n"
        "  - {model: a, parameters: {weight: 1}}\n  - {model: base, parameters: {weight: 3}}"
    )
    assert reading.experts == (("a", 1.0),)
    assert [note.split()[0] for note in reading.notes] == ["int8_mask", "parameters"]


@pytest.mark.parametrize("density", [0.1, 0.3, 0.9, 1.0])
def test_drop_is_what_is_not_kept_in_decimals(density):
    text = f"merge_method: dare_linear\nbase_model: b\nparameters: {{density: {density}}}\n" + ONE
    reading = read(text)
    assert reading.params == {"drop": pytest.approx(1 - density), "rescale": "norm"}
    assert len(repr(reading.params["drop"])) <= 3
    off = read(text.replace("}\n", ", rescale: false}\n", 1))
    assert off.params["rescale"] == "none"


def file(**changes):
    """Return a good file as text, with lines replaced."""
    parts = {"merge_method": "ties", "base_model": "base", "models": ONE.split(": ", 1)[1].strip()}
    parts |= changes
    return "\n".join(f"{key}: {value}" for key, value in parts.items() if value is not None)


def models(*parameters):
    return str([{"model": f"m{i}", "parameters": p} for i, p in enumerate(parameters)]).replace(
        "'", ""
    )


W = {"weight": 1}
REFUSALS = [
    (file(slices="[{sources: []}]", models=None), "`slices`", "whole experts"),
    (file(modules="{a: {}}", models=None), "`modules`", "whole experts"),
    (file(tokenizer="{source: union}"), "`tokenizer`", "source: base"),
    (file(tokenizer_source="union"), "`tokenizer_source`", "write base"),
    (file(chat_template="auto"), "`chat_template`", "leave it out"),
    (file(out_dtpe="float16"), "`out_dtpe`", "did you mean `out_dtype`?"),
    (file(parameters="{densty: 0.5}"), "`densty`", "did you mean `density`?"),
    (file(models=models({"weigth": 1})), "`weigth`", "did you mean `weight`?"),
    (file(models="[{model: a, weight: 1}]"), "unknown key `weight` in an entry", "known: model"),
    (file(merge_method="tise"), "merge_method tise", "did you mean `ties`?"),
    (file(merge_method="[a]"), "merge_method ['a']", "known:"),
    (file(merge_method="slerp"), "merge_method `slerp`", "linear"),
    (file(merge_method="passthrough"), "merge_method `passthrough`", "--as model"),
    (file(merge_method="ram"), "merge_method `ram`", "ties"),
    (file(merge_method="nearswap"), "merge_method `nearswap`", "linear"),
    (file(merge_method="arcee_fusion"), "merge_method `arcee_fusion`", "breadcrumbs"),
    (file(merge_method="della"), "merge_method `della`", "-m della"),
    (file(merge_method="karcher"), "merge_method `karcher`", "-m karcher"),
    (file(merge_method="breadcrumbs_ties"), "merge_method `breadcrumbs_ties`", "ties"),
    (file(merge_method="task_arithmetic", parameters="{density: 0.5}"), "`density`", "known:"),
    (file(base_model=None), "needs `base_model`", "add `base_model`"),
    (file(base_model="b+a"), "`base_model`", "--as model"),
    (file(models="[{model: other+a}]"), "is an adapter on other, and the base is base", "one base"),
    (file(models="[{model: a+b+c}]"), "a+b+c is not BASE+ADAPTER", "lora"),
    (file(models="[{model: a@main}]"), "`@` names a revision", "hf://"),
    (file(models="[{model: {path: a}}]"), "unknown key `path`", "known: lora, model"),
    (file(models="[{model: {model: {path: a, revision: x}}}]"), "`revision`", "hf://"),
    (file(models=models({"weight": "[0, much]"})), "`weight`: must be a number", None),
    (file(models=models({"weight": "[0, [1]]"})), "`weight` of m0: must be a number", None),
    (file(models=models({"weight": "[{filter: mlp, valeu: 1}]"})), "`weight` of m0", None),
    (file(models=models({"weight": "[]"})), "`weight` of m0", None),
    (file(models=models({"weight": "much"})), "`weight`: must be a number, found much", None),
    (file(models=models({"weight": ".inf"})), "`weight`: must be finite", None),
    (file(models=models({"weight": "1e999"})), "`weight`: must be finite", None),
    (file(models=models({"weight": "true"})), "`weight`: must be a number", None),
    (file(models=models({})), "`weight` of m0: is missing", "requires one"),
    (file(models=models({"weight": 1, "lambda": 2})), "`lambda` of m0", "move it"),
    (
        file(models=models({**W, "density": 0.2}, {**W, "density": 0.4})),
        "`density`: must be the same for every model here, found m0 0.2, m1 0.4",
        "give one density",
    ),
    (file(models=models({**W, "density": 0.2}, W)), "found m0 0.2, m1 1", "give one density"),
    (file(parameters="{density: 20}"), "`density`: must be in (0, 1], found 20", None),
    (file(parameters="{density: 0}"), "`density`: must be in (0, 1], found 0", None),
    (file(merge_method="breadcrumbs", parameters="{gamma: 1}"), "`gamma`: must be in", None),
    (file(parameters="{rescale: true}"), "`rescale: True`", "lambda"),
    (file(parameters="{normalize: maybe}"), "`normalize`: must be true or false", None),
    (file(models=models({"weight": -1})), "negative weights (-1)", "`normalize: false`"),
    (
        file(merge_method="task_arithmetic", parameters="{normalize: true}",
             models=models({"weight": 1}, {"weight": -1})),
        "the weights sum to 0", None,
    ),
    (
        file(merge_method="linear", parameters="{normalize: false}", models=models(W, W),
             base_model=None),
        "`normalize: false`: the weights sum to 2", "task_arithmetic",
    ),
    (
        file(merge_method="linear", models="[{model: base}, {model: a, parameters: {weight: 1}}]"),
        "`weight` of the base: is missing", "weight: 0",
    ),
    (
        file(merge_method="linear", models=models(W, W)),
        "`weight` of the base: is missing", "weight: 0",
    ),
    (
        file(merge_method="linear", models="[{model: a, parameters: {weight: 1}}, {model: b}]"),
        "`weight` of b: is missing", "every model",
    ),
    (file(merge_method="nuslerp", models=models(W)), "needs 2 models", None),
    (file(merge_method="model_stock", models="[{model: a}]"), "needs at least 2 models", None),
    (
        file(merge_method="nuslerp", models=models(W, W), parameters="{nuslerp_flatten: false}"),
        "`nuslerp_flatten: False`", None,
    ),
    (
        file(merge_method="nuslerp", models=models(W, W), base_model=None),
        "needs `base_model`", "whole weights",
    ),
    (file(dtype="int8"), "`dtype: int8`", None),
    (file(out_dtype="float64"), "`out_dtype: float64`", None),
    (file(models="[]"), "`models`: must be a list of at least one", None),
    (file(models="a"), "`models`: must be a list of at least one", None),
    (file(models="[a]"), "`models`: every entry has the key `model`", None),
    (file(models="[{model: 3}]"), "`model`: must be a reference", None),
    (file(parameters="3"), "parameters: must be a mapping", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "hint"), REFUSALS)
def test_what_cannot_be_honoured_is_named(text, words, hint):
    with pytest.raises(UsageError) as caught:
        read(text)
    assert caught.value.code == "usage.mergekit"
    assert words in str(caught.value)
    assert str(caught.value).startswith("r.yml: ")
    assert hint is None or hint in caught.value.hint


def test_the_file_that_the_refusals_change_is_good():
    assert read(file()).experts == (("a", 0.5),)


def written(folder, text):
    (folder / "merge.yml").write_text(text)
    return folder / "merge.yml"


TWO = (
    "merge_method: ties\nbase_model: base\ndtype: float32\n"
    "models:\n  - {model: E1, parameters: {weight: 0.3}}\n"
    "  - {model: base+E2, parameters: {weight: 0.7}}\n"
    "parameters: {density: 0.5, normalize: false, lambda: 0.8}\n"
)


@pytest.fixture
def merge_file(experts, models):
    (experts / "base").symlink_to(models / "B")
    return written(experts, TWO)


def test_compose_writes_the_model_of_a_mergekit_file(experts, merge_file, models, run):
    code, out, err = run("compose", merge_file, "-o", experts / "out", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["method"], said["as"], said["scale"]) == ("ties", "model", 0.8)
    expected = merge_state_dicts(
        "ties",
        [support.dense_deltas(experts / name) for name in ("E1", "E2")],
        weights=[0.3, 0.7],
        params={
            "density": 0.5, "trim": "tensor", "tie": "positive", "normalize": False, "scale": 0.8,
        },
    )  # fmt: skip
    before = load_file(models / "B" / "model.safetensors")
    after = load_file(experts / "out" / "model.safetensors")
    for name, value in before.items():
        wanted = value + expected.get(name.removesuffix(".weight"), torch.zeros(()))
        assert (after[name] - wanted).abs().max() < 1e-6, name
    assert expected


def test_options_override_a_mergekit_file_and_the_record_repeats_it(experts, merge_file, run):
    text = merge_file.read_text().replace("merge_method: ties", "merge_method: dare_linear")
    written(experts, text)
    words = ("compose", merge_file, "--as", "adapter", "--scale", "0.5", "--rank", "8", "--json")
    code, out, err = run(*words, "-o", experts / "once")
    assert code == 0, err
    said = json.loads(out)
    assert (said["as"], said["scale"], said["rank"]) == ("adapter", 0.5, 8)
    assert any("in distribution" in warning for warning in said["warnings"])
    assert "in distribution" in err
    assert run("compose", experts / "once" / "cgmerge.json", "-o", experts / "again")[0] == 0
    assert support.folder_bytes(experts / "again") == support.folder_bytes(experts / "once")


def test_without_a_base_an_adapter_is_written(experts, run):
    path = written(
        experts,
        "merge_method: linear\nmodels:\n"
        "  - {model: E1, parameters: {weight: 1}}\n  - {model: E2, parameters: {weight: 3}}\n",
    )
    assert read_recipe(path).form == "adapter"
    code, out, err = run("compose", path, "-o", experts / "out", "--json")
    assert code == 0, err
    assert any("names no base" in warning for warning in json.loads(out)["warnings"])
    one, two = (support.dense_deltas(experts / name) for name in ("E1", "E2"))
    expected = {name: 0.25 * one[name] + 0.75 * two[name] for name in one}
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6


def test_whole_models_are_averaged_without_a_base(tmp_path, models, run):
    """As in mergekit: the weighted mean of the weights themselves."""
    weights = {"F1": 1.0, "F2": 3.0, "F3": -0.5}
    for seed, name in enumerate(weights):
        support.make_full(tmp_path / name, models / "B", seed=seed)
    listed = "".join(
        f"  - {{model: {name}, parameters: {{weight: {weight}}}}}\n"
        for name, weight in weights.items()
    )
    path = written(tmp_path, f"merge_method: linear\ndtype: float32\nmodels:\n{listed}")
    code, out, err = run("compose", path, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    assert any("relative to F1" in warning for warning in json.loads(out)["warnings"])
    read_in = {name: load_file(tmp_path / name / "model.safetensors") for name in weights}
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        wanted = sum(w * read_in[one][name].double() for one, w in weights.items()) / 3.5
        assert (value - wanted).abs().max() < 1e-6, name


def test_a_refusal_on_the_command_line(experts, merge_file, run):
    written(experts, TWO + "slices: []\n")
    code, out, err = run("compose", merge_file, "-o", experts / "out")
    assert (code, out) == (2, "")
    assert "`slices`" in err
    assert "whole experts" in err
    assert not (experts / "out").exists()


def test_json_is_read_like_yaml(experts, merge_file):
    same = strictyaml.loads_mapping(TWO.encode(), source="")
    (experts / "merge.json").write_text(json.dumps(same))
    assert read_recipe(experts / "merge.json") == read_recipe(merge_file)
