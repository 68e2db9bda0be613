"""Small models and experts for tests, built without peft so that most tests stay fast."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, MLP, LAYERS, VOCAB, KV = 32, 48, 2, 128, 16


def llama_shapes(layers=LAYERS):
    """Module path to (out, in) of the test Llama; k and v are not square."""
    shapes = {}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{stem}.self_attn.k_proj": (KV, HIDDEN),
            f"{stem}.self_attn.v_proj": (KV, HIDDEN),
            f"{stem}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{stem}.mlp.gate_proj": (MLP, HIDDEN),
            f"{stem}.mlp.up_proj": (MLP, HIDDEN),
            f"{stem}.mlp.down_proj": (HIDDEN, MLP),
        }
    return shapes


def make_llama(folder, *, seed=0, tied=False, layers=LAYERS, hidden=HIDDEN, dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=MLP,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


def make_full(folder, base, *, seed=1, std=0.05, change=None, shard=None, only=""):
    """Write a full fine-tune of a model folder: noise on all weights whose name has `only`.

    `change` edits the tensors; `shard` splits them over files of at most so many bytes.
    """
    shutil.copytree(base, folder)
    tensors = load_tensors(folder)
    for path in Path(folder).glob("*.safetensors*"):
        path.unlink()
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        noise = torch.randn(tensors[name].shape, generator=generator) * std
        if only in name and tensors[name].is_floating_point():
            tensors[name] = (tensors[name].float() + noise).to(tensors[name].dtype)
    if change is not None:
        tensors = change(tensors)
    write_tensors(folder, tensors, shard)
    return Path(folder)


def load_tensors(folder):
    """All weights of a model folder, however they are sharded."""
    return {
        n: t for p in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(p).items()
    }


def write_tensors(folder, tensors, shard=None):
    """Write model weights as one file, or as shards of at most `shard` bytes and an index."""
    folder = Path(folder)
    if shard is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    groups, size = [{}], 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > shard and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += bytes_
    where = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def make_gpt2(folder, *, seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def pick(shapes, *leaves):
    return {path: size for path, size in shapes.items() if path.rsplit(".", 1)[-1] in leaves}


def make_expert(folder, shapes, *, rank=4, alpha=8, seed=1, std=0.1, dtype=torch.float32, **config):
    """Write a PEFT folder with non-zero B; `ranks` maps a module suffix to its own rank."""
    ranks = config.pop("ranks", {})
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (out, into) in shapes.items():
        own = next((r for key, r in ranks.items() if path.endswith(key)), rank)
        a = torch.randn(own, into, generator=generator) * std
        b = torch.randn(out, own, generator=generator) * std
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    raw = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in shapes}),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
    }
    if ranks:
        raw["rank_pattern"] = ranks
    raw.update(config)
    write_expert(folder, tensors, raw)
    return folder


def write_expert(folder, tensors, config):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))


def edit_config(folder, **changes):
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    path = Path(folder) / "adapter_model.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})


def edit_weights(folder, part, change):
    """Change every weight of a model folder whose name has `part`."""
    path = Path(folder) / "model.safetensors"
    tensors = {n: change(t) if part in n else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def dense_deltas(folder):
    """ΔW of every module in float64, straight from the files: an independent reading."""
    folder = Path(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace("lora_A", "lora_B")]
        alpha = config["lora_alpha"]
        for key, value in config.get("alpha_pattern", {}).items():
            if path.endswith(key):
                alpha = value
        rank = a.shape[0]
        scaling = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        found[path] = scaling * (b.double() @ a.double())
    return found


def relative(found, expected):
    """‖found − expected‖ / ‖expected‖ over all modules; a missing module counts as zero."""
    names = set(found) | set(expected)
    zero = torch.zeros((), dtype=torch.float64)
    gap = sum(
        float((found.get(n, zero).double() - expected.get(n, zero).double()).square().sum())
        for n in names
    )
    size = sum(float(value.double().square().sum()) for value in expected.values())
    return (gap / size) ** 0.5


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
