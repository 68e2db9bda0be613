"""Safetensors headers that lie, files that change: refused before anything is allocated."""

import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cgmerge.errors import CgmergeError, Damaged, Incompatible, LimitExceeded, NotFound, Unsafe
from cgmerge.tensorfile import (
    TensorFile,
    TensorInfo,
    dtype_name,
    file_sha256,
    header_bytes,
    plan_file,
    read_small,
)


def write(path, header, body=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool]
)
def test_reads_what_safetensors_wrote(tmp_path, dtype):
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.zeros(0, 4),
        "s": torch.ones(()),
    }
    save_file(tensors, tmp_path / "x", metadata={"k": "v"})
    with TensorFile(tmp_path / "x") as file:
        assert file.metadata == {"k": "v"}
        for name, tensor in tensors.items():
            assert torch.equal(file.read(name), tensor)
            assert file.read(name).dtype == tensor.dtype
        assert file.sha256() == file_sha256(tmp_path / "x")


LIES = {
    "length beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "length 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "short": b"\x02\0\0",
    "empty": b"",
    "zip in front": b"PK\x03\x04" + b"\0" * 100,
    "html": b"<html><body></body></html>",
}


@pytest.mark.parametrize("name", LIES)
def test_not_a_safetensors_file(tmp_path, name):
    path = tmp_path / "x"
    path.write_bytes(LIES[name])
    with pytest.raises(Damaged):
        TensorFile(path)


