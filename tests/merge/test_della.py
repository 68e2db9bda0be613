"""DELLA: chances by rank within rows, rescaling by each entry's own chance, then TIES' fusion."""

import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import make_rule, merge_state_dicts
from cgmerge.merge.methods.della import chances, mean_of_kept
from cgmerge.merge.randoms import draws
from cgmerge.merge.registry import get_method

SHAPES = {"b.w": (7, 5), "a.w": (4, 9), "c": (11,), "e": (3, 1), "k": (2, 3, 2)}
IDS = ["poet", "chef", "coder"]
WEIGHTS = [1.0, 0.7, -0.4]
ROW = [0.1, -0.4, 0.2, 0.3]


def experts(count=3, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in SHAPES.items()}
        for _ in range(count)
    ]


def reference_chances(row, density, epsilon):
    """q = density - ε for rank 1 up to density + ε for rank n, ranks by counting."""
    n = len(row)
    if n == 1:
        return [density]
    ranks = [
        1 + sum(abs(y) < abs(x) or (abs(y) == abs(x) and j > i) for j, y in enumerate(row))
        for i, x in enumerate(row)
    ]
    return [density - epsilon + (rank - 1) / (n - 1) * 2 * epsilon for rank in ranks]


def reference(given, ids, weights, density, epsilon, seed, *, rescale):
    merged = {}
    for name in given[0]:
        votes = []
        for expert, who, weight in zip(given, ids, weights, strict=True):
            matrix = expert[name].double().numpy()
            matrix = matrix.reshape(matrix.shape[0] if matrix.ndim > 1 else 1, -1)
            q = np.array([reference_chances(list(row), density, epsilon) for row in matrix])
            keep = (draws(seed, who, name, 0, q.size) / 2.0**32).reshape(q.shape) < q
            votes.append(weight * np.where(keep, matrix / q if rescale else matrix, 0.0))
        votes = np.array(votes)
        agree = np.sign(votes) * np.sign(votes.sum(axis=0)) > 0
        mass = (agree * np.abs(weights)[:, None, None]).sum(axis=0)
        total = (votes * agree).sum(axis=0)
        merged[name] = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
    return merged


def test_chances_by_hand():
    found = chances(torch.tensor([ROW]), 0.5, 0.2)
    assert found[0].tolist() == pytest.approx([0.3, 0.7, 0.43333, 0.56667], abs=1e-5)


def test_rescaled_by_the_own_chance():
    row = torch.tensor([[ROW]])
    share = torch.from_numpy(chances(row[0], 0.5, 0.2)).float()
    every = [torch.ones(1, 4, dtype=torch.bool)]
    found = mean_of_kept(row, every, [share], [1.0])
    assert found[0].tolist() == pytest.approx([0.33333, -0.57143, 0.46154, 0.52941], abs=1e-5)


def test_mask_vote_and_mean_by_hand():
    values = torch.tensor([[[1.0, 2.0, -3.0]], [[-4.0, 2.0, 6.0]]])
    masks = [torch.tensor([[True, True, True]]), torch.tensor([[False, True, True]])]
    # Divided by a half: [2, 4, -6] and [0, 4, 12]; weights 1 and 3: + wins everywhere.
    found = mean_of_kept(values, masks, [0.5, 0.5], [1.0, 3.0])
    assert found.tolist() == [[2, 4, 12]]


def test_equal_magnitudes_rank_the_lowest_index_highest():
    found = chances(torch.tensor([[1.0, -1.0, 1.0], [0.0, 5.0, 0.0]]), 0.5, 0.2)
    assert found.tolist() == [pytest.approx([0.7, 0.5, 0.3]), pytest.approx([0.5, 0.7, 0.3])]


def test_a_row_of_one_entry_has_the_mean_chance():
    assert chances(torch.tensor([[9.0], [0.0]]), 0.4, 0.3).tolist() == [[0.4], [0.4]]


@pytest.mark.parametrize(("density", "epsilon"), [(0.7, 0.07), (0.5, 0.2), (0.2, 0.19), (0.5, 0)])
@pytest.mark.parametrize("rescale", [True, False])
def test_it_equals_the_formula(density, epsilon, rescale):
    given = experts()
    expected = reference(given, IDS, WEIGHTS, density, epsilon, 4, rescale=rescale)
    params = {"density": density, "epsilon": epsilon, "seed": 4, "rescale": rescale}
    found = merge_state_dicts("della", given, weights=WEIGHTS, ids=IDS, params=params)
    for name, value in found.items():
        assert np.abs(value.numpy().reshape(expected[name].shape) - expected[name]).max() < 1e-12


