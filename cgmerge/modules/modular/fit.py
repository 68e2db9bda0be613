"""Learn modules and allocation in one run, every step with rows of all tasks.

A plain loop: AdamW with two learning rates, the same schedule on both, everything random from its
own seeded generator. The same inputs give the same bytes on the same machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from cgmerge.errors import InputError
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.modular.allocation import neg_log_ibp
from cgmerge.modules.modular.inventory import Inventory, stream
from cgmerge.modules.routing.support import row_losses
from cgmerge.modules.teacher import LOGIT_BUDGET, batches_of, make_batch
from cgmerge.modules.training.listener import Listener

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GRADIENT_SHARE = 4  # of the logit budget: a backward pass holds several copies
_MAX_NORM = 1.0

Tasks = Sequence[Sequence[Encoded]]
Pick = tuple[int, int]
"""A task, and one of its rows."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How to learn.

    Attributes:
        steps: How many.
        lr: Peak learning rate of the modules.
        allocation_lr: Peak learning rate of the allocation.
        batch: Rows in a step.
        parts: Parts that a step is computed in.
        schedule: How both rates fall: linear, cosine or constant.
        warmup: Steps over which they rise.
        weight_decay: On A and B.
        temperature: τ of the relaxed draws.
        ibp: Strength of the prior on the allocation.
        seed: Of draws and order.
    """

    steps: int
    lr: float
    allocation_lr: float
    batch: int
    parts: int = 1
    schedule: str = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    temperature: float = 1.0
    ibp: float = 0.0
    seed: int = 0


def fit(
    model: "PreTrainedModel",
    inventory: Inventory,
    tasks: Tasks,
    course: Course,
    listener: Listener,
) -> list[float]:
    """Learn in place.

    Args:
        model: Frozen, with the inventory attached.
        inventory: What is learned.
        tasks: Rows of each task; every row has a prompt and a target.
        course: How.
        listener: Told about every step.

    Returns:
        The loss of every step, before it was taken: the mean over its rows of the mean negative
        log-likelihood of a target token, in nats.

    Raises:
        InputError: A loss that is not finite; says at which step.
    """
    from transformers import get_scheduler

    optimiser = torch.optim.AdamW(
        [
            {"params": inventory.modules, "lr": course.lr, "weight_decay": course.weight_decay},
            {"params": [inventory.logits], "lr": course.allocation_lr, "weight_decay": 0.0},
        ]
    )
    constant = course.schedule == "constant"
    name = "constant_with_warmup" if constant else course.schedule
    scheduler = get_scheduler(name, optimiser, course.warmup, course.steps)
    chance, order = stream(course.seed, "draws"), mixed(tasks, course.batch, course.seed)
    losses = []
    for step in range(1, course.steps + 1):
        optimiser.zero_grad()
        uniform = torch.rand(inventory.size, generator=chance)
        loss = backward(model, inventory, tasks, next(order), course, uniform)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is not finite at step {step}: {loss}",
                code="loss",
                hint=f"lower the learning rate (now {course.lr:g}), or check the base and the data",
                step=step,
                found=str(loss),
            )
        # The allocation apart: a strong prior must not make the modules' steps small.
        torch.nn.utils.clip_grad_norm_(inventory.modules, _MAX_NORM)
        optimiser.step()
        scheduler.step()
        losses.append(loss)
        listener.on_step(step, course.steps, loss)
    return losses


def backward(
    model: "PreTrainedModel",
    inventory: Inventory,
    tasks: Tasks,
    picks: Sequence[Pick],
    course: Course,
    uniform: Float[Tensor, "tasks places skills"],
) -> float:
    """Add the gradient of one step, and return its loss (without the prior)."""
    vocab = int(model.config.get_text_config().vocab_size)
    limit = LOGIT_BUDGET // _GRADIENT_SHARE
    size = math.ceil(len(picks) / course.parts)
    whole = 0.0
    for first in range(0, len(picks), size):
        part = picks[first : first + size]
        rows = [tasks[task][row] for task, row in part]
        for batch in batches_of(rows, size, lambda b: b.logits * vocab <= limit):
            numbers = torch.tensor([part[i][0] for i in batch], device=inventory.logits.device)
            inventory.shares = inventory.weights(uniform, course.temperature)[numbers]
            made, _ = row_losses(model, make_batch([rows[i] for i in batch], model.device))
            loss = made.sum() / len(picks)
            loss.backward()
            whole += float(loss.detach())
    if course.ibp:
        prior = neg_log_ibp(inventory.logits.sigmoid().transpose(0, 1)).sum()
        (prior * (course.ibp / sum(map(len, tasks)))).backward()
    return whole


def mixed(tasks: Tasks, batch: int, seed: int) -> Iterator[list[Pick]]:
    """Yield the rows of every step: tasks in turn, and each task's rows in a new order every time.

    Over any stretch of steps the tasks have the same number of rows, give or take one.
    """
    generators = [stream(seed, f"order of task {number}") for number in range(len(tasks))]
    left: list[list[int]] = [[] for _ in tasks]
    turn = 0
    while True:
        picks = []
        for _ in range(batch):
            task = turn % len(tasks)
            turn += 1
            if not left[task]:
                order = torch.randperm(len(tasks[task]), generator=generators[task])
                left[task] = order.tolist()
            picks.append((task, left[task].pop()))
        yield picks