HEADERS = {
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
    "starts late": ({"a": entry(offsets=(4, 12))}, 12),
    "trailing bytes": ({"a": entry()}, 12),
    "short body": ({"a": entry()}, 4),
    "reversed": ({"a": entry(offsets=(8, 0))}, 8),
    "negative": ({"a": entry(offsets=(-8, 0))}, 0),
    "wrong size": ({"a": entry(shape=(3,))}, 8),
    "huge shape": ({"a": entry(shape=(2**40, 2**40))}, 8),
    "zero times huge": ({"a": entry(shape=(0, 2**62), offsets=(0, 0))}, 0),
    "float shape": ({"a": entry(shape=(2.0,))}, 8),
    "bool shape": ({"a": {**entry(), "shape": [True, 2]}}, 8),
    "extra field": ({"a": {**entry(), "more": 1}}, 8),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "entry is a list": ({"a": [1]}, 0),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "metadata is a list": ({"__metadata__": []}, 0),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.fault("F04")
def test_lying_headers(tmp_path, name):
    header, size = HEADERS[name]
    with pytest.raises(Damaged):
        TensorFile(write(tmp_path / "x", header, b"\0" * size))


def test_duplicate_names(tmp_path):
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' * 1
    text += b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    with pytest.raises(Damaged, match="twice"):
        TensorFile(write(tmp_path / "x", text, b"\0" * 8))


def test_unknown_dtype(tmp_path):
    with pytest.raises(Incompatible, match="F4"):
        TensorFile(write(tmp_path / "x", {"a": entry(dtype="F4")}, b"\0" * 8))


@pytest.mark.fault("F04")
def test_header_limit(tmp_path):
    """Each limit by its own name, so that none stands in for another."""
    path = write(tmp_path / "x", {"__metadata__": {"k": "v" * 5000}})
    with pytest.raises(LimitExceeded) as caught:
        TensorFile(path, max_header=1000)
    assert caught.value.code == "limit.header_size"
    path = write(tmp_path / "y", {f"t{i}": entry(shape=[0], offsets=[0, 0]) for i in range(4)})
    TensorFile(path, max_tensors=4).close()
    with pytest.raises(LimitExceeded) as caught:
        TensorFile(path, max_tensors=3)
    assert caught.value.code == "limit.tensors"
    assert read_small(path, limit=path.stat().st_size) == path.read_bytes()
    with pytest.raises(LimitExceeded) as caught:
        read_small(path, limit=path.stat().st_size - 1)
    assert caught.value.code == "limit.file_size"


@pytest.mark.parametrize("dtype", [[], {}, 32, None])
def test_types_that_are_no_names(tmp_path, dtype):
    with pytest.raises(Damaged, match="wrongly"):
        TensorFile(write(tmp_path / "x", {"a": {**entry(), "dtype": dtype}}, b"\0" * 8))


@pytest.mark.fault("F12")
def test_only_regular_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(Unsafe):
            TensorFile(tmp_path / name)
    with pytest.raises(Unsafe):
        read_small(tmp_path)
    TensorFile(tmp_path / "link", follow_links=True).close()
    with pytest.raises(NotFound):
        TensorFile(tmp_path / "missing")


@pytest.mark.fault("F42")
def test_file_that_shrinks_while_open(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "x")
    with TensorFile(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", 200)
        with pytest.raises(Damaged, match="shorter"):
            file.read("a")


@pytest.mark.fault("F42")
def test_replaced_file_does_not_change_what_is_open(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "x")
    with TensorFile(tmp_path / "x") as file:
        save_file({"a": torch.zeros(3)}, tmp_path / "y")
        (tmp_path / "y").replace(tmp_path / "x")
        assert file.read("a").tolist() == [1, 1, 1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_flip_of_the_header_is_an_error_or_still_covers_the_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "x"
    save_file({"alpha": torch.ones(3), "beta": torch.ones(2, 2)}, path)
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    place = data.draw(st.integers(0, 8 + length - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        with TensorFile(path) as file:
            assert sum(info.end - info.start for info in file.infos.values()) <= len(raw)
    except CgmergeError:
        pass


@pytest.mark.fault("F01")
def test_every_truncation_is_found(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    for size in range(len(raw)):
        (tmp_path / "x").write_bytes(raw[:size])
        with pytest.raises(Damaged):
            TensorFile(tmp_path / "x")


@pytest.mark.parametrize("seed", range(4))
def test_a_planned_file_is_read_by_the_library(tmp_path, seed):
    """Mixed types and shapes, empty ones and scalars."""
    generator = torch.Generator().manual_seed(seed)
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
    shapes = [(3, 5), (7,), (), (0, 4), (2, 3, 4), (1,)]
    tensors = {
        f"t{i}.é": (torch.randn(shape, generator=generator) * 3).to(types[(i + seed) % 6])
        for i, shape in enumerate(shapes)
    }
    head, order, size = plan_file(
        {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    )
    assert len(head) % 8 == 0
    data = b"".join(tensors[n].reshape(-1).view(torch.uint8).numpy().tobytes() for n in order)
    (tmp_path / "planned").write_bytes(head + data)
    assert len(head + data) == size
    loaded = load_file(tmp_path / "planned")
    with TensorFile(tmp_path / "planned") as file:
        assert set(file.infos) == set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor)
            assert torch.equal(file.read(name), tensor)
            flat = tensor.reshape(-1)
            for first, last in ((0, len(flat)), (len(flat) // 2, len(flat)), (1, 1)):
                part = file.read_entries(name, first, last)
                assert part.dtype == tensor.dtype
                assert torch.equal(part, flat[first:last])


def test_a_header_is_written_as_the_library_writes_it(tmp_path):
    tensors = {"b": torch.ones(3), "a": torch.ones(2, 2), "c": torch.ones(1, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x", metadata={"k": 'q"\\\n\x01é'})
    raw = (tmp_path / "x").read_bytes()
    with TensorFile(tmp_path / "x") as file:
        body = 8 + int.from_bytes(file.read_span(0, 8), "little")
        infos = {
            name: TensorInfo(info.dtype, info.shape, info.start - body, info.end - body)
            for name, info in file.infos.items()
        }
        assert header_bytes(infos, file.metadata) == file.read_span(0, body) == raw[:body]
        assert file.read_span(body, len(raw)) == raw[body:]


def test_a_file_left_open_at_the_end_of_a_program_says_nothing(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    # The reference in `sys.modules`' own dictionary outlives the modules that a reader needs.
    program = (
        "import sys, cgmerge.tensorfile as t\n"
        f"sys.modules['zz'] = kept = t.TensorFile({str(tmp_path / 'x.safetensors')!r})\n"
        "t.os = t.contextlib = None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
