"""Which task uses which module: a matrix of logits, how it is drawn, and how it is measured.

Source:
    Ponti et al. 2022, "Combining Modular Skills in Multitask Learning" (Polytropon),
    arXiv:2202.13914.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

EPS = 1e-12
_NEAREST = torch.finfo(torch.float32).eps  # uniform draws keep away from 0 and 1 by this

Logits = Float[Tensor, "*batch tasks skills"]
Shares = Float[Tensor, "*batch tasks skills"]


def relaxed(logits: Logits, uniform: Shares, temperature: float = 1.0) -> Shares:
    """Return a relaxed Bernoulli draw for every task and skill.

    Args:
        logits: Of a task using a skill.
        uniform: Draws from (0, 1), of the same shape.
        temperature: τ; below 1 the draws are closer to 0 and 1.

    Returns:
        σ((logit + log u − log(1 − u))/τ).
    """
    draws = uniform.clamp(_NEAREST, 1 - _NEAREST)
    return ((logits + draws.log() - (-draws).log1p()) / temperature).sigmoid()


def rows(shares: Shares) -> Shares:
    """Return the shares as weights: those of a task sum to 1."""
    return shares / (shares.sum(dim=-1, keepdim=True) + EPS)


def neg_log_ibp(shares: Shares) -> Float[Tensor, "*batch"]:
    """Return the negative logarithm of the Indian buffet process for shares rounded at 0.5.

    −[−Σ_h log K_h! + Σ_s (log (T − m_s)! + log (m_s − 1)!)], with m_s tasks that use skill s and
    K_h skills with the same set h of tasks. Skills that nobody uses do not count, and what depends
    on T and on the number of used skills alone is left out: it has no gradient. Rounding is
    straight-through.
    """
    tasks = shares.shape[-2]
    whole = (shares > 0.5).to(shares)
    used = (whole + shares - shares.detach()).sum(dim=-2)
    active = whole.sum(dim=-2) > 0
    # Where nobody uses a skill, log (m − 1)! has no value, and its gradient none either.
    counts = torch.where(active, used, 1.0)
    terms = torch.lgamma(tasks - counts + 1) + torch.lgamma(counts)
    same = (whole.unsqueeze(-1) == whole.unsqueeze(-2)).all(dim=-3)
    # Σ_h log K_h! = Σ_s log (how many skills up to s have the task set of s).
    rank = same.tril().sum(dim=-1).to(shares).log()
    return torch.where(active, rank - terms, 0.0).sum(dim=-1)


def discreteness(shares: Shares) -> float:
    """Return the mean entropy of using a skill in bits: 0 for yes or no, 1 for a coin."""
    entropy = torch.special.entr(shares) + torch.special.entr(1 - shares)
    return float(entropy.mean() / math.log(2))


def sparsity(shares: Shares) -> float:
    """Return the share of skills that a task uses, rounded at 0.5: 1 where all use all."""
    return float((shares > 0.5).double().mean())


def usage(shares: Shares) -> float:
    """Return how evenly skills are used: 1 for all alike, 0 where there is only one of many."""
    skills = shares.shape[-1]
    if skills == 1:
        return 1.0
    columns = shares.sum(dim=-2)
    parts = columns / columns.sum(dim=-1, keepdim=True)
    return float(torch.special.entr(parts).sum(dim=-1).mean() / math.log(skills))
