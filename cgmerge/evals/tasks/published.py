"""Readers of published benchmark files in a folder that the user gives; `.gz` copies too.

| suite    | files                                | becomes                                     |
|----------|--------------------------------------|---------------------------------------------|
| cogs     | train.tsv dev.tsv test.tsv [gen.tsv] | sentence, logical form; skill = kind of row |
| slog     | the same, perhaps in varfree_LF/     | the same                                    |
| bbh      | TASK.json                            | skill = task; evaluation only               |
| bigbench | task.json, or .jsonl of such objects | skill = task; evaluation only               |

Evaluation-only suites have five validation rows for each task, to choose or learn weights on, and
no training rows. Their canary goes into the card, never into a row.
"""

import gzip
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cgmerge import strictjson
from cgmerge.errors import Damaged, DataError, LimitExceeded, NotFound
from cgmerge.evals.tasks.parts import Parts, Record
from cgmerge.shown import some_of

_MOST_BYTES = 512 * 1024 * 1024
_SHOTS = 5
_LETTER = ("(", ")")
_FORMS = ("", "varfree_LF", "cogs_LF")


def read_cogs(folder: Path, split: str) -> Parts:
    """Read COGS or SLOG files.

    Args:
        folder: With train.tsv, dev.tsv and test.tsv, or gen.tsv for the split `gen`.
        split: `test`, or `gen` for the generalization set.

    Raises:
        NotFound: A file is missing; those found are named.
        Damaged: A row has not three columns.
    """
    place = next((folder / form for form in _FORMS if _find(folder / form, "train.tsv")), folder)
    names = ("train.tsv", "dev.tsv", f"{split}.tsv")
    train, dev, test = (list(_read_tsv(_needed(place, name))) for name in names)
    return Parts(train, dev, test)


def read_bbh(folder: Path, _split: str = "") -> Parts:
    """Read BIG-Bench Hard: one JSON file for each task, `{"examples": [{input, target}]}`."""
    tasks, canaries = [], set()
    for path in _files(folder, (".json", ".json.gz")):
        content = strictjson.loads_object(_content(path), source=str(path))
        if "examples" in content:
            canaries.add(str(content.get("canary", "")))
            tasks.append((_stem(path), _asked(content, str(path), "Q: {}\nA:")))
    return _evaluation(tasks, folder, canaries, options=True)


def read_bigbench(folder: Path, _split: str = "") -> Parts:
    """Read BIG-bench JSON tasks: `task.json` files, or JSON Lines of such objects."""
    tasks, canaries = [], set()
    for path in _files(folder, (".json", ".jsonl", ".json.gz", ".jsonl.gz")):
        lines = _content(path).splitlines() if ".jsonl" in path.name else [_content(path)]
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            content = strictjson.loads_object(line, source=where)
            if "examples" not in content:
                continue
            canaries.add(str(content.get("canary", "")))
            name = str(content.get("task_path") or content.get("name") or path.parent.name)
            prefix = str(content.get("example_input_prefix", "\nQ: "))
            suffix = str(content.get("example_output_prefix", "\nA: ")).rstrip(" ")
            tasks.append((name, _asked(content, where, f"{_plain(prefix)}{{}}{_plain(suffix)}")))
    return _evaluation(tasks, folder, canaries, options=False)


def _plain(text: str) -> str:
    """Escape braces, as the text becomes part of a format."""
    return text.replace("{", "{{").replace("}", "}}")


def _asked(content: dict[str, Any], where: str, form: str) -> list[Record]:
    """Return the rows of one task; of several accepted answers the first is the target."""
    rows = []
    intro = str(content.get("task_prefix", ""))
    for number, item in enumerate(content["examples"], 1):
        target = item.get("target") if isinstance(item, dict) else None
        answer = target[0] if isinstance(target, list) and target else target
        if (
            answer is None
            and isinstance(item, dict)
            and isinstance(item.get("target_scores"), dict)
        ):
            answer = max(item["target_scores"], key=item["target_scores"].__getitem__)
        if not isinstance(item, dict) or not isinstance(answer, str) or "input" not in item:
            raise DataError(
                f"{where}, example {number}: an input and a target are wanted, found "
                f"{', '.join(item) if isinstance(item, dict) else type(item).__name__}",
                code="column",
                row=number,
            )
        prompt = intro + form.format(item["input"])
        rows.append({"prompt": prompt.lstrip("\n"), "completion": f" {answer.strip()}"})
    return rows


def _evaluation(
    tasks: list[tuple[str, list[Record]]], folder: Path, canaries: set[str], *, options: bool
) -> Parts:
    if not tasks:
        raise DataError(f"{folder} holds no task with examples", code="empty", path=folder)
    validation: list[Record] = []
    test: list[Record] = []
    notes = ["evaluation only: never train on these rows", *sorted(canaries - {""})]
    for name, rows in tasks:
        # A checksum, not the run's seed: which rows are shown must never depend on a run.
        chosen = random.Random(zlib.crc32(name.encode())).sample(rows, min(_SHOTS, len(rows) - 1))
        shots = {id(row) for row in chosen}
        for row in rows:
            (validation if id(row) in shots else test).append({**row, "skill": name})
        if options:
            notes += _stray(name, rows)
    return Parts([], validation, test, tuple(notes))


def _stray(name: str, rows: list[Record]) -> list[str]:
    """Name targets that are no option letter where most are; they are scored as they are."""
    answers = [row["completion"].strip() for row in rows]
    odd = [one for one in answers if (one[:1], one[-1:]) != _LETTER or len(one) != 3]
    if not odd or len(odd) * 2 > len(answers):
        return []
    shown = some_of(one[:40] for one in sorted(set(odd)))
    return [f"{name}: {len(odd)} targets are no option letter: {shown}"]


def _read_tsv(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_content(path).decode("utf-8").splitlines(), 1):
        cells = line.split("\t")
        if len(cells) != 3:
            raise Damaged(
                f"{path}, line {number}: {len(cells)} columns, wanted are sentence, "
                "logical form and kind",
                code="tsv",
                row=number,
            )
        sentence, form, kind = cells
        yield {"prompt": f"{sentence}\n", "completion": form, "sentence": sentence, "skill": kind}


def _find(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _needed(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        there = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        raise NotFound(
            f"{folder} holds no {name} or {name}.gz; found {some_of(there, 12) or '(nothing)'}",
            code="data",
            path=folder,
        )
    return path


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"no such folder: {folder}", code="data", path=folder)
    return sorted(p for p in folder.rglob("*") if p.name.endswith(suffixes) and p.is_file())


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def _content(path: Path) -> bytes:
    """Read a file, unpacked where it is packed, of bounded size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Damaged(f"{path} is no gzip file: {error}", code="gzip", path=path) from error
    if len(content) > _MOST_BYTES:
        raise LimitExceeded(f"{path} has more than {_MOST_BYTES:,} bytes", code="size", path=path)
    return content
