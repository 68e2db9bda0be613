"""`cgmerge pull`, `push`, `lock`: experts from elsewhere, to elsewhere, and pinned."""

from typing import Annotated

import typer

from cgmerge.cli import options
from cgmerge.cli.library import Licence, Tags
from cgmerge.cli.output import Output
from cgmerge.quoting import quoted
from cgmerge.shown import counted


def pull(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="LIB/NAME, a URL, hf://user/repo, hf://user/repo/NAME@REV"
        ),
    ],
    out: options.Out,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy one expert into a folder, every byte checked; a library as a whole with push.

    Examples:

      cgmerge pull hf://user/experts/sort -o sort

      cgmerge push hf://user/experts my-copy
    """
    from cgmerge.modules.library.share import pull as fetch

    output = Output(as_json=as_json, quiet=quiet)
    item = fetch(ref, out, overwrite=overwrite)
    entry = item.entry
    output.line("wrote", f"{out} ({entry.size:,} bytes in {counted(len(entry.files), 'file')})")
    facts = {key: value for key, value in entry.facts().items() if key != "name"}
    output.result("cgmerge.pull/1", {"out": str(out), "ref": ref, **facts}, short=str(out))


def push(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An expert, or a library")],
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="LIB, LIB/NAME, a URL, hf://user/repo")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="In DEST; that of folder or file if not given")
    ] = None,
    licence: Licence = None,
    tags: Tags = None,
    private: Annotated[
        bool, typer.Option("--private", help="A repository that is made on the hub is private")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Send an expert, or all of a library, to another place; only what is missing is sent.

    One expert to hf://user/repo makes a repository that PEFT loads by name, with a model card;
    to hf://user/repo/NAME, or from a library, it makes a library there.

    Examples:

      cgmerge push sort hf://user/sort --license apache-2.0

      cgmerge push experts s3://bucket/experts
    """
    from cgmerge.modules.library.share import push as send

    output = Output(as_json=as_json, quiet=quiet)
    done = send(
        source,
        destination,
        name=name,
        licence=licence,
        tags=tags or [],
        overwrite=overwrite,
        private=private,
    )
    sent = [*done.new, *done.replaced]
    for each in sent:
        output.line("sent", f"{each} to {destination}")
    if done.same:
        output.line("there", f"{counted(len(done.same), 'expert')} with the same content")
    output.result(
        "cgmerge.push/1",
        {
            "source": source,
            "destination": destination,
            "new": done.new,
            "same": done.same,
            "replaced": done.replaced,
        },
        short=destination,
    )


def lock(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE|REF...", help="A recipe, or experts, EXPERT=WEIGHT"),
    ],
    out: options.Out,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a recipe that pins repository, revision and content digest of all it names.

    For example:

      cgmerge lock recipe.yml -o recipe.lock.json && cgmerge compose recipe.lock.json -o merged
    """
    from cgmerge.modules.library.lock import lock as pin

    output = Output(as_json=as_json, quiet=quiet)
    content = pin(what, out, overwrite=overwrite)
    for expert in content["experts"]:
        output.line("pinned", f"{expert['ref']} at {expert['sha256'][:16]}…")
    output.hint(f"use it: cgmerge compose {quoted(out)} -o OUT")
    output.result(
        "cgmerge.lock/1",
        {"out": str(out), "experts": content["experts"], "base": content.get("base")},
        short=str(out),
    )
