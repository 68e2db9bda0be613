"""The index of a `.cge` file: what lies where, column by column, deflated.

Columns, because a name per line and a digit per line deflate to a fraction of what records do:
ten bytes a tensor. Everything here is checked against the size of the file before any of it is
used as the size of an allocation.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cgmerge import strictjson
from cgmerge.errors import Damaged, Unsafe
from cgmerge.modules.compress.codec import DTYPES
from cgmerge.modules.compress.manifest import MAX_DEPTH

MAX_INDEX = 4 << 20
"""Bytes of the inflated index; as Python objects it may take twenty times as much."""

MAX_TENSORS = 10_000
MAX_SIDE = 2**31 - 1
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}")
_COLUMNS = ("name", "rows", "columns", "dtype", "scales", "transposed", "bytes", "crc32")
_DENSE = ("name", "crc32")


@dataclass(frozen=True, slots=True)
class CodedInfo:
    """One coded tensor: its shape as stored, and what it takes in the file.

    Attributes:
        rows: Rows of the levels.
        columns: Columns of the levels.
        dtype: I8, I16 or I32.
        scales: 1, or one per row.
        transposed: Whether the tensor is the levels transposed.
        bytes: Length of its section.
        crc32: Of its section followed by its scales.
        start: Where its section starts in `payload`.
        first_scale: Where its scales start in `scales`.
    """

    rows: int
    columns: int
    dtype: str
    scales: int
    transposed: bool
    bytes: int
    crc32: int
    start: int = 0
    first_scale: int = 0

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.rows * self.columns

    @property
    def decoded_bytes(self) -> int:
        """Return what the decoded levels take."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Index:
    """All coded tensors by name, checksums of the dense ones, and free details."""

    coded: Mapping[str, CodedInfo]
    dense: Mapping[str, int]
    details: Mapping[str, Any]


def pack(
    coded: Mapping[str, CodedInfo], dense: Mapping[str, int], details: Mapping[str, Any] | None
) -> bytes:
    """Write an index as it is stored.

    Args:
        coded: In the order of their sections.
        dense: Checksum of each dense tensor.
        details: Any JSON object that should not weigh on the header.
    """
    columns: dict[str, list[Any]] = {"name": list(coded)}
    for key in _COLUMNS[1:]:
        columns[key] = [getattr(info, key) for info in coded.values()]
    columns["transposed"] = [int(value) for value in columns["transposed"]]
    names = sorted(dense)
    value: dict[str, Any] = {
        "coded": columns,
        "dense": {"name": names, "crc32": [dense[name] for name in names]},
    }
    if details:
        value["details"] = dict(details)
    text = strictjson.canonical(value)
    if len(text) > MAX_INDEX or strictjson.depth(value) > MAX_DEPTH:
        raise ValueError(f"the index has {len(text):,} bytes; at most {MAX_INDEX:,} are allowed")
    return zlib.compress(text, 9)


def unpack(stored: bytes, source: str) -> Index:
    """Read a stored index and check all that can be checked without the sections.

    Raises:
        Damaged: Not an index, or columns that do not fit each other.
        Unsafe: Beyond a limit.
    """
    text = _inflate(stored, source)
    value = strictjson.loads_object(text, source=f"the index of {source}", max_bytes=MAX_INDEX)
    if strictjson.depth(value) > MAX_DEPTH:
        raise Unsafe(f"the index of {source} is nested more than {MAX_DEPTH} deep", code="depth")
    coded = _table(value.get("coded"), _COLUMNS, source)
    dense = _table(value.get("dense"), _DENSE, source)
    details = value.get("details", {})
    if not isinstance(details, dict):
        raise _wrong("details", source)
    names = [*coded["name"], *dense["name"]]
    if len(names) > MAX_TENSORS:
        raise Unsafe(
            f"{source} holds {len(names):,} tensors; the limit is {MAX_TENSORS:,}", code="tensors"
        )
    _check_names(names, source)
    for part in (coded["name"], dense["name"]):
        if part != sorted(part):
            raise Damaged(f"the index of {source} is not sorted by name", code="index")
    for crc in dense["crc32"]:
        _whole(crc, 2**32 - 1, "dense.crc32", source)
    infos = _place(coded, source)
    return Index(infos, dict(zip(dense["name"], dense["crc32"], strict=True)), details)


def check_name(name: object) -> bool:
    """Whether a tensor may have this name: no separators, no dots in front or in a row."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None and ".." not in name


def _inflate(stored: bytes, source: str) -> bytes:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stored, MAX_INDEX + 1)
    except zlib.error as error:
        raise Damaged(f"the index of {source} cannot be inflated: {error}", code="index") from error
    if len(text) > MAX_INDEX:
        raise Unsafe(
            f"the index of {source} inflates to more than the limit of {MAX_INDEX:,} bytes",
            code="index_size",
        )
    if not inflater.eof or inflater.unused_data or inflater.unconsumed_tail:
        raise Damaged(f"the index of {source} does not end where it should", code="index")
    return text


def _table(value: Any, keys: Iterable[str], source: str) -> dict[str, list[Any]]:
    """Check that all columns are lists of one length; columns that are not known are ignored."""
    if not isinstance(value, dict):
        raise _wrong("a table", source)
    table = {key: value.get(key) for key in keys}
    if not all(isinstance(column, list) for column in table.values()):
        raise _wrong("a column", source)
    if len({len(column) for column in table.values() if column is not None}) != 1:
        raise _wrong("the length of a column", source)
    return {key: column for key, column in table.items() if column is not None}


def _check_names(names: list[Any], source: str) -> None:
    for name in names:
        if not check_name(name):
            raise Unsafe(f"{source} holds a tensor of the name {name!r}", code="name", tensor=name)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Damaged(f"{source} holds the tensor {twice!r} twice", code="index", tensor=twice)


def _place(table: Mapping[str, list[Any]], source: str) -> dict[str, CodedInfo]:
    infos: dict[str, CodedInfo] = {}
    start = first_scale = 0
    for row in zip(*(table[key] for key in _COLUMNS), strict=True):
        name, rows, columns, dtype, scales, transposed, size, crc = row
        where = f"tensor {name!r}"
        _whole(rows, MAX_SIDE, f"{where}: rows", source)
        _whole(columns, MAX_SIDE, f"{where}: columns", source)
        _whole(scales, rows if rows > 1 else 1, f"{where}: scales", source)
        _whole(size, 2**62, f"{where}: bytes", source)
        _whole(crc, 2**32 - 1, f"{where}: crc32", source)
        _whole(transposed, 1, f"{where}: transposed", source)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _wrong(f"{where}: dtype", source)
        if scales not in (1, rows):
            raise _wrong(f"{where}: scales", source)
        infos[name] = CodedInfo(
            rows, columns, dtype, scales, bool(transposed), size, crc, start, first_scale
        )
        start += size
        first_scale += scales
    return infos


def _whole(value: Any, largest: int, where: str, source: str) -> None:
    if type(value) is not int or not 0 <= value <= largest:
        raise _wrong(where, source)


def _wrong(where: str, source: str) -> Damaged:
    return Damaged(f"the index of {source} is wrong at {where}", code="index")
