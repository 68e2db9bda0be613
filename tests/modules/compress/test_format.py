"""docs/FORMAT.md is true: a reader written from it, its example, its schema, golden bytes."""

import json
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import cge_reader
import numpy as np
import pytest
from cge_forge import Parts
from cge_samples import FIELDS, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cgmerge.modules.compress import manifest
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.sections import Coded

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "FORMAT.md").read_text()
GOLDEN = ROOT / "tests" / "data" / "golden.cge"
LEVELS = [[0, 0, 1, 0, 0, -1, 0, 0], [0, 2, 0, 0, 0, 0, 0, -1]]


def write_golden(path):
    tensor = Coded("m.lora_A", np.array(LEVELS, np.int8), np.array([0.5], np.float32))
    fields = {"base": {"id": "b"}, "peft": None, "method": {"mode": "ternary"}}
    write_cge(path, [tensor], {"m.bias": np.array([1.0], np.float32)}, fields)


def test_golden_bytes(tmp_path):
    """What was written once is written today; another zlib may deflate the index differently."""
    write_golden(tmp_path / "x.cge")
    written, golden = (tmp_path / "x.cge").read_bytes(), GOLDEN.read_bytes()
    if "ng" in zlib.ZLIB_RUNTIME_VERSION:
        new, old = Parts.of(written), Parts.of(golden)
        assert (new.index, new.payload, new.scales) == (old.index, old.payload, old.scales)
        assert new.manifest["digest"]["content"] == old.manifest["digest"]["content"]
    else:
        assert written == golden


def test_golden_file_is_read():
    with CgeFile.open(GOLDEN) as file:
        file.verify()
        assert file.read("m.lora_A").levels.tolist() == LEVELS
        assert file.read("m.lora_A").scales.tolist() == [0.5]
        assert file.read_dense("m.bias").array().tolist() == [1.0]


def test_the_page_shows_the_golden_file():
    dump = re.search(r"The whole file:\n\n```\n(.*?)```", PAGE, flags=re.S)[1]
    shown = "".join(line[6:54] for line in dump.splitlines())
    assert bytes.fromhex(shown) == GOLDEN.read_bytes()
    parts = Parts.of(GOLDEN.read_bytes())
    assert parts.payload.hex(" ") in PAGE
    index, text = (
        json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, flags=re.S)
    )
    assert index == parts.index
    assert text == parts.manifest


def test_the_pages_example_of_gaps():
    """Ones at 10 and 17 of 40, from the page: kind 5, u 2, v 1, bits 0101 10 1 00."""
    assert "Description `05 02 01`; bits `0101`, `10`, `1`, `00`." in PAGE
    found = cge_reader.read_description(cge_reader.Head(bytes([5, 2, 1])), 40, 2)
    bits = cge_reader.Bits(bytes([0b01011010, 0]))
    bits.all = bits.all[:9]
    assert np.flatnonzero(cge_reader.read_plane(bits, found, 40, 2)).tolist() == [10, 17]


def test_the_schema_is_that_of_the_program():
    build = runpy.run_path(str(ROOT / "scripts" / "make_schema.py"))["build"]
    assert (ROOT / "docs" / "cge-manifest.schema.json").read_text() == build()


def test_the_tables_of_the_page_name_every_field():
    for model in (manifest.Manifest, manifest.Base, manifest.Method, manifest.Digest):
        for field in model.model_fields:
            assert f"`{field}`" in PAGE, field


def agree(path):
    """Both readers find the same in a file."""
    fields, coded, dense = cge_reader.read(path.read_bytes())
    with CgeFile.open(path) as file:
        file.verify()
        assert file.manifest == fields
        assert set(file.names) == {*coded, *dense}
        for name, (levels, scales, transposed) in coded.items():
            tensor = file.read(name)
            assert tensor.levels.dtype == levels.dtype
            assert np.array_equal(tensor.levels, levels)
            assert np.array_equal(tensor.scales, scales)
            assert tensor.transposed == transposed
        for name, (dtype, shape, content) in dense.items():
            found = file.read_dense(name)
            assert (found.dtype, list(found.shape), bytes(found.data)) == (dtype, shape, content)


@pytest.mark.parametrize(
    "density", [0, 0.001, 0.03, 0.11, 0.21, 0.3, 0.38, 0.5, 0.62, 0.8, 0.95, 1]
)
def test_the_second_reader_reads_ternary_files(tmp_path, density):
    generator = np.random.default_rng(0)
    levels = (generator.random((6, 500)) < density) * generator.choice([-1, 1], (6, 500))
    mixed = np.concatenate([levels, generator.choice([-1, 0, 0, 0, 0, 0, 1], (6, 500))])
    long = np.tile(levels, 25)[:1, :].repeat(2, axis=0)
    long = np.concatenate([long] * 6, axis=1)
    one = np.ones(1, np.float32)
    tensors = [Coded("a", levels, one), Coded("b", mixed, one), Coded("c", long, one)]
    write_cge(tmp_path / "x.cge", tensors, {}, FIELDS)
    agree(tmp_path / "x.cge")


@pytest.mark.parametrize("spread", [0.5, 1, 2, 4, 9, 30, 1000, 1e8])
def test_the_second_reader_reads_files_of_many_levels(tmp_path, spread):
    sizes = np.geomspace(0.05, 1, 12)[:, None] * spread
    levels = np.rint(np.random.default_rng(0).normal(0, 1, (12, 300)) * sizes).astype(np.int32)
    scales = np.linspace(0.1, 1, 12, dtype=np.float32)
    write_cge(tmp_path / "x.cge", [Coded("a", levels, scales)], {}, FIELDS)
    agree(tmp_path / "x.cge")


def test_the_second_reader_reads_the_other_samples(tmp_path):
    write_cge(tmp_path / "x.cge", *sample(), FIELDS)
    agree(tmp_path / "x.cge")
    agree(GOLDEN)
    write_cge(tmp_path / "y.cge", [], {}, FIELDS)
    agree(tmp_path / "y.cge")


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 4, 300, 2**31 - 1]))
def test_the_second_reader_reads_whatever_is_written(tmp_path_factory, data, largest):
    shape = data.draw(arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=70))
    values = st.integers(-largest, largest)
    levels = data.draw(arrays.arrays(np.int32, shape, elements=values, fill=st.just(0)))
    path = tmp_path_factory.mktemp("second") / "x.cge"
    write_cge(path, [Coded("t", levels, np.ones(1, np.float32))], {}, FIELDS)
    agree(path)


def test_the_second_reader_needs_nothing_of_the_package():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import cge_reader;"
        "assert not [name for name in sys.modules if name.startswith('cgmerge')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    reader = [sys.executable, ROOT / "tests" / "cge_reader.py", GOLDEN]
    done = subprocess.run(reader, check=True, capture_output=True, text=True)
    assert "m.lora_A: int8 (2, 8), 1 scales" in done.stdout
    assert "m.bias: F32 [1], as it is" in done.stdout
