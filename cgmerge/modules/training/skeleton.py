"""The base as far as it is known without its weights: tokenizer, modules, what can carry a LoRA."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgmerge.errors import Incompatible, UsageError
from cgmerge.modules.base import Base
from cgmerge.modules.loading import quiet_transformers, refuse_encoder
from cgmerge.modules.training.settings import ALL_LINEAR
from cgmerge.nearest import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_empty(base: Base) -> "PreTrainedModel":
    """Build the base's modules without weights (on the meta device).

    Raises:
        Incompatible: Not a causal language model that transformers knows.
    """
    refuse_encoder(base)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(
                base.folder, local_files_only=True, trust_remote_code=False
            )
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                )
        except (ValueError, KeyError, OSError, TypeError) as error:
            raise Incompatible(
                f"transformers cannot load {base.folder}: {str(error).splitlines()[0]}",
                code="base_load",
                path=base.folder,
            ) from error
    return model


def find_targets(
    model: "PreTrainedModel", wanted: Sequence[str]
) -> tuple[dict[str, tuple[int, int]], bool]:
    """Choose the modules that get a LoRA.

    Args:
        model: Any causal language model; weights are not read.
        wanted: Exact paths or endings of them (`q_proj`, `mlp.down_proj`), or `all-linear`:
            every linear layer but the output head.

    Returns:
        Module path to (out, in) features, and whether they are GPT-2's transposed Conv1D.

    Raises:
        UsageError: A name that matches no linear layer.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    shapes: dict[str, tuple[int, int]] = {}
    conv = False
    for path, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):
            shapes[path] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            shapes[path] = (module.nf, module.nx)
            conv = True
    if tuple(wanted) == ALL_LINEAR:
        return shapes, conv
    chosen: dict[str, tuple[int, int]] = {}
    for name in wanted:
        found = {p: s for p, s in shapes.items() if p == name or p.endswith(f".{name}")}
        if not found:
            raise _no_target(name, shapes)
        chosen |= found
    return {path: shape for path, shape in shapes.items() if path in chosen}, conv


def _no_target(name: str, shapes: dict[str, tuple[int, int]]) -> UsageError:
    leaves = sorted({path.rsplit(".", 1)[-1] for path in shapes})
    near = nearest(name, [*leaves, *shapes], count=3)
    return UsageError(
        f"the base has no linear layer {name!r} that can carry a LoRA",
        code="target_modules",
        hint=f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(leaves)}",
        found=leaves,
    )
