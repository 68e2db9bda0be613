"""`cgmerge compress` for full models: the delta from the base, sized and tuned like an adapter."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.cli.compressreport import SCHEMA, report, warn_of, warn_of_unused
from cgmerge.cli.output import Output
from cgmerge.shown import score_text

if TYPE_CHECKING:
    from cgmerge.evals.compression import Kept
    from cgmerge.evals.suite import SkillSet
    from cgmerge.modules.compress.modes import Options
    from cgmerge.modules.compress.packfull import FullPlan


def compress_full(
    plan: "FullPlan",
    out: Path | None,
    skills: "list[SkillSet]",
    *,
    overwrite: bool,
    output: Output,
) -> None:
    """Compress the delta of a full fine-tune.

    Args:
        plan: From `plan_full`.
        out: The `.cge` file; None for a dry run.
        skills: Validation items; none where nothing is tuned.
        overwrite: Replace a file that exists.
        output: Where it is said.
    """
    from cgmerge.evals.compression import longest_entries
    from cgmerge.modules.compress.fullsize import settle
    from cgmerge.modules.compress.packfull import write_full

    output.line(
        "plan", f"{plan.mode}: {plan.expert.name}, a full model, {len(plan.deltas)} weights"
    )
    for warning in plan.expert.warnings:
        output.warn(warning)
    if out is None:
        output.line("ok", "nothing written (dry run)")
        output.result(SCHEMA, {"out": None, "mode": plan.mode, "warnings": output.warnings})
        return
    longest = longest_entries(skills)
    settled = settle(
        plan,
        longest,
        lambda density, size: output.detail("pass", f"density {density:.4f}: {size:,.0f} bytes"),
    )
    options = settled.options
    kept: Kept | None = None
    if skills:
        options, kept = _calibrated(plan, options, skills, output)
    found = write_full(plan, out, options, kept.entries if kept else None, overwrite=overwrite)
    facts = report(plan, out, found.size, found.fields, output, kept)
    fidelity = found.measured.fidelity
    warn_of_unused(plan, found.size, settled.next_bytes, output)
    warn_of(fidelity.emptied, fidelity, output)
    result: dict[str, Any] = {**facts, "emptied": fidelity.emptied}
    output.result(SCHEMA, result, short=str(out))


def _calibrated(
    plan: "FullPlan", options: "Options", skills: "list[SkillSet]", output: Output
) -> "tuple[Options, Kept]":
    """Tune strength on validation data, unless it is given; score before and after."""
    from cgmerge.evals.fullcompression import FullCalibration
    from cgmerge.modules.loading import load_base

    loaded = load_base(plan.base, with_encoder=True)
    count = FullCalibration.count(plan, options)
    if count:
        with output.progress("tune", count) as advance:
            search = FullCalibration(plan, options, loaded, skills, advance)
            options, best = search.tune()
        output.line(
            "tuned",
            f"{'α' if plan.mode == 'compeft' else 'strength'} {best.multiplier:.3g}, density"
            f" {best.density:.3f}: {score_text(best.score[0], 3)} ({len(search.trials)} tried)",
        )
    return options, FullCalibration(plan, options, loaded, skills).compare(options)
