"""`cgmerge report`: one page about evaluation records."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError

if TYPE_CHECKING:
    from cgmerge.evals.report.page import Report
    from cgmerge.evals.report.sections import Section

SCHEMA = "cgmerge.report/1"


def report(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="Records that `cgmerge eval -o` wrote")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Page to write: one HTML file that needs no other")
    ],
    markdown: Annotated[
        Path | None, typer.Option("--md", metavar="FILE", help="Also write the tables as Markdown")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the page")] = "Evaluation",
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="NAME=SKILL,SKILL...",
            help="Skills to read together; name first those that experts were trained on",
        ),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--files",
            metavar="TARGET=PATH...",
            help="Where a target's files are: adds its size and the curve of its tuning",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write one self-contained page about evaluation records, and what they say in words.

    Records of the same items share a part of the page; every number is computed from the items.

    For example:

      cgmerge report record.json -o report.html --md report.md

      cgmerge report old.json new.json -o both.html --group "own=sort,reverse" --group "pairs=pairs"

      cgmerge report record.json -o report.html --files ties=merged-ties sort=experts/sort
    """
    from cgmerge import fs
    from cgmerge.evals.record import items_path
    from cgmerge.evals.report.files import read_files
    from cgmerge.evals.report.markdown import render_markdown
    from cgmerge.evals.report.page import Report, render_page
    from cgmerge.evals.report.sections import make_sections, open_source

    output = Output(as_json=as_json, quiet=quiet)
    given = named(files or [], option="--files", form="TARGET=PATH")
    items = [items_path(path) for path in records if path.name]
    read = [*records, *items, *map(Path, given.values())]
    _check_outputs(out, markdown, read, overwrite=overwrite)
    groups = {
        name: [part.strip() for part in skills.split(",") if part.strip()]
        for name, skills in named(group or [], option="--group", form="NAME=SKILL,SKILL").items()
    }
    sections = make_sections([open_source(path) for path in records], groups)
    made = Report(title, sections, read_files(given, sections))
    page, text = render_page(made), render_markdown(made)
    for section in sections:
        output.text(" ".join(made.text(section)))
        for warning in made.warnings(section):
            output.warn(warning)
    if not dry_run:
        if markdown is not None:
            fs.replace_file(markdown, text.encode("utf-8", errors="replace"), overwrite=overwrite)
        fs.replace_file(out, page, overwrite=overwrite)
        output.line("wrote", f"{out}{f' and {markdown}' if markdown is not None else ''}")
    else:
        output.line("ok", "nothing written (dry run)")
    output.result(SCHEMA, _fields(made, (out, markdown), len(page), dry_run), short=str(out))


def named(words: list[str], *, option: str, form: str) -> dict[str, str]:
    """Read `NAME=VALUE` words.

    Raises:
        UsageError: A part is missing, or a name is there twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not value:
            raise UsageError(f"{option} takes {form}, found {word!r}", code="name", found=word)
        if name in found:
            raise UsageError(f"{option} names {name!r} twice", code="name", found=word)
        found[name] = value
    return found


def _check_outputs(
    out: Path, markdown: Path | None, inputs: list[Path], *, overwrite: bool
) -> None:
    """Refuse before any work what could not be written after it."""
    from cgmerge.inputs import real_path, refuse_inputs
    from cgmerge.outputs import refuse_foreign_file

    targets = {"--out": out, **({"--md": markdown} if markdown is not None else {})}
    if markdown is not None and real_path(markdown) == real_path(out):
        raise UsageError(f"--out and --md are both {out}", code="out_twice")
    for option, target in targets.items():
        refuse_inputs(target, inputs, option=option)
        if target.is_dir():
            raise UsageError(f"{target} is a folder, a file is wanted", code="out_is_folder")
        if target.exists() and not overwrite:
            raise UsageError(
                f"{target} exists already",
                code="out_exists",
                hint=f"choose another {option}, or --overwrite",
            )
    refuse_foreign_file(out)


def _fields(
    made: "Report", written: tuple[Path, Path | None], size: int, dry_run: bool
) -> dict[str, Any]:
    out, markdown = written
    return {
        "out": str(out),
        "md": None if markdown is None else str(markdown),
        "bytes": size,
        "dry_run": dry_run,
        "parts": [
            {
                **_part(section),
                "text": " ".join(made.text(section)),
                "warnings": made.warnings(section),
                "analysis": [asdict(one) for one in made.statements(section)],
            }
            for section in made.sections
        ],
    }


def _part(section: "Section") -> dict[str, Any]:
    from cgmerge.evals.report.sections import significant

    def of(family: Any) -> list[dict[str, Any]]:
        return [
            {**asdict(one), "target": column, "significant": significant(one)}
            for (column, _), one in family.items()
        ]

    return {
        "records": [one.name for one in section.sources],
        "metric": section.metric,
        "results": [
            {**asdict(one), "target": column.name}
            for column in section.columns
            for one in column.results.values()
        ],
        "means": [{**asdict(one.mean), "target": one.name} for one in section.columns],
        "best": section.top.name,
        "not_significantly_lower": [
            name for name, one in section.others.items() if significant(one) >= 0
        ],
        "against_base": of(section.base),
        "against_best_expert": of(section.expert),
    }
