"""`cgmerge extract`: a full fine-tune as a LoRA adapter."""

from typing import Annotated

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.quoting import quoted
from cgmerge.shown import counted


def extract(
    full: Annotated[str, typer.Argument(help="Folder of the full fine-tune")],
    *,
    base: options.BaseRef,
    rank: Annotated[int, typer.Option("--rank", help="Rank of every module", min=1)],
    out: options.Out,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Float type of the factors: auto is float32")
    ] = "auto",
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept a model whose record names another base")
    ] = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Make the best LoRA adapter of a rank from a full fine-tune, and measure what it misses.

    Changes that LoRA cannot hold (norms, embeddings) are named and count in the error.

    For example:

      cgmerge extract my-model --base BASE --rank 32 -o experts/mine

      cgmerge compose experts/mine experts/sort --base BASE -o merged
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.extract import check_extraction_out, plan_extraction, run_extraction
    from cgmerge.modules.fullmodel import open_full

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    opened = open_base(base)
    expert = open_full(full, opened, force_base=force_base)
    plan = plan_extraction(expert, opened, rank, dtype)
    check_extraction_out(plan, out, overwrite=overwrite)
    output.line("plan", f"rank {plan.rank} for {len(plan.linear)} of {len(plan.deltas)} weights")
    if dry_run:
        for warning in plan.warnings:
            output.warn(warning)
        output.line("ok", "nothing written (dry run)")
        facts = {"out": None, "rank": plan.rank, "modules": len(plan.linear)}
        output.result("cgmerge.extract/1", {**facts, "warnings": list(plan.warnings)})
        return
    with output.progress("extract", len(plan.deltas)) as advance:
        found = run_extraction(plan, out, overwrite=overwrite, progress=advance)
    for warning in found.warnings:
        output.warn(warning)
    for path, report in found.modules.items():
        output.detail("module", f"{path}: norm {report.norm:.4g}, error {report.error:.3%}")
    size = sum(path.stat().st_size for path in out.iterdir())
    output.line("lost", f"{found.error:.4%} of ‖ΔW‖ {found.norm:.4g} is not in the adapter")
    output.line("wrote", f"{out} ({size / 1e6:.2f} MB, {counted(len(found.modules), 'module')})")
    output.hint(f"compare them: cgmerge eval {quoted(out)} --base {quoted(base)} --data TEST.jsonl")
    output.result("cgmerge.extract/1", {"out": str(out), **found.facts()}, short=str(out))
