"""README.md on the hub: the metadata that it searches by, and a table for people."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cgmerge.modules.library.entry import Entry, ordered_scores, own_scores
from cgmerge.modules.usage import peft_snippet
from cgmerge.shown import counted

_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_MAX_ROWS = 500


def expert_page(entry: Entry, repo: str) -> str:
    """Write the page of a repository that is one expert.

    Args:
        entry: What is known of it.
        repo: The repository, `user/name`.
    """
    title = entry.skill or entry.name
    base = entry.base or "an unnamed base model"
    if entry.kind == "peft":
        how = ["```python", peft_snippet(entry.base, repo), "```"]
    else:
        how = [
            "```sh",
            f"cgmerge pull hf://{repo} -o {entry.name}",
            f"cgmerge decompress {entry.name}/expert.cge -o {entry.name}-peft",
            "```",
        ]
    size = f"{entry.size:,} bytes in {counted(len(entry.files), 'file')}"
    facts = [
        ("base", base),
        ("base fingerprint", entry.base_fingerprint or ""),
        ("rank", "" if entry.rank is None else str(entry.rank)),
        ("parameters", f"{entry.parameters:,}"),
        ("size", size),
        ("sha256", f"`{entry.digest}`"),
        *((name, f"{value:.6g}") for name, value in ordered_scores(entry.scores)),
    ]
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in facts if value]
    lines = [*_front([entry]), "", f"# {title}", "", "| | |", "|---|---|", *rows, "", *how, ""]
    return "\n".join(lines)


def library_page(entries: Sequence[Entry], repo: str) -> str:
    """Write the page of a repository that is a library."""
    rows = [
        f"| `{entry.name}` | {_cell(entry.skill)} | {_cell(entry.base)} | {entry.kind} |"
        f" {entry.size:,} | {_cell(_scores(entry))} | {entry.license or ''} |"
        for entry in sorted(entries, key=lambda entry: entry.name)[:_MAX_ROWS]
    ]
    more = len(entries) - len(rows)
    lines = [
        *_front(entries),
        "",
        f"# {repo.rpartition('/')[2]}",
        "",
        (
            f"A library of {counted(len(entries), 'expert')}, made with cgmerge. Each can be used"
            " by name:"
        ),
        "",
        "```sh",
        f"cgmerge ls hf://{repo}",
        f"cgmerge compose hf://{repo}/NAME hf://{repo}/OTHER -o both",
        "```",
        "",
        "| name | skill | base | kind | bytes | scores | licence |",
        "|---|---|---|---|---|---|---|",
        *rows,
        *(["", f"and {more:,} more"] if more > 0 else []),
        "",
    ]
    return "\n".join(lines)


def with_front(text: str, entry: Entry) -> str:
    """Complete the metadata of an expert's own page; what it says itself is kept."""
    facts = _metadata([entry])
    if not text.startswith("---\n") or "\n---" not in text[3:]:
        return "\n".join([*_front([entry]), "", text])
    head, _, rest = text[4:].partition("\n---")
    known = {match[1] for match in re.finditer(r"(?m)^([A-Za-z_]+):", head)}
    missing = [_field(key, value) for key, value in facts.items() if key not in known]
    return "\n".join(["---", head, *missing, "---"]) + rest


def _front(entries: Sequence[Entry]) -> list[str]:
    return ["---", *(_field(key, value) for key, value in _metadata(entries).items()), "---"]


def _metadata(entries: Sequence[Entry]) -> Mapping[str, Any]:
    """Return what the hub indexes; only what holds for all of the experts."""
    bases = sorted({entry.base for entry in entries if _ID.fullmatch(entry.base)})
    licences = {entry.license for entry in entries}
    tags = {tag for entry in entries for tag in entry.tags}
    adapters = all(entry.kind != "full" for entry in entries)
    facts: dict[str, Any] = {}
    if bases:
        facts["base_model"] = bases if len(bases) > 1 else bases[0]
        facts["base_model_relation"] = "adapter" if adapters else "finetune"
    if len(licences) == 1 and None not in licences:
        facts["license"] = licences.pop()
    facts["library_name"] = "peft" if all(e.kind == "peft" for e in entries) else "cgmerge"
    if adapters:
        tags |= {"lora"}
    return {**facts, "tags": sorted(tags | {"cgmerge"})}


def _field(key: str, value: Any) -> str:
    # JSON is YAML, and quotes what YAML would read otherwise.
    return f"{key}: {json.dumps(value, ensure_ascii=False)}"


def _scores(entry: Entry) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in own_scores(entry.scores)[:3])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
