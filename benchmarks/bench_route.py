"""What routing costs: forward and decoding against the base, one adapter, and PEFT's routers.

    python benchmarks/bench_route.py [--repeat 7] [--only NAME,NAME] [--out FILE.json] [--device D]

A 46 M Llama, rank-16 experts on all linear layers, top-2 where tokens choose, float32. Every case
runs in a process of its own, on one thread on a CPU; times are CPU seconds there (wall seconds on
an accelerator), the least of the repeats, as ratios to the plain base measured in that process.

base     the model alone            peft lora     one PEFT adapter, not merged
peft arrow  PEFT's Arrow            peft mixed    PEFT's adapter per row of a batch
peft x-lora                         arrow, spectral, gate, rows   cgmerge's routed layers
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPES = {"1x1": (1, 1), "1x64": (1, 64), "1x512": (1, 512), "8x64": (8, 64)}
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, TOP_K, VOCAB, DECODED = 16, 2, 16_384, 32
PEERS = ("peft lora", "peft mixed", "peft arrow", "peft x-lora")
OURS = ("arrow", "spectral", "gate", "rows")
BARS = {"1x512": 1.35, "1x1": 1.5}
FLAT, MEMORY_MB = 1.35, 30.0
"""32 experts may cost this much more than 8 beside the base, and this much memory beyond it."""


def build() -> Any:
    """Return the base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8,
        vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def targets(model: Any) -> dict[str, Any]:
    """Return the linear layers that experts change."""
    return {n: m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in LEAVES}


def write_experts(model: Any, folder: Path, count: int) -> None:
    """Write random experts as PEFT folders."""
    from safetensors.torch import save_file

    for expert in range(count):
        generator = torch.Generator().manual_seed(expert)
        tensors = {}
        for path, module in targets(model).items():
            a = torch.randn(RANK, module.in_features, generator=generator) * 0.05
            b = torch.randn(module.out_features, RANK, generator=generator) * 0.05
            tensors[f"base_model.model.{path}.lora_A.weight"] = a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
        place = folder / f"e{expert}"
        place.mkdir()
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(LEAVES),
            "task_type": "CAUSAL_LM", "base_model_name_or_path": "bench",
        }  # fmt: skip
        (place / "adapter_config.json").write_text(json.dumps(config))


def ours(kind: str, model: Any, folder: Path, count: int, undo: ExitStack) -> Mapping[str, Any]:
    """Attach a composition of cgmerge; returns what each batch size has to be told."""
    from cgmerge.modules.expert import open_expert
    from cgmerge.modules.loading import LoadedBase
    from cgmerge.modules.routing.attach import routed
    from cgmerge.modules.routing.choice import Choice
    from cgmerge.modules.routing.kernels import RowPlan
    from cgmerge.modules.routing.router import TaskRouter, TokenRouter
    from cgmerge.modules.routing.rule import TokenRule
    from cgmerge.modules.routing.scores import Gate
    from cgmerge.modules.routing.spectral import spectral_router
    from cgmerge.modules.routing.stack import stacks

    opened = [open_expert(str(folder / f"e{e}")) for e in range(count)]
    found = stacks([dict(expert.deltas()) for expert in opened])
    choice = Choice(TOP_K)
    if kind == "rows":
        router: Any = TaskRouter({"x": (1.0,) * count})
    elif kind == "gate":
        generator = torch.Generator().manual_seed(7)
        router = TokenRouter(
            {
                path: TokenRule(
                    Gate(rows=torch.randn(count, s.a.shape[1], generator=generator) * 0.1), choice
                )
                for path, s in found.items()
            }
        )
    else:
        directions = 1 if kind == "arrow" else None
        router = spectral_router(found, directions=directions, choice=choice)
    there: Any = LoadedBase(None, model, None)  # type: ignore[arg-type]  # only its model is used
    routes = undo.enter_context(routed(there, found, router)).routes
    if kind != "rows":
        return {}
    tables = {
        b: RowPlan.of(torch.eye(count)[torch.arange(b) % count].to(model.device)) for b in (1, 8)
    }
    return {"routes": routes, "plans": tables}


def peer(kind: str, model: Any, folder: Path, count: int) -> tuple[Any, dict[str, Any]]:
    """Wrap the model with PEFT; returns it and options of a call."""
    from peft import PeftModel

    paths = [str(folder / f"e{e}") for e in range(count)]
    if kind == "peft arrow":
        from peft import ArrowConfig, create_arrow_model

        config = ArrowConfig(top_k=TOP_K, router_temperature=1.0, rng_seed=0)
        return create_arrow_model(model, paths, arrow_config=config), {}
    if kind == "peft x-lora":
        from peft import XLoraConfig, get_peft_model

        mixed = XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=512, xlora_depth=1,
            adapters={f"e{e}": path for e, path in enumerate(paths)},
        )  # fmt: skip
        model.config.use_cache = False  # what X-LoRA asks for
        return get_peft_model(model, mixed), {}
    wrapped = PeftModel.from_pretrained(model, paths[0], adapter_name="e0")
    if kind == "peft lora":
        return wrapped, {}
    for e, path in enumerate(paths[1:], 1):
        wrapped.load_adapter(path, adapter_name=f"e{e}")
    return wrapped, {"adapter_names": [f"e{i % count}" for i in range(8)]}


def clock(device: torch.device) -> Callable[[], float]:
    """Return CPU seconds of this process, or wall seconds of an accelerator."""
    if device.type == "cpu":
        return time.process_time

    def now() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return now


def timed(call: Callable[[], Any], repeat: int, now: Callable[[], float]) -> float:
    """Return the least time of a call, after one to warm up."""
    call()
    found = []
    for _ in range(repeat):
        start = now()
        call()
        found.append(now() - start)
    return min(found)


