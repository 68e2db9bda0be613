"""Routers that need no data: the experts' own input directions say what they are for.

Arrow (arXiv:2405.11157) scores a token by |v·x|, v the direction that the expert amplifies most;
SpectR (COLM 2025) by ‖ΔW·x‖, the whole spectrum. In between are the leading q directions.
The directions come from a small exact SVD of the factors, not from power iterations with a random
start; the score has no sign, so that (−v) routes alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.merge.deltas import LowRank
from cgmerge.merge.engine import one_thread
from cgmerge.merge.params import Checked, param
from cgmerge.modules.routing.choice import LEAST, MOST, Choice
from cgmerge.modules.routing.fitting import FitInput, Fitted, TopK
from cgmerge.modules.routing.router import TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Energy, Scorer, Subspace
from cgmerge.modules.routing.stack import Stack


class Directions(str):
    """How many input directions of an expert count: a whole number, or `full`."""

    __slots__ = ()
    WANTED: ClassVar[str] = "a whole number of at least 1, or `full`"

    def __new__(cls, value: object) -> Self:
        """Read a number or `full`.

        Raises:
            ValueError: Neither.
        """
        text = str(value).strip().lower()
        if text != "full" and not (text.isascii() and text.isdecimal() and int(text) >= 1):
            raise ValueError(text)
        return super().__new__(cls, text)

    @property
    def number(self) -> int | None:
        """Return the number; None for the full spectrum."""
        return int(self) if self.isdecimal() else None


_TOP_K = TopK("3")


@dataclass(frozen=True, kw_only=True)
class ArrowParams(Checked):
    """Parameters of `arrow`."""

    top_k: TopK = param(_TOP_K, "experts per token and module, or `all`")
    temperature: float = param(
        1.0, "scores are divided by it before the softmax", low=LEAST, high=MOST
    )


@dataclass(frozen=True, kw_only=True)
class SpectralParams(ArrowParams):
    """Parameters of `spectral`."""

    directions: Directions = param(
        Directions("full"), "leading input directions of each expert; `full`: the whole spectrum"
    )
    normalise: Literal["none", "fro"] = param(
        "none", "fro: divide the score of an expert by its norm ‖ΔW‖ (directions=full)"
    )


def make_arrow(fit: FitInput) -> Fitted:
    """Score by the one direction that an expert amplifies most."""
    p = fit.params
    assert isinstance(p, ArrowParams)
    return _make(fit, p, directions=1, normalise=False)


def make_spectral(fit: FitInput) -> Fitted:
    """Score by several directions, or by the norm of what an expert would add."""
    p = fit.params
    assert isinstance(p, SpectralParams)
    return _make(fit, p, directions=p.directions.number, normalise=p.normalise == "fro")


def _make(fit: FitInput, p: ArrowParams, *, directions: int | None, normalise: bool) -> Fitted:
    warnings: list[str] = []
    choice = Choice(p.top_k.of(len(fit.names), warnings, default=_TOP_K), p.temperature)
    with one_thread():
        router = spectral_router(
            fit.stacks, directions=directions, choice=choice, normalise=normalise
        )
    return Fitted(router, {}, warnings)


def leading_directions(delta: LowRank, count: int) -> Float[Tensor, "count in"]:
    """Return the leading right singular vectors of ΔW, from QR of the factors and a small SVD.

    Args:
        delta: Any rank.
        count: How many; zeros where ΔW has fewer, or is zero.

    Returns:
        Orthonormal rows, float32, leading first; each with its largest entry positive.
    """
    into = delta.a.shape[1]
    found = torch.zeros(count, into, dtype=torch.float64)
    if delta.rank == 0 or not bool(delta.a.any()) or not bool(delta.b.any()):
        return found.float()
    q, r = torch.linalg.qr(delta.a.double().T)
    _, values, right = torch.linalg.svd(
        torch.linalg.qr(delta.b.double(), mode="r").R @ r.T, full_matrices=False
    )
    kept = min(count, int((values > values[0] * 1e-12).sum()))
    rows = right[:kept] @ q.T
    largest = rows.abs().argmax(dim=1, keepdim=True)
    found[:kept] = rows * rows.gather(1, largest).sign()
    return found.float()


def spectral_router(
    stacks: Mapping[str, Stack], *, directions: int | None, choice: Choice, normalise: bool = False
) -> TokenRouter:
    """Make a router from the experts alone.

    Args:
        stacks: The experts by module.
        directions: Leading input directions of each expert; 1 is Arrow, None the whole spectrum.
        choice: From scores to weights.
        normalise: Divide the score of an expert by ‖ΔW‖ (whole spectrum only; directions have
            length 1 anyway).
    """
    rules: dict[str, TokenRule] = {}
    for path, stack in stacks.items():
        rules[path] = TokenRule(_scorer(stack, directions, normalise=normalise), choice)
    return TokenRouter(rules)


def _scorer(stack: Stack, directions: int | None, *, normalise: bool) -> Scorer:
    norms = torch.tensor([stack.delta(e).norm() for e in range(stack.experts)])
    if directions is None:
        weights = torch.where(norms > 0, 1.0 / norms, 0.0) if normalise else None
        return Energy(weights=weights, present=_usable(norms, stack))
    rows = [leading_directions(stack.delta(e), directions) for e in range(stack.experts)]
    return Subspace(rows=torch.cat(rows), present=_usable(norms, stack), width=directions)


def _usable(norms: Tensor, stack: Stack) -> Tensor:
    """Leave out experts that do nothing here; where none does anything, any may be chosen."""
    usable = norms > 0
    return usable if bool(usable.any()) else torch.tensor(stack.present)
