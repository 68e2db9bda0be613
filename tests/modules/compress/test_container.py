"""`.cge` files: written once the same, read whole, and never trusted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cge_samples
import numpy as np
import pytest
import torch
from cge_forge import Parts
from cge_samples import FIELDS, coded, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open

from cgmerge.errors import (
    CgmergeError,
    Damaged,
    Incompatible,
    InputError,
    NotFound,
    Unsafe,
    UsageError,
)
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.dense import Dense
from cgmerge.modules.compress.sections import Coded


@pytest.fixture
def path(tmp_path):
    write_cge(tmp_path / "x.cge", *sample(), FIELDS, details={"m.a": {"cosine": 0.75}})
    return tmp_path / "x.cge"


def same(left, right):
    assert left.name == right.name
    assert np.array_equal(left.levels, right.levels)
    assert np.array_equal(left.scales, right.scales)
    assert left.transposed == right.transposed


def test_what_was_written_is_read(path):
    tensors, dense = sample()
    with CgeFile.open(path) as file:
        assert file.names == ("m.a.lora_A", "m.b.lora_B", "m.bias", "m.empty.lora_A", "m.head",
                              "m.none")  # fmt: skip
        for tensor in tensors:
            same(file.read(tensor.name), tensor)
        assert file.read_dense("m.bias").array().tolist() == [1.5, -2.0]
        assert torch.equal(file.read_dense("m.head").tensor(), dense["m.head"])
        assert file.read_dense("m.none").tensor().shape == (0, 3)
        assert file.details == {"m.a": {"cosine": 0.75}}
        assert file.manifest["base"] == {"id": "some/base"}
        assert file.manifest["numel"] == 120 + 120 + 18 + 2 + 3
        assert file.size == path.stat().st_size
        file.verify()


def test_the_library_of_safetensors_reads_it(path):
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["cgmerge"]
        assert json.loads(file.metadata()["cgmerge"])["spec"] == "cgmerge/1"
        assert set(file.keys()) == {
            "payload", "scales", "index", "dense.m.bias", "dense.m.head", "dense.m.none",
        }  # fmt: skip
        assert file.get_tensor("dense.m.head").dtype == torch.bfloat16


@pytest.mark.fault("F38")
def test_the_bytes_do_not_depend_on_order_or_process(path, tmp_path):
    tensors, dense = sample()
    other = dict(reversed(FIELDS.items()))
    again = dict(reversed(dense.items()))
    details = {"m.a": {"cosine": 0.75}}
    write_cge(tmp_path / "y.cge", reversed(tensors), again, other, details=details)
    assert (tmp_path / "y.cge").read_bytes() == path.read_bytes()
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); import cge_samples as samples;"
        "from cgmerge.modules.compress.container import write_cge;"
        "write_cge(pathlib.Path(sys.argv[1]), *samples.sample(), samples.FIELDS,"
        " details={'m.a': {'cosine': 0.75}})"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    words = [sys.executable, "-c", script, tmp_path / "z.cge", Path(cge_samples.__file__).parent]
    subprocess.run(words, check=True, env=environment)
    assert (tmp_path / "z.cge").read_bytes() == path.read_bytes()


def test_the_content_has_one_digest_whatever_is_said_of_it(path, tmp_path):
    """Other manifest, other place in the file: same tensors, same digest; other tensors, other."""
    tensors, dense = sample()
    first = write_cge(path, tensors, dense, FIELDS)
    second = write_cge(path, tensors, dense, {**FIELDS, "license": "MIT"}, details={"a": 1})
    assert first.content == second.content
    renamed = [coded("m.a2.lora_A", 3, 40), *tensors[:1], *tensors[2:]]
    turned = [coded("m.a.lora_A", 3, 40, transposed=True), *tensors[:1], *tensors[2:]]
    digests = {write_cge(path, case, dense, FIELDS).content for case in (renamed, turned)}
    assert len(digests | {first.content}) == 3


def test_the_whole_file_is_near_the_entropy(tmp_path):
    """Manifest, index, scales and safetensors' header included, at a tenth of a usual expert."""
    generator = np.random.default_rng(0)
    tensors, bits = [], 0.0
    for number in range(64):
        density = 0.06 * np.exp(generator.normal(0, 0.3))
        levels = generator.choice([-1, 1], (16, 4096)) * (generator.random((16, 4096)) < density)
        _, counts = np.unique(levels, return_counts=True)
        bits += float((counts * np.log2(levels.size / counts)).sum())
        name = f"model.layers.{number}.self_attn.q_proj.lora_A"
        tensors.append(Coded(name, levels.astype(np.int8), np.ones(1, np.float32)))
    written = write_cge(tmp_path / "x.cge", tensors, {}, FIELDS)
    assert 8 * written.size <= 1.03 * bits
    assert written.size <= 1.012 * written.payload


