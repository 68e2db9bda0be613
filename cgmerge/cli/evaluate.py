"""`cgmerge eval`: score base, experts, merged adapters and models side by side."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.plain import exact
from cgmerge.shown import counted, score_text

if TYPE_CHECKING:
    from cgmerge.evals.metrics import MetricInfo
    from cgmerge.evals.record import Evaluation, Record, Result
    from cgmerge.evals.runner import Settings
    from cgmerge.evals.targets import Target
    from cgmerge.modules.base import Base
    from cgmerge.modules.loading import LoadedBase

SCHEMA = "cgmerge.eval/1"

MetricOption = Literal[
    "exact", "loglik", "token-accuracy", "perplexity", "rouge-l", "token-f1", "choice",
    "choice-norm",
]  # fmt: skip
_METRIC_HELP = ", ".join(get_args(MetricOption))


def evaluate(
    *,
    base: options.BaseRef,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="[NAME=]FILE...", help="Data files; each is a skill, named after it"
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval",
            metavar="FOLDER|TASKS",
            help="Instead of data: tasks of lm-evaluation-harness, from a folder of task files"
            " or by name (a,b)",
        ),
    ] = None,
    lm_eval_metric: Annotated[
        str | None,
        typer.Option(
            "--lm-eval-metric",
            metavar="NAME[,FILTER]",
            help="Which of the tasks' metrics is the score \\[default: the first that fits]",
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]TARGET", help="Adapter or model folders, named after themselves"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Record to write; items go beside it")
    ] = None,
    metric: Annotated[
        MetricOption,
        typer.Option("--metric", metavar="NAME", help=f"What the score is: {_METRIC_HELP}"),
    ] = "exact",
    generate: Annotated[
        bool, typer.Option("--generate", help="Also generate greedily and compare item by item")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Longest generated answer \\[default: 256 with rouge-l and token-f1,"
            " else 2 more than the right one]",
            min=1,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Items in a pass", min=1)] = 32,
    limit: Annotated[
        int | None, typer.Option("--limit", help="First N items of each skill", min=1)
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="COLUMN",
            help="Also read scores over a column of numbers, or over the answer's `tokens`",
        ),
    ] = None,
    least: Annotated[
        float | None,
        typer.Option("--min", help="Exit with 1 if a target scores lower on a skill"),
    ] = None,
    compare_to: Annotated[
        str | None, typer.Option("--compare-to", metavar="NAME", help="Default: the base")
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option(
            "--validation",
            metavar="[NAME=]FILE...",
            help="Also show the expert that is best on this other data, as `best-single`",
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle", help="Also show the best expert of each skill, picked on the scored items"
        ),
    ] = False,
    ensemble: Annotated[
        bool,
        typer.Option(
            "--ensemble",
            help="Also show all experts asked together, their probabilities averaged; with"
            " --validation also as `stacked`, with weights from there",
        ),
    ] = False,
    no_base: Annotated[bool, typer.Option("--no-base", help="Leave the base out")] = False,
    expect_same: Annotated[
        bool, typer.Option("--expect-same", help="Accept targets that score as the base")
    ] = False,
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept adapters of another base fingerprint")
    ] = False,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Quantize weights on loading (bitsandbytes)")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Score base, experts, merged adapters and models side by side, with intervals.

    An item is right when every token of the answer, its end included, is the first choice.

    For example:

      cgmerge eval experts/* --base tiny --data skills/*.jsonl -o record.json

      cgmerge eval ties=merged sum=other --base BASE --data test.jsonl --compare-to sum

      cgmerge eval merged --base BASE --data test.jsonl --min 0.9

      cgmerge eval merged --base BASE --lm-eval my-tasks -o record.json
    """
    from cgmerge.cli.lmeval import Options, harness_request
    from cgmerge.evals.metrics import METRICS, metric_of
    from cgmerge.evals.record import check_out
    from cgmerge.evals.runner import Settings
    from cgmerge.evals.suite import split_name
    from cgmerge.evals.targets import LoadOptions
    from cgmerge.inputs import refuse_inputs
    from cgmerge.modules.base import open_base
    from cgmerge.refs import expanded

    unused = {
        "--data": data, "--metric": metric != "exact", "--generate": generate, "--by": by,
        "--max-new-tokens": max_new_tokens, "--validation": validation, "--ensemble": ensemble,
    }  # fmt: skip
    request = harness_request(Options(lm_eval, lm_eval_metric), unused)
    info = METRICS["lm_eval"] if request else metric_of(metric)
    _check_least(least, info)
    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    settings = Settings(
        metric=info.name,
        batch_size=batch_size,
        generates=generate,
        max_new_tokens=max_new_tokens,
        keeps_base=not no_base,
        expects_same=expect_same,
        compare_to=compare_to,
        by=tuple(by or ()),
        limit=limit,
        seed=seed,
        loading=LoadOptions(device, dtype, load_in_4bit),
    )
    _check_length(settings, info)
    if no_base and not targets:
        raise UsageError("nothing is left to evaluate", code="targets", hint="name a target")
    if out is not None:
        files = [*(data or []), *(validation or []), *(targets or [])]
        files += [lm_eval] if lm_eval else []
        places = [expanded(split_name(spec)[1]) for spec in files]
        there = [place for place in places if os.path.exists(place)]  # noqa: PTH110 (odd names)
        check_out(out, overwrite=overwrite, inputs=there)
    opened = open_base(base)
    if out is not None:
        refuse_inputs(out, [opened.folder])
    call = Call(opened, tuple(targets or ()), settings, force_base, dry_run, output)
    if request:
        evaluation = request.evaluate(call, oracle=oracle)
    else:
        evaluation = _evaluate_data(call, data or [], validation or [], oracle, ensemble)
    if evaluation is None:
        return
    record = evaluation.record
    if out is not None:
        from cgmerge.evals.record import write_record

        record = write_record(out, evaluation, overwrite=overwrite)
    if not _tell(record, evaluation, out, least, output):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Call:
    """What is evaluated, and how.

    Attributes:
        base: Opened.
        targets: As written.
        settings: How to evaluate.
        force_base: Accept adapters of another base.
        dry_run: Stop before the work.
        output: Where to speak.
    """

    base: "Base"
    targets: tuple[str, ...]
    settings: "Settings"
    force_base: bool
    dry_run: bool
    output: Output

    def open(self) -> "list[Target]":
        """Open the targets and check them."""
        from cgmerge.evals.targets import open_targets

        return open_targets(self.targets, self.base, force_base=self.force_base)

    def load(self, *, with_encoder: bool = False) -> "LoadedBase":
        """Bring the base into memory; one with an encoder only where that can be used."""
        from cgmerge.modules.loading import load_base

        loading = self.settings.loading
        loaded = load_base(
            self.base,
            device=loading.device,
            dtype=loading.dtype,
            load_in_4bit=loading.load_in_4bit,
            with_encoder=with_encoder,
        )
        kind = str(loaded.model.dtype).removeprefix("torch.")
        self.output.detail("device", f"{loaded.model.device}, {kind}")
        return loaded

    def say(self, targets: "list[Target]", skills: Sequence[tuple[str, int | None, str]]) -> None:
        """Say what will be evaluated: of skills the name, the number of items and the source."""
        say = self.output.line
        say("base", f"{self.base.ref}  {self.base.fingerprint}")
        for target in targets:
            say("target", f"{target.name}  {target.kind}  sha256 {target.digest[:12]}")
        for name, count, source in skills:
            items = "" if count is None else f"{counted(count, 'item')} "
            say("skill", f"{name}  {items}from {source}")

    def finish_dry_run(
        self, targets: "list[Target]", skills: Sequence[tuple[str, int | None, str]]
    ) -> None:
        """Tell what would have been evaluated."""
        for target in targets:
            for warning in target.warnings:
                self.output.warn(warning)
        self.output.line("ok", "nothing evaluated, nothing written (dry run)")
        self.output.result(
            SCHEMA,
            {
                "results": [],
                "items": None,
                "dry_run": True,
                "base": {"name": self.base.ref, "fingerprint": self.base.fingerprint},
                "targets": [
                    {"name": one.name, "kind": one.kind, "digest": one.digest} for one in targets
                ],
                "skills": [{"name": name, "n": count} for name, count, _ in skills],
            },
        )


