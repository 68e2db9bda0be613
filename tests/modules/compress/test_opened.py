"""`.cge` files where a folder is taken: compose, eval, inspect, stats give the folder's numbers."""

import json
import random
import shutil
import subprocess
import sys

import pytest
import support
import torch

from cgmerge.errors import CgmergeError, Damaged, Incompatible
from cgmerge.modules.compress.writer import write_cge
from cgmerge.modules.expert import open_expert


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two experts of `tiny`, compressed, and the folders that they decompress to."""
    from cgmerge.cli import app
    from cgmerge.modules.base import open_base

    place = tmp_path_factory.mktemp("opened")
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base("tiny").modules.items()
        if path.endswith(("q_proj", "down_proj"))
    }
    for name, rank, mode in (("x", 16, "ternary"), ("y", 8, "svdq")):
        folder, file = str(place / name), str(place / f"{name}.cge")
        support.make_expert(place / name, shapes, rank=rank, alpha=16, std=0.06)
        size = ["--base", "tiny", "--mode", mode, "--target-ratio", "5", "-q"]
        assert app.run(["compress", folder, "-o", file, *size]) == 0
        assert app.run(["decompress", file, "-o", f"{folder}-back", "-q"]) == 0
    return place


@pytest.fixture
def place(made, tmp_path):
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "place")


def test_the_file_is_the_expert_that_it_decompresses_to(place):
    file, folder = open_expert(str(place / "x.cge")), open_expert(str(place / "x-back"))
    assert file.compressed
    assert not folder.compressed
    assert file.name == folder.name
    assert file.base_fingerprint == folder.base_fingerprint
    assert file.size_bytes == (place / "x.cge").stat().st_size
    ours, theirs = file.deltas(), folder.deltas()
    assert set(ours) == set(theirs)
    for path in ours:
        assert torch.equal(ours[path].dense(), theirs[path].dense())
        out, into, rank = ours.sizes[path]
        assert (out, into) == ours[path].shape
        assert rank == ours[path].rank <= theirs[path].rank


@pytest.mark.parametrize("method", ["linear", "ties", "tsv", "core+ties"])
def test_compose_takes_files(run, place, method):
    words = ("-m", method, "--rank", 12, "--base", "tiny", "--json")
    one = run("compose", place / "x.cge", place / "y.cge", *words, "-o", place / "a")
    two = run("compose", place / "x-back", place / "y-back", *words, "-o", place / "b")
    assert one[0] == two[0] == 0, one[2] + two[2]
    first, second = open_expert(str(place / "a")).deltas(), open_expert(str(place / "b")).deltas()
    for path in first:
        assert torch.allclose(first[path].dense(), second[path].dense(), atol=1e-6)
    record = json.loads((place / "a" / "cgmerge.json").read_text())
    assert {e["sha256"] for e in record["experts"]} == {
        open_expert(str(place / name)).digest for name in ("x.cge", "y.cge")
    }
    again = run("compose", place / "a" / "cgmerge.json", "-o", place / "c")
    assert again[0] == 0, again[2]
    weights = [(place / name / "adapter_model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] == weights[1]


def test_eval_inspect_and_stats_take_files(run, place):
    from cgmerge.evals.tasks import chains

    rows = chains.group_rows("base1", random.Random(1), 6)
    kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    (place / "v.jsonl").write_text("\n".join(map(json.dumps, kept)) + "\n")
    words = ("--base", "tiny", "--data", place / "v.jsonl", "--json", "-o", place / "r.json")
    code, out, err = run("eval", place / "x.cge", f"back={place / 'x-back'}", *words)
    assert code == 0, err
    results = {r["target"]: r["score"] for r in json.loads(out)["results"]}
    assert results["x"] == results["back"]
    code, out, err = run("inspect", place / "x.cge", "--base", "tiny", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["size_bytes"] == (place / "x.cge").stat().st_size
    assert facts["kind"] == "compressed"
    assert facts["name"] == "x"
    assert facts["sha256"] == open_expert(str(place / "x.cge")).digest
    assert facts["method"]["mode"] == "ternary"
    assert facts["ratio_16bit"] == pytest.approx(2 * facts["parameters"] / facts["size_bytes"])
    assert "fits" in err
    assert all(0 <= module["error"] < 1 for module in facts["modules"].values())
    code, out, err = run("inspect", place / "x.cge", place / "y.cge", "--json")
    assert code == 0, err
    code, _, err = run("stats", place / "x.cge", "--base", "tiny", "--data", place / "v.jsonl")
    assert code == 0, err
    assert (place / "x.cge.stats.safetensors").exists()


def test_a_folder_with_a_compressed_expert_is_one(place):
    """As repositories hold it: expert.cge beside a config and a card for people."""
    (place / "repo").mkdir()
    shutil.copy(place / "x.cge", place / "repo" / "expert.cge")
    shutil.copy(place / "x-back" / "adapter_config.json", place / "repo")
    found = open_expert(str(place / "repo"))
    assert found.compressed
    assert found.digest == open_expert(str(place / "x.cge")).digest


def test_another_base_is_refused(place, tmp_path):
    from cgmerge.modules.base import open_base

    base = open_base("tiny")
    expert = open_expert(str(place / "x.cge"))
    object.__setattr__(expert.card.base, "fingerprint", "fp1:" + "0" * 32)
    with pytest.raises(Incompatible) as caught:
        expert.deltas(base)
    assert caught.value.code == "incompatible.base"


def test_damage_is_found_where_it_is_read(place):
    path = place / "x.cge"
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)
    with pytest.raises(CgmergeError) as caught:
        expert = open_expert(str(path))
        for delta in expert.deltas().values():
            delta.norm()
    assert caught.value.exit_code == 3


PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}


def coded(name, rows, columns, **options):
    import numpy as np

    from cgmerge.modules.compress.sections import Coded

    levels = np.ones((rows, columns), dtype=np.int8)
    return Coded(name, levels, np.ones(1, dtype=np.float32), **options)


@pytest.mark.parametrize(
    ("tensors", "peft", "code"),
    [
        ([coded("m.lora_A", 4, 6)], PEFT, "damaged.pair"),
        ([coded("m.lora_A", 4, 6), coded("m.lora_B", 3, 5, transposed=True)], PEFT, "damaged.pair"),
        ([coded("m.weight", 4, 6)], PEFT, "damaged.names"),
        ([], PEFT, "damaged.names"),
        ([coded("m.weight", 4, 6)], None, "incompatible.full_model"),
        ([coded("m.lora_A", 4, 6)], {**PEFT, "use_dora": True}, "incompatible.config_use_dora"),
    ],
)
def test_files_that_hold_no_adapter(tmp_path, tensors, peft, code):
    fields = {"base": {"id": "b"}, "peft": peft, "method": {"mode": "ternary"}}
    write_cge(tmp_path / "x.cge", tensors, {}, fields)
    with pytest.raises((Damaged, Incompatible)) as caught:
        open_expert(str(tmp_path / "x.cge"))
    assert caught.value.code == code


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.cge").write_bytes(b"not one")
    with pytest.raises(Damaged):
        open_expert(str(tmp_path / "x.cge"))
    (tmp_path / "x.bin").write_bytes(b"not one")
    with pytest.raises(CgmergeError) as caught:
        open_expert(str(tmp_path / "x.bin"))
    assert "a folder or a .cge file" in str(caught.value)


def test_inspect_reads_the_header_without_torch(made):
    code = (
        "import sys; from cgmerge.cli import app;"
        f"code = app.run(['inspect', {str(made / 'x.cge')!r}]);"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"
    assert "ternary, rank" in done.stdout


def test_a_card_for_people_may_be_edited(place):
    folder = place / "x-back"
    (folder / "README.md").write_text("# Mine\n")
    assert open_expert(str(folder)).name == "x"
