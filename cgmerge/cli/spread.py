"""Let one option take several words, as shells expand globs: `--data a.jsonl b.jsonl`."""

from collections.abc import Collection, Sequence


def spread(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Repeat an option before each of the words that follow it.

    Everything up to the next option word belongs to the option; `--` ends it and everything
    else. `--data=a` takes one word, as usual, and `-` is a word.

    Args:
        words: The command line without the program name.
        options: Options that take several words.

    Returns:
        Words that a parser with repeatable options understands.

    Example:
        >>> spread(["x", "--data", "a", "b", "--json"], {"--data"})
        ['x', '--data', 'a', '--data', 'b', '--json']
    """
    found: list[str] = []
    current: str | None = None
    for place, word in enumerate(words):
        if word == "--":
            return found + list(words[place:])
        if word.startswith("-") and word != "-":
            current = word if word in options else None
            found.append(word)
        elif current is None:
            found.append(word)
        else:
            if found[-1] != current:
                found.append(current)
            found.append(word)
    return found
