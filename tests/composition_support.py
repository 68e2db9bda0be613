"""Experts for the embedded base, made fast: random factors, no training."""

from functools import cache

import support
import torch

from cgmerge.modules.base import open_base
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import load_base


@cache
def tiny():
    """The embedded base in memory; every test leaves it as it was."""
    return load_base(open_base("tiny"))


def shapes(*leaves):
    modules = open_base("tiny").modules
    return {
        path: (module.out_features, module.in_features)
        for path, module in modules.items()
        if path.rsplit(".", 1)[-1] in leaves
    }


def make_experts(folder):
    """Three experts of different ranks and modules, as opened."""
    support.make_expert(folder / "sort", shapes("q_proj", "v_proj", "up_proj"), rank=4, seed=1)
    support.make_expert(folder / "reverse", shapes("q_proj", "down_proj"), rank=2, alpha=6, seed=2)
    support.make_expert(folder / "count", shapes("q_proj", "v_proj", "o_proj"), rank=3, seed=3)
    return [open_expert(str(folder / name)) for name in ("sort", "reverse", "count")]


def ids(rows, columns, seed=0):
    size = tiny().model.config.vocab_size
    return torch.randint(3, size, (rows, columns), generator=torch.Generator().manual_seed(seed))


def logits(tokens, **options):
    with torch.no_grad():
        return tiny().model(input_ids=tokens, use_cache=False, **options).logits
