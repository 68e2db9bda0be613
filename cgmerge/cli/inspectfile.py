"""`cgmerge inspect X.cge`: what a compressed expert says of itself, from its header alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output
from cgmerge.errors import readable
from cgmerge.shown import counted

if TYPE_CHECKING:
    from cgmerge.modules.base import Base
    from cgmerge.modules.compress.container import CgeFile

_MOST_SCORES = 5


def inspect_file(path: Path, base: "Base | None", output: Output) -> None:
    """Show manifest and index; nothing is decoded, and torch is not loaded.

    Raises:
        InputError: Not a compressed expert, damaged, or made for another base.
    """
    from cgmerge.modules.compress.container import CgeFile
    from cgmerge.modules.compress.health import warnings_of
    from cgmerge.modules.compress.opened import open_compressed
    from cgmerge.modules.compress.wholemodel import is_whole, uses_of

    whole = is_whole(path)
    digest = None if whole else open_compressed(path, str(path)).digest
    if base is not None and whole:
        from cgmerge.modules.compress.openedfull import open_compressed_full

        open_compressed_full(path, str(path), base).file.close()
    elif base is not None:
        open_compressed(path, str(path)).deltas(base)
    if base is not None:
        output.line("fits", f"all weights fit {base.ref}" if whole else f"it fits {base.ref}")
    with CgeFile.open(path) as file:
        facts = _facts(file, digest)
        for label, text in _lines(file, facts):
            output.text(f"{label:<10}{text}")
        if output.verbose:
            rows = [
                [name, str(part["rank"] or ""), _number(part["error"]), _number(part["cosine"])]
                for name, part in facts["modules"].items()
            ]
            output.table(["module", "rank", "error", "cosine"], rows)
    for warning in warnings_of(
        facts["fidelity"],
        {name: (part["error"], part["cosine"]) for name, part in facts["modules"].items()},
        facts["scores"],
    ):
        output.warn(warning)
    if whole:
        output.hint(uses_of(path))
    output.result("cgmerge.inspect/1", facts, short=facts["sha256"])


def _facts(file: "CgeFile", digest: str | None) -> dict[str, Any]:
    manifest = file.manifest
    numel = int((manifest.get("sizes") or {}).get("parameters", manifest["numel"]))
    ranks = {
        name.removesuffix(".lora_A"): info.rows
        for name, info in file.coded.items()
        if name.endswith(".lora_A")
    }
    known = file.details.get("modules", {})
    names = sorted(ranks or known or file.coded)
    modules = {
        name: {
            "rank": ranks.get(name),
            "error": known.get(name, [None, None])[0],
            "cosine": known.get(name, [None, None])[1],
        }
        for name in names
    }
    parent = (manifest.get("parents") or [{}])[0]
    return {
        "kind": "compressed" if digest else "compressed full model",
        "name": str(parent.get("name", file.path.stem)),
        "sha256": digest or file.sha256(),
        "size_bytes": file.size,
        "ratio_16bit": 2 * numel / file.size,
        "bits_per_param": 8 * file.size / numel,
        "parameters": numel,
        "method": manifest["method"],
        "fidelity": manifest.get("fidelity"),
        "scores": manifest.get("eval") or [],
        "ranks": sorted(set(ranks.values())),
        "base": manifest["base"]["id"],
        "base_fingerprint": manifest["base"].get("fingerprint"),
        "license": manifest.get("license"),
        "parents": manifest.get("parents") or [],
        "modules": modules,
        "producer": manifest.get("producer"),
        "content": file.content,
    }


def _lines(file: "CgeFile", facts: dict[str, Any]) -> list[tuple[str, str]]:
    method, fidelity = facts["method"], facts["fidelity"] or {}
    ranks = "/".join(map(str, facts["ranks"]))
    what = f"rank {ranks}, {counted(len(facts['modules']), 'module')}" if ranks else facts["kind"]
    lines = [
        ("expert", f"{facts['name']}   ({file.path})"),
        ("base", f"{facts['base']}   {facts['base_fingerprint'] or 'no fingerprint'}"),
        ("mode", f"{method['mode']}, {what}, {facts['parameters']:,} parameters"),
        (
            "size",
            (
                f"{facts['size_bytes']:,} bytes: 1/{facts['ratio_16bit']:.1f} of 16 bits,"
                f" {facts['bits_per_param']:.3f} bits per parameter"
            ),
        ),
    ]
    if {"error", "cosine", "cosine_min"} <= set(fidelity):
        lines.append(
            (
                "error",
                (
                    f"{fidelity['error']:.2%} of ‖ΔW‖, cosine {fidelity['cosine']:.3f}"
                    f" (lowest module {fidelity['cosine_min']:.3f})"
                ),
            )
        )
    scores = facts["scores"]
    lines += [("score", _score(entry)) for entry in scores[:_MOST_SCORES]]
    if len(scores) > _MOST_SCORES:
        lines.append(("score", f"and {len(scores) - _MOST_SCORES} more"))
    if facts["license"]:
        lines.append(("license", readable(facts["license"], 200)))
    lines.append(("checked", "header and index; every tensor when it is read"))
    return [*lines, ("sha256", facts["sha256"])]


def _score(entry: dict[str, Any]) -> str:
    """Show an entry of the manifest's `eval`, as compress writes it or as others do."""
    if {"original", "compressed"} <= set(entry):
        suite = readable(str(entry.get("suite", entry.get("skill", ""))), 100)
        return f"{suite} {entry['original']} before, {entry['compressed']} after".strip()
    return readable(", ".join(f"{key} {value}" for key, value in entry.items()), 300)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
