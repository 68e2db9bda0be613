"""Every file of tests/attacks is refused by name, in little memory, without touching anything."""

import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from cge_forge import Parts
from cge_samples import FIELDS, sample

from cgmerge.errors import InputError, Unsafe
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.sections import Coded

FOLDER = Path(__file__).parents[2] / "attacks"
ATTACKS = sorted(path.stem for path in FOLDER.glob("*.py"))
NAMED = "m.a.lora_A"


def load(name):
    spec = importlib.util.spec_from_file_location(f"attack_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "x.cge"
    write_cge(path, *sample(), FIELDS, details={"m.a": {"cosine": 0.75}})
    return path.read_bytes()


def refuse(path):
    with pytest.raises(InputError) as caught, CgeFile.open(path) as file:
        file.verify()
    return caught.value


def test_the_sample_is_sound_and_can_be_forged(sound, tmp_path):
    """What the attacks start from passes, or they would prove nothing."""
    parts = Parts.of(sound)
    assert parts.build() == sound
    parts.set_sections(parts.sections())
    assert parts.build() == sound
    (tmp_path / "x.cge").write_bytes(sound)
    with CgeFile.open(tmp_path / "x.cge") as file:
        file.verify()


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.fault("F03", "F04", "F05", "F06", "F07", "F25")
def test_attack(name, sound, tmp_path):
    attack = load(name)
    path = tmp_path / "x.cge"
    path.write_bytes(attack.build(Parts.of(sound)))
    tracemalloc.start()
    try:
        error = refuse(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert error.code == attack.CODE, error.message
    assert error.exit_code == 3
    assert str(path) in error.message
    assert peak < 200 << 20
    if name.startswith("section_"):
        assert error.details["tensor"] == NAMED
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.cge"]


@pytest.mark.fault("F05")
def test_all_attacks_in_a_small_machine(sound, tmp_path):
    """One process with 2 s of processor for each, and 200 MiB above what it has without them."""
    for name in ATTACKS:
        (tmp_path / f"{name}.cge").write_bytes(load(name).build(Parts.of(sound)))
    script = """
import resource, sys
from pathlib import Path
from cgmerge.errors import InputError
from cgmerge.modules.compress.container import CgeFile
files = sorted(Path(sys.argv[1]).iterdir())
resource.setrlimit(resource.RLIMIT_CPU, (2 * len(files), 2 * len(files)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in files:
    try:
        with CgeFile.open(path) as file:
            file.verify()
    except InputError:
        continue
    raise SystemExit(path.name)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
assert not {"torch", "pickle5", "safetensors"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fault("F05")
def test_a_sparse_file_of_more_than_64_gib(sound, tmp_path):
    parts = Parts.of(sound)
    parts.payload = b""
    data = parts.build().replace(b'"shape":[0],"data_offsets":[', b'"shape":[%d],"data_offsets":[')
    length = int.from_bytes(data[:8], "little")
    size = (1 << 36) + 1
    header = data[8 : 8 + length].rstrip()
    place = header.rindex(b"data_offsets")
    first = int(header[place:].split(b"[")[1].split(b",")[0])
    header = header[:place].replace(b"%d", b"%d" % size) + header[place:].replace(
        b"[%d,%d]" % (first, first), b"[%d,%d]" % (first, first + size)
    )
    header += b" " * (-len(header) % 8)
    path = tmp_path / "x.cge"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + data[8 + length :])
        file.truncate(8 + len(header) + first + size)
    with pytest.raises(Unsafe) as caught:
        CgeFile.open(path)
    assert caught.value.code == "unsafe.file_size"


def test_ten_thousand_tensors_are_no_attack(tmp_path):
    one = np.ones(1, np.float32)
    tensors = [Coded(f"t{number}", np.eye(3, dtype=np.int8), one) for number in range(10_000)]
    write_cge(tmp_path / "x.cge", tensors, {}, FIELDS)
    with CgeFile.open(tmp_path / "x.cge") as file:
        assert len(file.names) == 10_000
        file.verify()
