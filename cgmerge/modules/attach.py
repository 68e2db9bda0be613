"""Run an expert on a loaded base without changing a single weight.

Forward hooks add scaling·B·A·x beside each module, whatever the module is (nn.Linear, GPT-2's
Conv1D, a 4-bit layer), and are removed afterwards: the base before and after is the same object
with the same bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cgmerge.errors import Incompatible

if TYPE_CHECKING:
    import torch


class Factors(Protocol):
    """A low-rank delta with the scaling folded into `b`: ΔW = b @ a."""

    @property
    def a(self) -> "torch.Tensor":
        """Return A, [rank, in]."""

    @property
    def b(self) -> "torch.Tensor":
        """Return B, [out, rank], scaling folded in."""


@contextmanager
def attached(model: "torch.nn.Module", deltas: Mapping[str, Factors]) -> Iterator[None]:
    """Add low-rank deltas to a model's modules for the length of a `with` block.

    Args:
        model: Any module tree; not modified.
        deltas: Module path to its delta.

    Raises:
        Incompatible: A path that the model does not have.
    """
    modules = dict(model.named_modules())
    missing = [path for path in deltas if path not in modules]
    if missing:
        raise Incompatible(
            f"the model has no module {', '.join(missing[:5])}", code="modules", found=missing
        )
    handles = []
    try:
        for path, delta in deltas.items():
            module = modules[path]
            weight = next(module.parameters())
            dtype = weight.dtype if weight.is_floating_point() else None
            hook = _hook(delta.a.to(weight.device, dtype), delta.b.to(weight.device, dtype))
            handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(a: "torch.Tensor", b: "torch.Tensor") -> Any:
    def add_delta(
        _module: "torch.nn.Module", inputs: tuple["torch.Tensor", ...], output: "torch.Tensor"
    ) -> "torch.Tensor":
        x = inputs[0].to(a.dtype)
        return output + ((x @ a.T) @ b.T).to(output.dtype)

    return add_delta
