"""`cgmerge demo`: the whole story on a tiny model, offline, in under three minutes."""

import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output, Progress
from cgmerge.quoting import quoted
from cgmerge.shown import score_text

if TYPE_CHECKING:
    from cgmerge.evals.demo import DemoResult
    from cgmerge.evals.summary import GroupScore

_STAGES = {
    "data": "writing data: four string-edit skills the base barely knows",
    "train": "training one LoRA expert per skill (half alone, half paired, 40 % replay)",
    "sweep": "trying scales of two merge methods on validation data",
    "compose": "composing the best of each method into one adapter",
    "eval": "scoring base, experts and merges on test data",
}


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write")] = Path("cgmerge-demo"),
    steps: Annotated[int, typer.Option("--steps", help="Training steps per expert", min=1)] = 160,
    seed: options.Seed = 0,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train four experts on the embedded base, merge them, and show what merging does."""
    output = Output(as_json=as_json, quiet=quiet)
    from cgmerge.evals.demo import check_out, run_demo

    check_out(out, overwrite=overwrite)
    result = run_demo(out, seed=seed, steps=steps, voice=_Voice(output))
    _show(result, output)
    output.result("cgmerge.demo/1", {"checks": result.checks, "out": str(out)}, short=str(out))


class _Voice:
    def __init__(self, output: Output) -> None:
        self.output = output

    def stage(self, text: str) -> None:
        """Say which part begins."""
        self.output.line(text, _STAGES[text])

    def training(self, skill: str, steps: int) -> AbstractContextManager[Progress]:
        """Show the steps of one expert."""
        return self.output.progress(skill, steps)


def _show(result: "DemoResult", output: Output) -> None:
    from cgmerge.evals.demo import GROUPS, SKILLS
    from cgmerge.evals.summary import group_scores

    groups = list(GROUPS)
    output.text("\nThe scale decides (validation, exact match):")
    names = [target.name for target in result.validation.record.targets]
    chosen = {candidate.name for candidate in result.chosen.values()}
    rows = []
    for name in names:
        scores = group_scores(result.validation, name, GROUPS)
        mark = "  <- chosen" if name in chosen else ""
        rows.append([name, *[score_text(scores[group].score) for group in groups], mark])
    output.table(["merge", *groups, ""], rows)

    output.text("\nTest (exact match, ± half of the 95 % interval):")
    own = {r.skill: r.score for r in result.evaluation.record.results if r.target == r.skill}
    rows = []
    for name, scores in result.rows().items():
        label = f"expert {name}" if name in SKILLS else name
        first = score_text(own[name]) if name in SKILLS else ""
        rows.append([label, first, *[_cell(scores[group]) for group in groups]])
    output.table(["model", "own skill", *groups], rows)
    _explain(result, output)


def _cell(score: "GroupScore") -> str:
    return f"{score_text(score.score)} ±{score_text((score.high - score.low) / 2)}"


def _explain(result: "DemoResult", output: Output) -> None:
    from cgmerge.evals.demo import SKILLS

    rows = result.rows()
    base, merged = (
        {group: score_text(one.score) for group, one in rows[name].items()}
        for name in ("base", result.recommended)
    )
    best_pair = max(rows[skill]["unseen pairs"].score for skill in SKILLS)
    chosen = result.chosen[result.recommended]
    out, program = quoted(result.out), _program()
    output.text(
        f"""
What this shows
  Each expert solves at least {score_text(result.checks["own_skill_min"])} of its own skill.
  One adapter merged from all four ({chosen.name}) solves {merged["new skills"]} of
  the new skills; the base solves {base["new skills"]}.
  No expert saw two new skills in one chain. The best of them solves {score_text(best_pair)} of such
  pairs, the merge {merged["unseen pairs"]}: skills that were trained apart work together.
  It has a price: what the base can do falls from {base["base skills"]} to
  {merged["base skills"]}, and too large a scale destroys more (the first table).
  Scales were chosen on validation data, the second table is about test data.

All of it on one page, with intervals and tests: {out}/report.html

Next
  {program} inspect {out}/merged-{result.recommended}
  {program} compose {out}/experts/* -m ties --base tiny -o mine \\
      --tune {out}/data/unseen-pairs.validation.jsonl {out}/data/base-single.validation.jsonl
  {program} eval mine --base tiny --data {out}/data/unseen-pairs.test.jsonl
  {program} train --base YOUR_BASE --data YOUR.jsonl --skill NAME -o experts/NAME"""
    )


def _program() -> str:
    """Return what the user types to run this program in the shell it was started from."""
    if shutil.which("cgmerge"):
        return "cgmerge"
    place = Path(sys.executable).parent / "cgmerge"
    if not place.exists():
        return "python -m cgmerge"
    here = Path.cwd()
    return quoted(place.relative_to(here) if place.is_relative_to(here) else place)
