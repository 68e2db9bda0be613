"""LoRA weights: put on a loaded base before training, written and proven after it."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge import fs
from cgmerge.errors import Damaged, Incompatible
from cgmerge.modules.adapter_out import AdapterForm, missing_siblings, write_adapter
from cgmerge.modules.base import Base
from cgmerge.modules.card import BaseId, DataSource, ExpertCard, package_versions, write_card
from cgmerge.modules.expert import WEIGHTS, open_expert
from cgmerge.modules.loading import load_base
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.training.processes import local_device
from cgmerge.modules.training.readme import readme
from cgmerge.shown import some_of

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

Factors = Mapping[str, tuple["torch.Tensor", "torch.Tensor"]]
_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.default\.weight")


def attach_lora(plan: Plan) -> tuple["PeftModel", "PreTrainedTokenizerBase"]:
    """Load the base and give every target fresh factors: A random from the seed, B zero.

    Returns:
        The model, of which only A and B are trainable, and the tokenizer.

    Raises:
        MissingExtra: 4-bit asked for without bitsandbytes.
        Incompatible: The loaded modules are not those that were planned.
    """
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    settings = plan.settings
    device = local_device(plan.device)
    loaded = load_base(
        plan.base, device=device, dtype=plan.dtype, load_in_4bit=settings.load_in_4bit
    )
    model = loaded.model
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=plan.chosen.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(plan.targets),
        fan_in_fan_out=plan.transposed,
        bias="none",
        init_lora_weights=True,
    )
    with warnings.catch_warnings():
        # peft uses names that transformers has replaced.
        warnings.simplefilter("ignore", FutureWarning)
        if settings.load_in_4bit:
            model = prepare_model_for_kbit_training(
                model, use_gradient_checkpointing=settings.gradient_checkpointing
            )
        torch.manual_seed(settings.seed)
        adapted: PeftModel = get_peft_model(model, config)
    found = set(factors_of(dict(adapted.named_parameters())))
    if found != set(plan.targets):
        differing = sorted(found ^ set(plan.targets))
        raise Incompatible(
            f"{plan.base.ref}: the loaded model has other linear layers than its config says: "
            f"{some_of(differing)}",
            code="modules",
            found=differing[:5],
        )
    return adapted, loaded.tokenizer


def factors_of(tensors: Mapping[str, "torch.Tensor"]) -> Factors:
    """Group trainable tensors by module path.

    Args:
        tensors: Parameter name as peft gives it to A [rank, in] or B [out, rank]; other names
            are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match["path"], {})[match["factor"]] = tensor
    return {path: (pair["A"], pair["B"]) for path, pair in found.items()}


def commit_expert(
    plan: Plan, factors: Factors, metrics: Mapping[str, Any], *, overwrite: bool
) -> int:
    """Write the expert's folder, read it back, compare, and put it in place.

    Args:
        plan: What was trained.
        factors: Module path to (A, B) on the CPU.
        metrics: For card and README.
        overwrite: Replace a folder that is there.

    Returns:
        Bytes of the weights file.

    Raises:
        Damaged: The factors are empty, zero or not finite, or the disk gives back others.
        StorageError: The disk.
    """
    check_factors(factors)
    out = fs.absolute(plan.settings.out)
    name = base_name(plan.base)
    card = ExpertCard(
        skill=plan.settings.skill,
        base=BaseId(name=name, fingerprint=plan.base.fingerprint),
        data=[
            DataSource(name=file.path.name, sha256=file.sha256, rows=file.rows)
            for file in plan.data
        ],
        training=plan.identity,
        metrics=dict(metrics),
        seed=plan.settings.seed,
        versions=package_versions(),
    )
    with fs.new_folder(out, overwrite=overwrite) as stage:
        write_factors(stage, factors, plan)
        fs.write_bytes(stage / "README.md", readme(card, plan).encode())
        write_card(stage, card)
        prove_factors(stage, factors, plan)
        return (stage / WEIGHTS).stat().st_size


def check_factors(factors: Factors) -> None:
    """Refuse a result that is no expert.

    Raises:
        Damaged: No factors, values that are not finite, or a ΔW that is zero everywhere.
    """
    import torch

    if not factors:
        raise Damaged("training gave no LoRA weights at all", code="empty")
    for path, pair in factors.items():
        for tensor in pair:
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise Damaged(
                    f"training left values in {path} that are not finite: {bad:,}",
                    code="not_finite",
                    hint="lower the learning rate",
                    tensor=path,
                )
    if not any(a.any() and b.any() for a, b in factors.values()):
        raise Damaged(
            "training changed nothing: every ΔW is zero",
            code="zero",
            hint="raise the learning rate or the number of steps",
        )


def base_name(base: Base) -> str:
    """Label a base without paths of this machine: hub name, built-in name, or folder name."""
    if base.ref.startswith("hf://"):
        return base.ref.removeprefix("hf://").partition("@")[0]
    plain = "/" not in base.ref and base.ref not in (".", "..")
    return base.ref if plain else base.folder.name


def write_factors(stage: Path, factors: Factors, plan: Plan) -> None:
    """Write an adapter into a staged folder.

    Layers without a LoRA where other layers have it get a zero one: loaders go by type.

    Args:
        stage: An empty folder.
        factors: A and B of every target, on the CPU.
        plan: What was trained.
    """
    import torch

    rank = plan.settings.rank
    zeros = {
        path: (torch.zeros(rank, width), torch.zeros(out, rank))
        for path, (out, width) in missing_siblings(plan.targets).items()
    }
    form = AdapterForm(
        rank=rank,
        alpha=plan.chosen.alpha,
        base_name=base_name(plan.base),
        fan_in_fan_out=plan.transposed,
    )
    write_adapter(stage, {**factors, **zeros}, form)


def prove_factors(stage: Path, factors: Factors, plan: Plan) -> None:
    """Compare what stands on disk with memory, through the reader that everybody uses.

    Raises:
        Damaged: They differ.
    """
    import torch

    expert = open_expert(str(stage))
    try:
        expert.deltas(plan.base)
        for path, (a, b) in factors.items():
            pair = expert.pairs.get(path)
            same = pair is not None and (
                torch.equal(expert.file.read(pair.a), a)
                and torch.equal(expert.file.read(pair.b), b)
            )
            if not same:
                raise Damaged(
                    f"the adapter read back from disk differs from memory at {path}",
                    code="read_back",
                    tensor=path,
                )
    finally:
        expert.file.close()