def _evaluate_data(
    call: Call, data: list[str], validation: list[str], oracle: bool, ensemble: bool
) -> "Evaluation | None":
    """Score targets on data files; None after a dry run."""
    from cgmerge.cli.picks import Picks, measure
    from cgmerge.evals.chosen import tuned_warnings
    from cgmerge.evals.columns import check_metric
    from cgmerge.evals.suite import questions, read_skills
    from cgmerge.evals.targets import check_tasks

    settings = call.settings
    skills = read_skills(data, limit=settings.limit)
    check_metric(questions(skills, settings.by), settings.metric)
    picks = Picks(read_skills(validation) if validation else [], oracle, ensemble)
    found = call.open()
    picks.check(found, skills, settings)
    known = [(one.name, len(one.examples), one.source) for one in skills]
    call.say(found, known)
    check_tasks(found, [skill.name for skill in skills])
    if call.dry_run:
        for warning in tuned_warnings(found, skills):
            call.output.warn(warning)
        call.finish_dry_run(found, known)
        return None
    return measure(call, found, skills, picks)


def _tell(
    record: "Record",
    evaluation: "Evaluation",
    out: Path | None,
    least: float | None,
    output: Output,
) -> bool:
    """Show what was measured; say whether all of it passes the bar."""
    failed = _below(record, least)
    _show(record, failed, out, output)
    fields = _fields(record, out, least, failed)
    if output.as_json:
        from cgmerge.evals.statements import analyse_evaluation

        fields["analysis"] = [asdict(one) for one in analyse_evaluation(evaluation)]
    output.result(SCHEMA, fields, short=_short(record, out))
    return not failed


