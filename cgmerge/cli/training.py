"""What `cgmerge train` says: the plan, the steps, the result."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output, Progress
from cgmerge.quoting import quoted
from cgmerge.shown import counted, score_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cgmerge.modules.data import Encoded
    from cgmerge.modules.training.plan import Plan
    from cgmerge.modules.training.run import RunOptions, Start, TrainResult

_SHOWN = 600
_SMOOTH = 10


def run_one(plan: "Plan", handling: "RunOptions", output: Output) -> dict[str, Any]:
    """Train one skill and say what happens.

    Returns:
        The documented fields of its JSON object.
    """
    from cgmerge.modules.training.processes import is_main_process
    from cgmerge.modules.training.run import train_expert

    say_plan(plan, output)
    started = time.monotonic()
    voice = Voice(plan, output)
    try:
        with voice:
            result = train_expert(
                plan, handling, listener=voice, scorer=score_rows if plan.eval_rows else None
            )
    except (KeyboardInterrupt, SystemExit):
        if voice.saved is not None and is_main_process():
            output.line("kept", f"a checkpoint at step {voice.saved}; repeat the command to go on")
        raise
    if is_main_process():
        _say_result(plan, result, output, trained=voice.stepped)
    return _fields(plan, result, time.monotonic() - started, trained=voice.stepped)


def say_plan(plan: "Plan", output: Output) -> None:
    """Say what was understood of the data and what will be done."""
    from cgmerge.modules.training.processes import is_main_process

    if not is_main_process():
        return
    settings, chosen = plan.settings, plan.chosen
    output.line("skill", settings.skill)
    for file in plan.data:
        count = counted(file.rows, "row")
        if len(file.examples) != file.rows:
            count += f", {counted(len(file.examples), 'example')}"
        output.line("data", f"{file.path.name}: {count}, format {file.format}")
    how = f"; messages by {plan.how}" if plan.how else ""
    whole = plan.data[0].format == "text"
    learned = "all of the text" if whole else "the completion only"
    output.line("data", f"longest {counted(plan.longest, 'token')}{how}; loss on {learned}")
    output.line("example", _indent(_shorten(plan.example)))
    kinds = sorted({path.rsplit(".", 1)[-1] for path in plan.targets})
    output.line(
        "plan",
        f"LoRA rank {settings.rank}, alpha {chosen.alpha} on {counted(len(plan.targets), 'layer')} "
        f"({', '.join(kinds)}), {plan.trainable:,} trainable of {plan.total + plan.trainable:,}",
    )
    epochs = chosen.steps * plan.step_rows / len(plan.rows)
    output.line(
        "plan",
        f"{counted(chosen.steps, 'step')} of {counted(plan.step_rows, 'row')} "
        f"({epochs:.1f} epochs), learning rate {chosen.lr:g}, {plan.device}, "
        f"{'4-bit base' if settings.load_in_4bit else plan.dtype}, about "
        f"{_size(plan.base_bytes + 16 * plan.trainable)} without activations",
    )
    for name, reason in chosen.reasons.items():
        output.detail("default", f"{name} {getattr(chosen, name):g}: {reason}")
    asked = settings.batch_size
    if asked is not None and asked > plan.step_rows:
        output.warn(
            f"--batch-size {asked} is more than there are rows: steps of"
            f" {counted(plan.step_rows, 'row')}"
        )
    for warning in plan.warnings:
        output.warn(warning)


def dry_fields(plan: "Plan", start: "Start | None") -> dict[str, Any]:
    """Return the JSON fields of a dry run."""
    return {
        **_common(plan),
        "loss": None,
        "metrics": {},
        "dry_run": True,
        "start": start.step if start else 0,
        "finished": bool(start and start.finished),
        "memory_bytes": plan.base_bytes + 16 * plan.trainable,
    }


def say_next(plans: "Sequence[Plan]", output: Output) -> None:
    """Suggest what to type next."""
    base = quoted(plans[0].settings.base)
    outs = " ".join(quoted(plan.settings.out) for plan in plans)
    if len(plans) > 1:
        output.hint(f"combine them with `cgmerge compose {outs} -m ties --base {base} -o merged`")
        return
    names = " ".join(map(quoted, plans[0].settings.eval_data or ["TEST.jsonl"]))
    output.hint(f"measure it with `cgmerge eval {outs} --base {base} --data {names}`")


class Voice:
    """Turns the events of a run into lines and a progress bar."""

    def __init__(self, plan: "Plan", output: Output) -> None:
        self.output = output
        self.total = plan.chosen.steps
        self.saved: int | None = None
        self.stepped = False
        self._recent: list[float] = []
        self._after_resume = False
        self._stack = ExitStack()
        self._progress: Progress | None = None

    def __enter__(self) -> "Voice":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def on_resume(self, step: int, total: int, loss: float) -> None:
        """Say where it goes on."""
        self.output.line("resume", f"after step {step} of {total}, loss there {loss:.4f}")
        self._after_resume = True
        self.saved = step

    def on_step(self, step: int, total: int, loss: float) -> None:
        """Move the bar."""
        self.stepped = True
        if self._after_resume:
            self._after_resume = False
            self.output.line("resume", f"loss at step {step}: {loss:.4f}")
        if self._progress is None:
            # What lies before this step was done by an earlier run, or before the clock starts.
            bar = self.output.progress("train", total, start=step)
            self._progress = self._stack.enter_context(bar)
        self._recent = [*self._recent[1 - _SMOOTH :], loss]
        self._progress(step, note=f"loss {sum(self._recent) / len(self._recent):.4f}")

    def on_checkpoint(self, step: int) -> None:
        """Remember that there is one."""
        self.saved = step
        self.output.detail("saved", f"checkpoint at step {step}")

    def on_stop_wish(self) -> None:
        """Close the bar."""
        self._stack.close()
        self.output.line("stop", "the step is done; writing a checkpoint")

    def warn(self, text: str) -> None:
        """Warn."""
        self.output.warn(text)


def score_rows(model: "PreTrainedModel", rows: "Sequence[Encoded]") -> Mapping[str, float]:
    """Return exact match and the loss of a target token."""
    from cgmerge.evals.scoring import score

    scores = score(model, rows, batch_size=32)
    sizes = [len(row.target_ids) for row in rows]
    total = sum(item.loglik * size for item, size in zip(scores, sizes, strict=True))
    return {
        "exact_match": sum(item.correct for item in scores) / len(scores),
        "loss": -total / sum(sizes),
    }


def _say_result(plan: "Plan", result: "TrainResult", output: Output, *, trained: bool) -> None:
    if not trained:
        output.line("done", f"{result.out} was finished by an earlier run of this command")
        return
    output.line("loss", f"{result.metrics['first_loss']:.4f} at first, {result.loss:.4f} at last")
    scores = result.metrics.get("eval")
    if scores is not None:
        output.line(
            "eval",
            f"exact match {score_text(scores['exact_match'], 3)}"
            f" (base {score_text(scores['base_exact_match'], 3)}), loss {scores['loss']:.4f}"
            f" (base {scores['base_loss']:.4f}) on {counted(scores['n'], 'row')}",
        )
    output.line("wrote", f"{plan.settings.out} ({_size(result.size)})")


def _fields(
    plan: "Plan", result: "TrainResult", seconds: float, *, trained: bool
) -> dict[str, Any]:
    return {
        **_common(plan),
        "loss": result.loss,
        "metrics": result.metrics,
        "seconds": round(seconds, 3),
        "resumed_from": result.resumed_from,
        "trained": trained,
        "size_bytes": result.size,
    }


def _common(plan: "Plan") -> dict[str, Any]:
    return {
        "out": str(plan.settings.out),
        "skill": plan.settings.skill,
        "steps": plan.chosen.steps,
        "base": {"ref": plan.settings.base, "fingerprint": plan.base.fingerprint},
        "data": [
            {
                "file": str(file.path),
                "format": file.format,
                "rows": file.rows,
                "sha256": file.sha256,
            }
            for file in plan.data
        ],
        "rank": plan.settings.rank,
        "alpha": plan.chosen.alpha,
        "lr": plan.chosen.lr,
        "batch_size": plan.step_rows,
        "batch_size_asked": plan.chosen.batch_size,
        "trainable": plan.trainable,
        "longest": plan.longest,
        "seed": plan.settings.seed,
    }


def _shorten(text: str) -> str:
    """Keep both ends of a long example: the start, and where the loss begins."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _indent(text: str) -> str:
    return text.rstrip("\n").replace("\n", "\n" + " " * 9)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
