"""Recipe files, whatever they are for: one YAML or JSON mapping, read strictly.

Paths in a recipe are relative to the recipe, so that it means the same from every folder.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgmerge import fs, strictjson
from cgmerge.errors import NotFound, UsageError
from cgmerge.modules.builtin import NAMES
from cgmerge.refs import expanded
from cgmerge.shown import some_of
from cgmerge.tensorfile import read_small

MAX_BYTES = 4 * 1024 * 1024
"""Of JSON, which is read fast; `strictyaml` has a limit of its own."""

_LINE = "\n  "
_SUFFIXES = (".yml", ".yaml", ".json")


def is_recipe_name(path: Path) -> bool:
    """Whether a file is called like a recipe."""
    return path.suffix.lower() in _SUFFIXES


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a recipe: `.json` as JSON, everything else as YAML.

    Raises:
        NotFound, Unsafe: No such file, or not a regular one.
        UsageError: Not YAML, too long, aliases, tags, equal keys, or not a mapping.
        Damaged: Not JSON, equal keys, or not an object.
        LimitExceeded: Too long or nested too deeply.
    """
    data = read_small(path, limit=MAX_BYTES, follow_links=True)
    if path.suffix.lower() == ".json":
        return strictjson.loads_object(data, source=str(path))
    from cgmerge import strictyaml

    return strictyaml.loads_mapping(data, source=str(path))


def located(name: str, recipe: Path) -> Path:
    """Return what a path in a recipe means from the current folder.

    Raises:
        UsageError: It is empty or holds a NUL: no path does.
    """
    if not name.strip() or "\0" in name:
        what = "a NUL character" if name.strip() else "nothing"
        raise UsageError(
            f"{recipe}: a path holds {what}: {name!r}",
            code="recipe",
            hint="name a file or a folder",
        )
    return recipe.parent / expanded(name)


def refuse_missing(recipe: Path, named: Iterable[tuple[str, Path]], *, code: str = "file") -> None:
    """Refuse a recipe that names files or folders which are not there, all of them at once.

    Args:
        recipe: Its file.
        named: The key at which each stands, and where it would be.
        code: Last part of the error's code.

    Raises:
        NotFound: Says key and absolute path of each.
    """
    lost = [(place, path) for place, path in named if not os.path.exists(path)]  # noqa: PTH110
    if not lost:
        return
    lines = (f"{place}: {fs.absolute(path)}" for place, path in lost)
    raise NotFound(
        f"{recipe} names what is not there:\n  {some_of(lines, between=_LINE)}",
        code=code,
        hint=f"edit {recipe}, whose paths are relative to its own folder, or put the files there",
        path=lost[0][1],
        found={place: str(path) for place, path in lost},
    )


def located_ref(ref: str, recipe: Path) -> str:
    """Return what a reference in a recipe means from the current folder; `hf://…` stays."""
    return ref if not ref.strip() or "://" in ref else str(located(ref, recipe))


def located_base(ref: str, recipe: Path) -> str:
    """Return what a base in a recipe means from the current folder; a built-in name stays."""
    return ref if ref in NAMES else located_ref(ref, recipe)
