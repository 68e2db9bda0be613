"""Write tests/modules/mergekit_goldens.json: what mergekit itself makes of small merges.

The test suite has no mergekit; it reads these numbers. Run once, with the python of an environment
that has mergekit 0.1.5:

    python benchmarks/mergekit_goldens.py --peers PYTHON

A base and three fine-tunes of a four-layer Llama are made from Python's own generator, with values
that are sums of few powers of two, so that deltas are exact in float32. mergekit merges them from
YAML files; some tensors are kept, with the inputs. What DARE does at random is kept as mean and
variance over many seeds.
"""

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "tests" / "modules" / "mergekit_goldens.json"
MODELS = ("base", "ft0", "ft1", "ft2")
KEPT = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight")
DEEPER = ("model.layers.2.mlp.up_proj.weight", "model.layers.3.input_layernorm.weight")
OUTSIDE = ("model.norm.weight",)
LAYERS = 4
SEEDS = 4000

CASES = {
    "ties": "ties(ft0=.3, ft1=.7; density=.5 normalize=true lambda=.8)",
    "ties_sum": "ties(ft0=.3, ft1=.7; density=.5 normalize=false lambda=.8)",
    "ties_forget": "ties(ft0=1, ft1=.5, ft2=-.4; density=.25 normalize=false)",
    "ties_all": "ties(ft0=.2, ft1=.2, ft2=.2;)",
    "ties_few": "ties(base=.5, ft0=.3, ft1=.7; density=.001)",
    "task_arithmetic": "task_arithmetic(ft0=.6, ft1=-.25; lambda=.7)",
    "task_arithmetic_mean": "task_arithmetic(ft0=.6, ft1=.2; lambda=.7 normalize=true)",
    "linear": "linear(ft0=.3, ft1=.9, ft2=.2;)",
    "linear_sum": "linear(ft0=.25, ft1=.75; normalize=false)",
    "linear_with_base": "linear(base=.5, ft0=.3, ft1=.7;)",
    "linear_base_not_listed": "linear+(ft0, ft1=.75; weight=.5)",
    "dare_one": "dare_linear(ft0=.8; density=.5 lambda=.5)",
    "dare_ties_one": "dare_ties(ft0=.8; density=.5)",
    "dare_nothing_dropped": "dare_ties(ft0=.6, ft1=.4, ft2=.3; lambda=.9)",
    "dare_nothing_dropped_mean": "dare_ties(ft0=.6, ft1=.4, ft2=.3; normalize=true)",
    "dare_linear_mean": "dare_linear(ft0=.6, ft1=.2; normalize=true)",
    "breadcrumbs": "breadcrumbs(ft0=.6, ft1=.4; density=.5 gamma=.15)",
    "breadcrumbs_all": "breadcrumbs(ft0=.6, ft1=.4; gamma=.15)",
    "breadcrumbs_mean": "breadcrumbs(ft0=.6, ft1=.4; density=.5 gamma=.15 normalize=true)",
    "model_stock": "model_stock(ft0, ft1, ft2;)",
    "nuslerp": "nuslerp(ft0=.3, ft1=.9;)",
    "multislerp": "multislerp(base=.5, ft0=.3, ft1=.5, ft2=.4;)",
    "slerp": "slerp(ft0, ft1; t=.3)",
}
# Values that differ between layers, or between tensors by their names.
VARIED = {
    "varied_ties": """merge_method: ties
base_model: base
models:
  - {model: ft0, parameters: {weight: [0.25, 1.0], density: [0.8, 0.5, 0.25]}}
  - {model: ft1, parameters: {weight: [{filter: mlp, value: 0.75}, {value: [0.5, 0.0, 1.0]}],
                              density: [0.8, 0.5, 0.25]}}
parameters: {normalize: true, lambda: [1.0, 0.5]}
dtype: float32
""",
    "varied_sum": """merge_method: task_arithmetic
base_model: base
models:
  - {model: ft0, parameters: {weight: [{filter: k_proj, value: -0.5}]}}
  - {model: ft1, parameters: {weight: [{filter: layernorm, value: [1, 0, 0.5]},
                                       {filter: "*", value: 0.25}]}}
parameters: {weight: [0.1, 0.9], lambda: [{filter: up_proj, value: 0.7}]}
dtype: float32
""",
    "varied_linear": """merge_method: linear
base_model: base
models:
  - {model: base, parameters: {weight: [0.5, 0.1]}}
  - {model: ft0, parameters: {weight: [0.1, 0.9]}}
  - {model: ft2, parameters: {weight: {filter: mlp, value: 0.3}}}
parameters: {weight: 0.2}
dtype: float32
""",
    "varied_breadcrumbs": """merge_method: breadcrumbs
base_model: base
models:
  - {model: ft0, parameters: {weight: [0.6, 0.2], density: [0.9, 0.3], gamma: [0.0, 0.3]}}
  - {model: ft1, parameters: {weight: 0.4, density: [0.9, 0.3], gamma: [0.0, 0.3]}}
parameters: {normalize: [{filter: mlp, value: true}, {value: false}]}
dtype: float32
""",
}
RANDOM = {
    "dare_linear": {"weight": [0.6, 0.4], "density": 0.5},
    "dare_ties": {"weight": [0.6, 0.4], "density": 0.5, "lambda": 0.9},
}

