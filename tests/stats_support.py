"""Statistics made of random numbers: files that only a model pass would write otherwise."""

import json

import torch
from safetensors.torch import save_file

from cgmerge.modules.expert import open_expert
from cgmerge.modules.statsfile import SCHEMA, path_of


def stats_tensors(expert, seed):
    """Gram and Fisher of every module of an expert, float32."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (out, into) in expert.sizes.items():
        x = torch.randn(3 * into, into, generator=generator)
        found[f"gram.{name}"] = x.T @ x / len(x)
        found[f"fisher.{name}"] = torch.randn(out, into, generator=generator).square()
    return found


def make_stats(folder, fingerprint, *, seed=1, tensors=None, **content):
    """Write a statistics file beside an expert; `tensors` edits the values, `content` the header.

    With `along` it is the layerwise one. Returns its path.
    """
    expert = open_expert(str(folder))
    values = stats_tensors(expert, seed)
    values = values if tensors is None else tensors(values)
    header = {"schema": SCHEMA, "expert": expert.digest, "base": fingerprint, "shared": {}}
    header |= {"data": [f"{seed:064x}"], "rows": 8, "tokens": 100 + seed, **content}
    path = path_of(expert, "layerwise" if "along" in content else "gram")
    save_file(values, path, metadata={"cgmerge": json.dumps(header)})
    return path
