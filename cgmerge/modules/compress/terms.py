"""ΔW as a sum of terms d·x·yᵀ of whole numbers, found one after the other: what the modes share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.compress.sections import Coded

_STEPS = 24
"""Power iterations for the start of a term; it is only a start."""

_NOISE = 1e-12
"""Share of ‖ΔW‖² below which a rest is rounding noise."""

_LEAST = 1e-30
"""Scales below are dropped: float32 must hold them, with room for a multiplier."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Σ d·x·yᵀ of one module.

    Attributes:
        x: Levels on the output side.
        y: Levels on the input side.
        d: Weights, above 0, float64.
    """

    x: Int[Tensor, "terms out"]
    y: Int[Tensor, "terms in"]
    d: Float[Tensor, "terms"]

    def only(self, places: list[int]) -> "Terms":
        """Return some of the terms, with the weights as they are."""
        return Terms(self.x[places], self.y[places], self.d[places])

    def delta(self) -> LowRank:
        """Return the sum as factors, float64."""
        return LowRank(self.y.double(), (self.d[:, None] * self.x).T)

    def coded(self, name: str) -> list[Coded]:
        """Return both factors as they are stored.

        A gets one scale, a power of two near √d, so that A and B are of one size; B one for each
        term. A module without terms keeps one row of zeros: its rank is at least 1.

        Args:
            name: The module's path.
        """
        if not self.d.numel():
            one = np.ones(1, dtype=np.float32)
            blank = [np.zeros((1, side.shape[1]), dtype=np.int8) for side in (self.y, self.x)]
            return [
                Coded(f"{name}.lora_A", blank[0], one),
                Coded(f"{name}.lora_B", blank[1], one, transposed=True),
            ]
        root = 2.0 ** round(float(torch.log2(self.d).mean()) / 2)
        scales = (self.d / root).numpy().astype(np.float32)
        return [
            Coded(f"{name}.lora_A", _narrow(self.y), np.array([root], dtype=np.float32)),
            Coded(f"{name}.lora_B", _narrow(self.x), scales, transposed=True),
        ]


class Rest:
    """What is left of ΔW, as left @ right.T, with the Gram matrices of both sides."""

    def __init__(self, delta: LowRank) -> None:
        left, right = balanced(delta)
        (out, rank), into = left.shape, right.shape[0]
        room = rank + min(delta.rank, out, into)
        self.size, self._room = rank, room
        self._left = torch.zeros(out, room, dtype=torch.float64)
        self._right = torch.zeros(into, room, dtype=torch.float64)
        self._left[:, :rank], self._right[:, :rank] = left, right
        self._gram_left = self._left.T @ self._left
        self._gram_right = self._right.T @ self._right
        self._noise = _NOISE * self.energy()

    def times(self, y: Tensor) -> Tensor:
        """Return rest @ y."""
        k = self.size
        return self._left[:, :k] @ (self._right[:, :k].T @ y)

    def times_transposed(self, x: Tensor) -> Tensor:
        """Return restᵀ @ x."""
        k = self.size
        return self._right[:, :k] @ (self._left[:, :k].T @ x)

    def energy(self) -> float:
        """Return ‖rest‖²."""
        return float((self._gram_left * self._gram_right).sum())

    def worth_a_term(self) -> bool:
        """Whether the rank allows one more term, and something is left for it."""
        return self.size < self._room and self.energy() > self._noise

    def subtract(self, x: Tensor, y: Tensor, d: float) -> None:
        """Take d·x·yᵀ away."""
        k = self.size
        self._left[:, k] = -d * x
        self._right[:, k] = y
        self.size = k + 1
        for side, gram in ((self._left, self._gram_left), (self._right, self._gram_right)):
            gram[k, : k + 1] = gram[: k + 1, k] = side[:, : k + 1].T @ side[:, k]

    def leading(self) -> Tensor:
        """Return rest @ v for (about) the leading right singular vector v, from small matrices."""
        k = self.size
        left, right = self._gram_left[:k, :k], self._gram_right[:k, :k]
        start = torch.argmax(left.diagonal() * right.diagonal())
        w = torch.zeros(k, dtype=torch.float64)
        w[start] = 1.0
        for _ in range(_STEPS):
            w = left @ (right @ w)
            w /= w.abs().max().clamp_min(1e-300)
        # v = right @ w up to its length √(wᵀ·gram·w).
        image = right @ w
        length = torch.dot(w, image).clamp_min(1e-300).sqrt()
        return self._left[:, :k] @ (image / length)


def balanced(delta: LowRank) -> tuple[Float[Tensor, "out rank"], Float[Tensor, "in rank"]]:
    """Return U·√Σ and V·√Σ of ΔW = U·Σ·Vᵀ, float64: what ΔW is, however it was split into factors.

    The largest entry of each column of U is positive (the first of equals), as an SVD leaves the
    sign open.

    Args:
        delta: Any factors, also linearly dependent ones.
    """
    q_left, r_left = torch.linalg.qr(delta.b.double())
    q_right, r_right = torch.linalg.qr(delta.a.double().T)
    u, values, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    left, right, root = q_left @ u, q_right @ v.T, values.sqrt()
    peaks = left.gather(0, left.abs().argmax(dim=0, keepdim=True))
    sign = torch.where(peaks < 0, -root, root)
    return left * sign, right * sign


def solve_weights(delta: LowRank, found: Sequence[tuple[Tensor, Tensor]]) -> Terms:
    """Solve for all weights of a module together: least squares over the chosen patterns.

    Args:
        delta: What the terms stand for.
        found: Pairs of x [out] and y [in], whole numbers as float64.
    """
    out, into = delta.shape
    if not found:
        nothing = torch.zeros(0, dtype=torch.float64)
        return Terms(nothing.new_zeros(0, out).int(), nothing.new_zeros(0, into).int(), nothing)
    x = torch.stack([pair[0] for pair in found])
    y = torch.stack([pair[1] for pair in found])
    gram = (x @ x.T) * (y @ y.T)
    wanted = ((x @ delta.b.double()) * (y @ delta.a.double().T)).sum(dim=1)
    # The patterns of two terms can coincide; the smallest solution is then the one to take.
    d = torch.linalg.lstsq(gram, wanted[:, None], rcond=1e-10, driver="gelsd").solution[:, 0]
    kept = d.abs() > _LEAST
    x = torch.where(d[:, None] < 0, -x, x)
    return Terms(x[kept].int(), y[kept].int(), d[kept].abs())


def _narrow(levels: Tensor) -> np.ndarray:
    """Return levels in the smallest type that holds them."""
    most = int(levels.abs().max()) if levels.numel() else 0
    kind = np.int8 if most <= 127 else np.int16 if most <= 32767 else np.int32
    return np.ascontiguousarray(levels.numpy().astype(kind))
