"""DARE and DARE-TIES: numbers by hand, a dense reference, and what must not change the draws."""

import math

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, deltas, make_rule, merge_state_dicts
from cgmerge.merge.deltas import Block
from cgmerge.merge.methods.dare import sum_of_kept
from cgmerge.merge.methods.dare_ties import DareTiesParams, DareTiesState, mean_of_kept
from cgmerge.merge.randoms import draws
from cgmerge.merge.sparsify import Cut

SHAPES = {"b.w": (7, 5), "a.w": (4, 9), "c": (11,), "d": ()}
IDS = ["poet", "chef", "coder"]
WEIGHTS = [1.0, 0.7, -0.4]


def experts(count=3, *, seed=0, shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}
        for _ in range(count)
    ]


def flat(expert):
    return np.concatenate([expert[name].reshape(-1).double().numpy() for name in sorted(expert)])


def flat_mask(expert, who, seed, drop):
    parts = [draws(seed, who, name, 0, expert[name].numel()) for name in sorted(expert)]
    return np.concatenate(parts) / 2.0**32 < 1 - drop


def thinned(given, ids, seed, drop):
    return [
        np.where(flat_mask(e, i, seed, drop), flat(e) / (1 - drop), 0.0)
        for e, i in zip(given, ids, strict=True)
    ]


def reference_ties(rows, weights, density):
    """TIES on flat vectors, by sorting."""
    kept = max(1, int(density * rows[0].size))
    trimmed = []
    for row, weight in zip(rows, weights, strict=True):
        order = sorted(range(row.size), key=lambda i, row=row: (-abs(row[i]), i))[:kept]
        only = np.zeros_like(row)
        only[order] = row[order]
        trimmed.append(weight * only)
    merged = np.zeros(rows[0].size)
    for j in range(merged.size):
        column = [row[j] for row in trimmed]
        sign = np.sign(sum(column))
        agree = [place for place, value in enumerate(column) if value * sign > 0]
        if agree:
            mass = sum(abs(weights[place]) for place in agree)
            merged[j] = sum(column[place] for place in agree) / mass
    return merged


def test_dare_by_hand():
    mask = [torch.tensor([True, False])]
    assert sum_of_kept(torch.tensor([[2.0, -4.0]]), mask, [1.0], [0.5]).tolist() == [4, 0]
    two = torch.tensor([[2.0, -4.0], [1.0, 8.0]])
    masks = [torch.tensor([True, False]), torch.tensor([True, True])]
    # 2/(3/4) - 2·1/(3/4) and 0 - 2·8/(3/4).
    found = sum_of_kept(two, masks, [1.0, -2.0], [0.75, 0.75])
    assert found.tolist() == pytest.approx([0, -64 / 3])


def test_dare_ties_by_hand():
    block = Block("w", 0, torch.tensor([[[2.0, -4.0, 1.0]], [[-3.0, 1.0, 5.0]]]))
    masks = [torch.tensor([[True, False, True]]), torch.tensor([[True, True, True]])]
    # Cuts at 1.5: experts [2,0,0] and [-3,0,5]; + loses entry 0; all divided by a half.
    state = DareTiesState([Cut(1.5, 1.5, None)] * 2, None)
    found = mean_of_kept(block, masks, [1.0, 1.0], DareTiesParams(drop=0.5), state)
    assert found.tolist() == [[-6, 0, 10]]


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 7])
def test_dare_equals_the_formula(drop, seed):
    given = experts()
    rows = thinned(given, IDS, seed, drop)
    expected = 0.5 * sum(w * row for w, row in zip(WEIGHTS, rows, strict=True))
    params = {"drop": drop, "seed": seed, "scale": 0.5}
    found = merge_state_dicts("dare", given, weights=WEIGHTS, ids=IDS, params=params)
    assert np.abs(flat(found) - expected).max() < 1e-12


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("density", [0.1, 0.35, 1.0])
def test_dare_ties_equals_the_formula(drop, density):
    given = experts(seed=3)
    expected = reference_ties(thinned(given, IDS, 5, drop), WEIGHTS, density)
    params = {"drop": drop, "density": density, "seed": 5}
    found = merge_state_dicts("dare-ties", given, weights=WEIGHTS, ids=IDS, params=params)
    assert np.abs(flat(found) - expected).max() < 1e-12
    assert np.count_nonzero(expected)


