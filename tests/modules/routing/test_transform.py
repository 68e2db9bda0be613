"""Taking a general expert out of another: exact as a delta, published as factors."""

import pytest
import torch
from routing_support import expert

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.routing.transform import subtract

TASK = {"m": LowRank(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]]))}
GENERAL = {"m": LowRank(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [0.0]]))}
SHAPES = {"a": (6, 5), "b": (4, 6)}


def test_both_forms_by_hand():
    exact = subtract(TASK, GENERAL)
    assert exact.deltas["m"].dense().tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert exact.deltas["m"].rank == 2
    assert exact.removed == pytest.approx(1 / 8**0.5)
    published = subtract(TASK, GENERAL, space="factors")
    assert published.deltas["m"].dense().tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_the_difference_is_exact_and_the_sources_stay():
    task, general = expert(SHAPES, 3, 1), expert(SHAPES, 2, 2)
    copies = {path: (d.a.clone(), d.b.clone()) for path, d in task.items()}
    found = subtract(task, general, strength=0.5)
    for path, delta in found.deltas.items():
        wanted = task[path].dense() - 0.5 * general[path].dense()
        assert torch.allclose(delta.dense(), wanted, atol=1e-6)
        assert delta.rank == 5
        assert torch.equal(task[path].a, copies[path][0])
        assert torch.equal(task[path].b, copies[path][1])
    assert found.lost == 0.0


def test_what_truncation_loses_is_measured():
    task, general = expert(SHAPES, 3, 1), expert(SHAPES, 2, 2)
    exact, cut = subtract(task, general), subtract(task, general, rank=3)
    missing = whole = 0.0
    for path, delta in cut.deltas.items():
        assert delta.rank == 3
        missing += float((exact.deltas[path].dense() - delta.dense()).square().sum())
        whole += float(exact.deltas[path].dense().square().sum())
    assert cut.lost == pytest.approx((missing / whole) ** 0.5, rel=1e-4)
    assert cut.lost > 0.05
    assert subtract(task, general, rank=9).lost == 0.0


def test_modules_of_only_one_of_them_are_kept():
    task, general = expert({"a": (6, 5)}, 2, 1), expert({"b": (4, 6)}, 3, 2)
    found = subtract(task, general, strength=2.0).deltas
    assert list(found) == ["a", "b"]
    assert torch.equal(found["a"].dense(), task["a"].dense())
    assert torch.allclose(found["b"].dense(), -2.0 * general["b"].dense(), atol=1e-6)


@pytest.mark.parametrize("rank", [None, 2])
def test_an_expert_without_itself_is_nothing(rank):
    task = expert(SHAPES, 2, 1)
    found = subtract(task, task, rank=rank)
    assert found.removed == pytest.approx(1.0)
    for delta in found.deltas.values():
        assert float(delta.dense().abs().max()) < 1e-5
        assert torch.isfinite(delta.a).all()
        assert torch.isfinite(delta.b).all()


def test_the_factored_form_is_not_the_difference():
    """A copy written with other signs is the same expert; the published form doubles it."""
    task = expert(SHAPES, 2, 1)
    mirrored = {path: LowRank(-d.a, -d.b) for path, d in task.items()}
    exact, published = subtract(task, mirrored), subtract(task, mirrored, space="factors")
    for path in SHAPES:
        assert float(exact.deltas[path].dense().abs().max()) < 1e-5
        assert torch.allclose(published.deltas[path].dense(), 4 * task[path].dense(), atol=1e-5)


@pytest.mark.parametrize(
    ("general", "message"),
    [
        (expert(SHAPES, 3, 2), "have different ranks: 2 and 3"),
        (expert({"a": (6, 5)}, 2, 2), "are in one expert alone: b"),
        (expert({"a": (5, 5), "b": (4, 6)}, 2, 2), r"different shapes \(out, in\)"),
    ],
)
def test_factors_need_the_same_ranks_and_modules(general, message):
    with pytest.raises(Incompatible, match=message):
        subtract(expert(SHAPES, 2, 1), general, space="factors")


def test_impossible_requests_are_refused():
    with pytest.raises(Incompatible, match="different shapes"):
        subtract({"m": TASK["m"]}, expert({"m": (3, 2)}, 1))
    for options in ({"rank": 0}, {"rank": 2, "space": "factors"}):
        with pytest.raises(UsageError, match="the factor form has the rank of its experts"):
            subtract(TASK, GENERAL, **options)
