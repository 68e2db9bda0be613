"""`cgmerge inspect` of a routed composition: its experts and what decides between them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgmerge.cli.output import Output
from cgmerge.cli.routed import decides

if TYPE_CHECKING:
    from cgmerge.modules.base import Base
    from cgmerge.modules.composition import Composition


def inspect_routed(folder: Path, base: "Base | None", output: Output) -> None:
    """Show the record of a composition; every digest is checked, no model is loaded.

    Raises:
        InputError: Damaged, of a newer version, or made for another base.
    """
    from cgmerge.modules.routing.files import open_composition

    found = open_composition(folder, base)
    if base is not None:
        output.line("fits", f"all {len(found.experts)} experts fit {base.ref}")
    for warning in found.warnings:
        output.warn(warning)
    facts = _facts(found)
    output.text(f"routes    {found.method}: {decides(found.kind)}")
    output.text(f"base      {facts['base'] or 'unknown'}   {facts['base_fingerprint'] or ''}")
    if found.tasks:
        output.text(f"tasks     {', '.join(found.tasks)}")
    for name, value in facts["settings"].items():
        if name == "encoder":
            output.text(f"encoder   {value['name']}   {value['sha256'][:12]}")
            continue
        output.text(f"{name:<10}{'all' if value is None and name == 'top_k' else value}")
    output.text(f"size      {facts['size_bytes']:,} bytes")
    output.text(f"sha256    {found.digest}")
    rows = [
        [one["name"], "/".join(map(str, one["ranks"])), str(one["modules"]), one["sha256"][:12]]
        for one in facts["experts"]
    ]
    output.table(["expert", "rank", "modules", "sha256"], rows)
    output.result("cgmerge.inspect/1", facts, short=found.digest)


def _facts(found: "Composition") -> dict[str, Any]:
    assert found.router is not None
    learned = ("table", "tasks", "layers")  # shown as what they are, not as settings
    settings = found.router.settings()
    return {
        "kind": "composition",
        "method": found.method,
        "router": found.kind,
        "granularity": found.granularity,
        "sha256": found.digest,
        "size_bytes": sum(p.stat().st_size for p in found.folder.rglob("*") if p.is_file()),
        "base": found.base.name,
        "base_fingerprint": found.base.fingerprint,
        "tasks": list(found.tasks),
        "settings": {name: value for name, value in settings.items() if name not in learned},
        "experts": [
            {
                "name": name,
                "sha256": expert.digest,
                "ranks": expert.ranks,
                "modules": len(expert.pairs),
                "compressed": expert.compressed,
            }
            for name, expert in zip(found.names, found.experts, strict=True)
        ],
        "warnings": list(found.warnings),
    }
