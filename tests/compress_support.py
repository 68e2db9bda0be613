"""Deltas for the tests of compression: random factors, chosen spectra, other splits."""

import torch

from cgmerge.merge.deltas import LowRank


def random_expert(out, into, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return LowRank(
        torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator)
    )


def spectrum(out, into, values, seed=0):
    """Factors of a delta with given singular values, mixed at random over the rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows, columns):
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    rank = len(values)
    left, right = (torch.linalg.qr(draw(side, rank)).Q for side in (out, into))
    mix = torch.linalg.qr(draw(rank, rank)).Q
    root = torch.tensor(values, dtype=torch.float64).sqrt()
    return LowRank((mix.T @ (root[:, None] * right.T)).float(), ((left * root) @ mix).float())


def rescaled(delta, factor):
    """The same ΔW with B larger and A smaller."""
    return LowRank(delta.a / factor, delta.b * factor)
