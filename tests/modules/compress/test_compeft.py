"""ComPEFT against a transcription of the published rule, and where we differ on purpose."""

import math

import numpy as np
import pytest
import torch

from cgmerge.modules.compress.compeft import global_signs, sample_deviation


def reference(vectors, share, alpha):
    """The published code: kthvalue on |τ|, everything at or above it, α·σ·sign."""
    flat = torch.cat([vectors[name].reshape(-1) for name in sorted(vectors)])
    count = flat.numel() - int(flat.numel() * share)
    cut = flat.abs().kthvalue(count).values
    kept = torch.where(flat.abs() >= cut, torch.sign(flat), torch.zeros_like(flat))
    return kept, float(alpha * flat.std() * 1.0)


def ours(vectors, density):
    found = list(global_signs(vectors, density))
    assert [signs.name for signs in found] == sorted(vectors)
    for signs in found:
        rows = vectors[signs.name].shape[0] if vectors[signs.name].ndim > 1 else 1
        assert signs.levels.shape[0] == rows
    return torch.from_numpy(np.concatenate([signs.levels.reshape(-1) for signs in found]))


def lora(seed=0, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


FACTORS = lora(
    0, **{"m.lora_A": (4, 60), "m.lora_B": (40, 4), "n.lora_A": (4, 90), "n.lora_B": (30, 4)}
)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_reference_keeps_one_more(share):
    expected, sigma = reference(FACTORS, share, 1.0)
    total = expected.numel()
    count = int(total * share)
    found = ours(FACTORS, share)
    assert int(found.abs().sum()) == count
    assert int(expected.abs().sum()) == count + 1
    differing = torch.nonzero(found != expected)
    assert differing.numel() == 1
    # With k + 1 entries asked for, every entry is the same.
    assert torch.equal(ours(FACTORS, (count + 1) / total + 1e-9).float(), expected)
    assert sample_deviation(FACTORS) == pytest.approx(sigma, rel=1e-6)


def test_by_hand():
    vectors = {"b": torch.tensor([[1.0, -4.0]]), "a": torch.tensor([2.0, 0.0, -3.0])}
    assert ours(vectors, 0.4).tolist() == [0, 0, -1, 0, -1]
    # Mean −0.8, squares around it 7.84 + 0.64 + 4.84 + 3.24 + 10.24 = 26.8, over 4.
    assert sample_deviation(vectors) == pytest.approx(math.sqrt(26.8 / 4), rel=1e-15)


def test_equal_magnitudes_do_not_explode_the_density():
    """An expert that is quantised already: the reference keeps everything."""
    vectors = {"m.lora_A": torch.tensor([[1.0, -1, 1, 1], [-1, 1, -1, 0.5]])}
    assert int(reference(vectors, 0.25, 1.0)[0].abs().sum()) == 7
    assert ours(vectors, 0.25).tolist() == [1, -1, 0, 0, 0, 0, 0, 0]


def test_vectors_that_start_at_one():
    """(IA)³ multiplies activations: its task vector is what it differs from 1 by."""
    scales = {"k": torch.tensor([1.2, 0.9, 1.0, 0.5]), "ff": torch.tensor([1.0, 1.05])}
    vectors = {name: value - 1.0 for name, value in scales.items()}
    found = {signs.name: signs.levels for signs in global_signs(vectors, 0.34)}
    assert found["k"].tolist() == [[1, 0, 0, -1]]
    assert found["ff"].tolist() == [[0, 0]]


def test_full_deltas_in_blocks():
    """Tensors larger than a block, of any number of axes, and a zero one."""
    vectors = lora(3, w=(700, 900), conv=(8, 3, 5, 5), norm=(64,))
    vectors["zero"] = torch.zeros(16, 16)
    expected, sigma = reference(vectors, 0.1, 1.0)
    found = ours(vectors, 0.1)
    assert int((found != expected).sum()) == 1
    assert sample_deviation(vectors) == pytest.approx(sigma, rel=1e-5)


def test_gauge_decides_the_result():
    """Why this is not the default: the same ΔW, but one factor is gone."""
    scaled = {
        name: value * (8.0 if name.endswith("A") else 0.125) for name, value in FACTORS.items()
    }
    found = {signs.name: signs.levels for signs in global_signs(scaled, 0.2)}
    assert not found["m.lora_B"].any()
    assert found["m.lora_A"].any()


def test_inputs_are_left_alone():
    before = {name: value.clone() for name, value in FACTORS.items()}
    list(global_signs(FACTORS, 0.1))
    assert all(torch.equal(before[name], FACTORS[name]) for name in before)
