"""`cgmerge ls`, `add`, `rm`, `verify`: experts kept together, by name."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import counted

if TYPE_CHECKING:
    from cgmerge.modules.library.entry import Entry

Library = Annotated[
    str, typer.Argument(metavar="LIB", help="Library: a folder, a URL, hf://user/repo@REV")
]
Licence = Annotated[
    str | None, typer.Option("--license", help="Where the expert does not say: apache-2.0, mit …")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A word to find it by; repeatable")]


def ls(
    library: Library,
    tag: Annotated[str | None, typer.Option("--tag", help="Only experts with this tag")] = None,
    clusters: Annotated[
        int | None,
        typer.Option("--cluster", help="Group them by what they change: so many groups", min=1),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the experts of a library: what they are, for which base, how large, how good.

    For example:

      cgmerge ls experts

      cgmerge ls experts --cluster 4
    """
    from cgmerge.modules.library.library import listing, open_library

    output = Output(as_json=as_json, quiet=quiet)
    store = open_library(library)
    found = listing(store)
    for bad in found.bad:
        output.warn(f"left out: {bad.error.message}")
    entries = [entry for entry in found.entries if tag is None or tag in entry.tags]
    if entries:
        columns = ["name", "kind", "bytes", "rank", "base", "skill", "scores"]
        output.table(columns, [_row(entry) for entry in entries], words=True)
    elif not found.bad:
        output.hint(f"nothing there yet: cgmerge add {quoted(library)} EXPERT")
    groups = None if clusters is None else _groups(library, entries, clusters, output)
    output.result(
        "cgmerge.ls/1",
        {
            "library": library,
            "clusters": groups,
            "experts": [entry.facts() for entry in entries],
            "damaged": [{"entry": b.file, "message": b.error.message} for b in found.bad],
        },
        short="\n".join(entry.name for entry in entries) or None,
    )


def _groups(
    library: str, entries: "list[Entry]", count: int, output: Output
) -> list[dict[str, Any]]:
    """Group experts whose deltas are alike, and print the groups."""
    from cgmerge.modules.groups import group_experts

    found = group_experts([f"{library}/{entry.name}" for entry in entries], count)
    rows = [[str(g.number), f"{g.likeness:.2f}", " ".join(g.names)] for g in found]
    output.text("")
    output.table(["group", "cosine", "experts"], rows, words=True)
    output.hint("compose those of one group, or route between groups: cgmerge compose … -m gate")
    return [{"group": g.number, "likeness": g.likeness, "experts": list(g.names)} for g in found]


def add(
    library: Library,
    experts: Annotated[
        list[str], typer.Argument(metavar="EXPERT...", help="Folders, .cge files, references")
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="In the library; that of folder or file if not given"),
    ] = None,
    licence: Licence = None,
    tags: Tags = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Store experts in a library, made where there is none; each is checked to its last number.

    For example:

      cgmerge add experts sort reverse.cge

      cgmerge add s3://bucket/experts sort --name sort-v2 --license apache-2.0
    """
    from cgmerge.modules.library.admit import admit
    from cgmerge.modules.library.share import add_to, check_free, refuse_nested
    from cgmerge.modules.library.store import open_store

    output = Output(as_json=as_json, quiet=quiet)
    if name is not None and len(experts) > 1:
        raise UsageError("--name takes one expert", code="name", hint="add them one by one")
    store = open_store(library)
    refuse_nested(library, experts)
    items = [admit(ref, name=name, licence=licence, tags=tags or []) for ref in experts]
    check_free(store, items, overwrite=overwrite)
    done = None if dry_run else add_to(store, items, overwrite=overwrite)
    for item in items:
        entry = item.entry
        if done is None:
            word = "would add"
        else:
            word = "added" if entry.name in [*done.new, *done.replaced] else "there"
        output.line(word, f"{library}/{entry.name} ({entry.size:,} bytes, {entry.digest[:16]}…)")
    if done is not None:
        _hint_use(library, items[0].entry, output)
    output.result(
        "cgmerge.add/1",
        {
            "library": library,
            "experts": [item.entry.facts() for item in items],
            "new": done.new if done else [],
            "same": done.same if done else [],
            "replaced": done.replaced if done else [],
            "dry_run": dry_run,
        },
        short="\n".join(f"{library}/{item.entry.name}" for item in items),
    )


def rm(
    library: Library,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Experts")] = None,
    unreferenced: Annotated[
        bool, typer.Option("--unreferenced", help="Objects that no entry refers to (any longer)")
    ] = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove experts from a library, and their files where no other name refers to them.

    For example:

      cgmerge rm experts sort-v1 --dry-run
    """
    from cgmerge.modules.library.library import open_library
    from cgmerge.modules.library.share import remove_from

    output = Output(as_json=as_json, quiet=quiet)
    if bool(names) == unreferenced:
        raise UsageError(
            "nothing to remove" if not names else "names and --unreferenced exclude each other",
            code="names",
            hint=f"cgmerge rm {quoted(library)} NAME, or in place of NAME --unreferenced",
        )
    done = remove_from(open_library(library), names or [], dry_run=dry_run)
    verb = "would go" if dry_run else "removed"
    for name in done.names:
        output.line(verb, f"{library}/{name}")
    output.line(verb, f"{counted(len(done.objects), 'object')}, {done.freed:,} bytes")
    output.result(
        "cgmerge.rm/1",
        {
            "library": library,
            "names": done.names,
            "objects": done.objects,
            "freed_bytes": done.freed,
            "dry_run": dry_run,
        },
        short="\n".join(done.names) or None,
    )


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="Libraries, experts, folders of experts"),
    ],
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Read and hash everything again and list all damage; exit code 3 where there is any.

    For example:

      cgmerge verify experts sort.cge
    """
    from cgmerge.modules.library.check import Checked
    from cgmerge.modules.library.check import verify as check

    output = Output(as_json=as_json, quiet=quiet)
    checked = Checked()
    for target in targets:
        check(target, checked)
    for damage in checked.damages:
        output.text(f"damaged  {damage.place}: {damage.error.message}")
    for ref in checked.unsealed:
        output.warn(f"{ref} lists no digests: values and form are sound, changes cannot be told")
    if checked.unreferenced:
        stray = counted(len(checked.unreferenced), "object belongs", "objects belong")
        output.hint(f"{stray} to no entry: cgmerge rm LIB --unreferenced")
    bad = len(checked.damages)
    seen = counted(checked.experts, "expert")
    output.line("checked", f"{seen}, {checked.size:,} bytes: {bad} damaged")
    output.result(
        "cgmerge.verify/1",
        {
            "ok": not bad,
            "experts": checked.experts,
            "size_bytes": checked.size,
            "damaged": [damage.facts() for damage in checked.damages],
            "unreferenced": checked.unreferenced,
            "unsealed": checked.unsealed,
        },
        short="\n".join(damage.place for damage in checked.damages) or None,
    )
    if bad:
        raise typer.Exit(3)


def _row(entry: "Entry") -> list[str]:
    from cgmerge.modules.library.entry import own_scores

    scores = ", ".join([f"{name} {value:.4g}" for name, value in own_scores(entry.scores)[:2]])
    rank = "" if entry.rank is None else str(entry.rank)
    return [entry.name, entry.kind, f"{entry.size:,}", rank, entry.base, entry.skill, scores]


def _hint_use(library: str, entry: "Entry", output: Output) -> None:
    if entry.kind != "full":
        output.hint(f"use it: cgmerge compose {quoted(f'{library}/{entry.name}')} … -o OUT")
