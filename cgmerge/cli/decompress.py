"""`cgmerge decompress`: a compressed expert as an ordinary PEFT folder, or as a full model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import UsageError
from cgmerge.shown import counted

if TYPE_CHECKING:
    from cgmerge.modules.base import Base


def decompress(
    ref: Annotated[
        str, typer.Argument(metavar="FILE.cge", help="Compressed expert, also LIB/NAME or a URL")
    ],
    out: options.Out,
    base: Annotated[
        str | None, typer.Option("--base", help="Base model; needed for full models")
    ] = None,
    force_base: Annotated[
        bool, typer.Option("--force-base", help="Accept another base of the same shapes")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Full models: float type; auto is the base's own")
    ] = "auto",
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a compressed expert as a PEFT folder that every loader reads, the same bytes each time.

    The compressed delta of a full model becomes the model: base plus delta.

    For example:

      cgmerge decompress a.cge -o a

      cgmerge decompress my-model.cge --base BASE -o my-model
    """
    from cgmerge.modules.base import open_base
    from cgmerge.modules.compress.wholemodel import is_whole, need_base

    output = Output(as_json=as_json, quiet=quiet)
    file = _compressed(ref)
    opened = None if base is None else open_base(base)
    if not is_whole(file):
        if dtype != "auto":
            raise UsageError("--dtype is for full models; this is an adapter", code="dtype")
        _adapter(file, opened, out, force_base=force_base, overwrite=overwrite, output=output)
        return
    if opened is None:
        raise need_base(file)
    from cgmerge.modules.compress.wholemodel import expand_model

    with output.progress("write", len(opened.infos)) as advance:
        found = expand_model(
            file, opened, out, dtype=dtype, force_base=force_base, overwrite=overwrite,
            progress=advance,
        )  # fmt: skip
    for warning in found.composed.warnings:
        output.warn(warning)
    facts = {"weights": found.weights, "rounding_error": found.composed.rounding_error}
    _report(
        file, out, found.size, found.mode, f"{counted(found.weights, 'weight')} changed", output
    )
    output.hint(f"measure it: {_evaluation(out, opened)}")
    known: dict[str, Any] = {"id": opened.ref, "fingerprint": opened.fingerprint}
    _finish(file, out, found.size, found.mode, facts | {"kind": "model", "base": known}, output)


def _compressed(ref: str) -> Path:
    """Return the file that a reference means, as for every other command."""
    from cgmerge.modules.expert import COMPRESSED, compressed_file
    from cgmerge.refs import local_place

    place = local_place(ref, what="compressed expert", suffix=COMPRESSED)
    file = compressed_file(place)
    if file is None:
        raise UsageError(
            f"{ref} is a folder without a compressed expert in it", code="file",
            hint="name a .cge file",
        )  # fmt: skip
    return file


def _adapter(
    file: Path, base: "Base | None", out: Path, *, force_base: bool, overwrite: bool, output: Output
) -> None:
    from cgmerge.modules.compress.expand import decompress as expand

    found = expand(file, out, overwrite=overwrite, base=base, force_base=force_base)
    mode = found.manifest["method"]["mode"]
    _report(
        file,
        out,
        found.size,
        mode,
        f"rank {found.rank}, {counted(found.modules, 'module')}",
        output,
    )
    output.hint(f"measure it: {_evaluation(out, base, found.manifest['base']['id'])}")
    facts = {"modules": found.modules, "rank": found.rank, "base": found.manifest["base"]}
    _finish(file, out, found.size, mode, {"kind": "adapter", **facts}, output)


def _evaluation(out: Path, base: "Base | None", called: str = "") -> str:
    from cgmerge.modules.usage import base_word
    from cgmerge.quoting import quoted

    word = base_word(base.ref if base else None, [called])
    return f"cgmerge eval {quoted(out)} --base {word} --data TEST.jsonl"


def _report(file: Path, out: Path, size: int, mode: str, what: str, output: Output) -> None:
    written = sum(path.stat().st_size for path in out.iterdir())
    output.line("read", f"{file} ({size:,} bytes, mode {mode}), every digest verified")
    output.line("wrote", f"{out} ({written / 1e6:.2f} MB, {what})")


def _finish(
    file: Path, out: Path, size: int, mode: str, facts: dict[str, Any], output: Output
) -> None:
    common = {"out": str(out), "file": str(file), "mode": mode, "size_bytes": size}
    output.result("cgmerge.decompress/1", {**common, **facts}, short=str(out))
