"""Write PEFT LoRA folders that every loader reads: minimal config, uniform rank, exact names.

Servers read little of adapter_config.json: one global alpha/r, no patterns, no rsLoRA flag. So
everything written here has one rank for all modules (zero-padded), and merged adapters have
alpha == r with the scaling folded into B.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.modules.expert import WEIGHTS
from cgmerge.modules.pairs import CONFIG, PREFIX

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """How an adapter is written.

    Attributes:
        rank: `r`, the number of rows of every A.
        alpha: `lora_alpha`; a whole number, as some servers parse nothing else.
        base_name: `base_model_name_or_path`, a label.
        fan_in_fan_out: True for GPT-2's Conv1D modules.
        task_type: As in PEFT.
    """

    rank: int
    alpha: int
    base_name: str
    fan_in_fan_out: bool = False
    task_type: str = "CAUSAL_LM"


def write_adapter(
    folder: Path,
    factors: Mapping[str, tuple["torch.Tensor", "torch.Tensor"]],
    form: AdapterForm,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into a staged folder.

    Args:
        folder: From `fs.new_folder`.
        factors: Module path (as in the model) to (A [rank, in], B [out, rank]), any float type.
        form: Rank, alpha and labels.
    """
    tensors = {}
    for path in sorted(factors):
        a, b = factors[path]
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a.detach().contiguous().cpu()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b.detach().contiguous().cpu()
    fs.write_tensors(folder / WEIGHTS, tensors)
    fs.write_json(folder / CONFIG, adapter_config(factors, form))


def adapter_config(paths: Mapping[str, Any], form: AdapterForm) -> dict[str, Any]:
    """Return the content of adapter_config.json: only fields that old and new readers know."""
    return {
        "base_model_name_or_path": form.base_name,
        "bias": "none",
        "fan_in_fan_out": form.fan_in_fan_out,
        "inference_mode": True,
        "lora_alpha": form.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": form.rank,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in paths}),
        "task_type": form.task_type,
        "use_rslora": False,
    }


def missing_siblings(paths: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Find layers that lack a module which other layers have.

    A loader applies LoRA by module type (`q_proj`) to every layer, and some drop a whole type
    when one layer lacks it; the gaps are filled with zero factors.

    Args:
        paths: Module path to (out, in).

    Returns:
        The missing paths with the shape of their siblings.
    """
    layers: dict[str, dict[str, tuple[int, int]]] = {}
    numbers: dict[str, set[str]] = {}
    for path, shape in paths.items():
        match = _NUMBER.search(path)
        if match is None:
            continue
        stem, leaf = path[: match.start()], path[match.end() :]
        layers.setdefault(stem, {})[leaf] = shape
        numbers.setdefault(stem, set()).add(match.group())
    wanted = {
        f"{stem}{number}{leaf}": shape
        for stem, leaves in layers.items()
        for leaf, shape in leaves.items()
        for number in numbers[stem]
    }
    return {path: shape for path, shape in wanted.items() if path not in paths}
