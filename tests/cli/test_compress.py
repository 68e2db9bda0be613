"""The commands: documented keys, real sizes, tuning, dry runs, refusals with their exit codes."""

import json
import random
import re

import pytest
import support
import torch
from safetensors.torch import load_file, save_file

from cgmerge.evals.tasks import chains

KEYS = {
    "out", "mode", "size_bytes", "ratio_file", "ratio_16bit", "bits_per_param", "density",
    "delta_error", "cosine_min", "score_before", "score_after",
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A random expert of `tiny` and validation rows of base skills."""
    from cgmerge.modules.base import open_base

    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base("tiny").modules.items()
        if path.endswith(("q_proj", "down_proj"))
    }
    support.make_expert(tmp_path / "e", shapes, rank=8, alpha=16, std=0.06)
    rows = chains.group_rows("base1", random.Random(1), 12)
    kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    (tmp_path / "val.jsonl").write_text("\n".join(map(json.dumps, kept)) + "\n")
    return tmp_path


def test_json_and_the_file_agree(run, place):
    out = place / "e.cge"
    code, text, err = run("compress", place / "e", "-o", out, "--density", 0.3, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert set(result) >= KEYS
    size = out.stat().st_size
    weights = place / "e" / "adapter_model.safetensors"
    assert result["size_bytes"] == size
    assert result["ratio_file"] == pytest.approx(weights.stat().st_size / size)
    assert result["ratio_16bit"] == pytest.approx(2 * result["parameters"] / size)
    assert result["bits_per_param"] == pytest.approx(8 * size / result["parameters"])
    assert result["density"] == pytest.approx(0.3, abs=0.02)
    assert result["score_before"] is None
    assert result["mode"] == "ternary"
    assert "error    " in err


@pytest.mark.parametrize("mode", ["ternary", "svdq", "compeft"])
def test_calibration_tunes_and_scores(run, place, mode):
    out = place / "e.cge"
    words = ["--base", "tiny", "--target-ratio", 8, "--mode", mode, "-o", out, "--json"]
    code, text, err = run("compress", place / "e", *words, "--calibrate", place / "val.jsonl")
    assert code == 0, err
    result = json.loads(text)
    assert out.stat().st_size <= 2 * result["parameters"] / 8
    assert 0 <= result["score_before"] <= 1
    low, high = result["score_interval"]
    assert low <= result["score_after"] <= high
    assert "tuned" in err
    from cgmerge.modules.compress.container import CgeFile

    with CgeFile.open(out) as file:
        (entry,) = file.manifest["eval"]
    assert entry["n"] == 12
    assert entry["compressed"] == pytest.approx(result["score_after"])
    assert entry["original"] == pytest.approx(result["score_before"])


def test_a_fixed_multiplier_is_only_scored(run, place):
    words = ["--base", "tiny", "--multiplier", 1.5, "-o", place / "e.cge"]
    code, _, err = run("compress", place / "e", *words, "--calibrate", place / "val.jsonl")
    assert code == 0, err
    assert "tuned" not in err
    assert "score    " in err


def test_there_and_back(run, place):
    a, b = place / "a.cge", place / "b.cge"
    assert run("compress", place / "e", "-o", a, "-q")[:2] == (0, f"{a}\n")
    code, text, err = run("decompress", a, "-o", place / "back", "--json")
    assert code == 0, err
    assert json.loads(text)["modules"] == 6
    code, _, err = run("compress", place / "back", "-o", b)
    assert code == 0, err
    assert "that very file again" in err
    assert a.read_bytes() == b.read_bytes()
    assert run("eval", place / "back", "--base", "tiny", "--data", place / "val.jsonl")[0] == 0


def test_a_dry_run_writes_nothing(run, place):
    code, text, err = run("compress", place / "e", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(text)["out"] is None
    assert "nothing written" in err
    assert not list(place.glob("*.cge"))


def test_emptied_modules_are_warned_of(run, place):
    def faint(tensors):
        return {n: t * (1e-4 if "layers.1" in n else 1.0) for n, t in tensors.items()}

    support.edit_tensors(place / "e", faint)
    code, text, err = run("compress", place / "e", "-o", place / "e.cge", "--json")
    assert code == 0
    result = json.loads(text)
    assert {name for name in result["emptied"] if "layers.1" in name} == set(result["emptied"])
    assert len(result["emptied"]) == 2
    assert "no effect any more" in err
    assert "no effect any more" in result["warnings"][0]


def test_what_keeps_every_module_is_said_and_works(run, place):
    def faint(tensors):
        return {n: t * (0.3 if "layers.1" in n else 1.0) for n, t in tensors.items()}

    support.edit_tensors(place / "e", faint)
    words = ("compress", place / "e", "--json", "--overwrite", "-o", place / "e.cge")
    (warning,) = json.loads(run(*words, "--density", 0.05)[1])["warnings"]
    assert "no effect any more" in warning
    density = re.search(r"--density ([0-9.]+) keeps every module", warning)[1]
    assert json.loads(run(*words, "--density", density)[1])["warnings"] == []


def test_an_expert_that_needs_more_is_told_how_much(run, tmp_path):
    folder = support.make_expert(tmp_path / "t", {"m.q_proj": (3, 3)}, rank=1, alpha=1)
    code, _, err = run("compress", folder, "-o", tmp_path / "t.cge")
    assert code == 3
    assert "nothing is left" in err
    density = re.search(r"--density ([0-9.]+) keeps every module, --lossless every bit", err)[1]
    assert run("compress", folder, "-o", tmp_path / "t.cge", "--density", density)[0] == 0


def test_a_file_that_is_nearly_dead_says_so_when_it_is_looked_at(run, place):
    def faint(tensors):
        return {n: t * (1e-4 if "layers.1" in n else 1.0) for n, t in tensors.items()}

    support.edit_tensors(place / "e", faint)
    out = place / "e.cge"
    told = json.loads(run("compress", place / "e", "-o", out, "--json")[1])["warnings"]
    code, text, err = run("inspect", out, "--json")
    assert code == 0, err
    (warning,) = json.loads(text)["warnings"]
    assert warning.startswith("2 of 6 modules have no effect any more: model.layers.1")
    assert told[0].startswith(warning)
    assert f"warning: {warning}" in run("inspect", out)[2]


def test_a_gain_that_is_gone_is_warned_of(run, place, monkeypatch):
    from cgmerge.cli import compress as command
    from cgmerge.evals import compression

    entry = {"suite": "val", "base": 0.0, "original": 1.0, "compressed": 0.0}
    mean = lambda score: compression.Mean("x", "exact_match", score, score, score, 12, 1)  # noqa: E731
    kept = compression.Kept(mean(0.0), mean(1.0), mean(0.0), [entry])

    def calibrated(plan, _skills, _output):
        from cgmerge.modules.compress.modes import encode

        return lambda asked: encode(plan.mode, plan.raw_factors(), asked), lambda _found: kept

    monkeypatch.setattr(command, "_calibrated", calibrated)
    words = ("--base", "tiny", "--calibrate", place / "val.jsonl", "-o", place / "e.cge", "--json")
    code, text, err = run("compress", place / "e", *words)
    assert code == 0, err
    (warning,) = json.loads(text)["warnings"]
    assert "1.000 before and 0.000 after on val" in warning
    assert json.loads(run("inspect", place / "e.cge", "--json")[1])["warnings"] == [warning]


def test_force_base_without_a_base_is_refused(run, place):
    code, _, err = run("compress", place / "e", "--force-base", "-o", place / "e.cge")
    assert code == 2
    assert "no base is given" in err


@pytest.mark.parametrize("words", [("--target-size", 10), ("--target-ratio", 1e6)])
@pytest.mark.parametrize("mode", ["ternary", "compeft"])
def test_a_size_too_small_is_refused_in_whole_bytes_of_the_file(run, place, mode, words):
    words = (*words, "--mode", mode, "-o", place / "e.cge", "--json")
    code, _, err = run("compress", place / "e", *words)
    assert code == 2
    error = json.loads(err.splitlines()[-1])
    assert type(error["expected"]) is int
    assert type(error["found"]) is int
    assert f"gives is {error['found']:,} bytes" in error["message"]


def test_values_that_are_no_numbers_are_refused(run, place):
    def spoil(tensors):
        tensors[sorted(tensors)[0]][1, 1] = torch.nan
        return tensors

    support.edit_tensors(place / "e", spoil)
    code, _, err = run("compress", place / "e", "-o", place / "e.cge")
    assert code == 3
    assert "lora_A" in err
    assert not (place / "e.cge").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-o", "x.safetensors"], 2, "end in .cge"),
        ([], 2, "no output file"),
        (["-o", "x.cge", "--density", "2"], 2, "density"),
        (["-o", "x.cge", "--target-size", "2 parsecs"], 2, "no size"),
        (["-o", "x.cge", "--target-size", "1MB", "--density", "0.1"], 2, "at once"),
        (["-o", "x.cge", "--calibrate", "val.jsonl"], 2, "--base"),
        (["-o", "x.cge", "--mode", "gzip"], 2, "unknown mode"),
        (["-o", "x.cge", "--target-size", "300"], 2, "manifest alone"),
    ],
)
def test_refusals(run, place, monkeypatch, words, code, says):
    monkeypatch.chdir(place)
    found, _, err = run("compress", "e", *words)
    assert found == code
    assert says in err
    assert not list(place.glob("*.cge"))


def test_sizes_are_read_with_units():
    from cgmerge.cli.compress import _parse_size

    sizes = ("2MB", "300 kB", "1.5MiB", "65536", "7b")
    assert [_parse_size(text) for text in sizes] == [2_000_000, 300_000, 1_572_864, 65_536, 7]


def test_what_is_there_is_kept(run, place):
    out = place / "e.cge"
    out.write_bytes(b"mine")
    assert run("compress", place / "e", "-o", out)[0] == 2
    assert out.read_bytes() == b"mine"
    assert run("compress", place / "e", "-o", out, "--overwrite")[0] == 0
    assert run("compress", place / "e", "-o", place / "e" / "x.cge")[0] == 2
    (place / "folder.cge").mkdir()
    assert run("compress", place / "e", "-o", place / "folder.cge", "--overwrite")[0] == 2


def test_damaged_files_are_not_decompressed(run, place):
    out = place / "e.cge"
    run("compress", place / "e", "-o", out)
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 4
    out.write_bytes(data)
    code, _, err = run("decompress", out, "-o", place / "back")
    assert code == 3
    assert "damaged" in err
    assert not (place / "back").exists()
    assert run("decompress", place / "none.cge", "-o", place / "back")[0] == 2


@pytest.mark.parametrize("mode", ["ternary", "compeft"])
def test_a_full_model_is_stored_as_its_difference(run, models, tmp_path, mode):
    from cgmerge.modules.compress.container import CgeFile

    full = support.make_full(tmp_path / "F", models / "B", std=0.05)
    out = tmp_path / "f.cge"
    words = ["compress", full, "--base", models / "B", "--mode", mode, "--density", 0.3, "-o", out]
    code, text, err = run(*words, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert set(result) >= KEYS
    assert result["size_bytes"] == out.stat().st_size
    assert result["density"] == pytest.approx(0.3, abs=0.01)
    before, after = support.load_tensors(models / "B"), support.load_tensors(full)
    gap = size = 0.0
    with CgeFile.open(out) as file:
        assert file.manifest["peft"] is None
        for name in file.coded:
            exact = (after[name] - before[name]).double()
            value = file.read(name).tensor().reshape(exact.shape).double()
            gap, size = gap + float((exact - value).square().sum()), size + float((exact**2).sum())
    assert result["delta_error"] == pytest.approx((gap / size) ** 0.5, rel=1e-3)
    assert result["ratio_16bit"] > 8
    code, _, err = run("decompress", out, "-o", tmp_path / "back")
    assert code == 2
    assert f"cgmerge decompress {out} --base {models / 'B'} -o MODEL" in err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "add --base"),
        (["--base", "B", "--mode", "svdq"], "mode svdq"),
        (["--base", "B", "--gauge", "raw"], "gauge"),
        (["--base", "B", "--target-size", "300"], "manifest alone"),
        (["--base", "B", "--target-ratio", "20", "--density", "0.1"], "at once"),
        (["--base", "B", "--lossless"], "for adapters"),
        (["--base", "B", "--calibrate", "x.jsonl"], "x.jsonl"),
    ],
)
def test_what_a_full_model_cannot_have(run, models, tmp_path, words, says):
    full = support.make_full(tmp_path / "F", models / "B", std=0.05)
    words = [models / "B" if word == "B" else word for word in words]
    code, _, err = run("compress", full, "-o", tmp_path / "f.cge", *words)
    assert code == 2
    assert says in err


def test_a_full_model_that_is_the_base_is_refused(run, models, tmp_path):
    same = support.make_full(tmp_path / "F", models / "B", std=0.0)
    code, _, err = run("compress", same, "--base", models / "B", "-o", tmp_path / "f.cge")
    assert code == 3
    assert "nothing is left" in err


def test_densities_that_leave_nothing_are_skipped(run, place):
    from cgmerge.modules.base import open_base

    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base("tiny").modules.items()
        if path.endswith("q_proj")
    }
    folder = support.make_expert(place / "lopsided", shapes, rank=8, alpha=16, std=0.06)
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({n: t * 0.02 if "lora_B" in n else t for n, t in weights.items()}, path)
    words = ["--mode", "compeft", "-o", place / "l.cge"]
    code, _, err = run("compress", folder, *words, "--density", 0.05)
    assert code == 3
    assert "nothing is left" in err
    tune = ["--base", "tiny", "--calibrate", place / "val.jsonl", "--json"]
    code, out, err = run("compress", folder, *words, *tune)
    assert code == 0, err
    assert json.loads(out)["density"] > 0.3


def test_bytes_that_a_mode_cannot_use_are_said(run, place):
    code, _, err = run(
        "compress", place / "e", "--target-ratio", 1, "-o", place / "e.cge", "--json"
    )
    assert code == 0, err
    assert "cannot use more than" in err


@pytest.mark.parametrize("lossless", [True, False])
def test_another_base_is_refused_unless_forced(run, models, tmp_path, lossless):
    from cgmerge.modules.base import open_base
    from cgmerge.modules.compress.container import CgeFile

    card = {
        "schema": "cgmerge.expert/1",
        "skill": "s",
        "base": {"name": "other", "fingerprint": "fp1:" + "a" * 32},
    }
    expert = support.make_expert(tmp_path / "e", support.llama_shapes())
    (expert / "expert.json").write_text(json.dumps(card))
    words = ["compress", expert, "--base", models / "B", "-o", tmp_path / "e.cge"]
    words += ["--lossless"] if lossless else []
    code, _, err = run(*words)
    assert code == 3
    assert "--force-base" in err
    code, text, err = run(*words, "--force-base", "--json")
    assert code == 0, err
    assert "was made for fp1:aaaa" in err
    assert "was made for fp1:aaaa" in json.loads(text)["warnings"][0]
    with CgeFile.open(tmp_path / "e.cge") as file:
        # What it was trained on stays what the file says; that it was forced is said beside it.
        assert file.manifest["base"]["fingerprint"] == card["base"]["fingerprint"]
        assert file.manifest["method"]["forced_base"] == open_base(str(models / "B")).fingerprint
    back = ["decompress", tmp_path / "e.cge", "--base", models / "B", "-o", tmp_path / "back"]
    assert run(*back)[0] == 3
    assert run(*back, "--force-base")[0] == 0


def test_a_base_that_fits_needs_no_force(run, place):
    words = ["--base", "tiny", "--force-base", "-o", place / "e.cge", "--json"]
    code, text, err = run("compress", place / "e", *words)
    assert code == 0, err
    assert json.loads(text)["warnings"] == []
