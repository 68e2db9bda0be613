"""`cgmerge stats`: the statistics that data-aware merge methods need."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.quoting import quoted
from cgmerge.shown import counted

if TYPE_CHECKING:
    from cgmerge.modules.data import DataFile
    from cgmerge.modules.expert import Expert
    from cgmerge.modules.loading import LoadedBase
    from cgmerge.modules.stats import Statistics

LAYERWISE = "layerwise"


def stats(
    experts: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERT...", help="Adapter folder; for --kind layerwise all, EXPERT[=WEIGHT]"
        ),
    ],
    *,
    base: options.BaseRef,
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="FILE...",
            help="The expert's own kind of data; for --kind layerwise one file for each expert",
        ),
    ],
    kind: Annotated[
        Literal["all", "gram", "fisher", "layerwise"],
        typer.Option(
            "--kind",
            help="gram: regmean, mats; fisher: fisher (slower); layerwise: regmean++ (not in all)",
        ),
    ] = "all",
    alpha: Annotated[
        float, typer.Option("--alpha", help="layerwise: as in compose", min=0, max=1)
    ] = 0.9,
    limit: Annotated[
        int, typer.Option("--limit", help="Use the first N rows (of each expert)", min=1)
    ] = 256,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File  \\[default: inside the expert's folder]"),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept another base fingerprint")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Compute input Grams and diagonal Fisher information of an expert on its data.

    `compose -m regmean` and the like find them beside the expert. For `regmean++` the Grams are
    collected along the merge, layer after layer, which needs all experts at once.

    For example:

      cgmerge stats experts/sort --base BASE --data sort.jsonl

      cgmerge compose experts/* --base BASE -m regmean -o merged

      cgmerge stats experts/a experts/b --base BASE --data a.jsonl b.jsonl --kind layerwise
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.data import read_data
    from cgmerge.modules.loading import load_base
    from cgmerge.refs import expanded

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    opened = open_base(base)
    found, weights = _open(experts, kind, opened, force_base=force_base)
    if out is not None:
        _refuse_inputs(out, found, [*map(expanded, data), opened.folder])
    targets = [_target(expert, kind, out, overwrite=overwrite) for expert in found]
    files = [read_data(expanded(name)) for name in data]
    _check_counts(found, files, kind, out)
    loaded = load_base(opened, device=device, dtype=dtype)
    job = _Job(loaded, found, files, limit, output, force_base=force_base)
    kinds = ["gram", "fisher"] if kind == "all" else [kind]
    if kind == LAYERWISE:
        results, along = job.layerwise(weights, alpha)
    else:
        results, along = [job.alone(kinds)], None
    shown = [
        _write(target, result, expert, job, along)
        for target, result, expert in zip(targets, results, found, strict=True)
    ]
    fields: dict[str, Any] = {
        "out": shown[0] if len(shown) == 1 else shown,
        "expert": found[0].digest if len(found) == 1 else [expert.digest for expert in found],
        "base": {"ref": opened.ref, "fingerprint": opened.fingerprint},
        "kinds": kinds,
        "rows": sum(result.rows for result in results),
        "tokens": sum(result.tokens for result in results),
        "modules": len(results[0].grams or results[0].fishers),
        "size_bytes": sum(target.stat().st_size for target in targets),
    }
    output.result("cgmerge.stats/1", fields, short="\n".join(shown))


class _Job:
    """Data of the experts as tokens, and the two ways to run it."""

    def __init__(
        self,
        loaded: "LoadedBase",
        experts: "Sequence[Expert]",
        files: "Sequence[DataFile]",
        limit: int,
        output: Output,
        *,
        force_base: bool,
    ) -> None:
        from cgmerge.modules.encoding import encode_all

        self.loaded = loaded
        self.experts = experts
        self.output = output
        self.force_base = force_base
        self.data = [[file] for file in files] if len(experts) > 1 else [list(files)]
        self.rows = []
        for expert, own in zip(experts, self.data, strict=True):
            examples = [example for file in own for example in file.examples][:limit]
            self.rows.append(encode_all(examples, loaded.tokenizer))
            output.line(
                "expert",
                f"{expert.name}  {counted(len(expert.pairs), 'module')}  {expert.digest[:12]}",
            )
            tokens = sum(map(len, self.rows[-1]))
            output.line("data", f"{counted(len(self.rows[-1]), 'row')}, {counted(tokens, 'token')}")

    def alone(self, kinds: Sequence[Any]) -> "Statistics":
        """Run one expert by itself."""
        from cgmerge.modules.stats import collect

        (expert,), (rows,) = self.experts, self.rows
        with self.output.progress("stats", len(rows) * len(kinds)) as advance:
            return collect(
                self.loaded,
                expert,
                rows,
                kinds,
                progress=_counter(advance),
                force_base=self.force_base,
            )

    def layerwise(
        self, weights: Sequence[float | None], alpha: float
    ) -> "tuple[list[Statistics], dict[str, Any]]":
        """Run all experts along their merge; also return what merge that is."""
        from cgmerge.merge import make_rule
        from cgmerge.modules.layerstats import METHOD, Along, collect_layerwise, count_layers

        rule = make_rule(METHOD, len(self.experts), weights=weights, params={"alpha": alpha})
        layers = count_layers(self.experts)
        with self.output.progress("stats", layers * sum(map(len, self.rows))) as advance:
            results = collect_layerwise(
                self.loaded,
                self.experts,
                self.rows,
                rule,
                progress=_counter(advance),
                force_base=self.force_base,
            )
        return results, Along.of(rule, [expert.digest for expert in self.experts]).plain()


def _open(
    refs: Sequence[str], kind: str, base: Any, *, force_base: bool
) -> "tuple[list[Expert], list[float | None]]":
    from cgmerge.modules.compose_stats import refuse_twice
    from cgmerge.modules.expert import is_adapter, open_expert
    from cgmerge.refs import expanded, parse_weighted

    if kind != LAYERWISE and len(refs) > 1:
        raise UsageError(
            f"{len(refs)} experts: each has statistics of its own, on its own data",
            code="experts",
            hint="run it once for each; --kind layerwise (for regmean++) takes all experts",
        )
    for ref in refs:
        folder = expanded(ref)
        if (folder / "config.json").exists() and not is_adapter(folder):
            raise UsageError(
                f"{ref} is a full model; statistics are those of adapters",
                code="full_model",
                hint=f"make an adapter of it: cgmerge extract {quoted(ref)}"
                f" --base {quoted(base.ref)} --rank 16 -o OUT",
            )
    pairs = [parse_weighted(ref) if kind == LAYERWISE else (ref, None) for ref in refs]
    found = [open_expert(ref, base=base) for ref, _ in pairs]
    refuse_twice(found)
    for expert in found:
        expert.deltas(base, force_base=force_base)
    return found, [weight for _, weight in pairs]


def _refuse_inputs(out: Path, experts: "Sequence[Expert]", inputs: list[Path]) -> None:
    """Refuse a file that is read; statistics may lie with the expert that they belong to."""
    from cgmerge.inputs import refuse_inputs
    from cgmerge.modules.statsfile import is_stats_name

    for expert in experts:
        folder = expert.folder
        files = [folder] if folder.is_file() else folder.iterdir()
        inputs += [path for path in files if not is_stats_name(path.name)]
    refuse_inputs(out, inputs)


def _target(expert: "Expert", kind: str, out: Path | None, *, overwrite: bool) -> Path:
    from cgmerge import fs
    from cgmerge.modules.statsfile import path_of

    target = out or path_of(expert, kind)
    fs.check_file(target, overwrite=True)
    if target.exists() and not overwrite:
        raise UsageError(
            f"{_shown(target, expert)} exists already",
            code="out_exists",
            hint="choose another --out, or --overwrite",
        )
    return target


def _check_counts(
    experts: "Sequence[Expert]", files: "Sequence[DataFile]", kind: str, out: Path | None
) -> None:
    if kind != LAYERWISE or len(experts) == 1:
        return
    if len(files) != len(experts):
        raise UsageError(
            f"{counted(len(experts), 'expert')} and {counted(len(files), 'data file')}",
            code="data",
            hint="layerwise statistics take one file for each expert, in the same order",
        )
    if out is not None:
        raise UsageError(
            "--out names one file, and there is one for each expert",
            code="out",
            hint="leave it out: they are written into the experts' folders",
        )


def _write(
    target: Path,
    result: "Statistics",
    expert: "Expert",
    job: _Job,
    along: dict[str, Any] | None,
) -> str:
    from cgmerge.modules.stats import write_stats

    place = list(job.experts).index(expert)
    digests = [file.sha256 for file in job.data[place]]
    write_stats(target, result, expert, job.loaded, digests, along=along)
    size = target.stat().st_size
    held = [name for name, part in (("gram", result.grams), ("fisher", result.fishers)) if part]
    shown = _shown(target, expert)
    job.output.line("wrote", f"{shown} ({size / 1e6:.2f} MB: {', '.join(held)})")
    return shown


def _shown(target: Path, expert: "Expert") -> str:
    """Say a path in an expert's folder as the expert was given."""
    from cgmerge.refs import expanded

    inside = target.parent == expert.folder and expanded(expert.ref).is_dir()
    return str(Path(expert.ref) / target.name) if inside else str(target)


def _counter(advance: Any) -> Any:
    """Turn numbers of finished examples into their sum."""
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        advance(done)

    return step