def test_lossless_files_hold_tensors_as_they_are(tmp_path):
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int8", "uint8", "bool"]
    tensors = {name: torch.tensor([[0, 1], [1, 1]]).to(getattr(torch, name)) for name in names}
    fields = {**FIELDS, "method": {"mode": "lossless"}}
    write_cge(tmp_path / "x.cge", [], tensors, fields)
    with CgeFile.open(tmp_path / "x.cge") as file:
        file.verify()
        assert file.coded == {}
        for name, tensor in tensors.items():
            assert torch.equal(file.read_dense(name).tensor(), tensor)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([1, 3, 200, 40_000, 2**31 - 1]))
def test_round_trips(tmp_path_factory, data, per_row, largest):
    shape = data.draw(arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40))
    values = st.integers(-largest, largest)
    levels = data.draw(arrays.arrays(np.int32, shape, elements=values, fill=st.just(0)))
    count = shape[0] if per_row else 1
    positive = st.floats(2.0**-149, 2.0**64, width=32)
    scales = data.draw(arrays.arrays(np.float32, (count,), elements=positive))
    tensor = Coded("t", levels, scales, data.draw(st.booleans()))
    path = tmp_path_factory.mktemp("round") / "x.cge"
    written = write_cge(path, [tensor], {}, FIELDS)
    with CgeFile.open(path) as file:
        file.verify()
        same(file.read("t"), tensor)
    assert written.size == path.stat().st_size


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8", "b1"]))
def test_dense_round_trips(tmp_path_factory, data, word):
    options = {"allow_nan": False, "allow_infinity": False} if word[0] == "f" else {}
    elements = arrays.from_dtype(np.dtype(word), **options)
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
    array = data.draw(arrays.arrays(word, shape, elements=elements))
    path = tmp_path_factory.mktemp("round") / "x.cge"
    write_cge(path, [], {"t": array}, FIELDS)
    with CgeFile.open(path) as file:
        file.verify()
        found = file.read_dense("t").array()
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf, 2.0**65])
@pytest.mark.fault("F08")
def test_scales_that_are_no_scales(tmp_path, value):
    tensor = Coded("t", np.ones((2, 2), np.int8), np.array([1.0, value], np.float32))
    with pytest.raises(Damaged, match="'t'") as caught:
        write_cge(tmp_path / "x.cge", [tensor], {}, FIELDS)
    assert caught.value.details["tensor"] == "t"
    assert not (tmp_path / "x.cge").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16,
                                   torch.float8_e5m2, torch.float8_e4m3fn])  # fmt: skip
def test_entries_that_are_not_finite(tmp_path, dtype):
    tensor = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    with pytest.raises(Damaged, match="1 entries that are not finite"):
        write_cge(tmp_path / "x.cge", [], {"t": tensor}, FIELDS)
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    write_cge(tmp_path / "x.cge", [], {"t": largest}, FIELDS)