def memory_mb(what: str) -> float:
    """Return the memory of this process: VmRSS, what it has now; VmHWM, the most since `forget`."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if what in line) / 1024


def forget() -> float:
    """Give back what was freed, let the highest memory be that of now, and return it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_mb("VmRSS")


def measure(kind: str, count: int, folder: Path, repeat: int, device: str) -> dict[str, Any]:
    """Time one case beside the base in this process."""
    torch.set_num_threads(1)
    model = build().to(device)
    now = clock(model.device)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        name: torch.randint(3, VOCAB, shape, generator=generator).to(device)
        for name, shape in SHAPES.items()
    }
    found: dict[str, Any] = {"case": kind, "experts": count, "ratio": {}, "base_s": {}, "s": {}}
    with torch.no_grad(), ExitStack() as undo:
        for ids in inputs.values():  # what is set up once is nobody's need
            model(input_ids=ids, use_cache=False)
        started = forget()
        for name, ids in inputs.items():
            found["base_s"][name] = timed(_forward(model, ids, {}), repeat, now)
        base_needs = memory_mb("VmHWM") - started
        found["base_s"]["decode"] = timed(_decode(model, inputs["1x64"]), max(repeat // 2, 1), now)
        before = forget()
        wrapped: Any = model
        options: dict[str, Any] = {}
        told: Mapping[str, Any] = {}
        if kind in OURS:
            told = ours(kind, model, folder, count, undo)
        elif kind != "base":
            wrapped, options = peer(kind, model, folder, count)
            wrapped.eval()
        built = forget()
        for name, ids in inputs.items():
            if told:
                told["routes"].plan = told["plans"][ids.shape[0]]
            given = {k: v[: ids.shape[0]] for k, v in options.items()}
            found["s"][name] = timed(_forward(wrapped, ids, given), repeat, now)
        needs = memory_mb("VmHWM") - built
        if kind != "peft x-lora":  # it has no cache
            if told:
                told["routes"].plan = told["plans"][1]
            given = {k: v[:1] for k, v in options.items()}
            call = _decode(wrapped, inputs["1x64"], given)
            found["s"]["decode"] = timed(call, max(repeat // 2, 1), now)
    found["ratio"] = {name: s / found["base_s"][name] for name, s in found["s"].items()}
    # A forward of the base needs memory too, and takes it anew once the experts lie in between.
    found |= {"held_mb": built - before, "running_mb": needs - base_needs}
    return found


def _forward(model: Any, ids: Tensor, options: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: model(input_ids=ids, use_cache=False, **options)


def _decode(model: Any, ids: Tensor, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    return lambda: model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=DECODED,
        min_new_tokens=DECODED, do_sample=False, pad_token_id=0, **(options or {}),
    )  # fmt: skip


def run_case(kind: str, count: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in a process of its own."""
    words = [sys.executable, __file__, "--case", kind, "--experts", str(count), "--folder", folder]
    words += ["--repeat", str(options.repeat), "--device", options.device]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["failed"]
        return {"case": kind, "experts": count, "failed": reason[0]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def bars(found: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Compare with what was promised."""
    by_case = {(one["case"], one["experts"]): one for one in found if "failed" not in one}
    result = []
    for kind in ("arrow", "gate"):
        small, large = by_case.get((kind, 8)), by_case.get((kind, 32))
        if small is None:
            continue
        for name, bar in BARS.items():
            ratio = small["ratio"][name]
            result.append((f"{kind} {name}: {ratio:.2f} of base, bar {bar}", ratio <= bar))
        used = small["running_mb"]
        result.append((f"{kind}: {used:.0f} MB while running, bar {MEMORY_MB:.0f}",
                       used <= MEMORY_MB))  # fmt: skip
        if large is not None:
            grown = (large["ratio"]["1x512"] - 1) / max(small["ratio"]["1x512"] - 1, 1e-9)
            result.append((f"{kind}: 32 experts add {grown:.2f} times what 8 add, bar {FLAT}",
                           grown <= FLAT))  # fmt: skip
    return result


def main() -> None:
    """Run the cases and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--experts", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        one = measure(options.case, options.experts, options.folder, options.repeat, options.device)
        print(json.dumps(one))
        return
    wanted = options.only.split(",") if options.only else ["base", *PEERS, *OURS]
    cases = [(kind, 8) for kind in wanted]
    cases += [(kind, 32) for kind in ("peft arrow", "arrow", "gate", "rows") if kind in wanted]
    found = []
    with tempfile.TemporaryDirectory() as name:
        write_experts(build(), Path(name), 32)
        print(f"{'case':14} {'experts':>7}", *[f"{s:>7}" for s in [*SHAPES, "decode"]], "     MB")
        for kind, count in cases:
            one = run_case(kind, count, Path(name), options)
            found.append(one)
            print(_line(one), flush=True)
    checked = bars(found)
    for text, holds in checked:
        print("holds " if holds else "MISSED", text)
    if options.out:
        names = ("torch", "transformers", "peft")
        record = {
            "versions": {name: version(name) for name in names},
            "device": options.device,
            "results": found,
            "bars": [{"bar": text, "holds": holds} for text, holds in checked],
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def _line(one: dict[str, Any]) -> str:
    head = f"{one['case']:14} {one['experts']:7}"
    if "failed" in one:
        return f"{head} {one['failed']}"
    cells = [one["ratio"].get(name) for name in [*SHAPES, "decode"]]
    shown = [f"{cell:7.2f}" if cell is not None else f"{'-':>7}" for cell in cells]
    return " ".join([head, *shown, f"{one['running_mb']:7.0f}"])


if __name__ == "__main__":
    main()
