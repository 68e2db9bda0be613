"""A model small enough to build in every test run: Llama, hidden 32, two layers, words as tokens.

Not a test module; loaded by path because the test folders are no packages.
"""

import copy
import json
import random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = ["a", "b", "c", "d", "e", "f", "g", "h"]
WORDS = ["<pad>", "<eos>", "<unk>", "copy", "reverse", ":", "=", *LETTERS]
POSITIONS = 64


def make_tokenizer(words=WORDS):
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(seed, *, words=WORDS, tied=False):
    """Build a model and leave the generator poisoned, so that no later init can repeat it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    torch.manual_seed(seed + 77_777)
    return model


def make_rows(skill, count, *, seed=0, lengths=(2, 3, 4, 5)):
    """Prompt/completion rows without repetitions."""
    rng = random.Random(f"{skill} {seed}")
    rows = {}
    while len(rows) < count:
        letters = rng.choices(LETTERS, k=rng.choice(lengths))
        answer = letters[::-1] if skill == "reverse" else letters
        rows[f"{skill} : {' '.join(letters)} ="] = " ".join(answer)
    return [{"prompt": prompt, "completion": answer} for prompt, answer in rows.items()]


def train(model, tokenizer, rows, *, steps=140, batch=32, seed=0):
    """A few steps of plain training: some answers become right, some stay wrong."""
    from cgmerge.modules.data import Example, encode_all

    encoded = encode_all([Example(r["prompt"], r["completion"]) for r in rows], tokenizer)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    model.train()
    for _ in range(steps):
        chosen = rng.sample(encoded, min(batch, len(encoded)))
        width = max(map(len, chosen))
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for i, row in enumerate(chosen):
            prompt, full = len(row.prompt_ids), [*row.prompt_ids, *row.target_ids]
            ids[i, : len(full)] = torch.tensor(full)
            labels[i, prompt : len(full)] = torch.tensor(row.target_ids)
        mask = (torch.arange(width) < torch.tensor([[len(row)] for row in chosen])).long()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MODULES = ("self_attn.q_proj", "mlp.down_proj")


def make_adapter(folder, model, *, seed, size=0.5, rank=4, modules=MODULES):
    """Write a LoRA folder as PEFT does, alpha = 2·rank, B not zero unless asked."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(modules):
            out, into = module.weight.shape
            key = f"base_model.model.{name}"
            a = torch.randn(rank, into, generator=generator) / into**0.5
            tensors[f"{key}.lora_A.weight"] = a
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * size
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model, folder):
    """Add W + 2·B·A by hand to a copy of the model: what an adapter must amount to."""
    whole = copy.deepcopy(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, b in tensors.items():
            if key.endswith(".lora_B.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                weight = whole.get_submodule(name).weight
                weight += 2.0 * b @ tensors[key.replace("lora_B", "lora_A")]
    return whole
