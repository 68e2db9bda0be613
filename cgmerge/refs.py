"""What the user may write for an expert or a base, and how it becomes a local folder.

A reference is a local folder unless it is written as an explicit remote one (`hf://user/repo` or
`hf://user/repo@revision`); only that form may use the network. A misspelt path is answered with
what is near it, never with a hub look-up.
"""

import math
import os
import re
from pathlib import Path

from cgmerge import fs
from cgmerge.errors import EnvironmentProblem, NotFound, UsageError
from cgmerge.nearest import nearest

_REMOTE = "hf://"
_LIBRARY = "cgmerge-library.json"


def local_folder(ref: str, *, what: str) -> Path:
    """Turn a reference into a local folder; see `local_place`."""
    return local_place(ref, what=what)


def local_place(ref: str, *, what: str, suffix: str | None = None) -> Path:
    """Turn a reference into a local folder, or into a file where some are taken.

    Args:
        ref: A path, or `hf://user/repo[@revision]`.
        what: What to call it in messages, e.g. `base model`.
        suffix: Of files that are taken in place of a folder, e.g. `.cge`.

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
    if ref.startswith(_REMOTE):
        return _fetch(ref, what)
    path = fs.absolute(expanded(ref))
    if suffix is not None and is_in_library(path):
        from cgmerge.modules.library.fetch import expert_folder

        return expert_folder(str(path.parent), path.name)
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises where a parent is not readable)
        if not os.access(path, os.R_OK | os.X_OK):
            raise EnvironmentProblem(f"{path} cannot be read: permission denied", code="permission")
        return path
    if os.path.lexists(path):
        if suffix is not None and path.name.endswith(suffix):
            return path
        wanted = f"a folder or a {suffix} file" if suffix else "a folder"
        raise NotFound(
            f"{ref} is a file; the {what} must be {wanted}", code="not_folder", path=path
        )
    near = _near(path)
    hint = f"similar: {', '.join(near)}" if near else None
    plain = ref.count("/") == 1 and not ref.startswith((".", "~", "/"))
    if hint is None and plain and not os.path.lexists(path.parent):
        hint = f"for a repository on the hub write {_REMOTE}{ref}"
    raise NotFound(f"no such {what}: {ref}", code="folder", hint=hint, path=path)


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
    if re.fullmatch(r"(.*@)?[0-9a-f]{40}([0-9a-f]{24})?", folder.name):
        return ref.partition("@")[0].rstrip("/").rpartition("/")[2]
    return folder.name.removesuffix(".cge")


def parse_weighted(text: str) -> tuple[str, float | None]:
    """Split `REF=WEIGHT`; a reference without a number after the last `=` has no weight.

    Raises:
        UsageError: The weight is not a finite number.
    """
    ref, equals, number = text.rpartition("=")
    if not equals:
        return text, None
    try:
        weight = float(number)
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


def _fetch(ref: str, what: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = ref.removeprefix(_REMOTE).partition("@")
    patterns = ["*.json", "*.safetensors", "*.cge", "*.model", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
    except HFValidationError as error:
        raise UsageError(f"{ref} is not a hub reference: {error}", code="ref") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentProblem(
            f"cannot fetch the {what} {ref}: {error}",
            code="hub",
            hint="check the name and the connection, or pass a local folder",
        ) from error
