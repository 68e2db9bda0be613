"""`cgmerge split`: training and test rows out of any data file, by what the rows are made of."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.evals.splits.names import By
from cgmerge.shown import counted

if TYPE_CHECKING:
    from cgmerge.evals.splits.files import Asked, Items, Split


def split(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="json, jsonl, csv …")],
    *,
    by: Annotated[
        By,
        typer.Option(
            "--by",
            help="iid: at random; length: the long ones are test; template: whole templates are; "
            "primitive: one word's contexts are; mcd: maximum compound divergence",
        ),
    ],
    out: options.Out,
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            help="Column with the structure: (a (b c)), nested lists, or words  "
            "\\[default: the prompt's words]",
        ),
    ] = None,
    primitive: Annotated[
        str | None,
        typer.Option("--primitive", help="primitive: hold out this  \\[default: by the share]"),
    ] = None,
    size: Annotated[
        int, typer.Option("--compound-size", help="mcd: nodes of a compound", min=2, max=3)
    ] = 3,
    leave_out: Annotated[
        float,
        typer.Option(
            "--leave-out", help="mcd: share of the rows that may be in no part", min=0, max=0.9
        ),
    ] = 0.0,
    share: Annotated[float, typer.Option("--test-share", help="Wanted share of test rows")] = 0.2,
    seed: options.Seed = 0,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Split data files into train.jsonl and test.jsonl, and measure how far the two diverge.

    Rows with one prompt stay together. card.json says what was decided, and the divergence of
    atoms and compounds (0 alike, 1 disjoint).

    For example:

      cgmerge split scan/*.jsonl --by primitive --column structure --primitive jump -o jump

      cgmerge split data.jsonl --by mcd --column structure --seed 1 -o mcd

      cgmerge split data.jsonl --by template --column skill --test-share 0.25 -o new-skills
    """
    from cgmerge import fs
    from cgmerge.evals.splits.files import Asked, check_share, read_items
    from cgmerge.inputs import refuse_inputs

    check_share(share)
    _check_rule(by, primitive=primitive, leave_out=leave_out)
    output = Output(as_json=as_json, quiet=quiet)
    paths = [path.expanduser() for path in files]
    refuse_inputs(out, paths)
    fs.check_target(out, overwrite=overwrite)
    asked = Asked(by, share, seed, column, primitive, size, leave_out)
    items = read_items(paths, column)
    output.line(
        "read",
        f"{counted(len(items.rows), 'row')}, {items.duplicates:,} repeat an earlier prompt",
    )
    made = _split(items, asked, output)
    _say(made, output)
    if dry_run:
        output.line("ok", "nothing written (dry run)")
        output.result("cgmerge.split/1", {"out": None, **made.facts})
        return
    _write(made, out, output, overwrite=overwrite)


def _check_rule(by: By, *, primitive: str | None, leave_out: float) -> None:
    given = {"--primitive": (primitive is not None, "primitive"), "--leave-out": (leave_out, "mcd")}
    for option, (used, rule) in given.items():
        if used and by != rule:
            raise UsageError(f"{option} is for --by {rule}, found --by {by}", code="option")


def _split(items: "Items", asked: "Asked", output: Output) -> "Split":
    from cgmerge.evals.splits.files import split_items

    if asked.by != "mcd":
        return split_items(items, asked)
    from cgmerge.evals.splits.mcd import MOVES

    with output.progress("moves", MOVES) as advance:
        return split_items(items, asked, advance)


def _say(made: "Split", output: Output) -> None:
    for warning in made.warnings:
        output.warn(warning)
    found = made.facts["divergence"]
    left = made.facts["left_out"]
    output.text(f"train     {counted(len(made.train), 'row')}")
    output.text(
        f"test      {counted(len(made.test), 'row')}" + (f"; {left:,} left out" if left else "")
    )
    for key, name in _NAMES.items():
        if found[key] is not None:
            output.text(f"{name:<9} {found[key]:.6f}")


_NAMES = {
    "atoms": "D atoms",
    "compounds2": "D pairs",
    "compounds3": "D triples",
    "unseen": "unseen",
}


def _write(made: "Split", out: Path, output: Output, *, overwrite: bool) -> None:
    from cgmerge.evals.tasks.parts import write_parts

    parts = {"train": made.train, "test": made.test}
    facts: dict[str, Any] = {"generator": "cgmerge.split/1", **made.facts}
    card = write_parts(out, parts, facts, overwrite=overwrite)
    output.line("wrote", f"{out}  digest {card['digest'][:12]}")
    shown = {key: value for key, value in card.items() if key != "schema"}
    output.result("cgmerge.split/1", {"out": str(out), **shown}, short=str(out))