def _check_least(least: float | None, info: "MetricInfo") -> None:
    """Refuse a bar that no score can pass, or that every score does."""
    if least is None:
        return
    if info.lower_is_better:
        raise UsageError(
            f"--min does not fit {info.option}, of which less is better",
            code="min",
            hint="--metric loglik --min=-0.5 wants a perplexity of about e^0.5 = 1.65 or less",
            found=least,
        )
    if info.low <= least <= info.high and math.isfinite(least):
        return
    if info.high == 0:
        raise UsageError(
            f"--min {exact(least)} cannot be reached: log-likelihoods are at most 0",
            code="min",
            hint="for example --min=-0.5 (nats per token)",
            found=least,
        )
    raise UsageError(f"--min must be from 0 to 1, found {exact(least)}", code="min", found=least)


def _check_length(settings: "Settings", info: "MetricInfo") -> None:
    if settings.max_new_tokens is not None and not settings.writes:
        raise UsageError(
            f"--max-new-tokens has no effect: with --metric {info.option} nothing is generated",
            code="max_new_tokens",
            hint="add --generate, or leave it out",
        )


def _below(record: "Record", least: float | None) -> "list[Result]":
    """List results under the bar; the base has to pass only when it stands alone."""
    if least is None:
        return []
    given = [one for one in record.targets if one.kind != "baseline"]
    judged = [one for one in given if one.kind != "base" or len(given) == 1]
    names = {one.name for one in judged}
    return [one for one in record.results if one.target in names and one.score < least]


def _show(record: "Record", failed: "list[Result]", out: Path | None, output: Output) -> None:
    from cgmerge.cli.scoretable import how_to_read, score_table

    for warning in record.warnings:
        output.warn(warning)
    output.table(*score_table(record))
    output.text("")
    output.text(how_to_read(record))
    if record.settings.generate:
        agree = sum(one.agree or 0 for one in record.results)
        n = sum(one.n for one in record.results)
        output.text(f"generation and teacher forcing agree on {agree} of {n} items")
    for one in failed:
        output.line("below", f"{one.target} on {one.skill}: {score_text(one.score, 4)}")
    if out is not None:
        output.line("wrote", f"{out} and {record.items.file if record.items else ''}")


def _fields(
    record: "Record", out: Path | None, least: float | None, failed: "list[Result]"
) -> dict[str, Any]:
    from cgmerge.evals.record import items_path

    content = asdict(record)
    shown = {key: content[key] for key in _SHOWN}
    return {
        **shown,
        "items": str(items_path(out)) if out is not None else None,
        "out": str(out) if out is not None else None,
        "min": least,
        "passed": not failed,
    }


_SHOWN = ("base", "targets", "skills", "results", "means", "comparisons", "warnings", "settings")


def _short(record: "Record", out: Path | None) -> str:
    if out is not None:
        return str(out)
    return "\n".join(f"{mean.target} {score_text(mean.score, 4)}" for mean in record.means)