def test_single_and_double_precision_draw_the_same():
    given = experts(dtype=torch.float32)
    wide = [{key: value.double() for key, value in expert.items()} for expert in given]
    single, double = merge_state_dicts("della", given), merge_state_dicts("della", wide)
    for name in SHAPES:
        assert torch.allclose(single[name].double(), double[name], atol=1e-5)


def test_everything_kept_is_ties_at_full_density():
    given = experts()
    found = merge_state_dicts("della", given, weights=WEIGHTS, params={"density": 1, "epsilon": 0})
    expected = merge_state_dicts("ties", given, weights=WEIGHTS, params={"density": 1})
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def test_no_spread_is_dare_ties_without_a_trim():
    given = experts()
    found = merge_state_dicts("della", given, params={"density": 0.6, "epsilon": 0})
    expected = merge_state_dicts("dare-ties", given, params={"drop": 0.4, "density": 1})
    assert all(torch.allclose(found[name], expected[name], atol=1e-12) for name in SHAPES)


def test_the_mean_over_seeds_is_the_expert():
    expert = experts(1)[0]["a.w"]
    density, epsilon, seeds = 0.5, 0.3, 600
    total = torch.zeros_like(expert)
    for seed in range(seeds):
        params = {"density": density, "epsilon": epsilon, "seed": seed}
        total += merge_state_dicts("della", [{"w": expert}], params=params)["w"]
    q = np.array([reference_chances(row, density, epsilon) for row in expert.tolist()])
    # Var(m/q) = (1-q)/q for every entry.
    error = np.abs(expert.numpy()) * np.sqrt((1 - q) / q / seeds)
    z = (total.numpy() / seeds - expert.numpy()) / error
    assert np.abs(z).max() < 4.5
    assert 0.4 < (z**2).mean() < 1.8


def test_large_entries_survive_more_often():
    row = torch.arange(1.0, 11.0)
    counts = torch.zeros(10)
    for seed in range(300):
        params = {"density": 0.5, "epsilon": 0.45, "seed": seed, "rescale": False}
        counts += merge_state_dicts("della", [{"w": row}], params=params)["w"] != 0
    wanted = torch.linspace(0.05, 0.95, 10) * 300
    allowed = 5 * (wanted * (1 - wanted / 300)).sqrt()
    assert ((counts - wanted).abs() < allowed).all()


def test_weights_are_relative_and_opposite_experts_of_one_name_cancel():
    given = experts()
    once = merge_state_dicts("della", given, weights=WEIGHTS)
    twice = merge_state_dicts("della", given, weights=[2 * weight for weight in WEIGHTS])
    assert all(torch.allclose(once[name], twice[name], atol=1e-12) for name in SHAPES)
    opposite = {key: -value for key, value in given[0].items()}
    found = merge_state_dicts("della", [given[0], opposite], ids=["x", "x"])
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize(
    "params",
    [
        {"density": 0},
        {"density": 1.2},
        {"epsilon": -0.1},
        {"density": 0.2, "epsilon": 0.2},
        {"density": 0.1, "epsilon": 0.3},
        {"density": 0.9, "epsilon": 0.2},
        {"density": 1},
        {"rescale": "perhaps"},
        {"seed": -1},
    ],
)
def test_bad_parameters_are_refused(params):
    with pytest.raises(UsageError):
        make_rule("della", 2, params=params)


def test_limits_are_those_that_were_typed():
    # In binary 0.7 + 0.3 and 0.8 + 0.2 need not be 1.
    for density, epsilon in ((0.7, 0.3), (0.8, 0.2), (0.9, 0.1), (0.6, 0.4)):
        made = make_rule("della", 1, params={"density": density, "epsilon": epsilon})
        merged = merge_state_dicts(
            "della",
            [{"w": torch.tensor([1.0, 2.0])}],
            params={"density": density, "epsilon": epsilon},
        )
        assert made.params.density == density
        assert merged["w"][1] == pytest.approx(2.0)


def test_what_tuning_tries_fits_together():
    kind = get_method("della")[0].params
    grids = {item.name: item.metadata["grid"] or (item.default,) for item in fields(kind)}
    assert len(grids["density"]) > 1
    for values in itertools.product(*grids.values()):
        kind(**dict(zip(grids, values, strict=True)))