def norm_kept(expert, who, seed, drop):
    """Drop as drawn, then restore each tensor's sum of magnitudes, by numpy."""
    parts = []
    for name in sorted(expert):
        row = flat({name: expert[name]})
        kept = np.where(draws(seed, who, name, 0, row.size) / 2.0**32 < 1 - drop, row, 0.0)
        mass = np.abs(kept).sum()
        parts.append(kept * (np.abs(row).sum() / mass) if mass else kept)
    return np.concatenate(parts)


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.8])
def test_rescale_by_norm_and_not_at_all(drop):
    given = experts(seed=4)
    rows = [norm_kept(e, i, 2, drop) for e, i in zip(given, IDS, strict=True)]
    options = {"weights": WEIGHTS, "ids": IDS}
    params = {"drop": drop, "seed": 2, "rescale": "norm"}
    found = merge_state_dicts("dare", given, params=params, **options)
    expected = sum(w * row for w, row in zip(WEIGHTS, rows, strict=True))
    assert np.abs(flat(found) - expected).max() < 1e-12
    params = {**params, "density": 1.0}
    found = merge_state_dicts("dare-ties", given, params=params, **options)
    assert np.abs(flat(found) - reference_ties(rows, WEIGHTS, 1.0)).max() < 1e-12
    for name, more in (("dare", {}), ("dare-ties", {"density": 0.4})):
        plain = {"drop": drop, "seed": 2, **more}
        once = merge_state_dicts(name, given, params=plain, **options)
        none = merge_state_dicts(name, given, params={**plain, "rescale": "none"}, **options)
        assert np.abs(flat(none) - (1 - drop) * flat(once)).max() < 1e-12


def test_a_tensor_of_which_nothing_survives_is_zero():
    given = [{"w": torch.tensor([[0.5]]), "v": torch.ones(4, 4), "z": torch.zeros(3)}]
    lost = next(s for s in range(99) if draws(s, "0", "w", 0, 1)[0] >= 2.0**32 * 0.5)
    params = {"drop": 0.5, "seed": lost, "rescale": "norm"}
    found = merge_state_dicts("dare", given, params=params)
    assert found["w"].tolist() == [[0.0]]
    assert found["z"].tolist() == [0.0] * 3
    assert float(found["v"].sum()) == pytest.approx(16)


@pytest.mark.parametrize(("tie", "value"), [("zero", 0.0), ("positive", 3.0)])
def test_dare_ties_without_normalize_adds_up(tie, value):
    rows = [{"w": torch.tensor([[2.0, 3.0, 0.0]])}, {"w": torch.tensor([[4.0, -3.0, 0.0]])}]
    params = {"drop": 0, "density": 1, "normalize": False, "tie": tie}
    assert merge_state_dicts("dare-ties", rows, params=params)["w"].tolist() == [[6, value, 0]]


def test_single_precision_draws_the_same():
    given = experts(dtype=torch.float32)
    expected = sum(thinned(given, IDS, 0, 0.5))
    found = merge_state_dicts("dare", given, ids=IDS)
    assert all(value.dtype == torch.float32 for value in found.values())
    assert np.abs(flat(found) - expected).max() < 1e-6


def test_nothing_dropped_is_task_arithmetic_and_ties():
    given = experts()
    for name, plain, more in (
        ("dare", "task-arithmetic", {}),
        ("dare-ties", "ties", {"density": 0.3}),
    ):
        found = merge_state_dicts(name, given, weights=WEIGHTS, params={"drop": 0, **more})
        expected = merge_state_dicts(plain, given, weights=WEIGHTS, params=more)
        assert np.abs(flat(found) - flat(expected)).max() < 1e-12


def test_the_mean_over_seeds_is_the_sum():
    given = experts(2, shapes={"w": (20, 30)})
    drop, seeds = 0.7, 400
    total = np.zeros(600)
    for seed in range(seeds):
        params = {"drop": drop, "seed": seed}
        total += flat(merge_state_dicts("dare", given, weights=[1, 0.5], params=params))
    x, y = flat(given[0]), flat(given[1])
    # Var(m/(1-p)) = p/(1-p), independent for experts, entries and seeds.
    error = np.sqrt(drop / (1 - drop) * (x**2 + 0.25 * y**2) / seeds)
    z = (total / seeds - (x + 0.5 * y)) / error
    assert np.abs(z).max() < 5  # one in 3000 runs of 600 entries would exceed; the seeds are fixed
    assert abs(z.sum()) < 4 * math.sqrt(600)
    assert 0.8 < (z**2).mean() < 1.2  # neither too far nor suspiciously near


@pytest.mark.parametrize("name", ["dare", "dare-ties", "della"])
def test_order_blocks_and_company_do_not_change_the_draws(monkeypatch, name):
    given = experts(dtype=torch.float32)
    expected = merge_state_dicts(name, given, ids=IDS)
    for turn in ([2, 0, 1], [1, 0, 2]):
        found = merge_state_dicts(name, [given[i] for i in turn], ids=[IDS[i] for i in turn])
        assert np.abs(flat(found) - flat(expected)).max() < 1e-5
    for size in (1, 40, 200):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        found = merge_state_dicts(name, given, ids=IDS)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    # An expert of weight 0, an absent name, more tensors: the others draw as before.
    silent = merge_state_dicts(
        "dare", [*given, {"zz": torch.ones(3)}], weights=[1, 1, 1, 0], ids=[*IDS, "new"]
    )
    alone = merge_state_dicts("dare", given, ids=IDS)
    assert all(torch.equal(silent[key], alone[key]) for key in alone)


