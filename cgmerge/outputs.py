"""What `--overwrite` may replace: results of this package, and nothing of the user's."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from cgmerge.errors import UsageError
from cgmerge.inputs import real_path

_LOOKED_AT = 1 << 20
SHOWN = 5
"""So many of the files that would be lost are named."""

_MARKS = (
    "cgmerge.json",
    "compressed.json",
    "expert.json",
    "extract.json",
    "routing.json",
)
"""One of them is in every folder that a command writes; other tools write none of them."""

_NAMES = re.compile(
    r"adapter_config\.json|cgmerge\.json|compressed\.json|expert\.json|extract\.json"
    r"|routing\.json|README\.md|serve\.sh|Modelfile"
    r"|(adapter_model|router|cgmerge-stats[\w.-]*|model[\w.-]*)\.safetensors"
    r"|model\.safetensors\.index\.json|expert\.cge"
    # What a full model takes over from its base.
    r"|(config|generation_config|preprocessor_config|processor_config)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(merges|vocab)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|(chat_template)\.jinja|(LICENSE|NOTICE)[\w.-]*"
)
_PARTS = ("experts", "adapters")
"""Folders of a result; each holds one folder for each of its experts, and no deeper ones."""


def refuse_foreign(out: Path) -> None:
    """Refuse to replace a folder that holds what no command here writes.

    Args:
        out: A folder that is there; empty ones are nobody's.

    Raises:
        UsageError: It is no result, or holds more than that; names what would be lost.
    """
    marked = any((out / name).is_file() for name in _MARKS)
    lost = lost_files(out, is_ours if marked else _nothing)
    if lost:
        why = "holds files that cgmerge did not write" if marked else "is no result of cgmerge"
        raise foreign(out, why, lost)


def refuse_here(out: Path) -> None:
    """Refuse to replace the current folder, one that it lies in, or the home folder.

    Raises:
        UsageError: Naming which.
    """
    real = real_path(out)
    for name, place in (("current", _current()), ("home", real_path(Path("~")))):
        if place is not None and (real == place or real in place.parents):
            what = f"is the {name} folder" if real == place else f"holds the {name} folder"
            raise UsageError(
                f"{out} {what}, which is never replaced",
                code="out_foreign",
                hint="choose another --out, one folder below",
                path=out,
            )


def refuse_special(path: Path) -> None:
    """Refuse to replace what is no file: a folder, a device, a pipe, a socket.

    Raises:
        UsageError: `path` is there, links followed, and is none.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder, a file is wanted", code="out_is_folder")
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is a device, a pipe or a socket, which is never replaced",
            code="out_is_special",
            hint="choose another --out, the name of a file",
            path=path,
        )


def refuse_foreign_file(path: Path) -> None:
    """Refuse to replace a record or a page that is none: each holds the name of this program.

    Args:
        path: What may be replaced; empty files are nobody's.

    Raises:
        UsageError: It is there and is no result.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
        if not head or b"cgmerge" in head:
            return
        while chunk := file.read(_LOOKED_AT):
            if b"cgmerge" in (head[-16:] + chunk):
                return
            head = chunk
    raise foreign(path, "is no result of cgmerge", [path.name])


def foreign(out: Path, why: str, lost: list[str]) -> UsageError:
    """Make the error that names what would be lost; of many only the first five."""
    names = ", ".join(lost[:SHOWN]) + (" …" if len(lost) > SHOWN else "")
    return UsageError(
        f"{out} {why}, so it is not replaced; lost would be {names}",
        code="out_foreign",
        hint="choose another --out, or move these away first",
        path=out,
        found=lost[:SHOWN],
    )


def lost_files(out: Path, ours: Callable[[str], bool]) -> list[str]:
    """List up to six files below a folder that `ours` does not take, by their relative names."""
    found: list[str] = []
    for name in _files(out):
        if not ours(name):
            found.append(name)
            if len(found) > SHOWN:
                break
    return sorted(found)


def is_ours(name: str) -> bool:
    """Whether a command writes a file of this relative name into a result folder."""
    *folders, last = Path(name).parts
    placed = not folders or (len(folders) == 2 and folders[0] in _PARTS)
    return placed and _NAMES.fullmatch(last) is not None


def _nothing(_name: str) -> bool:
    return False


def _files(out: Path) -> Iterator[str]:
    """Give relative names of files, and of links to folders, which are not followed."""
    for folder, names, files in os.walk(out):
        place = Path(folder)
        links = [name for name in names if (place / name).is_symlink()]
        for name in (*links, *files):
            if ".cgmerge-tmp-" in str(place / name):  # of a killed writer
                continue
            yield str((place / name).relative_to(out))


def _current() -> Path | None:
    try:
        return real_path(Path.cwd())
    except OSError:  # removed meanwhile
        return None
