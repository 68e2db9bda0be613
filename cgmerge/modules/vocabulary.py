"""Tokenizers that lie beside adapters: a token that has another number means another word.

Trainers save the tokenizer with every adapter. Shapes say nothing where two tokens changed places:
the tables are compared; tokens that only one side has are no contradiction (a pad token is often
added and its row never trained).
"""

from pathlib import Path
from typing import Any

from cgmerge import strictjson
from cgmerge.errors import Incompatible, InputError
from cgmerge.modules.base import Base
from cgmerge.tensorfile import file_sha256, read_small

TOKENIZER = "tokenizer.json"
_MAX_BYTES = 64 << 20


def check_tokenizer(folder: Path, base: Base) -> None:
    """Refuse an adapter whose own tokenizer gives some token another number than the base's.

    Args:
        folder: Of the adapter.
        base: Its base; nothing is compared where either has no tokenizer.json.

    Raises:
        Incompatible: With both sizes and the first such token.
    """
    ours, theirs = folder / TOKENIZER, base.folder / TOKENIZER
    if not ours.is_file() or ours.is_symlink() or not theirs.is_file():
        return
    if file_sha256(ours, follow_links=False) == file_sha256(theirs):
        return
    table, known = numbers(ours), numbers(theirs, follow_links=True)
    moved = [name for name, number in table.items() if known.get(name, number) != number]
    if not moved:
        return
    first = min(moved, key=lambda name: table[name])
    raise Incompatible(
        f"{ours} numbers {len(moved)} tokens otherwise than {base.ref}: {first[:60]!r} is"
        f" {table[first]}, in the base {known[first]} ({len(table)} tokens, the base has"
        f" {len(known)})",
        code="tokenizer",
        hint="pass the base it was trained on; if the file is a stray one, remove it",
        path=ours,
        expected=known[first],
        found=table[first],
    )


def numbers(path: Path, *, follow_links: bool = False) -> dict[str, int]:
    """Read token to number from a tokenizer.json; empty where it has no table of a known form."""
    data = read_small(path, limit=_MAX_BYTES, follow_links=follow_links)
    try:
        raw = strictjson.loads_object(data, source=str(path), max_bytes=_MAX_BYTES)
    except InputError:  # odd Unicode in a vocabulary is no fault of the adapter
        return {}
    model = raw.get("model")
    found = _table(model.get("vocab") if isinstance(model, dict) else None)
    for token in raw.get("added_tokens") or []:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            found[token["content"]] = token.get("id")
    return {name: number for name, number in found.items() if type(number) is int}


def _table(vocab: Any) -> dict[str, Any]:
    """Return a vocabulary as a table: a map (BPE, words), or a list of [token, score] (unigram)."""
    if isinstance(vocab, dict):
        return dict(vocab)
    if isinstance(vocab, list):
        return {
            entry[0]: number
            for number, entry in enumerate(vocab)
            if isinstance(entry, list) and entry and isinstance(entry[0], str)
        }
    return {}