@pytest.mark.parametrize("name", ["dare", "dare-ties", "della"])
def test_threads_do_not_matter(name):
    given = experts(shapes={"w": (300, 400)}, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(merge_state_dicts(name, given)["w"])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["dare", "dare-ties", "della"])
def test_seed_and_name_change_the_draws(name):
    given = experts(2)
    base = flat(merge_state_dicts(name, given, ids=["x", "y"]))
    assert np.array_equal(base, flat(merge_state_dicts(name, given, ids=["x", "y"])))
    assert not np.array_equal(base, flat(merge_state_dicts(name, given, ids=["x", "z"])))
    other = merge_state_dicts(name, given, ids=["x", "y"], params={"seed": 1})
    assert not np.array_equal(base, flat(other))


def test_experts_of_one_name_share_the_mask():
    expert = experts(1)[0]
    one = flat(merge_state_dicts("dare", [expert], ids=["x"]))
    two = flat(merge_state_dicts("dare", [expert, expert], ids=["x", "x"]))
    apart = flat(merge_state_dicts("dare", [expert, expert], ids=["x", "y"]))
    assert np.array_equal(two, 2 * one)
    assert not np.array_equal(apart, 2 * one)


@pytest.mark.parametrize("name", ["dare", "dare-ties"])
def test_low_rank_experts_draw_for_entries_of_the_delta(name):
    generator = torch.Generator().manual_seed(2)
    given = [
        {
            "w": LowRank(
                torch.randn(2, 9, generator=generator), torch.randn(8, 2, generator=generator)
            )
        }
        for _ in range(2)
    ]
    merger = Merger(make_rule(name, 2), given, ids=["x", "y"])
    dense = [{"w": expert["w"].dense()} for expert in given]
    expected = merge_state_dicts(name, dense, ids=["x", "y"])["w"]
    assert torch.allclose(merger.dense("w"), expected, atol=1e-5)


def test_density_above_the_share_that_survives_trims_nothing():
    # With 90 % dropped at most a fifth survives here, so that the k-th largest is 0.
    given = experts()
    params = {"drop": 0.9, "density": 0.5}
    found = flat(merge_state_dicts("dare-ties", given, ids=IDS, params=params))
    full = flat(merge_state_dicts("dare-ties", given, ids=IDS, params={"drop": 0.9, "density": 1}))
    assert np.array_equal(found, full)
    alone = merge_state_dicts("dare-ties", given[:1], ids=IDS, params=params)
    assert np.count_nonzero(flat(alone)) == flat_mask(given[0], "poet", 0, 0.9).sum()


def test_weights_are_absolute_in_dare_and_relative_in_dare_ties():
    given = experts()
    doubled = [2 * weight for weight in WEIGHTS]
    for name, factor in (("dare", 2), ("dare-ties", 1)):
        once = flat(merge_state_dicts(name, given, weights=WEIGHTS))
        twice = flat(merge_state_dicts(name, given, weights=doubled))
        assert np.abs(twice - factor * once).max() < 1e-12


def test_opposite_experts_of_one_name_cancel():
    given = experts(1)[0]
    opposite = {key: -value for key, value in given.items()}
    for name in ("dare", "dare-ties"):
        found = flat(merge_state_dicts(name, [given, opposite], ids=["x", "x"]))
        assert not found.any()


@pytest.mark.parametrize("name", ["dare", "dare-ties", "della"])
def test_zero_experts_and_single_entries(name):
    zero = {"w": torch.zeros(3, 4)}
    assert not merge_state_dicts(name, [zero, zero])["w"].any()
    results = {
        merge_state_dicts(name, [{"w": torch.tensor(3.0)}], params={"seed": seed})["w"].item()
        for seed in range(40)
    }
    share = 0.7 if name == "della" else 0.5
    assert sorted(results) == pytest.approx([0, 3 / share])


@pytest.mark.parametrize("name", ["dare", "dare-ties"])
@pytest.mark.parametrize(
    "params",
    [
        {"drop": 1},
        {"drop": 1.5},
        {"drop": -0.1},
        {"drop": float("nan")},
        {"seed": -1},
        {"seed": 0.5},
    ],
)
def test_bad_parameters_are_refused(name, params):
    with pytest.raises(UsageError):
        make_rule(name, 2, params=params)


@pytest.mark.parametrize("density", [0, 1.1])
def test_bad_density_is_refused(density):
    with pytest.raises(UsageError, match="density"):
        make_rule("dare-ties", 2, params={"density": density})
    with pytest.raises(UsageError, match="no parameter"):
        make_rule("dare", 2, params={"density": 0.5})
