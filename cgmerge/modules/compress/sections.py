"""What a compressed expert consists of: tensors as whole numbers times scales."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Coded:
    """One tensor as whole numbers times scales: value[i, j] = scales[i or 0] · levels[i, j].

    Attributes:
        name: The module's name and the factor, `….lora_A` or `….lora_B`; for the delta of a full
            fine-tune the name of the tensor.
        levels: [rows, columns] as stored, int8, int16 or int32; 0 where nothing is kept.
        scales: float32, [1] or [rows], finite and above 0.
        transposed: Whether the tensor is `levels` transposed (factor B, stored by component).
    """

    name: str
    levels: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    transposed: bool = False

    def tensor(self) -> "torch.Tensor":
        """Return the values, float32: one product per entry, the same on every machine."""
        import torch

        values = self.levels.astype(np.float32)
        values *= self.scales.reshape(-1, 1)
        return torch.from_numpy(np.ascontiguousarray(values.T) if self.transposed else values)
