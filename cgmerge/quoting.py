"""Commands that are shown to people: what is pasted into a shell must arrive as it is."""

import shlex
from pathlib import Path


def quoted(word: str | Path) -> str:
    """Write a path or a name as a shell reads it back; most stay as they are."""
    return shlex.quote(str(word))
