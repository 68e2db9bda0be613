"""`cgmerge tasks`: suites of compositional tasks, listed and made."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted

if TYPE_CHECKING:
    from cgmerge.evals.tasks.parts import Parts
    from cgmerge.evals.tasks.suites import Suite, Wanted


def tasks(
    action: Annotated[
        Literal["make"] | None, typer.Argument(metavar="[make]", help="Nothing lists the suites")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Suite to make")] = None,
    *,
    split: Annotated[
        str | None, typer.Option("--split", help="What is held out  \\[default: the first listed]")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--n", help="Rows in all  \\[default: the suite's own size]", min=10),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            "--validation-share",
            help="scan: of the training rows; 0 leaves these as published",
            min=0,
            max=0.5,
        ),
    ] = 0.1,
    modulus: Annotated[int, typer.Option("--modulus", help="arithmetic: p", min=3, max=997)] = 29,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Folder of published files")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write")] = None,
    seed: options.Seed = 0,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List suites of compositional tasks, or make one: train, validation and test files.

    The folder also gets card.json: split, seed, rows, and digests of what was written.

    For example:

      cgmerge tasks

      cgmerge tasks make scan --split addprim-jump -o scan-jump

      cgmerge tasks make pcfg --split productivity --n 20000 --seed 1 -o pcfg

      cgmerge tasks make cogs --from COGS/data --split gen -o cogs
    """
    from cgmerge.evals.tasks.suites import Wanted, find_suite

    output = Output(as_json=as_json, quiet=quiet)
    if action is None:
        _list(output)
        return
    if name is None:
        raise UsageError("which suite?", code="suite", hint="cgmerge tasks lists them")
    if out is None:
        raise UsageError("--out is missing", code="out", hint="-o DIR, a new folder")
    suite = find_suite(name)
    wanted = Wanted(
        split=split or suite.splits[0],
        seed=seed,
        count=count,
        share=share,
        folder=None if source is None else source.expanduser(),
        modulus=modulus,
    )
    _make(suite, wanted, out, output, overwrite=overwrite, dry_run=dry_run)


def _list(output: Output) -> None:
    from cgmerge.evals.tasks.suites import SUITES

    rows = [[one.name, one.summary, one.sizes] for one in SUITES.values()]
    output.table(["suite", "what it asks", "rows"], rows, words=True)
    for suite in SUITES.values():
        output.text("")
        output.text(f"{suite.name}: {', '.join(_folded(suite.splits))}")
        how = "read with --from; " if suite.reads else ""
        output.text(f"  {suite.source}; {how}{suite.licence}")
    output.hint("make one: cgmerge tasks make scan --split length -o scan-length")
    facts = [suite.facts() for suite in SUITES.values()]
    output.result("cgmerge.tasks/1", {"suites": facts}, short="\n".join(SUITES))


def _folded(splits: tuple[str, ...]) -> list[str]:
    """Write few-shot-1 … few-shot-1024 as one word."""
    shots = [name for name in splits if name.startswith("few-shot-")]
    others = [name for name in splits if name not in shots]
    return [*others, *([f"{shots[0]} … {shots[-1]} (powers of 2)"] if shots else [])]


def _make(
    suite: "Suite", wanted: "Wanted", out: Path, output: Output, *, overwrite: bool, dry_run: bool
) -> None:
    from cgmerge import fs
    from cgmerge.evals.tasks.parts import write_parts
    from cgmerge.evals.tasks.suites import make_parts
    from cgmerge.inputs import refuse_inputs

    if wanted.folder is not None:
        refuse_inputs(out, [wanted.folder])
    fs.check_target(out, overwrite=overwrite)
    parts = make_parts(suite, wanted)
    shared = _shared(parts)
    for note in parts.notes:
        output.line("note", note)
    if shared:
        output.warn(f"{shared} test prompts are also in other parts, as the source has them")
    sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in parts.items())
    output.line("rows", sizes)
    facts = {**_facts(suite, wanted, parts), "shared_prompts": shared}
    if dry_run:
        output.line("ok", "nothing written (dry run)")
        output.result("cgmerge.tasks.make/1", {"out": None, **facts})
        return
    card = write_parts(out, dict(parts.items()), facts, overwrite=overwrite)
    output.line("wrote", f"{out}  digest {card['digest'][:12]}")
    if parts.train:
        data = quoted(out / "train.jsonl")
        output.hint(f"train on it: cgmerge train --base BASE --data {data} -o EXPERT")
    shown = {key: value for key, value in card.items() if key != "schema"}
    output.result("cgmerge.tasks.make/1", {"out": str(out), **shown}, short=str(out))


def _facts(suite: "Suite", wanted: "Wanted", parts: "Parts") -> dict[str, Any]:
    facts: dict[str, Any] = {
        "suite": suite.name,
        "generator": f"cgmerge.tasks.{suite.name}/1",
        "split": wanted.split,
        "seed": wanted.seed,
        "n": wanted.count,
        "source": suite.source,
        "licence": suite.licence,
        "notes": list(parts.notes),
    }
    if suite.name == "arithmetic":
        facts["modulus"] = wanted.modulus
    if suite.name == "scan":
        facts["validation_share"] = wanted.share
    return facts


def _shared(parts: "Parts") -> int:
    """Count test rows whose prompt another part has too."""
    known = {row["prompt"] for part in (parts.train, parts.validation) for row in part}
    return sum(row["prompt"] in known for row in parts.test)
