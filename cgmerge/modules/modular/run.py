"""One run from plan to committed composition."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cgmerge.modules.card import BaseId, DataSource, ExpertCard, package_versions, write_card
from cgmerge.modules.composition import Composition
from cgmerge.modules.loading import load_base
from cgmerge.modules.modular import METHOD
from cgmerge.modules.modular.allocation import discreteness, sparsity, usage
from cgmerge.modules.modular.fit import Course, fit
from cgmerge.modules.modular.inventory import Inventory
from cgmerge.modules.modular.plan import ModularPlan, check_modular_out
from cgmerge.modules.routing.files import Contents, Fresh, save_composition
from cgmerge.modules.routing.router import TaskRouter
from cgmerge.modules.stats import frozen
from cgmerge.modules.training.adapter import base_name, check_factors, prove_factors, write_factors
from cgmerge.modules.training.listener import Listener, Silent
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.training.run import LAST_STEPS, Scorer, prompted
from cgmerge.modules.training.watch import memory_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POINTS = 200
_DIGITS = 6


@dataclass(frozen=True)
class ModularResult:
    """What a run gave.

    Attributes:
        composition: As anybody who opens the folder gets it.
        losses: The loss of every step.
    """

    composition: Composition
    losses: tuple[float, ...] = field(repr=False)

    @property
    def fit(self) -> Mapping[str, Any]:
        """Return what is recorded about the run."""
        found: Mapping[str, Any] = self.composition.record["fit"]
        return found


def train_modular(
    plan: ModularPlan,
    *,
    overwrite: bool = False,
    listener: Listener | None = None,
    scorer: Scorer | None = None,
) -> ModularResult:
    """Train modules and allocation together, and write the composition.

    Args:
        plan: From `make_modular_plan`.
        overwrite: Replace an earlier result.
        listener: Told about steps; nobody by default.
        scorer: Scores the evaluation data of each task, where there is some.

    Raises:
        UsageError: The output exists.
        InputError: A loss that is not finite.
        Damaged: A module that is zero or not finite.
        LimitExceeded: The memory of the device is used up.
        StorageError: The disk.
    """
    check_modular_out(plan, overwrite=overwrite)
    joint = plan.joint
    loaded = load_base(joint.base, device=joint.settings.device, dtype=joint.dtype)
    model = loaded.model
    inventory = Inventory(plan.frame, joint.settings.seed, model.device)
    rows = [prompted(task.rows) for task in plan.tasks]
    with frozen(model), inventory.attached(model), memory_errors(joint, four_bit=False):
        losses = fit(model, inventory, rows, _course(plan), listener or Silent())
        scores = {} if scorer is None else _scores(model, inventory, plan, scorer)
    saved = _commit(plan, inventory, _record(plan, inventory, losses, scores), overwrite=overwrite)
    return ModularResult(saved, tuple(losses))


def _course(plan: ModularPlan) -> Course:
    settings, chosen, params = plan.joint.settings, plan.joint.chosen, plan.params
    return Course(
        steps=chosen.steps,
        lr=chosen.lr,
        allocation_lr=params.allocation_lr,
        batch=chosen.batch_size,
        parts=settings.accumulate,
        schedule=settings.schedule,
        warmup=chosen.warmup,
        weight_decay=settings.weight_decay,
        temperature=params.temperature,
        ibp=params.ibp,
        seed=settings.seed,
    )


def _scores(
    model: "PreTrainedModel", inventory: Inventory, plan: ModularPlan, scorer: Scorer
) -> dict[str, dict[str, Any]]:
    """Score each task's evaluation rows with its own weights, and without any module."""
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for number, (name, task) in enumerate(zip(plan.names, plan.tasks, strict=True)):
            if not task.eval_rows:
                continue
            rows = prompted(task.eval_rows)
            inventory.shares = inventory.weights()[number : number + 1]
            own = scorer(model, rows)
            inventory.shares = torch.zeros_like(inventory.shares)
            base = scorer(model, rows)
            found[name] = {**own, **{f"base_{key}": value for key, value in base.items()}}
            found[name]["n"] = len(rows)
    return found


