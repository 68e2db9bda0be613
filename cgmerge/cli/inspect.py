"""`cgmerge inspect`: show what an expert or a base is, without loading a model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import readable
from cgmerge.shown import counted, some_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cgmerge.modules.expert import Expert


def inspect(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="An expert (folder or .cge), a composition, or a base model; several experts are"
            " compared",
        ),
    ],
    base: Annotated[
        str | None, typer.Option("--base", help="Also check that the expert fits this base")
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what an expert is, or how several relate before they are merged.

    One: skill, base, rank, scaling, size, norms, where it comes from. Several: norms, effective
    ranks, cosines, conflicting signs, shared subspaces, and what a rank would lose.

    For example:

      cgmerge inspect experts/sort --base BASE

      cgmerge inspect experts/a experts/b=0.5 experts/c
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.builtin import builtin_base
    from cgmerge.modules.expert import COMPRESSED, compressed_file, is_adapter, open_expert
    from cgmerge.refs import local_place

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    if len(targets) > 1:
        from cgmerge.cli.comparison import compare_experts

        compare_experts(targets, base, output)
        return
    target = targets[0]
    folder = builtin_base(target) or local_place(target, what="expert or base", suffix=COMPRESSED)
    if not is_adapter(folder) and (folder / "config.json").exists():
        _inspect_base(target, output)
        return
    opened = open_base(base) if base is not None else None
    file = compressed_file(folder)
    if file is not None:
        from cgmerge.cli.inspectfile import inspect_file

        inspect_file(file, opened, output)
        return
    from cgmerge.modules.routing.files import is_routed  # with torch, which a .cge does not need

    if is_routed(folder):
        from cgmerge.cli.inspectrouted import inspect_routed

        inspect_routed(folder, opened, output)
        return
    expert = open_expert(target, base=opened)
    if opened is not None:
        expert.deltas(opened)
        output.line("fits", f"all {len(expert.pairs)} modules fit {base}")
    for warning in expert.warnings:
        output.warn(warning)
    facts = _facts(expert)
    for label, text in _lines(expert, facts):
        output.text(f"{label:<10}{text}")
    if verbose:
        rows = [
            [path, str(n["rank"]), f"{n['scaling']:g}", f"{n['norm']:.4g}"]
            for path, n in facts["modules"].items()
        ]
        output.table(["module", "rank", "scaling", "norm"], rows)
    output.result("cgmerge.inspect/1", facts, short=expert.digest)


def _inspect_base(ref: str, output: Output) -> None:
    from cgmerge.modules.base import open_base

    base = open_base(ref)
    parameters = sum(
        int(_product(info.shape)) for name, info in base.infos.items() if name in base.files
    )
    facts: dict[str, Any] = {
        "kind": "base",
        "ref": ref,
        "model_type": base.model_type,
        "fingerprint": base.fingerprint,
        "parameters": parameters,
        "modules": len(base.modules),
        "tied_head": base.ties_head,
    }
    for label in ("model_type", "fingerprint", "parameters", "tied_head"):
        output.text(f"{label:<13}{facts[label]:,}" if label == "parameters" else
                    f"{label:<13}{facts[label]}")  # fmt: skip
    output.result("cgmerge.inspect/1", facts, short=base.fingerprint)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _facts(expert: "Expert") -> dict[str, Any]:
    from cgmerge.merge.outliers import unusual

    deltas = expert.deltas()
    modules = {
        path: {"rank": pair.rank, "scaling": pair.scaling, "norm": deltas[path].norm()}
        for path, pair in expert.pairs.items()
    }
    card = expert.card.model_dump(mode="json", by_alias=True) if expert.card else None
    return {
        "kind": "expert",
        "name": expert.name,
        "sha256": expert.digest,
        "size_bytes": expert.size_bytes,
        "ranks": expert.ranks,
        "alpha": expert.config.alpha,
        "rslora": expert.config.use_rslora,
        "base": expert.config.base_name,
        "base_fingerprint": expert.base_fingerprint,
        "norm": sum(m["norm"] ** 2 for m in modules.values()) ** 0.5,
        "idle_modules": [path for path, m in modules.items() if m["norm"] == 0.0],
        "modules": modules,
        "unusual": unusual(deltas),
        "card": card,
        "warnings": list(expert.warnings),
    }


def _metrics(metrics: "Mapping[str, Any]") -> "Iterator[tuple[str, str]]":
    """Name what a card says of scores, one by one, the expert's own first."""
    from cgmerge.modules.library.entry import ordered_scores

    every = dict(_flat(metrics))
    numbers = {name: value for name, value in every.items() if type(value) in (int, float)}
    yield from ((name, f"{value:.6g}") for name, value in ordered_scores(numbers))
    yield from ((name, str(value)) for name, value in every.items() if name not in numbers)


def _flat(metrics: "Mapping[str, Any]", stem: str = "") -> "Iterator[tuple[str, Any]]":
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{stem}{key}.")
        else:
            yield f"{stem}{key}", value


def _lines(expert: "Expert", facts: dict[str, Any]) -> list[tuple[str, str]]:
    scalings = sorted({m["scaling"] for m in facts["modules"].values()})
    shown = some_of((f"{value:g}" for value in scalings), 4)
    dtype = next(iter(expert.file.infos.values())).dtype
    lines = [
        ("expert", f"{expert.name}   ({expert.folder})"),
        ("base", f"{facts['base'] or 'unknown'}   {facts['base_fingerprint'] or 'no fingerprint'}"),
        (
            "lora",
            (
                f"rank {'/'.join(map(str, expert.ranks))}, scaling {shown}"
                f"{' (rsLoRA)' if facts['rslora'] else ''},"
                f" {counted(len(expert.pairs), 'module')}, {dtype}"
            ),
        ),
        ("delta", f"‖ΔW‖ {facts['norm']:.4g}"),
        ("size", f"{facts['size_bytes']:,} bytes"),
        ("sha256", expert.digest),
    ]
    if facts["idle_modules"]:
        lines.append(("idle", f"{counted(len(facts['idle_modules']), 'module')} with ΔW = 0"))
    lines += [("unusual", note) for note in facts["unusual"]]
    if expert.card:
        lines += [
            ("data", f"{source.name}: {counted(source.rows, 'row')}, sha256 {source.sha256[:12]}…")
            for source in expert.card.data
        ]
        lines += [
            ("metric", readable(f"{name} = {value}", 200))
            for name, value in _metrics(expert.card.metrics)
        ]
    return lines
