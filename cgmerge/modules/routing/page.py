"""The model card of a routed composition."""

import json
from collections.abc import Mapping

from cgmerge.modules.card import BaseId
from cgmerge.modules.routing.router import RetrievalRouter, Router, TaskRouter
from cgmerge.modules.usage import base_word


def composition_page(method: str, router: Router, experts: Mapping[str, str], base: BaseId) -> str:
    """Return the README of a composition's folder.

    Args:
        method: What made it.
        router: What decides.
        experts: Name to digest, as they lie in the folder.
        base: Their base.
    """
    word = base_word(None, [base.name])
    asks = isinstance(router, TaskRouter)
    task, name = (" --task TASK", "TASK=") if asks else ("", "")
    lines = [
        "---",
        f"base_model: {json.dumps(base.name)}",
        "tags: [lora, routing, cgmerge]",
        "---",
        "",
        f"A routed composition of {len(experts)} LoRA experts, made with cgmerge: `{method}`.",
        "",
        _when(router),
        "",
        "| expert | sha256 |",
        "|---|---|",
        *[f"| {name} | `{digest[:16]}` |" for name, digest in experts.items()],
        "",
        "Use it in this folder, which can be copied as a whole:",
        "",
        "```",
        f"cgmerge chat . --base {word}{task}",
        f"cgmerge eval . --base {word} --data {name}TEST.jsonl",
        f'cgmerge route . --base {word}{task} --explain "text"',
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
        said = f"Whoever asks names the task: {', '.join(sorted(router.table))}."
        return f"{said} Its weights differ between layers." if router.layers else said
    if isinstance(router, RetrievalRouter):
        said = "The prompt decides once, by its likeness to the examples of each expert"
        own = router.encoder
        if own is None:
            return f"{said}."
        return (
            f"{said}, in the embedding of the sentence-transformers model `{own.name}`"
            f" (sha256 `{own.sha256[:16]}`), which has to be there."
        )
    return "Every token decides anew which experts speak."


def _served(router: Router) -> str:
    if router.granularity == "token":
        return (
            "Servers that take one adapter per request cannot serve this composition, because"
            " tokens of one request use different experts."
        )
    return (
        "Servers that take one adapter per request can serve it: `cgmerge export . --to vllm"
        " -o OUT` writes the adapters and the routing table."
    )
