"""The model card of a routed composition."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgmerge.modules.card import BaseId
from cgmerge.modules.routing.router import RetrievalRouter, Router, TaskRouter

if TYPE_CHECKING:
    from cgmerge.modules.routing.files import Member


def composition_page(method: str, router: Router, members: "Sequence[Member]", base: BaseId) -> str:
    """Return the README of a composition's folder."""
    lines = [
        "---",
        f"base_model: {json.dumps(base.name)}",
        "tags: [lora, routing, cgmerge]",
        "---",
        "",
        f"A routed composition of {len(members)} LoRA experts, made with cgmerge: `{method}`.",
        "",
        _when(router),
        "",
        "| expert | sha256 |",
        "|---|---|",
        *[f"| {m.name} | `{m.expert.digest[:16]}` |" for m in members],
        "",
        "Use it where it lies, or copy the whole folder:",
        "",
        "```",
        "cgmerge chat FOLDER --base BASE",
        "cgmerge eval FOLDER --base BASE --data TEST.jsonl",
        'cgmerge route FOLDER --base BASE --explain "text"',
        "```",
        "",
        (
            "Every folder in `experts/` is an ordinary PEFT adapter, or a compressed expert that"
            " `cgmerge decompress` turns into one."
        ),
        "",
        _served(router),
    ]
    return "\n".join(lines) + "\n"


def _when(router: Router) -> str:
    if isinstance(router, TaskRouter):
        return f"Whoever asks names the task: {', '.join(sorted(router.table))}."
    if isinstance(router, RetrievalRouter):
        return "The prompt decides once, by its likeness to the examples of each expert."
    return "Every token decides anew which experts speak."


def _served(router: Router) -> str:
    if router.granularity == "token":
        return (
            "Servers that take one adapter per request cannot serve this composition, because"
            " tokens of one request use different experts."
        )
    return (
        "Servers that take one adapter per request can serve it: `cgmerge export FOLDER --to vllm`"
        " writes the adapters and the routing table."
    )
