"""Data files as examples: json, jsonl, csv and parquet, five row formats, nothing guessed.

One source of truth for training and evaluation: `read_data` gives the examples, `encode` their
tokens. See `formats` for the row formats and `encoding` for the tokens.
"""

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgmerge import fs, strictjson
from cgmerge.errors import Damaged, DataError, NotFound
from cgmerge.modules.encoding import (
    Encoded,
    Rendering,
    begin_ids,
    encode,
    encode_all,
    end_ids,
    render,
    rendering,
)
from cgmerge.modules.formats import (
    FORMATS,
    Example,
    FormatName,
    Message,
    detect_format,
    examples_of,
    missing_columns,
)
from cgmerge.nearest import nearest
from cgmerge.shown import some_of
from cgmerge.tensorfile import read_small

__all__ = [
    "FORMATS",
    "DataFile",
    "Encoded",
    "Example",
    "FormatName",
    "Message",
    "Rendering",
    "begin_ids",
    "encode",
    "encode_all",
    "end_ids",
    "read_data",
    "read_rows",
    "render",
    "rendering",
]

MAX_BYTES = 2 * 1024**3
_MAX_FIELD = 16 * 1024 * 1024
_ROWS = 'a row is an object such as {"prompt": …, "completion": …}'
_BOM = b"\xef\xbb\xbf"  # Excel and PowerShell write one; it carries no meaning in UTF-8
_Row = Mapping[str, Any]


@dataclass(frozen=True)
class DataFile:
    """A data file that was read and checked.

    Attributes:
        path: As the user wrote it.
        format: The row format, the same for all rows.
        examples: In the order of the file; a conversation gives several.
        rows: Rows in the file.
        duplicates: Examples that repeat an earlier one word for word.
        sha256: Digest of the file's bytes.
    """

    path: Path
    format: FormatName
    examples: tuple[Example, ...] = field(repr=False)
    rows: int
    duplicates: int
    sha256: str


def read_data(path: Path) -> DataFile:
    """Read a data file; the suffix tells json, jsonl, csv, tsv or parquet.

    Args:
        path: A regular file of at most 2 GiB.

    Returns:
        Its examples and what is known about the file.

    Raises:
        NotFound: No such file; similar names are listed.
        DataError: Unknown suffix, format or encoding, an empty file, or a row that cannot be used.
        Damaged: Not valid JSON, CSV or parquet.
    """
    content, rows = _opened(path)
    return _collect(path, rows, content)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read a data file's rows as they are, whatever their columns.

    Args:
        path: As for `read_data`.

    Returns:
        The rows, in order, and the sha256 of the file.

    Raises:
        NotFound: No such file; similar names are listed.
        DataError: Unknown suffix or encoding, or an empty file.
        Damaged: Not valid JSON, CSV or parquet.
    """
    content, rows = _opened(path)
    found = [dict(row) for _, row in rows]
    if not found:
        raise DataError(f"{path} holds no rows", code="empty_file", hint=_ROWS, path=path)
    return found, hashlib.sha256(content).hexdigest()


def _opened(path: Path) -> tuple[bytes, Iterator[tuple[int, _Row]]]:
    """Return a file's bytes, and its rows with their numbers."""
    read = _READERS.get(path.suffix.lower())
    if not path.exists():
        raise NotFound(f"no such data file: {path}", code="data", hint=_near(path), path=path)
    if path.is_dir():
        raise NotFound(
            f"{path} is a folder; a data file is wanted", code="data", hint=_inside(path), path=path
        )
    if read is None:
        raise DataError(
            f"{path} has the suffix {path.suffix or '(none)'}; known are {', '.join(_READERS)}",
            code="suffix",
            hint="write the rows as JSON lines (.jsonl) or as a table (.csv, .tsv, .parquet)",
            path=path,
        )
    content = read_small(fs.absolute(path), limit=MAX_BYTES, follow_links=True)
    return content, read(content.removeprefix(_BOM), str(path))