def _record(
    plan: ModularPlan,
    inventory: Inventory,
    losses: Sequence[float],
    scores: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    shares = inventory.logits.detach().sigmoid().cpu().double().transpose(0, 1)
    last = losses[-LAST_STEPS:]
    return {
        "training": plan.identity,
        "tasks": {
            name: {
                "data": [source.model_dump() for source in _sources(task)],
                "eval": scores.get(name),
            }
            for name, task in zip(plan.names, plan.tasks, strict=True)
        },
        "loss": sum(last) / len(last),
        "first_loss": losses[0],
        "curve": curve(losses),
        "discreteness": discreteness(shares),
        "sparsity": sparsity(shares),
        "usage": usage(shares),
        "allocation": {
            place or "all": {
                name: [round(value, _DIGITS) for value in row]
                for name, row in zip(plan.names, own.tolist(), strict=True)
            }
            for place, own in zip(plan.frame.places, shares, strict=True)
        },
        "notes": [],
    }


def curve(losses: Sequence[float], points: int = _POINTS) -> list[list[float]]:
    """Return the losses as [last step, mean loss] of at most so many stretches of equal length."""
    length = -(-len(losses) // points)
    parts = [losses[first : first + length] for first in range(0, len(losses), length)]
    ends = [min((number + 1) * length, len(losses)) for number in range(len(parts))]
    means = [round(sum(part) / len(part), _DIGITS) for part in parts]
    return [[end, mean] for end, mean in zip(ends, means, strict=True)]


def _sources(plan: Plan) -> list[DataSource]:
    return [
        DataSource(name=file.path.name, sha256=file.sha256, rows=file.rows) for file in plan.data
    ]


def _commit(
    plan: ModularPlan, inventory: Inventory, record: dict[str, Any], *, overwrite: bool
) -> Composition:
    joint = plan.joint
    base = BaseId(name=base_name(joint.base), fingerprint=joint.base.fingerprint)
    contents = Contents(
        method=METHOD,
        params={
            **asdict(plan.params),
            "rank": joint.settings.rank,
            "alpha": joint.chosen.alpha,
            "steps": joint.chosen.steps,
            "lr": joint.chosen.lr,
            "batch_size": joint.chosen.batch_size,
            "seed": joint.settings.seed,
        },
        members=[
            Fresh(f"skill-{number}", _writer(plan, inventory, number))
            for number in range(plan.params.skills)
        ],
        router=_router(plan, inventory.weights().detach().cpu()),
        base=base,
        fit=record,
        warnings=joint.warnings,
    )
    return save_composition(plan.out, contents, overwrite=overwrite)


def _writer(plan: ModularPlan, inventory: Inventory, number: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        factors = inventory.skill(number)
        check_factors(factors)
        write_factors(folder, factors, plan.joint)
        sources = [source for task in plan.tasks for source in _sources(task)]
        card = ExpertCard(
            skill=f"skill-{number}",
            base=BaseId(name=base_name(plan.joint.base), fingerprint=plan.joint.base.fingerprint),
            data=sources,
            training={**plan.identity, "module": number},
            seed=plan.joint.settings.seed,
            versions=package_versions(),
        )
        write_card(folder, card)
        prove_factors(folder, factors, plan.joint)

    return write


def _router(plan: ModularPlan, weights: Tensor) -> TaskRouter:
    """Return the table of σ(logit), rows summing to 1."""
    if plan.params.granularity == "model":
        rows = weights[:, 0].tolist()
        return TaskRouter({n: tuple(row) for n, row in zip(plan.names, rows, strict=True)})
    layers = weights.tolist()
    table = {n: tuple(map(tuple, own)) for n, own in zip(plan.names, layers, strict=True)}
    return TaskRouter(table, plan.frame.places)
