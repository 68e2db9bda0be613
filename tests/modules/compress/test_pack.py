"""Folder to file and back: sizes count the file, the way back is exact, edits are noticed."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import support
import torch
from safetensors.torch import load_file

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.modules.compress.container import CgeFile, write_cge
from cgmerge.modules.compress.expand import decompress
from cgmerge.modules.compress.modes import decode, encode
from cgmerge.modules.compress.pack import (
    Request,
    compress,
    make_plan,
    manifest_fields,
    write_packed,
    write_restored,
)
from cgmerge.modules.compress.sidecar import SIDECAR, read_sidecar
from cgmerge.modules.expert import open_expert

MODES = ["ternary", "svdq", "compeft"]


@pytest.fixture
def expert(tmp_path):
    """Rank 8 on q and v with its own rank and scaling for v."""
    shapes = support.pick(support.llama_shapes(), "q_proj", "v_proj", "down_proj")
    return support.make_expert(
        tmp_path / "E", shapes, rank=8, alpha=12, ranks={"v_proj": 4}, seed=3
    )


def pack(folder, out, **asked):
    plan = make_plan(str(folder), Request(**asked))
    assert plan.restored is None
    factors = plan.raw_factors()
    encoded = compress(
        plan, lambda o: encode(plan.mode, factors, o), lambda e: manifest_fields(plan, e, [])
    )
    return write_packed(out, encoded, manifest_fields(plan, encoded, []), overwrite=True), encoded


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize("mode", MODES)
def test_there_and_back_and_there_again(expert, tmp_path, mode):
    size, encoded = pack(expert, tmp_path / "a.cge", mode=mode, density=0.3)
    assert size == (tmp_path / "a.cge").stat().st_size
    found = decompress(tmp_path / "a.cge", tmp_path / "back")
    assert found.size == size
    assert found.modules == 6
    # The decoded factors are the folder's, padded to one rank.
    tensors = load_file(tmp_path / "back" / "adapter_model.safetensors")
    for path, delta in decode(encoded.coded).items():
        a = tensors[f"base_model.model.{path}.lora_A.weight"]
        assert a.dtype == torch.float32
        assert a.shape[0] == found.rank
        assert torch.equal(a[: delta.rank], delta.a)
        assert not a[delta.rank :].any()
    plan = make_plan(str(tmp_path / "back"), Request())
    assert plan.mode == mode
    write_restored(tmp_path / "b.cge", plan.restored)
    assert sha256(tmp_path / "a.cge") == sha256(tmp_path / "b.cge")


@pytest.mark.parametrize("mode", MODES)
def test_the_folder_is_the_same_every_time(expert, tmp_path, mode):
    pack(expert, tmp_path / "a.cge", mode=mode)
    decompress(tmp_path / "a.cge", tmp_path / "one")
    decompress(tmp_path / "a.cge", tmp_path / "two")
    assert support.folder_bytes(tmp_path / "one") == support.folder_bytes(tmp_path / "two")


def test_the_delta_is_what_the_report_says(expert, tmp_path):
    _, encoded = pack(expert, tmp_path / "a.cge", density=0.4)
    decompress(tmp_path / "a.cge", tmp_path / "back")
    lost = support.relative(support.dense_deltas(tmp_path / "back"), support.dense_deltas(expert))
    assert lost == pytest.approx(encoded.fidelity.error, rel=1e-4)
    with CgeFile.open(tmp_path / "a.cge") as file:
        assert file.manifest["fidelity"]["error"] == pytest.approx(lost, rel=1e-4)
        assert file.manifest["parents"][0]["sha256"] == open_expert(str(expert)).digest
        assert set(file.details["modules"]) == set(encoded.fidelity.modules)


def test_published_mode_takes_the_factors_without_their_scaling(expert, tmp_path):
    """alpha / r is 1.5 and 3 here; the threshold must not see it."""
    raw = load_file(expert / "adapter_model.safetensors")
    flat = torch.cat([raw[name].flatten() for name in sorted(raw)])
    cut = flat.abs().sort(descending=True).values[int(flat.numel() * 0.25) - 1]
    _, encoded = pack(expert, tmp_path / "a.cge", mode="compeft", density=0.25)
    sigma = float(flat.double().std())
    for part in encoded.coded:
        values = raw[f"base_model.model.{part.name}.weight"]
        expected = torch.where(values.abs() >= cut, values.sign(), torch.zeros(()))
        levels = torch.from_numpy(part.levels)
        assert torch.equal((levels.T if part.transposed else levels).float(), expected)
        scaling = 1.0 if part.name.endswith("A") else 3.0 if "v_proj" in part.name else 1.5
        assert float(part.scales[0]) == pytest.approx(sigma * scaling, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", [{"size": 4500}, {"ratio": 8.0}])
def test_the_file_is_no_larger_than_asked(tmp_path, mode, asked):
    shapes = {f"model.layers.{i}.q_proj": (256, 192) for i in range(4)}
    folder = support.make_expert(tmp_path / "E", shapes, rank=8, alpha=8, seed=1)
    size, encoded = pack(folder, tmp_path / "a.cge", mode=mode, **asked)
    target = asked.get("size", 2 * encoded.entries / asked.get("ratio", 1))
    assert (0.8 if mode == "ternary" else 0.9) * target <= size <= target


@pytest.mark.parametrize(("gauge", "mode"), [(None, "compeft"), ("raw", "ternary")])
def test_sizes_above_that_of_all_signs_are_used(tmp_path, gauge, mode):
    """Signs alone are smaller than two thirds of them: density 1 is not the largest file."""
    shapes = {f"model.layers.{i}.q_proj": (128, 96) for i in range(4)}
    folder = support.make_expert(tmp_path / "E", shapes, rank=8, alpha=8, seed=1)
    asked = {"mode": mode, "gauge": gauge}
    all_signs, _ = pack(folder, tmp_path / "1.cge", density=1.0, **asked)
    largest, encoded = pack(folder, tmp_path / "a.cge", size=10**6, **asked)
    assert largest > 1.1 * all_signs
    assert encoded.above is encoded.next_bytes is None
    for density in (0.6, 0.75, 0.9):
        assert pack(folder, tmp_path / "d.cge", density=density, **asked)[0] <= 1.01 * largest
    target = (all_signs + largest) // 2
    size, encoded = pack(folder, tmp_path / "b.cge", size=target, **asked)
    assert 0.98 * target <= size <= target
    for density in (0.3, 0.4, 0.5, 0.8, 0.85, 0.9, 0.95):  # none of the size is much better
        other, found = pack(folder, tmp_path / "d.cge", density=density, **asked)
        if 0.98 * target <= other <= target:
            assert encoded.fidelity.error <= 1.02 * found.fidelity.error


def test_small_files_are_met_closely(tmp_path):
    """What names and shapes take is guessed at first, and too high for a nearly empty file."""
    shapes = {f"model.layers.{i}.q_proj": (96, 96) for i in range(6)}
    folder = support.make_expert(tmp_path / "E", shapes, rank=8, alpha=8, seed=1)
    for target in (1900, 2300):
        size, encoded = pack(folder, tmp_path / "a.cge", size=target)
        term = 2 * 96 * 1.585 / 8  # whole terms come and go
        assert target - 1.5 * term <= size <= target
        assert encoded.fidelity.total.coded_sq > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_smallest_file_is_what_the_refusal_says(expert, tmp_path, mode):
    with pytest.raises(UsageError, match="manifest alone; asked are 400") as caught:
        pack(expert, tmp_path / "a.cge", size=400, mode=mode)
    details = caught.value.details
    assert details["expected"] == 400
    smallest = details["found"]
    assert isinstance(smallest, int)
    assert f"--target-size {smallest}" in caught.value.hint
    assert f"gives is {smallest:,} bytes" in caught.value.message
    size, encoded = pack(expert, tmp_path / "a.cge", size=smallest, mode=mode)
    assert 0.97 * smallest <= size <= smallest
    assert encoded.fidelity.total.coded_sq > 0


def test_the_next_size_is_one_that_can_be_had(tmp_path):
    """One module of one term: sizes jump, and the next one is named."""
    folder = support.make_expert(tmp_path / "E", {"m.q_proj": (900, 900)}, rank=2, seed=2)
    for target in range(1970, 2250, 30):
        size, encoded = pack(folder, tmp_path / "a.cge", size=target)
        if encoded.next_bytes is not None:
            break
    assert size < 0.9 * target < target < encoded.next_bytes
    more, _ = pack(folder, tmp_path / "b.cge", size=encoded.next_bytes)
    assert size < 0.97 * encoded.next_bytes <= more <= encoded.next_bytes


def test_a_size_below_what_names_take_is_refused(expert, tmp_path):
    with pytest.raises(UsageError, match="manifest alone"):
        pack(expert, tmp_path / "a.cge", size=400)


def test_an_edited_folder_is_an_expert_like_any_other(expert, tmp_path):
    pack(expert, tmp_path / "a.cge")
    back = tmp_path / "back"
    decompress(tmp_path / "a.cge", back)
    (back / "expert.json").unlink()

    def nudge(tensors):
        name = sorted(tensors)[0]
        tensors[name][0, 0] += 1e-3
        return tensors

    support.edit_tensors(back, nudge)
    assert read_sidecar(open_expert(str(back))) is None
    assert make_plan(str(back), Request()).restored is None


def test_another_request_compresses_once_more(expert, tmp_path):
    pack(expert, tmp_path / "a.cge", density=0.4)
    decompress(tmp_path / "a.cge", tmp_path / "back")
    same = make_plan(str(tmp_path / "back"), Request(density=0.4))
    assert same.restored is not None
    other = make_plan(str(tmp_path / "back"), Request(density=0.2))
    assert other.restored is None
    assert "compressed before" in other.warnings[0]


def test_a_compressed_file_is_not_silently_compressed_again(expert, tmp_path):
    pack(expert, tmp_path / "a.cge", mode="svdq", density=0.4)
    same = make_plan(str(tmp_path / "a.cge"), Request())
    assert same.mode == "svdq"
    write_restored(tmp_path / "b.cge", same.restored)
    assert sha256(tmp_path / "a.cge") == sha256(tmp_path / "b.cge")
    other = make_plan(str(tmp_path / "a.cge"), Request(mode="ternary"))
    assert other.restored is None
    assert "compressed before" in other.warnings[0]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda raw: raw.update(schema="cgmerge.compressed/2"),
        lambda raw: raw.update(more=1),
        lambda raw: raw.pop("grids"),
        lambda raw: next(iter(raw["grids"].values())).update(rows=-1),
        lambda raw: next(iter(raw["grids"].values())).update(scales=["x"]),
        lambda raw: next(iter(raw["grids"].values())).update(scales=[1e300]),
    ],
)
def test_a_sidecar_of_another_form_is_damaged(expert, tmp_path, break_it):
    pack(expert, tmp_path / "a.cge")
    back = tmp_path / "back"
    decompress(tmp_path / "a.cge", back)
    (back / "expert.json").unlink()
    raw = json.loads((back / SIDECAR).read_text())
    break_it(raw)
    (back / SIDECAR).write_text(json.dumps(raw))
    with pytest.raises(Damaged, match=SIDECAR):
        read_sidecar(open_expert(str(back)))


@pytest.mark.parametrize("scales", [[0.0], [-1.0], [1e37], [1e-40], [1.0, 2.0, 3.0], []])
def test_grids_that_do_not_fit_are_never_taken(expert, tmp_path, scales):
    pack(expert, tmp_path / "a.cge")
    back = tmp_path / "back"
    decompress(tmp_path / "a.cge", back)
    (back / "expert.json").unlink()
    raw = json.loads((back / SIDECAR).read_text())
    next(iter(raw["grids"].values()))["scales"] = scales
    (back / SIDECAR).write_text(json.dumps(raw))
    assert read_sidecar(open_expert(str(back))) is None


def test_a_file_that_is_no_adapter_is_refused(expert, tmp_path):
    pack(expert, tmp_path / "a.cge")
    with CgeFile.open(tmp_path / "a.cge") as file:
        coded = [file.read(name) for name in file.coded]
        fields = {key: file.manifest[key] for key in ("base", "peft", "method")}
    write_cge(tmp_path / "full.cge", coded, {}, {**fields, "peft": None})
    with pytest.raises(Incompatible, match="full model"):
        decompress(tmp_path / "full.cge", tmp_path / "o")
    write_cge(tmp_path / "half.cge", coded[1:], {}, fields)
    with pytest.raises(Damaged, match="with a twin"):
        decompress(tmp_path / "half.cge", tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"density": 0.1, "ratio": 20}, "at once"),
        ({"mode": "zip"}, "unknown mode"),
        ({"mode": "svdq", "alpha": 2.0}, "belongs to mode compeft"),
        ({"mode": "compeft", "multiplier": 2.0}, "belongs to mode ternary and svdq"),
        ({"mode": "svdq", "gauge": "raw"}, "belongs to mode ternary"),
        ({"gauge": "x"}, "unknown gauge"),
        ({"size": 0}, "above 0"),
        ({"ratio": float("nan")}, "above 0"),
        ({"ratio": float("inf")}, "a finite number above 0, found inf"),
    ],
)
def test_requests_that_make_no_sense(expert, asked, word):
    with pytest.raises(UsageError, match=word):
        make_plan(str(expert), Request(**asked))


def test_two_processes_write_the_same_files(expert, tmp_path):
    digests = set()
    for number, threads in enumerate(("1", "2")):
        code = f"import torch\ntorch.set_num_threads({threads})\nfrom cgmerge.cli.app import run\n"
        for mode in MODES:
            out = tmp_path / f"{mode}{number}.cge"
            words = ["compress", str(expert), "-o", str(out), "--mode", mode, "-q"]
            code += f"assert run({words!r}) == 0\n"
        env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONHASHSEED": threads, "PATH": ""}
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
        digests.add(tuple(sha256(tmp_path / f"{mode}{number}.cge") for mode in MODES))
    assert len(digests) == 1
    assert len(set(*digests)) == 3
