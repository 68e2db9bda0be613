"""One training run from plan to committed expert."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cgmerge import fs
from cgmerge.errors import InputError, UsageError
from cgmerge.modules.card import CARD, ExpertCard, read_card
from cgmerge.modules.data import Encoded
from cgmerge.modules.expert import WEIGHTS
from cgmerge.modules.training.adapter import attach_lora, commit_expert, factors_of
from cgmerge.modules.training.checkpoints import WorkFolder
from cgmerge.modules.training.listener import Listener, Silent
from cgmerge.modules.training.plan import Plan
from cgmerge.modules.training.processes import is_main_process, join_processes, share
from cgmerge.modules.training.quantized import settle_bitsandbytes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Scorer = Callable[["PreTrainedModel", Sequence[Encoded]], Mapping[str, float]]
"""Scores rows on a model; gives at least `exact_match` and `loss`."""

LAST_STEPS = 10
"""The loss of a run is the mean over so many steps at its end."""
_LARGE = 1 << 30


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        out: The expert's folder.
        steps: Optimiser steps in all.
        loss: Mean loss of the last ten steps.
        metrics: Losses, and scores on the evaluation data.
        resumed_from: The step that training went on after, or None.
        size: Bytes of the weights on disk.
        losses: The loss of every step.
    """

    out: Path
    steps: int
    loss: float
    metrics: dict[str, Any]
    resumed_from: int | None
    size: int
    losses: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run treats what it finds.

    Attributes:
        resume: Go on from a checkpoint of the same run (else it is discarded).
        overwrite: Replace a finished expert, and discard checkpoints of another run.
        keep_finished: Take an expert that this very run made for the result, instead of refusing
            to overwrite it (so that a recipe can be repeated until all its skills are done).
    """

    resume: bool = True
    overwrite: bool = False
    keep_finished: bool = False


def train_expert(
    plan: Plan,
    options: RunOptions,
    *,
    listener: Listener | None = None,
    scorer: Scorer | None = None,
) -> TrainResult:
    """Train one expert and commit its folder, or go on where a killed run stopped.

    Args:
        plan: From `make_plan`.
        options: What to do with what is there already.
        listener: Told about steps; nobody by default.
        scorer: Scores the evaluation data, where the plan has some.

    Raises:
        UsageError: The output exists; checkpoints of another run stand there.
        InputError: A loss that is not finite.
        Damaged: The written adapter differs from memory, is empty, zero or not finite.
        StorageError: The disk.
    """
    told = listener if listener is not None and is_main_process() else Silent()
    work = WorkFolder(plan.settings.out)
    join_processes(plan.device)
    try:
        done = _prepare(plan, work, options, told) if is_main_process() else None
        done = share(done)
        if done is not None:
            return done
        return _train(plan, work, options, told, scorer)
    finally:
        work.close()


@dataclass(frozen=True, slots=True)
class Start:
    """What a run would do first: `step` > 0 goes on from a checkpoint; `finished` does nothing.

    `unclaimed` says which checkpoints would be discarded because nothing tells whose they are.
    """

    step: int = 0
    finished: bool = False
    unclaimed: str | None = None


def check_start(plan: Plan, options: RunOptions) -> Start:
    """Say what a run would start from, changing nothing.

    Raises:
        UsageError: As `train_expert`.
    """
    work = WorkFolder(plan.settings.out)
    if _finished_card(plan, work, options) is not None:
        return Start(finished=True)
    _check_target(plan, options)
    recorded = work.recorded()
    if recorded is None:
        return Start(unclaimed=work.unclaimed())
    if recorded != plan.identity:
        if not options.overwrite:
            raise _other_run(work, recorded, plan.identity)
        return Start()
    newest = work.newest()[0] if options.resume else None
    return Start(newest.step if newest else 0)


def _prepare(
    plan: Plan, work: WorkFolder, options: RunOptions, told: Listener
) -> TrainResult | None:
    """Look at what is there and lock the work folder; a result means that all is done."""
    done = _finished(plan, work, options)
    if done is not None:
        return done
    _check_target(plan, options)
    lost = work.unclaimed()
    if lost is not None:
        told.warn(lost)
    _make_room(plan, work, options)
    work.open(plan.identity)
    return None


def _make_room(plan: Plan, work: WorkFolder, options: RunOptions) -> None:
    """Keep the checkpoints of this very run, discard what may be discarded, refuse the rest."""
    if not work.path.exists():
        return
    recorded = work.recorded()
    same = recorded == plan.identity
    if same and options.resume:
        return
    if recorded is not None and not same and not options.overwrite:
        raise _other_run(work, recorded, plan.identity)
    work.open(plan.identity)  # the lock: never discard what another process is using
    work.discard()
    work.close()


def _finished(plan: Plan, work: WorkFolder, options: RunOptions) -> TrainResult | None:
    card = _finished_card(plan, work, options)
    if card is None:
        return None
    if work.path.exists():
        work.discard()
    out = fs.absolute(plan.settings.out)
    return TrainResult(
        out=plan.settings.out,
        steps=plan.chosen.steps,
        loss=float(card.metrics["loss"]),
        metrics=dict(card.metrics),
        resumed_from=plan.chosen.steps,
        size=(out / WEIGHTS).stat().st_size,
    )


def _finished_card(plan: Plan, work: WorkFolder, options: RunOptions) -> ExpertCard | None:
    """Recognise an expert that this run made: killed before it removed its checkpoints, or kept."""
    out = fs.absolute(plan.settings.out)
    kept = options.keep_finished and not options.overwrite
    # Without run.json the folder is what a killed clean-up left.
    left_over = work.path.exists() and work.recorded() in (None, plan.identity)
    if not (kept or left_over) or not (out / CARD).exists():
        return None
    card = read_card(out)
    return card if card is not None and card.training == plan.identity else None


def _check_target(plan: Plan, options: RunOptions) -> None:
    """Refuse what must not be replaced; an expert with what it was trained otherwise.

    Raises:
        UsageError: See `fs.check_target`.
    """
    try:
        fs.check_target(plan.settings.out, overwrite=options.overwrite)
    except UsageError as error:
        card = _card_there(fs.absolute(plan.settings.out))
        if error.code != "usage.out_exists" or card is None:
            raise
        raise _expert_there(error, card.training, plan.identity) from None


def _expert_there(error: UsageError, there: dict[str, Any], now: dict[str, Any]) -> UsageError:
    if there == now:
        return UsageError(
            f"{error.message}: the expert that this very command made",
            code="out_exists",
            hint="there is nothing to do; --overwrite trains it again",
        )
    differing, lines = _differences(there, now)
    return UsageError(
        f"{error.message}, an expert that was trained otherwise\n  " + "\n  ".join(lines),
        code="out_exists",
        hint=error.hint,
        expected={name: there.get(name) for name in differing},
        found={name: now.get(name) for name in differing},
    )


def _card_there(out: Path) -> ExpertCard | None:
    """Return the card of a trained expert, where a sound one is in the way."""
    try:
        card = read_card(out)
    except InputError:
        return None
    # Other commands note how they made an expert, which is no way of training.
    return card if card is not None and "tokens" in card.training else None


def _differences(there: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return in what two runs differ, and a line with both values for each."""
    names = sorted(there.keys() | now.keys())
    differing = [name for name in names if there.get(name) != now.get(name)]
    return differing, [
        f"{name}: {_short(there.get(name))} there, {_short(now.get(name))} now"
        for name in differing
    ]


