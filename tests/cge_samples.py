"""Compressed experts that the tests of the format share."""

import numpy as np
import torch

from cgmerge.modules.compress.sections import Coded

FIELDS = {"base": {"id": "some/base"}, "peft": {"r": 4}, "method": {"mode": "ternary"}}


def coded(name, rows=3, columns=40, *, seed=0, per_row=False, transposed=False, spread=0.6):
    generator = np.random.default_rng(seed)
    levels = np.rint(generator.normal(0, spread, (rows, columns))).astype(np.int8)
    scales = generator.random(rows if per_row else 1).astype(np.float32) + 0.5
    return Coded(name, levels, scales, transposed)


def sample():
    """Three coded tensors of several kinds and three dense ones."""
    return [
        coded("m.b.lora_B", 4, 30, seed=1, per_row=True, transposed=True, spread=2.0),
        coded("m.a.lora_A", 3, 40),
        coded("m.empty.lora_A", 2, 9, spread=0.0),
    ], {
        "m.bias": np.array([1.5, -2.0], np.float32),
        "m.head": torch.tensor([[1.0], [2.0], [-0.5]], dtype=torch.bfloat16),
        "m.none": np.zeros((0, 3), np.float16),
    }
