"""What the user may write for an expert or a base, and how it becomes a local folder.

A reference is a local path unless it is written as an explicit remote one: `hf://user/repo`,
`hf://user/repo/name@revision`, or another URL; only those may use the network. `LIB/name` is an
expert of a library. `user/repo` is what was fetched from the hub before, where there is no such
path. A misspelt path is answered with what is near it, never with a hub look-up.
"""

import math
import os
import re
from pathlib import Path

from cgmerge import fs, plain
from cgmerge.errors import EnvironmentProblem, NotFound, UsageError
from cgmerge.nearest import nearest
from cgmerge.quoting import quoted

_REMOTE = "hf://"
_LIBRARY = "cgmerge-library.json"
_PARTS = ("adapter_config.json", "config.json")
_OTHER = (".safetensors", ".bin", ".pt", ".json", ".yml", ".yaml", ".jsonl", ".csv")


def local_folder(ref: str, *, what: str) -> Path:
    """Turn a reference into a local folder; see `local_place`."""
    return local_place(ref, what=what)


def local_place(ref: str, *, what: str, suffix: str | None = None) -> Path:
    """Turn a reference into a local folder, or into a file where some are taken.

    Args:
        ref: A path, `hf://user/repo[@revision]`; for experts also the other forms.
        what: What to call it in messages, e.g. `base model`.
        suffix: Of files that are taken in place of a folder, `.cge`: an expert is wanted.

    Returns:
        An absolute path of a folder that exists, or of something that is not a folder and has the
        suffix.

    Raises:
        NotFound: No such folder; the message lists what is near it.
        UsageError: An empty or malformed reference.
        EnvironmentProblem: A remote reference that cannot be fetched, or no permission.
    """
    if not ref.strip():
        raise UsageError(f"the {what} reference is empty", code="ref")
    if any("\ud800" <= char <= "\udfff" for char in ref):
        raise UsageError(f"the {what} reference {ref!r} is not valid Unicode", code="ref")
    fetched = _fetched(ref, what, expert=suffix is not None)
    if fetched is not None:
        return fetched
    path = fs.absolute(expanded(ref))
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises where a parent is not readable)
        if not os.access(path, os.R_OK | os.X_OK):
            raise EnvironmentProblem(
                f"{path} cannot be read: permission denied",
                code="permission",
                hint=f"chmod u+rx {quoted(path)}",
            )
        return path
    if os.path.lexists(path):
        if suffix is not None and path.name.endswith(suffix):
            # A link that the user names is followed; those inside folders never are.
            if not os.path.exists(path):  # noqa: PTH110
                raise NotFound(f"{ref} is a link that leads nowhere", code="link", path=path)
            return Path(os.path.realpath(path)) if os.path.isfile(path) else path  # noqa: PTH113
        wanted = f"a folder or a {suffix} file" if suffix else "a folder"
        raise NotFound(
            f"{ref} is a file; the {what} must be {wanted}",
            code="not_folder",
            hint=_instead_of(path, suffix),
            path=path,
        )
    raise _absent(ref, what, path, builtins=suffix is None)


def _absent(ref: str, what: str, path: Path, *, builtins: bool) -> NotFound:
    """Describe what is not there, with what is near it."""
    near = _near(path)
    if builtins:
        from cgmerge.modules.builtin import NAMES

        near = [*nearest(ref, NAMES), *near]
    hint = f"similar: {', '.join(near)}" if near else None
    plain_word = ref.count("/") == 1 and not ref.startswith((".", "~", "/"))
    if hint is None and plain_word and not os.path.lexists(path.parent):
        hint = f"for a repository on the hub write {_REMOTE}{ref}"
    if os.path.lexists(path.parent / f".{path.name}.training"):
        hint = "a training of it is unfinished: repeat its command, and it goes on"
    return NotFound(f"no such {what}: {ref}", code="folder", hint=hint, path=path)


def _instead_of(path: Path, suffix: str | None) -> str | None:
    """Say what to name in place of a file: its folder where it is a part of something."""
    if any(os.path.isfile(path.parent / name) for name in _PARTS):  # noqa: PTH113
        return f"name its folder: {quoted(path.parent)}"
    if suffix and path.suffix not in _OTHER:
        return f"if it is a compressed expert, rename it to end in {suffix}"
    return None


def _fetched(ref: str, what: str, *, expert: bool) -> Path | None:
    """Return where an expert of a library, or something from elsewhere, lies; None for paths."""
    from cgmerge.modules.library import store

    path = store.local_path(ref) if ref.startswith("file://") else None
    if path is None and "://" in ref:
        from cgmerge.modules.library import fetch

        if expert:
            return fetch.place_of(ref, what)
        if ref.startswith(_REMOTE):
            return fetch.hub_model(ref, what)
        raise UsageError(
            f"a {what} cannot be read from {ref}",
            code="ref",
            hint=f"pass a local folder, or {_REMOTE}user/repo[@revision]",
        )
    place = path or fs.absolute(expanded(ref))
    if expert and is_in_library(place):
        from cgmerge.modules.library import fetch

        return fetch.expert_folder(str(place.parent), place.name)
    if expert and not os.path.lexists(place) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", ref):
        from cgmerge.modules.library import fetch

        return fetch.cached(ref, what)
    return path


def is_in_library(path: Path) -> bool:
    """Whether a path means an expert of a library: its parent is one, and it is no folder of it."""
    marked = os.path.isfile(path.parent / _LIBRARY)  # noqa: PTH113  (raises on odd names)
    return marked and not os.path.lexists(path)


def label(ref: str, place: Path) -> str:
    """Return what to call an expert that does not name itself.

    Args:
        ref: What the user wrote.
        place: Where that is: a folder, or a `.cge` file, or one in a folder of its own.

    Returns:
        The name of folder or file; where that is a digest, the last word of the reference.
    """
    folder = place.parent if place.name == "expert.cge" else place
    name = folder.name
    if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", name):
        name = ref.partition("@")[0].rstrip("/").rpartition("/")[2]
    return name.removesuffix(".cge")


def parse_weighted(text: str) -> tuple[str, float | None]:
    """Split `REF=WEIGHT`; a reference without a number after the last `=` has no weight.

    Raises:
        UsageError: The weight is not a finite number.
    """
    ref, equals, number = text.rpartition("=")
    if not equals:
        return text, None
    try:
        weight = plain.number(number)
    except ValueError:
        if _exists(text):
            return text, None
        raise UsageError(
            f"the weight in {text!r} is not a number: {number!r}",
            code="weight",
            hint="write EXPERT=0.5",
        ) from None
    if _exists(text) and not _exists(ref):  # a folder whose own name ends like a weight
        return text, None
    if not math.isfinite(weight):
        raise UsageError(f"the weight in {text!r} is not finite", code="weight")
    return ref, weight


def expanded(ref: str) -> Path:
    """Read a path as shells do: `~` is the home folder."""
    try:
        return Path(ref).expanduser()
    except RuntimeError:  # `~name` of nobody
        return Path(ref)


def _exists(ref: str) -> bool:
    return os.path.exists(expanded(ref))  # noqa: PTH110  (Path.exists raises on odd names)


def _near(path: Path) -> list[str]:
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return []
    return nearest(path.name, names, count=3)
