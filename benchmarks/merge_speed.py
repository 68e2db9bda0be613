"""CPU time and memory of composing three LoRA experts, beside peft (and mergekit with --peers).

Every case runs in a process of its own, on one thread, and reports CPU seconds and peak memory
above what it had after its imports. Shapes: a Llama of 254 M parameters (18 layers, hidden 1024,
MLP 2816, vocabulary 22,000), three experts of rank 16 on all seven linear layers.

    python benchmarks/merge_speed.py [--repeat 3] [--peers] [--out benchmarks/results/FILE.json]
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, MLP, VOCAB, RANK, EXPERTS = 18, 1024, 2816, 22_000, 16, 3
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
CASES = {
    "cgmerge linear -> rank 16": ("cgmerge", "linear"),
    "cgmerge ties -> rank 16": ("cgmerge", "ties"),
    "peft svd -> rank 16": ("peft", "svd"),
    "peft ties_svd -> rank 16": ("peft", "ties_svd"),
}
PAIRS = (
    ("peft svd -> rank 16", "cgmerge linear -> rank 16"),
    ("peft ties_svd -> rank 16", "cgmerge ties -> rank 16"),
    ("mergekit ties (full models)", "cgmerge ties -> rank 16"),
)


def make_inputs(folder: Path) -> None:
    """Write base and experts with random weights once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cgmerge import fs
    from cgmerge.modules.adapter_out import AdapterForm, write_adapter

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        vocab_size=VOCAB,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    for number in range(EXPERTS):
        factors = {
            f"model.layers.{layer}.{leaf}": (
                torch.randn(RANK, into) * 0.02,
                torch.randn(out, RANK) * 0.02,
            )
            for layer in range(LAYERS)
            for leaf, (out, into) in SHAPES.items()
        }
        with fs.new_folder(folder / f"e{number}") as stage:
            write_adapter(stage, factors, AdapterForm(RANK, 2 * RANK, "base"))


def measure(tool: str, method: str, folder: Path) -> dict[str, float]:
    """Run one case in this process and return CPU seconds and MB above import."""
    import torch

    torch.set_num_threads(1)
    run = _prepare_cgmerge(method, folder) if tool == "cgmerge" else _prepare_peft(method, folder)
    before = peak_mb()
    started = time.process_time()
    run()
    return {"cpu_s": time.process_time() - started, "above_mb": peak_mb() - before}


def peak_mb() -> float:
    """Peak resident memory of this process; getrusage would inherit the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _prepare_cgmerge(method: str, folder: Path) -> Any:
    from cgmerge.merge import all_methods
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe

    all_methods()
    refs = tuple(ExpertRef(str(folder / f"e{i}")) for i in range(EXPERTS))
    recipe = Recipe(experts=refs, method=method, rank=RANK)
    out = folder / f"out-{os.getpid()}"
    return lambda: run_plan(make_plan(recipe), out)


def _prepare_peft(method: str, folder: Path) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(model, folder / "e0", adapter_name="e0")
    names = [f"e{i}" for i in range(EXPERTS)]
    for name in names[1:]:
        peft_model.load_adapter(folder / name, adapter_name=name)
    options: dict[str, Any] = {"density": 0.2} if method == "ties_svd" else {}

    def run() -> None:
        peft_model.add_weighted_adapter(
            names, [1.0] * EXPERTS, "merged", combination_type=method, svd_rank=RANK, **options
        )

    return run


def measure_mergekit(folder: Path, python: Path) -> dict[str, float]:
    """Run mergekit's route: TIES over full models made from base and expert."""
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe

    for number in range(EXPERTS):
        out = folder / f"full{number}"
        if not out.exists():
            refs = (ExpertRef(str(folder / f"e{number}")),)
            base = str(folder / "base")
            recipe = Recipe(experts=refs, method="linear", base=base, form="model")
            run_plan(make_plan(recipe), out)
    lines = [
        f"  - {{model: {folder}/full{n}, parameters: {{density: 0.2, weight: 1}}}}"
        for n in range(EXPERTS)
    ]
    config = folder / "ties.yml"
    config.write_text(
        "merge_method: ties\nmodels:\n"
        + "\n".join(lines)
        + f"\nbase_model: {folder}/base\nparameters: {{normalize: true}}\ndtype: float32\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(python.parent / "mergekit-yaml"), str(config), str(folder / "mk")]
    subprocess.run([*command, "--copy-tokenizer"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": used, "above_mb": after.ru_maxrss / 1024}


def run_case(name: str, folder: Path) -> dict[str, float]:
    tool, method = CASES[name]
    words = [sys.executable, __file__, "--case", tool, method, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="python of an environment with mergekit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--case", nargs=3)
    arguments = parser.parse_args()
    if arguments.case:
        tool, method, folder = arguments.case
        print(json.dumps(measure(tool, method, Path(folder))))
        return
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder)
        for turn in range(arguments.repeat):
            for name in CASES:
                # The peers take minutes: once is enough for a ratio of this size.
                if arguments.only in name and (turn == 0 or name.startswith("cgmerge")):
                    record(rows, name, run_case(name, folder))
        if arguments.peers:
            record(rows, PAIRS[2][0], measure_mergekit(folder, arguments.peers))
    report(rows, arguments.out)


def record(rows: dict[str, dict[str, list[float]]], name: str, found: dict[str, float]) -> None:
    for key, value in found.items():
        rows.setdefault(name, {}).setdefault(key, []).append(value)
    print(f"{name:<30} {found['cpu_s']:8.2f} CPU-s  {found['above_mb']:7.0f} MB", flush=True)


def report(rows: dict[str, dict[str, list[float]]], out: Path | None) -> None:
    medians = {
        name: {key: statistics.median(values) for key, values in found.items()}
        for name, found in rows.items()
    }
    ratios = {
        f"{slow} / {fast}": medians[slow]["cpu_s"] / medians[fast]["cpu_s"]
        for slow, fast in PAIRS
        if slow in medians and fast in medians
    }
    print("\nmedian")
    for name, found in medians.items():
        print(f"{name:<30} {found['cpu_s']:8.2f} CPU-s  {found['above_mb']:7.0f} MB")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.0f} x")
    if out:
        content = {"machine": platform.processor(), "median": medians, "cpu_ratios": ratios}
        out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
