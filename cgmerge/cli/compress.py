"""`cgmerge compress`: an expert as one small file."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.compressreport import SCHEMA, report, warn_of, warn_of_unused
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import counted, score_text

if TYPE_CHECKING:
    from cgmerge.evals.compression import Kept
    from cgmerge.evals.suite import SkillSet
    from cgmerge.merge.deltas import LowRank
    from cgmerge.modules.base import Base
    from cgmerge.modules.compress.modes import Encoded, Options
    from cgmerge.modules.compress.pack import Maker, Plan
    from cgmerge.modules.expert import Expert

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}  # fmt: skip


def compress(
    expert: Annotated[
        str, typer.Argument(metavar="EXPERT", help="Adapter folder, or a full model (with --base)")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write, ending in .cge")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", "-m", help="ternary, svdq or compeft  \\[default: ternary]"),
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Keep every bit: one verified file, not a small one")
    ] = False,
    density: Annotated[
        float | None, typer.Option("--density", help="Share of entries kept  \\[default: 0.2]")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option("--target-size", help="Size of the file: 2MB, 300kB, 65536 …")
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option("--target-ratio", help="Times smaller than at 16 bits per parameter"),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            "--calibrate",
            metavar="[NAME=]FILE...",
            help="Validation data: tune the strength, report scores before and after",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Base model; needed for --calibrate and full models"),
    ] = None,
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept an expert of another base; recorded")
    ] = False,
    gauge: Annotated[
        str | None,
        typer.Option("--gauge", help="Mode ternary: svd, or raw to keep the factors' own basis"),
    ] = None,
    multiplier: Annotated[
        float | None, typer.Option("--multiplier", help="Modes ternary, svdq: strength of ΔW")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Mode compeft: factor on σ  \\[default: 1]")
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write an expert as one small, verified file, and measure what was lost.

    A full model is stored as its difference from the base. A folder that `cgmerge decompress`
    wrote becomes the very same file again.

    Examples:

      cgmerge compress experts/a -o a.cge

      cgmerge compress experts/a --target-ratio 20 --base BASE --calibrate val.jsonl -o a.cge

      cgmerge compress experts/a --mode svdq --target-size 2MB -o a.cge

      cgmerge compress my-model --base BASE --target-ratio 20 -o my-model.cge
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.compress.pack import Request, make_plan
    from cgmerge.modules.compress.packfull import is_full, plan_full

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    if out is None and not dry_run:
        raise UsageError("no output file", code="out", hint="add -o FILE.cge (or --dry-run)")
    request = Request(
        mode=mode,  # type: ignore[arg-type]  # checked by `make_plan`
        density=density,
        size=None if target_size is None else _parse_size(target_size),
        ratio=target_ratio,
        gauge=gauge,  # type: ignore[arg-type]
        alpha=alpha,
        multiplier=multiplier,
    )
    if force_base and base is None:
        raise UsageError(
            "--force-base accepts another base than the expert's, and no base is given",
            code="force_base",
            hint="add --base BASE, or leave it out",
        )
    opened = None if base is None else open_base(base)
    if is_full(Path(expert)):
        if lossless:
            raise UsageError("--lossless is for adapters; this is a full model", code="full_model")
        from cgmerge.cli.compressfull import compress_full

        full = plan_full(expert, request, opened, force_base=force_base)
        skills = _validation(opened, calibrate, [])
        _check_out([full.expert.folder, *_files(calibrate)], opened, out, overwrite=overwrite)
        compress_full(full, None if dry_run else out, skills, overwrite=overwrite, output=output)
        return
    if lossless:
        if request.asked() or calibrate:
            raise UsageError(
                "--lossless keeps every bit: there is nothing to choose", code="lossless",
                hint="leave out modes, sizes and --calibrate",
            )  # fmt: skip
        plan = make_plan(expert, Request(), opened, force_base=force_base)
        _lossless(plan, None if dry_run else out, overwrite=overwrite, output=output)
        return
    plan = make_plan(expert, request, opened, force_base=force_base)
    skills = _validation(opened, calibrate, [plan.expert])
    _check_out([plan.expert.folder, *_files(calibrate)], opened, out, overwrite=overwrite)
    _show(plan, output)
    if dry_run or out is None:
        output.line("ok", "nothing written (dry run)")
        facts = {"out": None, "mode": plan.mode, "parameters": plan.entries}
        output.result(SCHEMA, {**facts, "warnings": list(plan.warnings)})
    elif plan.restored is not None and not skills:
        _write_again(plan, out, overwrite=overwrite, output=output)
    else:
        _run(replace(plan, restored=None), out, skills, overwrite=overwrite, output=output)


def _run(
    plan: "Plan", out: Path, skills: "list[SkillSet]", *, overwrite: bool, output: Output
) -> None:
    from cgmerge.evals.compression import longest_entries
    from cgmerge.modules.compress import pack
    from cgmerge.modules.compress.advice import keeping_all
    from cgmerge.modules.compress.modes import decode, encode

    factors = plan.raw_factors()
    make: pack.Maker = lambda asked: encode(plan.mode, factors, asked)  # noqa: E731
    measure = None
    if skills:
        make, measure = _calibrated(plan, skills, output)
    longest = longest_entries(skills)

    def fields_of(encoded: "Encoded") -> dict[str, Any]:
        return pack.manifest_fields(plan, encoded, longest)

    if skills:  # tuning shows its own progress, and two bars cannot be shown at once
        encoded = pack.compress(plan, make, fields_of)
    else:
        with output.progress("compress", len(factors)) as advance:
            # The last step is left for the end: how many passes there are is not known before.
            encoded = pack.compress(
                plan,
                make,
                fields_of,
                lambda done, number: advance(min(done, len(factors) - 1), note=f"pass {number}"),
            )
            advance(len(factors))
    kept = measure(decode(encoded.coded)) if measure else None
    fields = pack.manifest_fields(plan, encoded, kept.entries if kept else [])
    size = pack.write_packed(out, encoded, fields, overwrite=overwrite)
    facts = report(plan, out, size, fields, output, kept)
    emptied = encoded.fidelity.emptied
    warn_of_unused(plan, size, encoded.next_bytes, output)
    option = None
    if emptied and plan.target is None:
        option = keeping_all(plan.mode, factors, plan.options(None))
    warn_of(emptied, encoded.fidelity, output, option)
    output.result(SCHEMA, {**facts, "emptied": emptied}, short=str(out))


def _lossless(plan: "Plan", out: Path | None, *, overwrite: bool, output: Output) -> None:
    """Write an adapter as it is."""
    from cgmerge.modules.compress.lossless import write_lossless

    _check_out([plan.expert.folder], plan.base, out, overwrite=overwrite)
    output.line("plan", f"lossless: {plan.expert.name}, {plan.entries:,} parameters")
    for warning in plan.warnings:
        output.warn(warning)
    if out is None:
        output.line("ok", "nothing written (dry run)")
        output.result(SCHEMA, {"out": None, "mode": "lossless", "parameters": plan.entries})
        return
    if plan.restored is not None and plan.restored.lossless:
        _write_again(plan, out, overwrite=overwrite, output=output)
        return
    size, fields = write_lossless(plan.expert, plan.base, out, overwrite=overwrite)
    facts = report(plan, out, size, fields, output, None)
    output.result(SCHEMA, facts, short=str(out))


def _calibrated(
    plan: "Plan", skills: "list[SkillSet]", output: Output
) -> "tuple[Maker, Callable[[Mapping[str, LowRank]], Kept]]":
    """Return a maker that tunes once, and a function that scores before against after."""
    from cgmerge.evals.compression import compare, make_scorer
    from cgmerge.modules.compress.tuning import Search
    from cgmerge.modules.loading import load_base

    assert plan.base is not None
    loaded = load_base(plan.base, with_encoder=True)
    exact = dict(plan.expert.deltas())
    search = Search(plan.mode, plan.raw_factors(), plan.request.alpha, plan.request.multiplier)

    def make(asked: "Options") -> "Encoded":
        if search.found is not None or not search.count(asked):
            return search.make(asked)
        with output.progress("tune", search.count(asked)) as advance:
            tuned = search.tune(asked, make_scorer(loaded, skills, advance))
        best = tuned.best
        output.line(
            "tuned",
            f"{'α' if plan.mode == 'compeft' else 'strength'} {best.multiplier:.3g}, density"
            f" {best.density:.3f}: {score_text(best.score[0], 3)} ({len(tuned.trials)} tried)",
        )
        return tuned.encoded

    return make, lambda found: compare(loaded, skills, exact, found)


def _write_again(plan: "Plan", out: Path, *, overwrite: bool, output: Output) -> None:
    """Write the file that the folder was decompressed from."""
    from cgmerge.modules.compress import pack

    assert plan.restored is not None
    size = pack.write_restored(out, plan.restored, overwrite=overwrite)
    fields = plan.restored.fields
    output.line("same", "this expert was compressed before and is that very file again")
    facts = report(plan, out, size, fields, output, None)
    output.result(SCHEMA, facts, short=str(out))


def _show(plan: "Plan", output: Output) -> None:
    expert = plan.expert
    ranks = "/".join(map(str, expert.ranks))
    modules = counted(len(expert.pairs), "module")
    output.line("plan", f"{plan.mode}: {expert.name}, rank {ranks}, {modules},"
                f" {plan.entries:,} parameters")  # fmt: skip
    for warning in plan.warnings:
        output.warn(warning)


def _check_out(
    inputs: list[Path], base: "Base | None", out: Path | None, *, overwrite: bool
) -> None:
    from cgmerge import fs
    from cgmerge.inputs import refuse_inputs

    if out is None:
        return
    if out.suffix != ".cge":
        better = quoted(f"{out.name or 'expert'}.cge")
        raise UsageError(f"--out {out} does not end in .cge", code="out", hint=f"-o {better}")
    refuse_inputs(out, [*inputs, *([base.folder] if base else [])])
    fs.check_file(out, overwrite=overwrite)


def _files(calibrate: list[str] | None) -> list[Path]:
    from cgmerge.evals.suite import split_name
    from cgmerge.refs import expanded

    return [expanded(split_name(spec)[1]) for spec in calibrate or ()]


def _validation(
    base: "Base | None", calibrate: list[str] | None, experts: "Sequence[Expert]"
) -> "list[SkillSet]":
    from cgmerge.evals.suite import read_skills
    from cgmerge.modules.usage import base_names, base_word

    if not calibrate:
        return []
    if base is None:
        raise UsageError("--calibrate scores the expert on its base", code="base",
                         hint=f"add --base {base_word(None, base_names(experts))}")  # fmt: skip
    return read_skills(calibrate)


def _parse_size(text: str) -> int:
    """Read `2MB`, `300 kB`, `1.5MiB` or a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or len(text) > 40:
        raise UsageError(
            f"--target-size {text!r} is no size", code="size", hint="write 2MB, 300kB or 65536"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])
