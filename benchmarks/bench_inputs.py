"""Random models and experts for `bench_merge.py`: Llamas of a given shape, no training.

Run as a program it writes one set of inputs and ends, so that what making them takes in memory
and threads is no part of any measurement:

    python benchmarks/bench_inputs.py FOLDER '{"layers": 16, …}' FULL ADAPTERS
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

RANK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with grouped-query attention (half as many key heads) and its own head."""

    layers: int
    hidden: int
    mlp: int
    vocab: int
    heads: int = 16

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of the linear modules of one layer."""
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.hidden // 2, self.hidden),
            "self_attn.v_proj": (self.hidden // 2, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "mlp.down_proj": (self.hidden, self.mlp),
        }

    @property
    def parameters(self) -> int:
        """Return the number of weights of the whole model."""
        matrices = sum(out * into for out, into in self.modules.values())
        norms = 2 * self.layers * self.hidden + self.hidden
        return self.layers * matrices + 2 * self.vocab * self.hidden + norms

    def as_json(self) -> str:
        """Return what the program takes."""
        return json.dumps(asdict(self))


def make_inputs(folder: Path, shape: Shape, full: int, adapters: int) -> None:
    """Write `base` and `ft0 …` in bfloat16, and `lora0 …` in float32.

    Args:
        folder: Created.
        shape: Of every model.
        full: How many full fine-tunes: the base plus heavy-tailed noise.
        adapters: How many LoRA experts of rank 16 on all linear modules.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        vocab_size=shape.vocab,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="200MB")
    if full:
        start = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(full):
        for name, value in model.state_dict().items():
            # Cubed: a fine-tune moves few weights far and most of them hardly.
            noise = torch.randn(value.shape).pow_(3).mul_(0.002 / 15**0.5)
            value.copy_(start[name].float() + noise)
        model.save_pretrained(folder / f"ft{number}", max_shard_size="200MB")
    for number in range(adapters):
        _write_adapter(folder / f"lora{number}", shape, str(folder / "base"))


def _write_adapter(out: Path, shape: Shape, base: str) -> None:
    import torch

    from cgmerge import fs
    from cgmerge.modules.adapter_out import AdapterForm, write_adapter

    factors = {
        f"model.layers.{layer}.{leaf}": (
            torch.randn(RANK, into) * 0.02,
            torch.randn(rows, RANK) * 0.02,
        )
        for layer in range(shape.layers)
        for leaf, (rows, into) in shape.modules.items()
    }
    with fs.new_folder(out) as stage:
        write_adapter(stage, factors, AdapterForm(RANK, 2 * RANK, base))


if __name__ == "__main__":
    where, sizes, models, experts = sys.argv[1:]
    make_inputs(Path(where), Shape(**json.loads(sizes)), int(models), int(experts))
