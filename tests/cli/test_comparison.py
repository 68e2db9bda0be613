"""`cgmerge inspect A B …`: relations of experts with known geometry, on screen and as JSON."""

import json

import pytest
import support
import torch

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.1.mlp.up_proj": (12, 8)}
PREFIX = "base_model.model."


def write(folder, factors, rank):
    """Write an expert with the given ΔW factors and scaling 1."""
    support.make_expert(folder, dict.fromkeys(factors, (1, 1)), rank=rank, alpha=rank)
    tensors = {}
    for path, (a, b) in factors.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b
    support.edit_tensors(folder, lambda _: tensors)
    return folder


@pytest.fixture
def three(tmp_path):
    """x; y = -2x; z, twenty times as large as x, on other directions of one module only."""
    generator = torch.Generator().manual_seed(1)
    x = {
        path: (torch.randn(2, into, generator=generator), torch.randn(out, 2, generator=generator))
        for path, (out, into) in SHAPES.items()
    }
    y = {path: (a, -2 * b) for path, (a, b) in x.items()}
    first = next(iter(SHAPES))
    z = {
        first: (torch.randn(3, 8, generator=generator), torch.randn(8, 3, generator=generator) * 20)
    }
    return [
        write(tmp_path / "x", x, 2), write(tmp_path / "y", y, 2), write(tmp_path / "z", z, 3)
    ]  # fmt: skip


def inspect(run, *targets):
    code, text, err = run("inspect", *targets, "--json")
    assert code == 0, err
    return json.loads(text)


def test_opposite_experts(run, three):
    found = inspect(run, three[0], three[1])
    assert found["schema"] == "cgmerge.comparison/1"
    one, two = found["experts"]
    assert two["norm"] == pytest.approx(2 * one["norm"], rel=1e-5)
    assert one["effective_rank"] == pytest.approx(two["effective_rank"], rel=1e-4)
    pairs = found["pairs"]
    assert pairs["cosine"][0][1] == pytest.approx(-1.0, abs=1e-5)
    assert pairs["sign_conflict"][0][1] == pytest.approx(1.0)
    assert pairs["output_overlap"][0][1] == pytest.approx(1.0, abs=1e-5)
    assert pairs["input_overlap"][0][1] == pytest.approx(1.0, abs=1e-5)
    # x + y = -x: no more than the rank of x is needed.
    assert found["exact_rank"] == 2
    assert found["lost_at_rank"]["2"] < 1e-5
    assert found["lost_at_rank"]["1"] > 0.01


def test_experts_without_a_module_in_common_have_no_conflict_to_report(run, three, tmp_path):
    (first, a), (second, b) = (
        (path, (torch.ones(1, into), torch.ones(out, 1))) for path, (out, into) in SHAPES.items()
    )
    apart = write(tmp_path / "p", {first: a}, 1), write(tmp_path / "q", {second: b}, 1)
    pairs = inspect(run, *apart)["pairs"]
    assert pairs["cosine"][0][1] == 0.0  # disjoint entries: orthogonal, a fact
    for measure in ("sign_conflict", "output_overlap", "input_overlap"):
        assert pairs[measure][0][1] is None
        assert pairs[measure][0][0] is not None
    code, text, _ = run("inspect", *apart)
    assert code == 0
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["p", "q"])
    assert row[2:] == ["0.000", "-", "-", "-"]


def test_the_conflict_is_the_share_of_all_entries_not_the_mean_over_modules(run, tmp_path):
    """q_proj: 64 entries alike; up_proj: 8 of its 96 in both, all opposite: 8 of 72."""
    first, second = SHAPES
    row = torch.zeros(12, 1)
    row[3] = 1.0
    square = (torch.ones(1, 8), torch.ones(8, 1))
    one = write(tmp_path / "one", {first: square, second: (torch.ones(1, 8), row)}, 1)
    two = write(tmp_path / "two", {first: square, second: (-torch.ones(1, 8), row)}, 1)
    found = inspect(run, one, two)
    assert found["pairs"]["sign_conflict"][0][1] == pytest.approx(8 / 72)
    assert found["pairs"]["output_overlap"][0][1] == pytest.approx(1.0)
    conflicts = {name: one["sign_conflict"] for name, one in found["modules"].items()}
    assert conflicts == {first: 0.0, second: 1.0}
    # The same module, no entry in common: nothing is counted.
    other = torch.zeros(12, 1)
    other[4] = 1.0
    apart = write(tmp_path / "apart", {second: (torch.ones(1, 8), other)}, 1)
    assert inspect(run, one, apart)["pairs"]["sign_conflict"][0][1] is None


def test_weights_decide_what_a_rank_loses(run, three):
    assert inspect(run, three[0], three[2])["exact_rank"] == 5
    cancelled = inspect(run, f"{three[0]}=2", three[1], three[2])
    assert cancelled["exact_rank"] == 3
    assert [expert["weight"] for expert in cancelled["experts"]] == [2.0, 1.0, 1.0]


def test_outliers_and_partial_modules_are_said(run, three):
    found = inspect(run, *three)
    notes = " ".join(found["notes"])
    assert "z is an outlier" in notes
    assert "1 of 2 modules are changed by some experts only" in notes
    assert "up_proj" in notes


def test_the_screen_shows_pairs_heat_and_ranks(run, three):
    code, text, err = run("inspect", *three)
    assert code == 0
    assert "sign conflict" in text
    lines = text.splitlines()
    heat = lines.index(next(line for line in lines if line.startswith("module")))
    assert "q_proj" in lines[heat]
    assert "up_proj" in lines[heat]
    assert lines[heat + 1].startswith("0")
    assert "·" in lines[heat + 1]
    assert "█" in text
    assert "holds the weighted sum exactly" in err


def test_other_bases_are_refused_as_by_compose(run, three, tmp_path):
    other = support.make_expert(tmp_path / "o", {"model.layers.0.self_attn.q_proj": (9, 8)})
    code, _, err = run("inspect", three[0], other)
    assert code == 3
    assert "8×8" in err
    assert "9×8" in err