def _collect(path: Path, rows: Iterable[tuple[int, _Row]], content: bytes) -> DataFile:
    """Check that all rows share one format and gather their examples."""
    examples: list[Example] = []
    chosen: FormatName | None = None
    first = count = 0
    for number, row in rows:
        count += 1
        name = _format_of(row, chosen, source=str(path), number=number)
        if chosen is None:
            chosen, first = name, number
        elif name != chosen:
            raise DataError(
                f"{path}: row {first} is {chosen}, row {number} is {name}; "
                "a file holds rows of one format",
                code="mixed",
                hint="make a file of each",
                path=path,
                row=number,
            )
        examples += examples_of(row, chosen, source=str(path), number=number)
    if chosen is None:
        raise DataError(f"{path} holds no rows", code="empty_file", hint=_ROWS, path=path)
    distinct = {(example.prompt, example.completion) for example in examples}
    return DataFile(
        path=path,
        format=chosen,
        examples=tuple(examples),
        rows=count,
        duplicates=len(examples) - len(distinct),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _format_of(row: _Row, chosen: FormatName | None, *, source: str, number: int) -> FormatName:
    """Name the format of a row; where the file's is known, what it lacks of that."""
    columns = list(row)
    fits = any(all(c in columns for c in needed) for needed in FORMATS.values())
    if chosen is not None and not fits:
        missing = [column for column in FORMATS[chosen] if column not in columns]
        raise missing_columns(missing, columns, chosen, source=source, row=number)
    return detect_format(columns, source=source, row=number)


def _read_jsonl(content: bytes, source: str) -> Iterator[tuple[int, _Row]]:
    number = 0
    for line_number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        number += 1
        where = f"{source}, line {line_number}"
        yield number, _object(strictjson.loads(line, source=where), where)


def _is_one_object(content: bytes, source: str) -> bool:
    """Whether it is one object written over several lines."""
    if content.strip().count(b"\n") == 0:
        return False
    try:
        return isinstance(strictjson.loads(content, source=source, max_bytes=MAX_BYTES), dict)
    except Damaged:
        return False


def _read_json(content: bytes, source: str) -> Iterator[tuple[int, _Row]]:
    """Read an array of objects, or one object per line as many `.json` files hold."""
    if content.lstrip()[:1] == b"{":
        if _is_one_object(content, source):
            raise DataError(
                f"{source} holds one object; an array of objects, or one object per line, is"
                " wanted",
                code="json",
                hint="put the rows between [ and ], or each on a line of its own",
                path=source,
            )
        yield from _read_jsonl(content, source)
        return
    if not content.strip():
        return
    rows = strictjson.loads(content, source=source, max_bytes=MAX_BYTES)
    if not isinstance(rows, list):
        raise DataError(
            f"{source} must hold an array of objects, found {strictjson.kind_of(rows)}",
            code="json",
            hint=_ROWS,
        )
    for number, row in enumerate(rows, start=1):
        yield number, _object(row, f"{source}, row {number}")


def _read_csv(content: bytes, source: str) -> Iterator[tuple[int, _Row]]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: {error.reason} at byte {error.start}",
            code="encoding",
            hint="save it as `CSV UTF-8`",
        ) from error
    header = text.partition("\n")[0]
    # Spreadsheets write semicolons where the comma is the decimal mark.
    delimiter = max(",;\t", key=header.count)
    # The module's limit is process-wide and too small for long texts.
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        if len(set(columns)) != len(columns):
            raise DataError(f"{source} has two columns of one name: {columns}", code="columns")
        number = 0
        for cells in reader:
            if not cells:
                continue
            number += 1
            if len(cells) != len(columns):
                raise DataError(
                    f"{source}, line {reader.line_num}: {len(cells)} cells, "
                    f"the header has {len(columns)}",
                    code="columns",
                    row=number,
                )
            yield number, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise Damaged(f"{source}, line {reader.line_num}: {error}", code="csv") from error


def _read_parquet(content: bytes, source: str) -> Iterator[tuple[int, _Row]]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        file = pq.ParquetFile(io.BytesIO(content))
        columns = list(file.schema_arrow.names)
        if len(set(columns)) != len(columns):
            raise DataError(f"{source} has two columns of one name: {columns}", code="columns")
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in _python_rows(batch, source, number):
                number += 1
                yield number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{source} is not readable parquet: {error}", code="parquet") from error


def _python_rows(batch: Any, source: str, before: int) -> list[_Row]:
    """Turn a record batch into rows; pyarrow reads values that Python cannot hold.

    Args:
        batch: The rows.
        source: What to call the file in messages.
        before: How many rows of the file lie before it.

    Raises:
        DataError: Names the first such value: text that is not UTF-8, a date beyond year 9999.
    """
    import pyarrow as pa

    # KeyError: a time zone that nobody knows.
    unfit = (ValueError, OverflowError, TypeError, KeyError, pa.ArrowException)
    try:
        rows: list[_Row] = batch.to_pylist()
    except unfit as whole:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(column, start=before + 1):
                try:
                    value.as_py()
                except unfit as error:
                    raise DataError(
                        f"{source}, row {number}: column {name!r} ({value.type}) holds a value "
                        f"that cannot be used: {error}",
                        code="value",
                        hint="correct the value, or leave the column out",
                        row=number,
                        column=name,
                    ) from error
        raise DataError(
            f"{source} holds rows that cannot be used: {whole}", code="value"
        ) from whole
    return rows


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _object(value: Any, where: str) -> _Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: expected an object, found {strictjson.kind_of(value)}",
            code="json",
            hint="a whole array of objects is a .json file, not .jsonl"
            if isinstance(value, list)
            else _ROWS,
        )
    return value


def _near(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    near = nearest(path.name, names, count=3)
    return f"similar: {', '.join(near)}" if near else None


def _inside(path: Path) -> str | None:
    names = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() in _READERS)
    return f"it holds {some_of(names)}" if names else None
