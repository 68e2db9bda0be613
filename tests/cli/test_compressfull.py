"""Full models: sizes that are met, tuning in the base in memory, and back to a model."""

import json
import random

import pytest
import support
import torch

from cgmerge.evals.tasks import chains
from cgmerge.modules.compress.container import CgeFile


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A full fine-tune of `tiny` and validation rows of a base skill."""
    from cgmerge.modules.base import open_base

    place = tmp_path_factory.mktemp("full")
    support.make_full(place / "F", open_base("tiny").folder, std=0.01)
    rows = chains.group_rows("base1", random.Random(1), 12)
    kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    (place / "val.jsonl").write_text("\n".join(map(json.dumps, kept)) + "\n")
    return place


def compressed(run, place, out, *words):
    code, text, err = run("compress", place / "F", "--base", "tiny", "-o", out, *words, "--json")
    assert code == 0, err
    return json.loads(text), err


@pytest.mark.parametrize("mode", ["ternary", "compeft"])
def test_sizes_are_met_from_below(run, place, tmp_path, mode):
    out = tmp_path / "f.cge"
    result, _ = compressed(run, place, out, "--mode", mode, "--target-ratio", 16)
    target = 2 * result["parameters"] / 16
    assert 0.95 * target < out.stat().st_size == result["size_bytes"] <= target
    assert result["asked"] == {"mode": mode, "ratio": 16}
    small, _ = compressed(run, place, tmp_path / "g.cge", "--target-size", "60kB", "--mode", mode)
    assert 57_000 < small["size_bytes"] <= 60_000
    assert small["density"] < result["density"]


def test_bytes_that_signs_cannot_use_are_said(run, place, tmp_path):
    result, _ = compressed(run, place, tmp_path / "f.cge", "--target-ratio", 2)
    # Two thirds of the entries: signs without any zero are smaller than that.
    assert result["density"] == pytest.approx(2 / 3, abs=0.01)
    assert "cannot use more than" in result["warnings"][0]


@pytest.mark.parametrize(
    "words", [(), ("--target-size", "60kB"), ("--mode", "compeft", "--density", 0.2)]
)
def test_calibration_tunes_and_scores(run, place, tmp_path, words):
    out = tmp_path / "f.cge"
    result, err = compressed(run, place, out, *words, "--calibrate", place / "val.jsonl")
    assert "tuned" in err
    with CgeFile.open(out) as file:
        method, (entry,) = file.manifest["method"], file.manifest["eval"]
    assert method["alpha" if "compeft" in words else "multiplier"] > 0
    assert entry["n"] == 12
    assert entry["compressed"] == pytest.approx(result["score_after"])
    assert entry["original"] == pytest.approx(result["score_before"])
    if "60kB" in words:
        assert out.stat().st_size <= 60_000
    # What was scored in memory is what `decompress` writes.
    back = tmp_path / "back"
    assert run("decompress", out, "--base", "tiny", "-o", back, "-q")[0] == 0
    code, text, err = run(
        "eval", back, "--base", "tiny", "--data", place / "val.jsonl", "--json"
    )  # fmt: skip
    assert code == 0, err
    record = json.loads(text)
    found = next(r for r in record["results"] if r["target"] == "back")
    assert found["score"] == pytest.approx(result["score_after"])


def test_a_fixed_strength_is_only_scored(run, place, tmp_path):
    words = ["--multiplier", 1.5, "--calibrate", place / "val.jsonl"]
    result, err = compressed(run, place, tmp_path / "f.cge", *words)
    assert "tuned" not in err
    assert result["score_after"] is not None


@pytest.fixture(params=["plain", "tied"])
def small(request, tmp_path):
    """A random base, a full fine-tune of it, and its compressed delta."""
    base = support.make_llama(tmp_path / "my base", tied=request.param == "tied")
    support.make_full(tmp_path / "F", base)
    return tmp_path


def compress_small(run, small):
    words = ["--base", small / "my base", "--density", 0.3, "-o", small / "f.cge", "-q"]
    assert run("compress", small / "F", *words)[0] == 0
    return small / "f.cge"


def test_decompressing_adds_the_delta_to_the_base(run, small):
    file, out = compress_small(run, small), small / "out"
    words = ["decompress", file, "--base", small / "my base", "-o", out]
    code, text, err = run(*words, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert (result["kind"], result["mode"]) == ("model", "ternary")
    found, base = support.load_tensors(out), support.load_tensors(small / "my base")
    with CgeFile.open(file) as opened:
        assert result["weights"] == len(opened.coded) > 10
        assert set(found) == set(base)
        for name, tensor in base.items():
            expected = tensor
            if name in opened.coded:
                expected = tensor + opened.read(name).tensor().reshape(tensor.shape)
            assert torch.equal(found[name], expected), name
    assert run(*words)[0] == 2  # it is there already
    assert run(*words, "--overwrite")[0] == 0
    assert run("eval", out, "--base", small / "my base", "--data", small / "none")[0] == 2


def test_another_base_is_refused_unless_forced(run, small):
    file = compress_small(run, small)
    other = support.make_llama(small / "other", seed=9)
    words = ["decompress", file, "--base", other, "-o", small / "out"]
    code, _, err = run(*words)
    assert code == 3
    assert "another base" in err
    assert "--force-base" in err
    assert not (small / "out").exists()


def test_force_base_is_recorded(run, tmp_path):
    bases = [support.make_llama(tmp_path / name, seed=seed) for name, seed in (("B", 0), ("O", 9))]
    support.make_full(tmp_path / "F", bases[0])
    file = tmp_path / "f.cge"
    assert run("compress", tmp_path / "F", "--base", bases[0], "-o", file, "-q")[0] == 0
    words = ["decompress", file, "--base", bases[1], "-o", tmp_path / "out", "--force-base"]
    code, _, err = run(*words)
    assert code == 0, err
    assert "--force-base" in err
    assert json.loads((tmp_path / "out" / "cgmerge.json").read_text())["force_base"] is True


def test_damage_is_found_before_anything_is_written(run, small):
    file = compress_small(run, small)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)
    code, _, err = run("decompress", file, "--base", small / "my base", "-o", small / "out")
    assert code == 3, err
    assert not (small / "out").exists()


def test_a_float_type_that_swallows_the_delta(run, tmp_path):
    base = support.make_llama(tmp_path / "B", dtype=torch.bfloat16)

    def wide(tensors):
        return {name: tensor.float() + 1e-6 for name, tensor in tensors.items()}

    support.make_full(tmp_path / "F", base, std=0.0, change=wide)
    file = tmp_path / "f.cge"
    assert run("compress", tmp_path / "F", "--base", base, "-o", file, "-q")[0] == 0
    words = ["decompress", file, "--base", base, "-o", tmp_path / "out"]
    code, _, err = run(*words)
    assert code == 3
    assert "hint: add --dtype float32" in err
    assert run(*words, "--dtype", "float32", "-q")[0] == 0
    assert support.load_tensors(tmp_path / "out")["lm_head.weight"].dtype == torch.float32


def test_a_dtype_is_for_models(run, tmp_path):
    support.make_expert(tmp_path / "e", {"model.layers.0.self_attn.q_proj": (64, 64)}, rank=2)
    assert run("compress", tmp_path / "e", "-o", tmp_path / "e.cge", "-q")[0] == 0
    words = ["decompress", tmp_path / "e.cge", "-o", tmp_path / "out", "--dtype", "float32"]
    code, _, err = run(*words)
    assert code == 2
    assert "full models" in err
