"""Sizes and speeds of the codec of compressed experts, against the entropy; and of whole files.

Sizes are exact. Speeds are entries per second of CPU time on one thread, the best of several
runs. The file is a rank-16 expert of a 7B Llama on all linear layers: 448 tensors, 40 M
parameters.

    python benchmarks/codec_speed.py [--entries 16000000] [--repeat 5] [--out FILE.json]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from cgmerge.modules.compress.codec import coded_bits, decode, dtype_of, encode
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.sections import Coded

Array = np.ndarray[Any, Any]

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.2138, 0.25, 0.3, 0.35, 0.382, 0.4, 0.43, 0.5, 1.0)
SPREADS = (0.3, 0.5, 0.7, 1.0, 2.0, 4.0, 20.0)
LAYERS, HIDDEN, MLP, RANK = 32, 4096, 11008, 16
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


def entropy(levels: Array) -> float:
    """Return the bits of a tensor whose values take -log2 of their share each."""
    smallest = int(levels.min())
    counts = np.bincount((levels.astype(np.int64) - smallest).reshape(-1))
    counts = counts[counts > 0]
    return float((counts * np.log2(levels.size / counts)).sum())


def ternary(generator: np.random.Generator, rows: int, columns: int, density: float) -> Array:
    levels = (generator.random((rows, columns)) < density).astype(np.int8)
    levels[generator.random((rows, columns)) < 0.5] *= -1
    return levels


def seconds(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def measure(levels: Array, repeat: int) -> dict[str, float]:
    section, dtype = encode(levels), dtype_of(levels)
    if not np.array_equal(decode(section, *levels.shape, dtype), levels):
        raise SystemExit("the codec lost something")
    million = levels.size / 1e6
    return {
        "bits_per_entry": 8 * len(section) / levels.size,
        "over_entropy": 8 * len(section) / entropy(levels),
        "encode": million / seconds(lambda: encode(levels), repeat),
        "size_only": million / seconds(lambda: coded_bits(levels), repeat),
        "decode": million / seconds(lambda: decode(section, *levels.shape, dtype), repeat),
    }


def expert(density: float) -> Iterator[Coded]:
    """Yield the factors of the 7B expert, densities differing from tensor to tensor."""
    generator = np.random.default_rng(0)
    for layer in range(LAYERS):
        for module, (out, into) in MODULES.items():
            for factor, width in (("lora_A", into), ("lora_B", out)):
                share = min(density * float(np.exp(generator.normal(0, 0.3))), 1.0)
                levels = ternary(generator, RANK, width, share)
                scale = np.array([0.01 * generator.random() + 0.001], np.float32)
                name = f"model.layers.{layer}.{module}.{factor}"
                yield Coded(name, levels, scale, transposed=factor == "lora_B")


def manifest() -> dict[str, Any]:
    """Return a manifest as long as a real one."""
    return {
        "base": {"id": "meta-llama/Llama-2-7b-hf", "fingerprint": "8b" * 32, "dtype": "float16"},
        "peft": {
            "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0,
            "target_modules": sorted(name.split(".")[1] for name in MODULES), "bias": "none",
            "task_type": "CAUSAL_LM", "use_rslora": False, "fan_in_fan_out": False,
        },
        "method": {"mode": "ternary", "density": 0.05, "multiplier": 2.2, "seed": 0},
        "fidelity": {"delta_error": 0.62, "cosine_min": 0.71, "cosine_mean": 0.79},
        "license": "apache-2.0",
        "producer": "cgmerge",
    }  # fmt: skip


def whole_file(density: float) -> dict[str, float]:
    bits, entries = 0.0, 0

    def counted() -> Iterator[Coded]:
        nonlocal bits, entries
        for tensor in expert(density):
            bits += entropy(tensor.levels)
            entries += tensor.levels.size
            yield tensor

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expert.cge"
        written = write_cge(path, counted(), {}, manifest())
        start = time.process_time()
        with CgeFile.open(path) as file:
            opened = time.process_time() - start
            file.verify()
        verified = time.process_time() - start
    return {
        "density": density,
        "entries": entries,
        "bytes": written.size,
        "over_entropy": 8 * written.size / bits,
        "container_overhead": written.size / written.payload - 1,
        "ratio_16bit": 2 * entries / written.size,
        "open_ms": 1000 * opened,
        "verify_ms": 1000 * verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=16_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    shape = (16, options.entries // 16)
    report: dict[str, Any] = {"entries": options.entries, "ternary": {}, "normal": {}, "files": []}
    print("M entries/s of CPU time  bits/entry  x entropy   encode  size only   decode")
    for kind, values in (("ternary", DENSITIES), ("normal", SPREADS)):
        for value in values:
            if kind == "ternary":
                levels = ternary(generator, *shape, value)
            else:
                levels = np.rint(generator.normal(0, value, shape)).astype(np.int16)
            found = report[kind][str(value)] = measure(levels, options.repeat)
            word = f"{kind}, density {value}" if kind == "ternary" else f"{kind}, sigma {value}"
            print(
                f"{word:24} {found['bits_per_entry']:11.4f} {found['over_entropy']:10.4f}"
                f" {found['encode']:8.0f} {found['size_only']:10.0f} {found['decode']:8.0f}"
            )
    for density in (0.059, 0.207):
        found = whole_file(density)
        report["files"].append(found)
        print(
            f"file, density {density}: {found['bytes']:,.0f} bytes, {found['over_entropy']:.4f} x"
            f" entropy, container {found['container_overhead']:.2%},"
            f" {found['ratio_16bit']:.1f} x smaller than 16 bit,"
            f" open {found['open_ms']:.0f} ms, verify {found['verify_ms']:.0f} ms"
        )
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
