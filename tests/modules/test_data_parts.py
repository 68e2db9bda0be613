"""Data files: what would be lost, and what cannot be held, is refused by name."""

import datetime
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgmerge.errors import Damaged, DataError
from cgmerge.modules.data import Message, read_data

ALPACA = {"instruction": "i", "output": "o"}
ASK = {"role": "user", "content": "U"}
ANSWER = {"role": "assistant", "content": "A"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("history", "found"),
    [(3, "a number"), (True, "a boolean"), (0, "a number"), (False, "a boolean"), ("x", "string"),
     ({}, "an object")],
)  # fmt: skip
def test_alpaca_history_of_another_type(tmp_path, history, found):
    path = write(tmp_path / "d.jsonl", [ALPACA, {**ALPACA, "history": history}])
    with pytest.raises(DataError, match=rf"d\.jsonl, row 2: 'history' .* found {found}$") as error:
        read_data(path)
    assert error.value.code == "data.type"


@pytest.mark.parametrize("history", [None, "", []])
def test_alpaca_without_history(tmp_path, history):
    path = write(tmp_path / "d.jsonl", [{**ALPACA, "history": history}])
    assert read_data(path).examples[0].prompt == (Message("user", "i"),)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "thinking"])
def test_parts_of_messages_that_would_be_lost(tmp_path, key):
    lost = {"role": "assistant", "content": None, key: [{"name": "f"}]}
    path = write(tmp_path / "d.jsonl", [{"messages": [ASK, ANSWER]}, {"messages": [ASK, lost]}])
    with pytest.raises(DataError, match=rf"row 2: 'messages', message 2 has '{key}'") as error:
        read_data(path)
    assert error.value.code == "data.unsupported"
    assert key in error.value.hint
    for nothing in (None, [], ""):
        kept = write(tmp_path / "e.jsonl", [{"messages": [ASK, {**ANSWER, key: nothing}]}])
        assert len(read_data(kept).examples) == 1


def test_tools_beside_the_messages(tmp_path):
    turns = [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]
    for row in ({"messages": [ASK, ANSWER]}, {"conversations": turns},
                {"prompt": [ASK], "completion": [ANSWER]}):  # fmt: skip
        path = write(tmp_path / "d.jsonl", [{**row, "tools": [{"name": "f"}]}])
        with pytest.raises(DataError, match="row 1: there is the column 'tools'"):
            read_data(path)
        assert read_data(write(path, [{**row, "tools": "[]"}])).rows == 1


def test_answers_of_weight_0_are_context(tmp_path):
    first, last = {**ANSWER, "weight": 0}, {**ANSWER, "content": "B", "weight": 1}
    path = write(tmp_path / "d.jsonl", [{"messages": [ASK, first, {**ASK, "weight": 0}, last]}])
    (example,) = read_data(path).examples
    user = Message("user", "U")
    assert example.prompt == (user, Message("assistant", "A"), user)
    assert example.completion == "B"
    with pytest.raises(DataError, match="no assistant message to learn from"):
        read_data(write(path, [{"messages": [ASK, first]}]))


@pytest.mark.parametrize(
    ("message", "allowed"),
    [({**ANSWER, "weight": 0.5}, "0 or 1"), ({**ANSWER, "weight": True}, "0 or 1"),
     ({**ANSWER, "weight": "0"}, "0 or 1"), ({**ASK, "weight": 1}, "0")],
)  # fmt: skip
def test_other_weights(tmp_path, message, allowed):
    path = write(tmp_path / "d.jsonl", [{"messages": [ASK, message, ANSWER]}])
    with pytest.raises(DataError, match=rf"row 1: .*message 2 .*'weight' must be {allowed}, found"):
        read_data(path)


