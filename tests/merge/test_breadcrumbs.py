"""Breadcrumbs: a band of magnitude ranks, within rows or within tensors."""

import itertools
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import UsageError
from cgmerge.merge import deltas, make_rule, merge_state_dicts
from cgmerge.merge.methods.breadcrumbs import band_counts
from cgmerge.merge.registry import get_method

SHAPES = {"b.w": (7, 5), "a.w": (4, 9), "c": (11,), "d": (), "k": (2, 3, 2)}
WEIGHTS = [1.0, 0.7, -0.4]


def experts(count=3, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in SHAPES.items()}
        for _ in range(count)
    ]


def reference_band(row, beta, gamma):
    """Sort by (-|x|, index), leave out the first ⌊γn⌋, keep the next ⌊βn⌋ (at least one)."""
    n = len(row)
    first = int(Fraction(str(gamma)) * n)
    count = max(1, int(Fraction(str(beta)) * n))
    order = sorted(range(n), key=lambda i: (-abs(row[i]), i))
    kept = set(order[first : first + count])
    return [value if i in kept else 0.0 for i, value in enumerate(row)]


def reference(given_experts, weights, beta, gamma, scope):
    merged = {}
    for name, first in given_experts[0].items():
        total = np.zeros(first.shape)
        for expert, weight in zip(given_experts, weights, strict=True):
            rows = (
                expert[name]
                .numpy()
                .reshape(first.shape[0] if first.ndim > 1 and scope == "row" else 1, -1)
            )
            kept = np.array([reference_band(list(row), beta, gamma) for row in rows])
            total = total + weight * kept.reshape(first.shape)
        merged[name] = total
    return merged


def merged(*rows, weights=None, **params):
    made = [{"w": torch.tensor(row)} for row in rows]
    return merge_state_dicts("breadcrumbs", made, weights=weights, params=params)["w"].tolist()


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_by_hand(scope):
    row = [5.0, 1.0, -4.0, 2.0, 3.0]
    assert merged(row, density=0.4, gamma=0.2, scope=scope) == [0, 0, -4, 0, 3]


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_outliers_that_round_to_none_remove_nothing(scope):
    # ⌊0.1·5⌋ = 0: mergekit answers with zeros here.
    row = [5.0, 1.0, -4.0, 2.0, 3.0]
    assert merged(row, density=0.4, gamma=0.1, scope=scope) == [5, 0, -4, 0, 0]


def test_rows_and_tensors_differ():
    matrix = [[10.0, 20.0, 30.0, 40.0], [1.0, 2.0, 3.0, 4.0]]
    by_row = merged(matrix, density=0.25, gamma=0.25, scope="row")
    assert by_row == [[0, 0, 30, 0], [0, 0, 3, 0]]
    by_tensor = merged(matrix, density=0.25, gamma=0.25, scope="tensor")
    assert by_tensor == [[10, 20, 0, 0], [0, 0, 0, 0]]


