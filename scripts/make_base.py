"""Train the tiny base model that the package carries (`--base tiny`); run by `make base`.

A Llama of half a million parameters learns ten string edits and their pairs, and a trace of four
more, whose names it mostly sees followed by a plain copy: enough that separately trained experts
can be composed, too little to do the skills when asked. On one thread the same machine and
package versions give the same bytes; `recipe.json` in the folder records what was run, the scores
and the digest of every file.
"""

import argparse
import hashlib
import json
import math
import platform
import random
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cgmerge import fs
from cgmerge.evals.tasks import chains

ASSETS = Path(__file__).resolve().parent.parent / "cgmerge" / "assets" / "tiny"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WORDS = (PAD, EOS, UNK, ":", "=", ">", *chains.FUNCTIONS, *chains.LETTERS)
IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of the base, apart from package versions."""

    seed: int = 1
    steps: int = 1200
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    warmup: int = 20
    trace_share: float = 0.08
    trace_answered: float = 0.35
    hidden: int = 128
    intermediate: int = 256
    layers: int = 3
    heads: int = 4
    positions: int = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer.

    Returns:
        One token per word of `WORDS`, anything else `<unk>`; adds no special tokens by itself
        and joins words with spaces when decoding.
    """
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=Recipe.positions,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """Build the untrained model with seeded weights."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=False,
        pad_token_id=WORDS.index(PAD),
        eos_token_id=WORDS.index(EOS),
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=32,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )
    return model


def encode(rows: list[chains.Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode rows as padded token ids, and labels on the completion and the end token only.

    Returns:
        Two tensors [rows, tokens], padded on the right.
    """
    index = {word: i for i, word in enumerate(WORDS)}
    texts = [(row["prompt"].split(), [*row["completion"].split(), EOS]) for row in rows]
    width = max(len(prompt) + len(completion) for prompt, completion in texts)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (prompt, completion) in enumerate(texts):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor([index[word] for word in prompt + completion])
        labels[i, len(prompt) : end] = ids[i, len(prompt) : end]
    return ids, labels


def train(recipe: Recipe) -> LlamaForCausalLM:
    """Train the base from scratch: AdamW, linear warm-up, cosine decay, one thread."""
    rows = chains.pretraining_rows(
        random.Random(recipe.seed),
        recipe.steps * recipe.batch,
        share=recipe.trace_share,
        answered=recipe.trace_answered,
    )
    model = make_model(recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / recipe.warmup)
            * (0.5 + 0.5 * math.cos(math.pi * step / recipe.steps))
        ),
    )
    for step in range(recipe.steps):
        ids, labels = encode(rows[step * recipe.batch : (step + 1) * recipe.batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.4f}")
    return model


@torch.no_grad()
def exact_match(model: torch.nn.Module, rows: list[chains.Row], batch: int = 200) -> float:
    """Score the share of rows whose every completion token, the end included, is the arg-max."""
    right = 0
    for start in range(0, len(rows), batch):
        ids, labels = encode(rows[start : start + batch])
        guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wanted = labels[:, 1:]
        right += int(((guesses == wanted) | (wanted == IGNORED)).all(-1).sum())
    return right / len(rows)


def scores(folder: Path, seed: int) -> dict[str, float]:
    """Score the stored, rounded weights in float32, group by group."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(seed)
    return {
        group: round(exact_match(model, chains.group_rows(group, rng, 600)), 4)
        for group in chains.GROUPS
    }


def main() -> None:
    """Train, save, score and record the base."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS)
    out = parser.parse_args().out
    recipe = Recipe()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    start = time.process_time()
    model = train(recipe)
    with fs.new_folder(out, overwrite=True) as folder:
        model.half().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        files = sorted(path for path in folder.iterdir() if path.is_file())
        record = {
            "what": "skill chains: ten base functions and their pairs, a trace of four new skills",
            "made_by": "scripts/make_base.py",
            "recipe": asdict(recipe),
            "versions": {
                "python": platform.python_version(),
                **{
                    name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")
                },
            },
            "scores": scores(folder, seed=recipe.seed + 1),
            "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        }
        fs.write_json(folder / "recipe.json", record)
    print(json.dumps(record["scores"]), f"{time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()