DRIVER = """
import json, sys
import torch, yaml
from pathlib import Path
from safetensors.torch import load_file
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import merge_state_dicts
from mergekit.options import MergeOptions
kept, varied, random_cases, seeds, models = json.loads(sys.argv[1])
torch.set_num_threads(1)
options = MergeOptions(copy_tokenizer=False, write_model_card=False, random_seed=1, quiet=True)
found = {"cases": {}, "random": {}}
for path in sorted(Path(".").glob("*.yml")):
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(path.read_text())), "out", options)
    merged = load_file("out/model.safetensors")
    names = kept + varied if path.stem.startswith("varied") else kept
    found["cases"][path.stem] = {name: merged[name].tolist() for name in names}
states = {name: load_file(name + "/model.safetensors") for name in models}
found["inputs"] = {m: {n: states[m][n].tolist() for n in kept + varied} for m in models}
states = {name: {k: state[k] for k in kept} for name, state in states.items()}
given = {name: states[name] for name in ("base", "ft0", "ft1")}
for method, parameters in random_cases.items():
    parameters["weight"] = dict(zip(("ft0", "ft1"), parameters["weight"]))
    first = {name: torch.zeros_like(given["base"][name], dtype=torch.float64) for name in kept}
    second = {name: value.clone() for name, value in first.items()}
    for seed in range(seeds):
        torch.manual_seed(seed)
        merged = merge_state_dicts(given, method, parameters=parameters, base="base")
        for name in kept:
            delta = merged[name].double() - given["base"][name].double()
            first[name] += delta / seeds
            second[name] += delta.square() / seeds
    found["random"][method] = {
        "mean": {name: first[name].tolist() for name in kept},
        "variance": {name: (second[name] - first[name].square()).tolist() for name in kept},
    }
Path("found.json").write_text(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peers", type=Path, required=True, help="python of a mergekit environment"
    )
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        texts = {case: as_yaml(short) for case, short in CASES.items()} | VARIED
        for case, text in texts.items():
            (folder / f"{case}.yml").write_text(text)
        asked = json.dumps([KEPT, DEEPER + OUTSIDE, RANDOM, SEEDS, MODELS])
        command = [str(options.peers), "-c", DRIVER, asked]
        subprocess.run(command, cwd=folder, check=True)
        found = json.loads((folder / "found.json").read_text())
    found["cases"] = {
        case: {"yaml": texts[case], "merged": merged} for case, merged in found["cases"].items()
    }
    for method, moments in found["random"].items():
        moments |= {"given": RANDOM[method], "seeds": SEEDS}
    found["random"] = rounded(found["random"], 4)
    text = json.dumps(rounded(found, 9), separators=(",", ":"))
    options.out.write_text(text.replace('},"', '},\n"') + "\n")


def as_yaml(short: str) -> str:
    """Write a case as the file that mergekit reads; `linear+` names a base that is no model."""
    method, _, rest = short.rstrip(")").partition("(")
    models, _, settings = rest.partition(";")
    lines = [f"merge_method: {method.rstrip('+')}", "models:"]
    for item in models.split(","):
        model, _, weight = item.strip().partition("=")
        lines.append(f"  - model: {model}")
        if weight:
            lines.append(f"    parameters: {{weight: {float(weight)}}}")
    if method != "linear":
        lines.append(f"base_model: {'ft0' if method == 'slerp' else 'base'}")
    if settings.strip():
        pairs = (word.replace("=.", "=0.").replace("=", ": ") for word in settings.split())
        lines.append(f"parameters: {{{', '.join(pairs)}}}")
    return "\n".join([*lines, "dtype: float32", ""])


def make_models(folder: Path) -> None:
    """Write base and fine-tunes as ordinary model folders."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=4,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        tie_word_embeddings=False,
    )
    empty = LlamaForCausalLM(config)
    for model in MODELS:
        empty.save_pretrained(folder / model)
        path = folder / model / "model.safetensors"
        tensors = {}
        for name, value in load_file(path).items():
            numbers = _numbers(f"base {name}", value.numel(), 19)
            if model != "base":
                # Something in common, so that the fine-tunes are neither alike nor unrelated.
                for words in (f"common {name}", f"{model} {name}"):
                    more = _numbers(words, value.numel(), 15)
                    numbers = [x + y for x, y in zip(numbers, more, strict=True)]
            tensors[name] = torch.tensor(numbers, dtype=torch.float64).float().reshape(value.shape)
        save_file(tensors, path, metadata={"format": "pt"})


def _numbers(words: str, count: int, bits: int) -> list[float]:
    """Return multiples of 2^-20 below 2^(bits-20), the same on every machine."""
    source = random.Random(words)
    return [(source.getrandbits(bits + 1) - 2**bits) / 2**20 for _ in range(count)]


def rounded(value: Any, digits: int) -> Any:
    """Shorten floats; nine digits are exact for float32."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
