"""What no Gram matrix and no Fisher information can be, by hand and at random."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import Damaged
from cgmerge.merge import flaws, merge_state_dicts
from cgmerge.merge.flaws import flaw_of

GRAM = [[2.0, 1.0], [1.0, 3.0]]


def gram_with(place, value):
    found = torch.tensor(GRAM)
    found[place] = value
    return found


@pytest.mark.parametrize(
    ("values", "gram", "words"),
    [
        (gram_with((0, 1), math.nan), True, "1 NaN or infinity"),
        (gram_with((1, 1), math.inf), True, "1 NaN or infinity"),
        (gram_with((1, 1), -3.0), True, "holds -3 on its diagonal"),
        (gram_with((0, 1), 1.5), True, "is not symmetric: 1.5 at [0, 1], 1 at [1, 0]"),
        (torch.tensor([[1.0, -1e-9]]), False, "holds -1e-09; a mean of squares"),
        (torch.tensor([[math.nan, math.nan]]), False, "2 NaN or infinite values"),
        (torch.tensor(GRAM), True, None),
        (gram_with((0, 1), -1.0).triu() + gram_with((0, 1), -1.0).triu(1).T, True, None),
        (torch.zeros(3, 3), True, None),
        (torch.zeros(0, 0), True, None),
        (torch.zeros(2, 5), False, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hand_numbers(values, gram, words, dtype):
    found = flaw_of(values.to(dtype), gram=gram)
    assert found is None if words is None else words in found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 40), st.floats(1e-18, 1e12), st.data())
def test_what_was_computed_passes_and_one_changed_entry_does_not(seed, n, size, data):
    """Added up in another order on the other side of the diagonal, as fast products may."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(n, generator=generator).mul_(8).sub_(4).exp_()  # some inputs are huge
    x = torch.randn(3000, n, generator=generator) * scales * math.sqrt(size)
    gram = (x.T @ x / len(x)).triu() + (x.flip(0).T @ x.flip(0) / len(x)).tril(-1)
    assert flaw_of(gram, gram=True) is None
    i = data.draw(st.integers(0, n - 1))
    j = data.draw(st.integers(0, n - 1).filter(lambda k: k != i))
    gram[i, j] += 0.01 * gram[i, i].sqrt() * gram[j, j].sqrt()
    assert "is not symmetric" in flaw_of(gram, gram=True)


@pytest.mark.parametrize("place", [(0, 8), (8, 0), (7, 6)])
def test_blocks_of_rows_name_the_right_place(monkeypatch, place):
    monkeypatch.setattr(flaws, "_BLOCK_ENTRIES", 20)  # two rows of nine at a time
    gram = torch.eye(9)
    assert flaw_of(gram, gram=True) is None
    gram[place] = 0.5
    i, j = place
    assert flaw_of(gram, gram=True) in (
        f"is not symmetric: 0.5 at [{i}, {j}], 0 at [{j}, {i}]",
        f"is not symmetric: 0 at [{j}, {i}], 0.5 at [{i}, {j}]",
    )


@pytest.mark.parametrize("method", ["regmean", "mats", "fisher"])
def test_the_plain_door_refuses_them_too(method):
    deltas = [{"w": torch.eye(2)}, {"w": torch.ones(2, 2)}]
    stats = [{"w": torch.tensor(GRAM)}, {"w": gram_with((0, 1), math.nan)}]
    with pytest.raises(Damaged, match="'w' of expert 1: the matrix holds 1 NaN"):
        merge_state_dicts(method, deltas, stats=stats)
    assert merge_state_dicts(method, deltas, stats=stats[:1] * 2)["w"].isfinite().all()
