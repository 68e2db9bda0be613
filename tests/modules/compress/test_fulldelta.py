"""Full deltas: every tensor by itself or one threshold for all, whatever the shape."""

import math

import numpy as np
import pytest
import torch

from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.compress.fulldelta import encode_tensors, measure_tensors
from cgmerge.modules.compress.modes import Options

MODES = ["ternary", "compeft"]


@pytest.fixture(scope="module")
def deltas():
    generator = torch.Generator().manual_seed(4)
    shapes = {"w": (60, 50), "conv": (4, 3, 2, 2), "norm": (30,), "scalar": ()}
    found = {
        name: 0.01 * (1 + i) * torch.randn(shape, generator=generator)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {**found, "same": torch.zeros(5, 5)}


def test_ternary_by_hand():
    deltas = {"b": torch.tensor([1.0, -4.0, 2.0, 0.0]), "a": torch.tensor([[0.5], [-0.25]])}
    parts = list(encode_tensors("ternary", deltas, Options(density=0.5)))
    assert [part.name for part in parts] == ["a", "b"]
    assert parts[0].levels.tolist() == [[1], [0]]
    assert parts[1].levels.tolist() == [[0, -1, 1, 0]]
    assert [float(part.scales[0]) for part in parts] == [0.5, 3.0]
    (scaled,) = encode_tensors("ternary", {"b": deltas["b"]}, Options(density=0.5, multiplier=2.0))
    assert float(scaled.scales[0]) == 6.0


@pytest.mark.parametrize("mode", MODES)
def test_the_measure_is_what_the_decoded_tensors_are(deltas, mode):
    options = Options(density=0.3)
    found = measure_tensors(mode, deltas, options)
    gap = size = kept = 0.0
    for part in encode_tensors(mode, deltas, options):
        exact = deltas[part.name].double().reshape(part.levels.shape)
        value = part.tensor().double()
        gap += float((exact - value).square().sum())
        size += float(exact.square().sum())
        kept += np.count_nonzero(part.levels)
        assert found.fidelity.modules[part.name].error == pytest.approx(
            float((exact - value).norm() / exact.norm().clamp_min(1e-30)), rel=1e-5, abs=1e-9
        )
    assert found.fidelity.error == pytest.approx(math.sqrt(gap / size), rel=1e-5)
    assert found.density == kept / sum(delta.numel() for delta in deltas.values())


def test_least_squares_scale_of_each_tensor(deltas):
    for part in encode_tensors("ternary", deltas, Options(density=0.2)):
        if part.levels.any():
            exact = deltas[part.name].double().reshape(part.levels.shape).numpy()
            best = (exact * part.levels).sum() / np.count_nonzero(part.levels)
            assert float(part.scales[0]) == pytest.approx(best, rel=1e-6)


def test_one_threshold_favours_large_tensors(deltas):
    parts = {p.name: p for p in encode_tensors("compeft", deltas, Options(density=0.2, alpha=2.0))}
    flat = torch.cat([delta.flatten() for delta in deltas.values()])
    for part in parts.values():
        if part.levels.any():
            assert float(part.scales[0]) == pytest.approx(2 * float(flat.std()), rel=1e-6)
    assert sum(int(np.count_nonzero(p.levels)) for p in parts.values()) == int(0.2 * flat.numel())
    assert not parts["same"].levels.any()


@pytest.mark.parametrize("mode", MODES)
def test_refusals(deltas, mode):
    bad = {**deltas, "w": torch.full((2, 2), math.inf)}
    with pytest.raises(Damaged, match="^w holds 4 values"):
        list(encode_tensors(mode, bad, Options()))
    with pytest.raises(UsageError, match="density decides"):
        list(encode_tensors(mode, deltas, Options(target=100.0)))
    with pytest.raises(UsageError, match="low-rank factors"):
        list(encode_tensors("svdq", deltas, Options()))
