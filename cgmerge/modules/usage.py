"""What people are told to type next: commands and code with the names that are known."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cgmerge.modules.builtin import NAMES
from cgmerge.modules.expert import Expert
from cgmerge.quoting import quoted

if TYPE_CHECKING:
    from cgmerge.merge import Rule

_UNKNOWN = "BASE"
_LONGEST = 200
_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def base_names(experts: Iterable[object]) -> set[str]:
    """Return what adapters call their bases: the card, or else the config; full models say nothing.

    Args:
        experts: Adapters and full models.
    """
    found = set()
    for expert in experts:
        if isinstance(expert, Expert):
            card = expert.card.base.name if expert.card else ""
            found.add(card or expert.config.base_name)
    return found - {""}


def base_word(given: str | None, names: Iterable[str]) -> str:
    """Return what to write behind `--base` in a command that is shown, quoted for the shell.

    Args:
        given: What the user named as base, where there was one.
        names: What the experts call it; strangers' words.

    Returns:
        The base that was given, else the one that all experts name, else `BASE`. A name that can
        only be a repository on the hub is written as one.

    Example:
        >>> base_word(None, ["tiny"]), base_word(None, ["a", "b"]), base_word("my base", [])
        ('tiny', 'BASE', "'my base'")
    """
    if given:
        return quoted(given)
    known = set(names) - {""}
    if len(known) != 1:
        return _UNKNOWN
    name = known.pop()
    if len(name) > _LONGEST or not name.isprintable() or name.startswith("-"):
        return _UNKNOWN
    remote = _HUB.fullmatch(name) and not os.path.exists(name)  # noqa: PTH110
    return quoted(f"hf://{name}" if remote else name)


def stats_command(
    experts: Sequence[Expert], base: str, *, overwrite: bool, along: "Rule | None" = None
) -> str:
    """Return the command that computes the statistics of an expert, or of several along a merge.

    Args:
        experts: One; or all of a merge, in the order of the rule's weights.
        base: From `base_word`.
        overwrite: Whether there is a file already.
        along: The merge that layerwise statistics are for.
    """
    words, files, options = [quoted(expert.ref) for expert in experts], "FILE", ""
    if along is not None:
        if len(set(along.weights)) > 1:
            words = [
                quoted(f"{expert.ref}={_shortest(weight)}")
                for expert, weight in zip(experts, along.weights, strict=True)
            ]
        files = " ".join(["FILE"] * len(experts))
        options = " --kind layerwise"
        # Statistics are those of one alpha; the command has the method's default.
        alpha = asdict(along.params)["alpha"]
        if alpha != asdict(along.spec.make_params())["alpha"]:
            options += f" --alpha {_shortest(alpha)}"
    written = " --overwrite" if overwrite else ""
    return f"cgmerge stats {' '.join(words)} --base {base} --data {files}{options}{written}"


def _shortest(number: float) -> str:
    """Write a number so that it is read back the same."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def peft_snippet(base: str, adapter: str) -> str:
    """Return Python that loads an adapter on its base with transformers and peft.

    Args:
        base: What the expert calls its base; may be empty.
        adapter: Folder or repository of the adapter.

    Returns:
        Lines without a final line end. The built-in bases, which transformers does not know by
        name, are found with cgmerge.
    """
    name = json.dumps(base or _UNKNOWN, ensure_ascii=False)
    lines = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM", ""]
    if base in NAMES:
        lines.insert(2, "from cgmerge.modules.base import open_base")
        name = f"open_base({name}).folder"
    elif not _HUB.fullmatch(base):
        lines.append(
            "# Write in place of this name where the base lies, as a folder or on the hub."
        )
    return "\n".join(
        [
            *lines,
            f"base = AutoModelForCausalLM.from_pretrained({name})",
            f"model = PeftModel.from_pretrained(base, {json.dumps(adapter, ensure_ascii=False)})",
        ]
    )
