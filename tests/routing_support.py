"""Small models, random experts and a naive oracle for the tests of routing."""

from contextlib import contextmanager
from types import SimpleNamespace

import support
import torch

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.loading import LoadedBase


def llama(seed=0, layers=2, dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=support.HIDDEN,
        intermediate_size=support.MLP,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=support.VOCAB,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return loaded(model)


def gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=64, attn_implementation="eager"
    )
    return loaded(GPT2LMHeadModel(config).eval())


def loaded(model):
    return LoadedBase(None, model, SimpleNamespace(bos_token_id=None, pad_token_id=0))


def expert(shapes, rank=3, seed=0, std=0.3):
    generator = torch.Generator().manual_seed(seed)
    return {
        path: LowRank(
            torch.randn(rank, into, generator=generator) * std,
            torch.randn(out, rank, generator=generator) * std,
        )
        for path, (out, into) in shapes.items()
    }


def different_experts(shapes=None):
    """Three experts: all modules at rank 3, q and down at rank 5, everything but v at rank 1."""
    shapes = support.llama_shapes() if shapes is None else shapes
    some = {p: s for p, s in shapes.items() if p.endswith(("q_proj", "down_proj"))}
    rest = {p: s for p, s in shapes.items() if not p.endswith("v_proj")}
    return [expert(shapes, 3, 1), expert(some, 5, 2), expert(rest, 1, 3)]


@contextmanager
def naively(model, experts, weigh):
    """Add Σ w_e·ΔW_e·x in a loop over dense matrices; weigh(path, x) gives [..., experts]."""
    modules = dict(model.named_modules())

    def hook(path):
        def add(_module, args, output):
            x = args[0]
            weights = weigh(path, x)
            for number, own in enumerate(experts):
                if path in own:
                    output = output + weights[..., number, None] * (x @ own[path].dense().T)
            return output

        return add

    paths = dict.fromkeys(path for own in experts for path in own)
    handles = [modules[path].register_forward_hook(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def choose(scores, k, temperature=1.0):
    """Softmax over the k best of one row of scores, of equal ones the first; plain Python."""
    kept = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[: k or len(scores)]
    top = torch.tensor([scores[e] for e in kept], dtype=torch.float64) / temperature
    found = torch.zeros(len(scores), dtype=torch.float64)
    found[kept] = top.softmax(0)
    return found.float()


def rows(count=6, seed=0, prompt=5, target=2):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        size = prompt + number % 3
        ids = torch.randint(3, support.VOCAB, (size + target,), generator=generator).tolist()
        found.append(Encoded(ids[:size], ids[size:]))
    return found


def logits(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits
