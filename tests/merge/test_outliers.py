"""What stands out in a delta, on matrices whose answer is known, and honest ones that do not."""

import pytest
import torch

from cgmerge.merge.deltas import LowRank
from cgmerge.merge.outliers import DIRECTION, MODULE, ROWS, portrait, unusual


def made(values, out=40, into=30, seed=0, rows=None):
    """A delta with given singular values; `rows` multiplies rows afterwards."""
    generator = torch.Generator().manual_seed(seed)
    rank = len(values)
    u = torch.linalg.qr(torch.randn(out, rank, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(into, rank, generator=generator, dtype=torch.float64)).Q
    b = u * torch.tensor(values, dtype=torch.float64)
    if rows is not None:
        b = b * rows[:, None]
    return LowRank(v.T.float(), b.float())


def test_by_hand():
    delta = LowRank(torch.eye(2), torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    found = portrait(delta)
    assert found.norm == pytest.approx(10**0.5)
    assert found.direction == pytest.approx(3)
    assert found.rows == pytest.approx(3)  # rows of 3, 1 and 0; the median is 1
    assert portrait(LowRank(torch.zeros(2, 4), torch.ones(3, 2))).norm == 0
    assert portrait(made([2.0])).direction == 1  # of rank one: there are no others


@pytest.mark.fault("F14")
@pytest.mark.parametrize("times", [DIRECTION * 0.9, DIRECTION * 1.1])
def test_a_direction(times):
    expert = {"a.q": made([1.0, 0.9, 0.8]), "b.q": made([times, 1.0, 0.5], seed=1)}
    notes = unusual(expert)
    assert (notes != []) == (times > DIRECTION)
    if notes:
        assert notes[0] == f"b.q: one direction is {times:.0f} times the next"


@pytest.mark.fault("F14")
@pytest.mark.parametrize("hidden", [1.0, 0.0])
def test_a_row(hidden):
    """One row far above the others, and one row that is all there is."""
    rows = torch.full((40,), hidden, dtype=torch.float64)
    rows[7] = 1000.0
    notes = unusual({"a.q": made([1.0, 0.9], seed=2), "b.q": made([1.0, 1.0], rows=rows)})
    assert any(note.startswith("b.q: one row is") for note in notes)
    assert any("nearly all" in note for note in notes) == (hidden == 0.0)


def test_half_of_the_rows_may_be_zero():
    rows = torch.ones(40, dtype=torch.float64)
    rows[:30] = 0
    assert unusual({"a.q": made([1.0, 1.0], rows=rows)}) == []
    assert ROWS > 7


@pytest.mark.fault("F14")
def test_a_module():
    expert = {f"{i}.q": made([1.0, 0.8], seed=i) for i in range(5)}
    expert["4.q"] = made([1.1 * MODULE, 0.9 * MODULE])
    (note,) = unusual(expert)
    assert note.startswith("4.q: ‖ΔW‖ is")
    assert note.endswith("times that of the median module")


@pytest.mark.fault("F14")
def test_the_head_alone():
    assert unusual({"lm_head": made([1.0, 0.9])}) == ["it changes the output head and nothing else"]
    assert unusual({"lm_head": made([1.0, 0.9]), "a.q": made([1.0, 0.9])}) == []
    assert unusual({"a.q": made([0.0, 0.0])}) == []


@pytest.mark.fault("F14")
def test_honest_experts_are_left_alone():
    """Spectra from flat to steep, rows and modules of uneven size: at most 5 % are noted."""
    noted = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(1000 + seed)
        steep = 2.5 * seed / 60  # values 1/k^steep: the first up to 5.7 times the second
        expert = {}
        for module in range(6):
            size = float(torch.exp(0.5 * torch.randn((), generator=generator)))
            rows = torch.exp(0.6 * torch.randn(40, generator=generator, dtype=torch.float64))
            values = [size / (k + 1) ** steep for k in range(8)]
            expert[f"{module}.q"] = made(values, seed=seed * 10 + module, rows=rows)
        noted += bool(unusual(expert))
    assert noted <= 3
