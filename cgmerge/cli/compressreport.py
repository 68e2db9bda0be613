"""What `cgmerge compress` says of a file that it wrote, adapters and full models alike."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output
from cgmerge.modules.compress.health import emptied_warning, lost_gains
from cgmerge.shown import score_text

if TYPE_CHECKING:
    from cgmerge.evals.compression import Kept
    from cgmerge.modules.compress.fidelity import Fidelity
    from cgmerge.modules.compress.pack import Plan
    from cgmerge.modules.compress.packfull import FullPlan

SCHEMA = "cgmerge.compress/1"


def facts_of(
    plan: "Plan | FullPlan", out: Path, size: int, fields: dict[str, Any], kept: "Kept | None"
) -> dict[str, Any]:
    """Return the documented keys of `compress --json`."""
    entries = int(fields["sizes"]["parameters"])
    return {
        "out": str(out),
        "mode": fields["method"]["mode"],
        "size_bytes": size,
        "ratio_file": fields["sizes"]["bytes"] / size,
        "ratio_16bit": 2 * entries / size,
        "bits_per_param": 8 * size / entries,
        "density": fields["method"]["density"],
        "delta_error": fields["fidelity"]["error"],
        "cosine_min": fields["fidelity"]["cosine_min"],
        "cosine": fields["fidelity"]["cosine"],
        "score_before": kept.before.score if kept else None,
        "score_after": kept.after.score if kept else None,
        "score_interval": [kept.after.low, kept.after.high] if kept else None,
        "gain_kept": kept.share if kept else None,
        "emptied": [],
        "asked": plan.request.asked(),
        "parameters": entries,
    }


def report(
    plan: "Plan | FullPlan",
    out: Path,
    size: int,
    fields: dict[str, Any],
    output: Output,
    kept: "Kept | None",
) -> dict[str, Any]:
    """Say what was written; return the documented keys."""
    facts = facts_of(plan, out, size, fields, kept)
    fidelity, method = fields["fidelity"], fields["method"]
    asked = plan.request.density
    output.line(
        "size",
        f"{size:,} bytes: 1/{facts['ratio_file']:.1f} of the file, 1/{facts['ratio_16bit']:.1f} of"
        f" 16 bits, {facts['bits_per_param']:.3f} bits per parameter",
    )
    output.line(
        "density",
        f"{method['density']:.4f}" + (f" (asked {asked:g})" if asked is not None else ""),
    )
    output.line(
        "error",
        f"{fidelity['error']:.2%} of ‖ΔW‖, cosine {fidelity['cosine']:.3f}"
        f" (lowest module {fidelity['cosine_min']:.3f}, mean {fidelity['cosine_mean']:.3f})",
    )
    if kept:
        share = "" if kept.share is None else f"; {kept.share:.1%} of the gain kept"
        output.line(
            "score",
            f"{score_text(kept.before.score, 3)} before, {score_text(kept.after.score, 3)}"
            f" [{score_text(kept.after.low, 3)}, {score_text(kept.after.high, 3)}] after,"
            f" base {score_text(kept.base.score, 3)}{share}",
        )
    output.line("wrote", str(out))
    for warning in lost_gains(fields.get("eval") or []):
        output.warn(warning)
    return facts


def warn_of_unused(
    plan: "Plan | FullPlan", size: int, next_bytes: int | None, output: Output
) -> None:
    """Say where a mode could not use the bytes that were asked for, and what comes next.

    Args:
        plan: What was asked for.
        size: Bytes of the file.
        next_bytes: Of the next larger file; None where this one is the largest.
        output: Where it is said.
    """
    from cgmerge.modules.compress.pack import USED

    if plan.target is None or size >= USED * plan.target:
        return
    asked = f"{plan.target:,.0f}"
    if next_bytes is not None:
        output.warn(
            f"{size:,} of {asked} bytes are used: the next size up in mode {plan.mode} is"
            f" {next_bytes:,} bytes"
        )
        return
    other = "--lossless keeps every bit" if plan.mode == "svdq" else "--mode svdq uses more"
    if not hasattr(plan.expert, "pairs"):
        other = "no density gives more"
    output.warn(
        f"mode {plan.mode} cannot use more than {size:,} bytes here, of {asked} asked for; {other}"
    )


def warn_of(
    emptied: list[str], found: "Fidelity", output: Output, option: str | None = None
) -> None:
    """Name the modules without effect, and with `--verbose` what became of each.

    Args:
        emptied: The modules.
        found: Of all modules.
        output: Where it is said.
        option: With which every module keeps an effect, where that is known.
    """
    if emptied:
        more = "" if option is None else f"; {option} keeps every module"
        output.warn(emptied_warning(emptied, len(found.modules)) + more)
    for name, part in found.modules.items():
        output.detail("module", f"{name}: error {part.error:.2%}, cosine {part.cosine:.3f}")
