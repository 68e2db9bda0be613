"""MagMax: the largest magnitude wins; opposite ties; weights."""

import itertools

import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import make_rule, merge_state_dicts

A, B = [1.0, -2.0, 3.0], [2.0, -1.0, -4.0]


def merged(*rows, weights=None, **params):
    made = [{"w": torch.tensor(row)} for row in rows]
    return merge_state_dicts("magmax", made, weights=weights, params=params)["w"].tolist()


def reference(columns, tie):
    """One entry of all experts."""
    size = max(abs(value) for value in columns)
    winners = [value for value in columns if abs(value) == size]
    if tie == "last":
        return winners[-1]
    return winners[0] if len(set(winners)) == 1 else 0.0


@pytest.mark.parametrize("tie", ["zero", "last"])
def test_by_hand(tie):
    assert merged(A, B, tie=tie) == [2, -2, -4]
    assert merged(A, B, tie=tie, scale=0.5) == [1, -1, -2]


def test_weights_take_part_in_the_choice():
    assert merged(A, B, weights=[3, 1]) == [3, -6, 9]
    assert merged(A, B, weights=[-1, 1]) == [2, 2, -4]
    assert merged(A, B, weights=[0, 1]) == B
    # Absolute: a common factor goes through.
    assert merged(A, B, weights=[2, 2]) == [4, -4, -8]


def test_opposite_ties():
    opposite = [-value for value in A]
    assert merged(A, opposite) == [0, 0, 0]
    assert merged(A, opposite, tie="last") == opposite
    assert merged(opposite, A, tie="last") == A
    # A smaller third one does not win a tie of the larger ones.
    assert merged([2.0], [-2.0], [1.0]) == [0]
    assert merged([2.0], [-2.0], [1.0], tie="last") == [-2]
    # A larger one ends the tie.
    assert merged([2.0], [-2.0], [-3.0]) == [-3]


@pytest.mark.parametrize("tie", ["zero", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_the_definition(tie, dtype):
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers, so that ties of both kinds are frequent; and continuous ones.
    tensors = {
        "a": torch.randint(-2, 3, (4, 30, 20), generator=generator).to(dtype),
        "b": torch.randn(4, 50, generator=generator, dtype=dtype),
        "c": torch.randn(4, generator=generator, dtype=dtype),
    }
    weights = [1.0, -1.0, 2.0, 0.5]
    made = [{key: value[place] for key, value in tensors.items()} for place in range(4)]
    found = merge_state_dicts("magmax", made, weights=weights, params={"tie": tie})
    for key, value in tensors.items():
        scaled = [(w * row).flatten().tolist() for w, row in zip(weights, value, strict=True)]
        expected = [reference(column, tie) for column in zip(*scaled, strict=True)]
        assert found[key].flatten().tolist() == pytest.approx(expected, rel=1e-7, abs=0)


def test_the_order_of_experts_does_not_matter_at_ties():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (3, 200), generator=generator).float().tolist()
    results = {tuple(merged(*turn)) for turn in itertools.permutations(rows)}
    assert len(results) == 1


def test_duplicates_and_zero_experts_change_nothing():
    assert merged(A, A) == A
    assert merged(A, [0.0] * 3) == A
    assert merged([0.0], [0.0]) == [0]
    assert merged([0.0], [0.0], tie="last") == [0]
    assert merged(-3.0) == -3


def test_absent_names_count_as_zero():
    made = [{"a": torch.tensor([1.0])}, {"b": torch.tensor([-2.0])}]
    found = merge_state_dicts("magmax", made)
    assert (found["a"].tolist(), found["b"].tolist()) == ([1], [-2])


def test_no_entry_is_smaller_than_in_any_expert():
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 100, generator=generator)
    found = torch.tensor(merged(*rows.tolist()))
    assert torch.equal(found.abs(), rows.abs().amax(dim=0))


def test_bad_parameters_are_refused():
    with pytest.raises(UsageError, match="one of zero, last"):
        make_rule("magmax", 2, params={"tie": "first"})