def test_the_sum_is_weighted():
    rows = [5.0, 1.0, -4.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    found = merged(*rows, weights=[2.0, -1.0], density=0.4, gamma=0.2, scale=0.5)
    # Kept: [0,0,-4,0,3] and [0,0,3,4,0].
    assert found == [0, 0, -5.5, -2, 3]
    # A common factor of the weights goes through.
    assert merged(*rows, weights=[4.0, -2.0], density=0.4, gamma=0.2, scale=0.25) == found


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize(
    ("beta", "gamma"), [(0.2, 0.1), (0.4, 0.2), (0.7, 0.3), (0.01, 0.99), (1, 0), (0.3, 0.0)]
)
def test_it_equals_the_formula(scope, beta, gamma):
    made = experts()
    expected = reference(made, WEIGHTS, beta, gamma, scope)
    params = {"density": beta, "gamma": gamma, "scope": scope}
    found = merge_state_dicts("breadcrumbs", made, weights=WEIGHTS, params=params)
    for name in SHAPES:
        assert np.abs(found[name].numpy() - expected[name]).max() < 1e-12, name


number = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0])


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(number, min_size=1, max_size=24),
    shares=st.tuples(st.integers(1, 20), st.integers(0, 19)).filter(lambda x: sum(x) <= 20),
    scope=st.sampled_from(["row", "tensor"]),
    block=st.sampled_from([1, 7, 1 << 18]),
)
def test_equal_magnitudes_go_by_index(row, shares, scope, block):
    beta, gamma = (share / 20 for share in shares)
    column = scope == "tensor"  # one entry in a row, so that blocks cut the tensor
    values = torch.tensor(row)[:, None] if column else torch.tensor(row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_ENTRIES", block)
        params = {"density": beta, "gamma": gamma, "scope": scope}
        found = merge_state_dicts("breadcrumbs", [{"w": values}], params=params)["w"]
    assert found.flatten().tolist() == reference_band(row, beta, gamma)


def test_a_tensor_large_enough_for_a_sampled_cut():
    matrix = torch.randn(1100, 1000, generator=torch.Generator().manual_seed(2))
    params = {"density": 0.25, "gamma": 0.03, "scope": "tensor"}
    found = merge_state_dicts("breadcrumbs", [{"w": matrix}], params=params)["w"]
    ordered = matrix.abs().flatten().sort(descending=True).values
    largest, count = 33_000, 275_000
    inside = (matrix.abs() <= ordered[largest]) & (matrix.abs() >= ordered[largest + count - 1])
    assert torch.equal(found, matrix * inside)


@pytest.mark.parametrize(
    ("entries", "beta", "gamma", "wanted"),
    [
        (5, 0.4, 0.2, (1, 2)),
        (100, 0.29, 0.29, (29, 29)),
        (3, 0.2, 0.1, (0, 1)),
        (1, 0.1, 0.9, (0, 1)),
        (10, 0.1, 0.9, (9, 1)),
        (7, 1.0, 0.0, (0, 7)),
    ],
)
def test_counts_are_those_of_the_shares_as_typed(entries, beta, gamma, wanted):
    assert band_counts(entries, beta, gamma) == wanted


def test_zero_rows_and_duplicates():
    rows = [[0.0] * 5, [5.0, 1.0, -4.0, 2.0, 3.0]]
    once = merged(rows, density=0.4, gamma=0.2)
    assert once == [[0] * 5, [0, 0, -4, 0, 3]]
    twice = merged(rows, rows, density=0.4, gamma=0.2, scale=0.5)
    assert twice == once
    opposite = [[-value for value in row] for row in rows]
    assert merged(rows, opposite, density=0.4, gamma=0.2) == [[0] * 5] * 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"density": 0}, "density"),
        ({"density": 1.1, "gamma": 0}, "density"),
        ({"gamma": -0.1}, "gamma"),
        ({"density": 0.5, "gamma": 0.6}, "more than 1"),
        ({"density": 1.0}, "more than 1"),
        ({"scope": "layer"}, "one of row, tensor"),
    ],
)
def test_bad_parameters_are_refused(params, words):
    with pytest.raises(UsageError, match=words):
        make_rule("breadcrumbs", 2, params=params)


def test_shares_that_fill_everything_are_accepted():
    for beta, gamma in ((0.7, 0.3), (0.9, 0.1), (0.8, 0.2), (0.1, 0.9)):
        made = make_rule("breadcrumbs", 2, params={"density": beta, "gamma": gamma})
        assert made.params.gamma == gamma


def test_what_tuning_tries_fits_together():
    kind = get_method("breadcrumbs")[0].params
    grids = {item.name: item.metadata["grid"] or (item.default,) for item in fields(kind)}
    assert len(grids["density"]) > 1
    for values in itertools.product(*grids.values()):
        kind(**dict(zip(grids, values, strict=True)))