def strings(*values):
    """A column of text whose bytes nobody checks."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))]
    return pa.StringArray.from_buffers(len(values), buffers[1], buffers[2])


@pytest.mark.parametrize(
    "column",
    [
        strings(b"ok", b"\xff\xfe"),
        pa.array([0, 2**30], pa.int32()).cast(pa.date32()),
        pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("ms")),
        pa.array([0, 1], pa.timestamp("ms", tz="No/Where")),
        pa.array([{"d": 0}, {"d": 2**30}], pa.struct([("d", pa.int32())])).cast(
            pa.struct([("d", pa.date32())])
        ),
    ],
    ids=["text", "date", "timestamp", "zone", "nested"],
)
def test_parquet_values_that_python_cannot_hold(tmp_path, column):
    table = pa.table({"prompt": ["p"] * 2, "completion": ["c"] * 2, "extra": column})
    pq.write_table(table, tmp_path / "d.parquet", store_schema=True)
    with pytest.raises(DataError, match=r"d\.parquet, row [12]: column 'extra'") as error:
        read_data(tmp_path / "d.parquet")
    assert error.value.exit_code == 3
    assert error.value.details["column"] == "extra"
    assert error.value.details["row"] == (1 if "tz=" in str(column.type) else 2)


def test_parquet_rows_are_counted_over_batches(tmp_path):
    days = pa.array([0] * 1500 + [2**30], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"text": ["t"] * 1501, "day": days}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="row 1501: column 'day'"):
        read_data(tmp_path / "d.parquet")


def test_parquet_values_that_python_can_hold(tmp_path):
    day = datetime.date(9999, 12, 31)
    pq.write_table(pa.table({"text": ["t"], "day": [day]}), tmp_path / "d.parquet")
    assert read_data(tmp_path / "d.parquet").examples[0].extra == {"day": day}


def test_parquet_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match="two columns of one name") as error:
        read_data(tmp_path / "d.parquet")
    assert error.value.code == "data.columns"


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "iconv -f UTF-16"),
        ('{"text": "ä"}\n'.encode("latin-1"), "iconv -f WINDOWS-1252"),
        (b'{"text": "a"}\r{"text": "b"}\r', "tr '\\r' '\\n'"),
    ],
    ids=["bom", "utf-16", "latin-1", "cr"],
)
def test_other_encodings_say_what_to_do(tmp_path, content, hint):
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(Damaged) as error:
        read_data(tmp_path / "d.jsonl")
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": 2}, "place from 0 to 1, found 2"),
        ({"answer": -1}, "found -1"),
        ({"answer": True}, "found True"),
        ({"answer": "z"}, "found 'z'"),
        ({"answer": 0, "choices": ["x"]}, "at least two"),
        ({"answer": 0, "choices": ["x", "x"]}, "twice"),
        ({"answer": 0, "choices": ["x", " "]}, "must hold texts"),
        ({"answer": 0, "prompt": ""}, "'prompt' is empty"),
    ],
)
def test_multiple_choice_of_another_kind(tmp_path, row, says):
    rows = [
        {"prompt": "p", "choices": ["x", "y"], "answer": 0},
        {"prompt": "p", "choices": ["x", "y"], **row},
    ]
    with pytest.raises(DataError, match=re.escape(says)) as error:
        read_data(write(tmp_path / "d.jsonl", rows))
    assert "row 2" in error.value.message


def test_multiple_choice_of_messages(tmp_path):
    turns = [{"role": "user", "content": "which?"}]
    row = {"prompt": turns, "choices": ["x", "y"], "answer": "y"}
    (one,) = read_data(write(tmp_path / "d.jsonl", [row])).examples
    assert (one.prompt, one.completion) == ((Message("user", "which?"),), "y")


@pytest.mark.parametrize("row", [{"question": "q", "answer": "a"}, {"answer": 1}])
def test_an_answer_alone_is_no_multiple_choice(tmp_path, row):
    write(tmp_path / "d.jsonl", [row])
    with pytest.raises(DataError, match="no known format"):
        read_data(tmp_path / "d.jsonl")