BAD_INPUT = {
    "a name with a path": ([coded("../x")], {}, {}),
    "a name with a zero": ([], {"a\0": np.ones(1)}, {}),
    "a name twice": ([coded("a"), coded("a")], {}, {}),
    "coded and dense": ([coded("a")], {"a": np.ones(1)}, {}),
    "scales of another length": ([Coded("a", np.ones((3, 2), np.int8), np.ones(2, "f4"))], {}, {}),
    "scales of another type": ([Coded("a", np.ones((3, 2), np.int8), np.ones(1))], {}, {}),
    "levels that are floats": ([Coded("a", np.ones((3, 2)), np.ones(1, "f4"))], {}, {}),
    "a field of ours": ([], {}, {"spec": "cgmerge/1"}),
    "no base": ([], {}, {"base": None}),
    "a number that is none": ([], {}, {"fidelity": {"cosine": float("nan")}}),
    "not JSON": ([], {}, {"fidelity": {"cosine": {1, 2}}}),
    "too deep": ([], {}, {"fidelity": {"a": json.loads("[" * 20 + "]" * 20)}}),
    "too long": ([], {}, {"fidelity": {"a": "x" * (1 << 20)}}),
    "the place of the digest": ([], {}, {"license": "0" * 64}),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_cannot_be_written(tmp_path, name):
    tensors, dense, extra = BAD_INPUT[name]
    with pytest.raises(UsageError):
        write_cge(tmp_path / "x.cge", tensors, dense, {**FIELDS, **extra})
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_a_type_that_the_format_lacks(tmp_path):
    for array in (np.ones(2, np.complex64), np.array(["a"]), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(Incompatible, match="cannot be stored"):
            write_cge(tmp_path / "x.cge", [], {"t": array}, FIELDS)
    assert Dense.of(np.ones((2, 3), ">f4")).array().tolist() == np.ones((2, 3)).tolist()


@pytest.mark.parametrize(
    "value",
    ["x" * (5 << 20), [[]] * 100_001, json.loads("[" * 20 + "]" * 20), float("nan"), {1, 2}],
)
def test_details_beyond_the_limits(tmp_path, value):
    with pytest.raises(UsageError, match="the index cannot be written"):
        write_cge(tmp_path / "x.cge", [], {}, FIELDS, details={"a": value})


def test_a_file_that_exists(path):
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        write_cge(path, [], {}, FIELDS, overwrite=False)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.fault("F12")
def test_only_regular_files(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(Unsafe):
        CgeFile.open(tmp_path / "link")
    CgeFile.open(tmp_path / "link", follow_links=True).close()
    with pytest.raises(NotFound):
        CgeFile.open(tmp_path / "missing")


def refused(path):
    """Open and verify; return the error, which must be there and say that the input is bad."""
    with pytest.raises(InputError) as caught, CgeFile.open(path) as file:
        file.verify()
    assert caught.value.exit_code == 3
    return caught.value


@pytest.mark.fault("F01")
def test_every_truncation(path):
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        assert refused(path).code.startswith("damaged.")


@pytest.mark.slow
@pytest.mark.fault("F02")
def test_every_bit_flip(tmp_path):
    """Found, and where it lies in a tensor, the tensor is named."""
    path = tmp_path / "x.cge"
    write_cge(path, [coded("a"), coded("b")], {"c": np.ones(2, np.float32)}, FIELDS)
    raw = path.read_bytes()
    with CgeFile.open(path) as file:
        starts = {name: file._file.infos[name].start for name in ("payload", "dense.c")}
        owners = dict.fromkeys(range(starts["dense.c"], starts["dense.c"] + 8), "c")
        for name, info in file.coded.items():
            first = starts["payload"] + info.start
            owners |= dict.fromkeys(range(first, first + info.bytes), name)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        error = refused(path)
        if bit // 8 in owners:
            assert error.details["tensor"] == owners[bit // 8]


@pytest.mark.parametrize("extra", [b"\0", b" ", b"PK\x03\x04", b"<html>", b"x" * 4096])
@pytest.mark.fault("F03")
def test_bytes_around_the_file(path, extra):
    raw = path.read_bytes()
    path.write_bytes(raw + extra)
    refused(path)
    path.write_bytes(extra + raw)
    refused(path)


def test_all_damaged_tensors_are_listed(path):
    parts = Parts.of(path.read_bytes())
    sections = parts.sections()
    table = parts.index["coded"]
    for name in ("m.a.lora_A", "m.b.lora_B"):
        sections[name] = sections[name][:-1] + bytes([sections[name][-1] ^ 64])
    parts.payload = b"".join(sections[name] for name in table["name"])
    path.write_bytes(parts.build())
    with CgeFile.open(path) as file:
        assert [damage.name for damage in file.damages()] == ["m.a.lora_A", "m.b.lora_B"]
        with pytest.raises(Damaged, match=r"'m.a.lora_A'.*and in 1 more: m.b.lora_B") as caught:
            file.verify()
        assert caught.value.details["tensors"] == ["m.a.lora_A", "m.b.lora_B"]
        same(file.read("m.empty.lora_A"), sample()[0][2])


def test_a_dense_tensor_is_checked_where_it_is_read(path):
    """Without `verify`, which looks at all of them, before."""
    data = bytearray(path.read_bytes())
    with CgeFile.open(path) as file:
        place = file._file.infos["dense.m.bias"].start
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with CgeFile.open(path) as file:
        file.read_dense("m.head")
        with pytest.raises(Damaged, match="m.bias") as caught:
            file.read_dense("m.bias")
        assert caught.value.code == "damaged.crc32"


def test_other_content_under_a_true_checksum(path):
    """The checksum of a tensor can be forged; the digest of the content cannot."""
    parts = Parts.of(path.read_bytes())
    parts.scales = np.full(len(parts.scales) // 4, 3.0, "<f4").tobytes()
    parts.check_sums()
    path.write_bytes(parts.build())
    error = refused(path)
    assert error.code == "damaged.digest"
    assert error.details["tensor"] is None


def test_shapes_from_the_base(path):
    shapes = {"m.a.lora_A": (3, 40), "m.b.lora_B": (4, 30), "m.empty.lora_A": (2, 9)}
    CgeFile.open(path, shapes=shapes).close()
    for wrong in ({**shapes, "m.a.lora_A": (40, 3)}, {"m.a.lora_A": (3, 40)}):
        with pytest.raises(Incompatible, match=r"tensor 'm\.[ab]"):
            CgeFile.open(path, shapes=wrong)


def test_a_large_tensor_of_zeros_is_read_where_the_base_confirms_it(tmp_path):
    path = tmp_path / "x.cge"
    tensor = Coded("t", np.zeros((300, 300_000), np.int8), np.ones(1, np.float32))
    write_cge(path, [tensor], {}, FIELDS)
    with pytest.raises(Unsafe, match="expands to 90,000,000") as caught:
        CgeFile.open(path)
    assert caught.value.details["tensor"] == "t"
    with CgeFile.open(path, shapes={"t": (300, 300_000)}) as file:
        assert not file.read("t").levels.any()


def test_the_header_is_read_without_torch(path):
    script = (
        "import sys, pathlib; from cgmerge.modules.compress.container import CgeFile;"
        "file = CgeFile.open(pathlib.Path(sys.argv[1])); file.verify(); print(file.names);"
        "assert not {'torch', 'safetensors', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True)


@pytest.mark.fault("F25")
def test_unknown_fields_are_kept_and_ignored(path):
    parts = Parts.of(path.read_bytes())
    parts.manifest.update(novelty={"a": [1]}, must_understand=["eval"])
    parts.index["novelty"] = [1]
    parts.index["coded"]["novelty"] = [1]
    path.write_bytes(parts.build())
    with CgeFile.open(path) as file:
        file.verify()
        assert file.manifest["novelty"] == {"a": [1]}


@pytest.mark.fault("F42")
def test_a_file_that_shrinks_while_open(path):
    with CgeFile.open(path) as file:
        os.truncate(path, path.stat().st_size - 200)
        with pytest.raises(CgmergeError):
            file.verify()