def _other_run(work: WorkFolder, recorded: dict[str, Any], identity: dict[str, Any]) -> UsageError:
    differing, lines = _differences(recorded, identity)
    return UsageError(
        f"an unfinished run with other settings stands in {work.path}\n  " + "\n  ".join(lines),
        code="other_run",
        hint="repeat its settings to continue it, or --overwrite to discard it and start anew",
        path=work.path,
        expected={name: recorded.get(name) for name in differing},
        found={name: identity.get(name) for name in differing},
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 48 else f"{text[:45]}…"


def _train(
    plan: Plan,
    work: WorkFolder,
    options: RunOptions,
    listener: Listener,
    scorer: Scorer | None,
) -> TrainResult:
    settle_bitsandbytes(needed=plan.settings.load_in_4bit)
    from cgmerge.modules.training.trainer import lora_tensors, train_adapter

    start, skipped = work.newest()
    for reason in skipped:
        listener.warn(f"checkpoint skipped: {reason}")
    model, tokenizer = attach_lora(plan)
    losses = train_adapter(model, tokenizer, plan, work, start, listener)
    metrics = _metrics(losses)
    size = 0
    if is_main_process():
        if plan.eval_rows and scorer is not None:
            metrics["eval"] = _evaluate(model, plan, scorer)
        factors = factors_of(lora_tensors(model))
        size = commit_expert(plan, factors, metrics, overwrite=options.overwrite)
        work.discard()
    del model
    if plan.device != "cpu" or plan.base_bytes > _LARGE:
        gc.collect()  # trainer and model refer to each other; the next skill needs the room
    return TrainResult(
        out=plan.settings.out,
        steps=len(losses),
        loss=metrics["loss"],
        metrics=metrics,
        resumed_from=start.step if start else None,
        size=size,
        losses=tuple(losses),
    )


def _metrics(losses: Sequence[float]) -> dict[str, Any]:
    last = losses[-LAST_STEPS:]
    return {"loss": sum(last) / len(last), "first_loss": losses[0]}


def prompted(rows: Sequence[Encoded]) -> list[Encoded]:
    """Return rows that all have a prompt.

    A text without begin token has nothing before its first token, which nobody can predict.
    """
    return [
        row if row.prompt_ids else Encoded(row.target_ids[:1], row.target_ids[1:]) for row in rows
    ]


def _evaluate(model: "PeftModel", plan: Plan, scorer: Scorer) -> dict[str, Any]:
    """Score the evaluation rows with and without the adapter."""
    inner = cast("PreTrainedModel", model.get_base_model())
    rows = prompted(plan.eval_rows)
    own = scorer(inner, rows)
    with model.disable_adapter():
        base = scorer(inner, rows)
    scores = {**own, **{f"base_{name}": value for name, value in base.items()}}
    return {**scores, "n": len(rows)}
