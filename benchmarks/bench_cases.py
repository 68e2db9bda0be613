"""The measured merges of `bench_merge.py`, each in a process of its own, on one thread.

    PYTHON benchmarks/bench_cases.py CASE FOLDER OUT

PYTHON is the environment that has the tool. A case first imports and opens what is not counted,
then runs; the last line of output has CPU seconds (getrusage, children included) and the growth of
the peak memory in between.
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = 16
TIES_EXPERTS = 3
LINEAR_EXPERTS = 8
DENSITY = 0.2

Run = Callable[[], None]


def cgmerge_ties_full(folder: Path, out: Path) -> tuple[Run, Run]:
    """Full fine-tunes to a full model, as published: one threshold for the whole vector."""
    return _compose(folder, out, "ft", TIES_EXPERTS, "ties", {"density": DENSITY})


def cgmerge_yaml_full(folder: Path, out: Path) -> tuple[Run, Run]:
    """Full fine-tunes to a full model, from mergekit's file and with its numbers."""
    import cgmerge.modules.model_out
    import cgmerge.strictyaml  # noqa: F401
    from cgmerge.merge import all_methods
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.recipe import read_recipe

    all_methods()
    config = _mergekit_file(folder, out, [f"{folder}/ft{n}" for n in range(TIES_EXPERTS)])

    def run() -> None:
        run_plan(make_plan(read_recipe(config)), out)

    return run, _nothing


def cgmerge_ties_lora(folder: Path, out: Path) -> tuple[Run, Run]:
    """LoRA experts to an adapter of rank 16, entry by entry."""
    return _compose(folder, out, "lora", TIES_EXPERTS, "ties", {"density": DENSITY})


def cgmerge_linear_lora(folder: Path, out: Path) -> tuple[Run, Run]:
    """LoRA experts to an adapter of rank 16, in factors."""
    return _compose(folder, out, "lora", LINEAR_EXPERTS, "linear", {})


def mergekit_ties_full(folder: Path, out: Path) -> tuple[Run, Run]:
    """mergekit-yaml on the full fine-tunes."""
    from mergekit.scripts.run_yaml import main

    config = _mergekit_file(folder, out, [f"{folder}/ft{n}" for n in range(TIES_EXPERTS)])
    words = [str(config), str(out), "--no-copy-tokenizer"]
    return lambda: main.main(args=words, standalone_mode=False), _nothing


def mergekit_ties_lora(folder: Path, out: Path) -> tuple[Run, Run]:
    """Merge adapters by way of mergekit: a model of each, a merged model, an adapter of that."""
    import mergekit.scripts.extract_lora as extract
    import mergekit.scripts.run_yaml as merge
    import peft  # noqa: F401  (imported late otherwise, and imports are not counted)
    from transformers.models.llama import modeling_llama  # noqa: F401

    refs = [f"{folder}/base+{folder}/lora{n}" for n in range(TIES_EXPERTS)]
    config = _mergekit_file(folder, out, refs)
    model, cache = out.with_name(out.name + "-model"), out.with_name(out.name + "-cache")
    first = [str(config), str(model), "--no-copy-tokenizer", "--lora-merge-cache", str(cache)]
    second = ["--model", str(model), "--base-model", f"{folder}/base", "--out-path", str(out)]
    for pattern in ("embed_tokens", "lm_head", "norm"):
        second += ["--exclude-regex", pattern]

    def run() -> None:
        merge.main.main(args=first, standalone_mode=False)
        extract.main.main(args=[*second, "--max-rank", str(RANK)], standalone_mode=False)

    return run, _nothing


def peft_svd_lora(folder: Path, out: Path) -> tuple[Run, Run]:
    """Merge adapters exactly with peft; reading and writing files is not counted for it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    names = [f"lora{n}" for n in range(LINEAR_EXPERTS)]
    merged = PeftModel.from_pretrained(model, folder / names[0], adapter_name=names[0])
    for name in names[1:]:
        merged.load_adapter(folder / name, adapter_name=name)
    weights = [1.0 / LINEAR_EXPERTS] * LINEAR_EXPERTS

    def run() -> None:
        merged.add_weighted_adapter(names, weights, "merged", combination_type="svd", svd_rank=RANK)

    def keep() -> None:
        merged.save_pretrained(str(out), selected_adapters=["merged"])

    return run, keep


CASES: dict[str, Callable[[Path, Path], tuple[Run, Run]]] = {
    "cgmerge ties full": cgmerge_ties_full,
    "cgmerge ties full, mergekit's file": cgmerge_yaml_full,
    "mergekit ties full": mergekit_ties_full,
    "cgmerge ties lora": cgmerge_ties_lora,
    "mergekit ties lora": mergekit_ties_lora,
    "cgmerge linear lora": cgmerge_linear_lora,
    "peft svd lora": peft_svd_lora,
}


def _compose(
    folder: Path, out: Path, kind: str, experts: int, method: str, params: dict[str, float]
) -> tuple[Run, Run]:
    import cgmerge.modules.compose_adapter
    import cgmerge.modules.model_out  # noqa: F401
    from cgmerge.merge import all_methods
    from cgmerge.modules.compose import make_plan, run_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe

    all_methods()
    refs = tuple(ExpertRef(str(folder / f"{kind}{n}")) for n in range(experts))
    whole: dict[str, Any] = {"base": str(folder / "base"), "form": "model"}
    form = whole if kind == "ft" else {"rank": RANK}
    recipe = Recipe(experts=refs, method=method, params=params, **form)

    def run() -> None:
        run_plan(make_plan(recipe), out)

    return run, _nothing


def _mergekit_file(folder: Path, out: Path, refs: list[str]) -> Path:
    """Write the same TIES for mergekit: computed in float32, written in bfloat16."""
    models = "".join(f"  - {{model: {ref}, parameters: {{weight: 1}}}}\n" for ref in refs)
    config = out.with_suffix(".yml")
    config.write_text(
        f"merge_method: ties\nbase_model: {folder}/base\nmodels:\n{models}"
        f"parameters: {{density: {DENSITY}}}\ndtype: float32\nout_dtype: bfloat16\n"
    )
    return config


def _nothing() -> None:
    """Keep nothing beyond what the run has written."""


def used() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def peak_mb() -> float:
    """Return the peak memory of this process; getrusage would tell that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    name, folder, out = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    run, keep = CASES[name](Path(folder), Path(out))
    cpu, memory = used(), peak_mb()
    run()
    found = {"cpu_s": used() - cpu, "above_mb": peak_mb() - memory}
    keep()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
