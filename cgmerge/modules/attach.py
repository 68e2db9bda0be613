"""Run an expert on a loaded base without changing a single weight.

Forward hooks add scaling·B·A·x beside each module, whatever the module is (nn.Linear, GPT-2's
Conv1D, a 4-bit layer), and are removed afterwards: the base before and after is the same object
with the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from cgmerge.errors import Incompatible
from cgmerge.shown import some_of

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


Hook = Callable[["torch.nn.Module", tuple["torch.Tensor", ...], "torch.Tensor"], "torch.Tensor"]
MakeHook = Callable[["torch.device", "torch.dtype | None"], Hook]


@contextmanager
def attached(model: "torch.nn.Module", deltas: Mapping[str, Factors]) -> Iterator[None]:
    """Add low-rank deltas to a model's modules for the length of a `with` block.

    Args:
        model: Any module tree; not modified.
        deltas: Module path to its delta.

    Raises:
        Incompatible: A path that the model does not have.
    """
    with hooked(model, {path: _adds(deltas, path) for path in deltas}):
        yield


@contextmanager
def hooked(model: "torch.nn.Module", makers: Mapping[str, MakeHook]) -> Iterator[None]:
    """Let hooks change what modules return, for the length of a `with` block.

    Args:
        model: Any module tree; not modified.
        makers: Module path to what makes its hook, given the module's device and float type (None
            where the weight is no float, as in 4-bit layers).

    Raises:
        Incompatible: A path that the model does not have.
    """
    modules = dict(model.named_modules())
    missing = [path for path in makers if path not in modules]
    if missing:
        raise Incompatible(
            f"the model has no module {some_of(missing)}",
            code="modules",
            hint="where its files have these weights, as those of models with fused experts,"
            " compose --as model merges into them",
            found=missing[:5],
        )
    handles = []
    try:
        for path, make in makers.items():
            weight = next(modules[path].parameters())
            dtype = weight.dtype if weight.is_floating_point() else None
            handles.append(modules[path].register_forward_hook(make(weight.device, dtype)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adds(deltas: Mapping[str, Factors], path: str) -> MakeHook:
    """Return what reads one delta, when its turn comes, and makes the hook that adds it."""

    def make(device: "torch.device", dtype: "torch.dtype | None") -> Hook:
        delta = deltas[path]
        return _hook(delta.a.to(device, dtype), delta.b.to(device, dtype))

    return make


def _hook(a: "torch.Tensor", b: "torch.Tensor") -> Hook:
    def add_delta(
        _module: "torch.nn.Module", inputs: tuple["torch.Tensor", ...], output: "torch.Tensor"
    ) -> "torch.Tensor":
        x = inputs[0].to(a.dtype)
        return output + ((x @ a.T) @ b.T).to(output.dtype)

    return add_delta
