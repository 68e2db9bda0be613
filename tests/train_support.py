"""A base with a tokenizer that training tests can afford, and data files for it."""

import json
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cgmerge.modules.training.listener import Silent
from cgmerge.modules.training.settings import TrainSettings

LETTERS = tuple("abcdefgh")
WORDS = ("<pad>", "<eos>", "<unk>", "<bos>", "copy", "reverse", ":", "=", *LETTERS)
# As SmolLM2 and Qwen write it: the turn ends with a special token, then a line end.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(words=WORDS, **options):
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def make_byte_tokenizer(*, template=None):
    """Every character is a token, none is unknown; specials as chat models have them."""
    specials = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [*specials, *sorted(alphabet)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_base(folder, *, seed=0, hidden=32, tokenizer=None, **config):
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # the default is so small that LoRA could hardly move it
        **config,
    }
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed + 77_777)  # no later init may repeat the model's own numbers
    return folder


def make_rows(count=40, *, seed=3, skill="reverse"):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        word = rng.choices(LETTERS, k=rng.randint(2, 5))
        answer = word[::-1] if skill == "reverse" else word
        prompt = " ".join([skill, ":", *word, "="])
        rows.append({"prompt": prompt, "completion": " ".join(answer)})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(base, data, out, **changes):
    chosen = {"skill": "reverse", "rank": 4, "steps": 6, "batch_size": 8, "device": "cpu"}
    return TrainSettings(base=str(base), data=(data,), out=out, **{**chosen, **changes})


class Recorder(Silent):
    """Remembers what happened; `at_step` may do something after a step."""

    def __init__(self, at_step=None):
        self.losses, self.saved, self.resumed, self.warnings = {}, [], [], []
        self.at_step = at_step

    def on_resume(self, step, total, loss):
        self.resumed.append((step, loss))

    def on_step(self, step, total, loss):
        self.losses[step] = loss
        if self.at_step:
            self.at_step(step)

    def on_checkpoint(self, step):
        self.saved.append(step)

    def warn(self, text):
        self.warnings.append(text)
