"""`cgmerge route`: show which experts a composition would use for a text, and where."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.cli.routed import decides
from cgmerge.errors import UsageError

if TYPE_CHECKING:
    from cgmerge.modules.composition import Composition, Explanation
    from cgmerge.modules.loading import LoadedBase


def route(
    composition: Annotated[str, typer.Argument(help="Folder of a routed composition")],
    base: options.BaseRef = "",
    explain: Annotated[
        list[str] | None,
        typer.Option("--explain", metavar="TEXT", help="Prompt to explain; again for several"),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="For compositions that route by task")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept experts of another base fingerprint")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show how much each expert has to say about a text: per layer, with -v per module.

    Examples:

      cgmerge route composed --base tiny --explain "caesar : b a d ="
    """
    from cgmerge.evals.talk import prompt_ids
    from cgmerge.modules.base import open_base
    from cgmerge.modules.loading import load_base
    from cgmerge.modules.routing.files import find_composition, open_composition
    from cgmerge.refs import local_place

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    if not base:
        raise UsageError("no base", code="base", hint="add --base BASE, e.g. --base tiny")
    if not explain:
        raise UsageError("nothing to explain", code="prompt", hint='add --explain "TEXT"')
    folder = local_place(composition, what="composition")
    find_composition(folder)
    opened = open_base(base)
    found = open_composition(folder, opened, force_base=force_base)
    found.refuse_task(task)
    if found.router is not None:
        output.line("routes", f"{found.method}: {decides(found.kind)}")
    loaded = load_base(opened, device=device, dtype=dtype)
    explained = []
    for text in explain:
        ids = prompt_ids(text, loaded)
        shares = found.explain(loaded, ids, task)
        explained.append(_fields(text, ids, shares, found, loaded))
        _show(text, shares, output, verbose=verbose)
    output.result(
        "cgmerge.route/1",
        {
            "composition": composition,
            "method": found.method,
            "granularity": found.granularity,
            "experts": list(found.names),
            "explained": explained,
        },
        short="\n".join(_best(item) for item in explained),
    )


def _fields(
    text: str,
    ids: list[int],
    shares: "Explanation",
    found: "Composition",
    loaded: "LoadedBase",
) -> dict[str, Any]:
    tokens: list[dict[str, Any]] = []
    if found.granularity == "token":
        words = loaded.tokenizer.convert_ids_to_tokens(ids)
        tokens = [
            {"token": word, "shares": _named(found.names, row)}
            for word, row in zip(words, shares.by_token(), strict=True)
        ]
    return {
        "text": text,
        "overall": _named(found.names, shares.overall()),
        "layers": {name: _named(found.names, row) for name, row in shares.by_layer().items()},
        "modules": {name: _named(found.names, row) for name, row in shares.by_module().items()},
        "tokens": tokens,
    }


def _named(names: tuple[str, ...], row: list[float]) -> dict[str, float]:
    return dict(zip(names, row, strict=True))


def _best(explained: dict[str, Any]) -> str:
    overall: dict[str, float] = explained["overall"]
    return max(overall, key=lambda name: overall[name])


def _show(text: str, shares: "Explanation", output: Output, *, verbose: bool) -> None:
    rows = [["all", *_percent(shares.overall())]]
    rows += [[name, *_percent(row)] for name, row in shares.by_layer().items()]
    if verbose:
        rows += [[name, *_percent(row)] for name, row in shares.by_module().items()]
    output.text(text)
    output.table(["", *shares.experts], rows)


def _percent(row: list[float]) -> list[str]:
    return [f"{share:.0%}" for share in row]
