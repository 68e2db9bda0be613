"""LoRA-LEGO: rank-one units, clustered by direction."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts
from cgmerge.merge.spectral import numerical_rank


def basis(size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, count, generator=generator).double()).Q


def build(u, s, v):
    return (u * torch.tensor(s).double()) @ v.T


def loras(seed=0, ranks=(2, 4, 3)):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m": (14, 17), "n": (20, 15)}
    return [
        {
            name: LowRank(
                torch.randn(rank, into, generator=generator).double(),
                torch.randn(out, rank, generator=generator).double(),
            )
            for name, (out, into) in shapes.items()
        }
        for rank in ranks
    ]


def dense(experts):
    return [{name: delta.dense() for name, delta in expert.items()} for expert in experts]


def merged(*matrices, weights=None, **params):
    experts = [{"w": matrix} for matrix in matrices]
    return merge_state_dicts("lego", experts, weights=weights, params=params)["w"]


def close(found, expected, tolerance=1e-10):
    scale = float(torch.linalg.norm(expected))
    return float(torch.linalg.norm(found - expected)) <= tolerance * scale


def centroid(units):
    """Mean of [a; b] vectors that agree in sign, at the mean of their lengths (numpy)."""
    units = np.array(units)
    mean = units.mean(axis=0)
    return mean * np.linalg.norm(units, axis=1).mean() / np.linalg.norm(mean)


def turned(matrix, angle, seed):
    """The same kind of matrix with directions turned a little."""
    generator = torch.Generator().manual_seed(seed)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = numerical_rank(matrix)

    def nudge(columns):
        noise = torch.randn(columns.shape, generator=generator).double()
        return torch.linalg.qr(columns + angle * noise).Q * torch.sign(
            torch.linalg.qr(columns + angle * noise).R.diagonal()
        )

    return build(nudge(u[:, :rank]), (s[:rank] * 1.7).tolist(), nudge(vh[:rank].T))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_alike_units_are_averaged_at_their_mean_length(seed):
    first = build(basis(12, 3, 1), [9.0, 5.0, 2.0], basis(10, 3, 2))
    second = turned(first, 0.02, 5)
    found = merged(first, second, rank=3, seed=seed)
    expected = np.zeros((12, 10))
    parts = []
    for matrix in (first, second):
        u, s, vh = np.linalg.svd(matrix.numpy())
        parts.append([np.concatenate([vh[k], u[:, k]]) * np.sqrt(s[k]) for k in range(3)])
    for x, y in zip(*parts, strict=True):  # the k-th of both belong together
        unit = centroid([x, y if x @ y > 0 else -y])
        expected += np.outer(unit[10:], unit[:10])
    assert np.allclose(found.numpy(), expected, atol=1e-10)
    assert numerical_rank(found) == 3


def test_hand_numbers():
    # Two units of lengths √2 and √8 along the same line: their mean length is √2·1.5.
    e = torch.zeros(2, 2).double()
    e[0, 0] = 1.0
    assert torch.allclose(merged(e, 4 * e, rank=1), 2.25 * e)
    assert torch.allclose(merged(e, 4 * e, rank=2), 5 * e)


@pytest.mark.parametrize("rank", [9, 50])
def test_all_units_reproduce_the_sum(rank):
    plain = dense(loras())
    found = merge_state_dicts("lego", plain, params={"rank": rank})
    for name in found:
        assert close(found[name], sum(expert[name] for expert in plain))


def test_all_units_but_one_is_not_the_sum():
    plain = dense(loras())
    found = merge_state_dicts("lego", plain, params={"rank": 8})["m"]
    total = sum(expert["m"] for expert in plain)
    assert not close(found, total, 1e-3)
    assert numerical_rank(found) == 8


def test_the_default_rank_is_the_largest():
    plain = dense(loras())
    assert numerical_rank(merge_state_dicts("lego", plain)["m"]) == 4


@pytest.mark.parametrize("count", [2, 5])
def test_duplicates_come_back(count):
    expert = loras(ranks=(4,))[0]["m"].dense()
    assert close(merged(*[expert] * count), expert)


def test_opposite_experts_with_all_units_cancel():
    expert = loras(ranks=(3,))[0]["m"].dense()
    assert float(merged(expert, -expert, rank=6).abs().max()) < 1e-12
    assert torch.isfinite(merged(expert, -expert)).all()


def test_unrelated_units_are_left_out_not_mixed():
    first, second = torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    first[0, 0], second[1, 1] = 3.0, 2.0
    results = [merged(first, second, rank=1, seed=seed) for seed in range(30)]
    firsts = [close(result, first) for result in results]
    assert all(is_first or close(r, second) for is_first, r in zip(firsts, results, strict=True))
    # The stronger one is drawn more often (3 of 5), so both occur.
    assert 0 < sum(firsts) < 30


def test_the_seed_matters_only_when_it_must():
    plain = dense(loras())
    results = [merge_state_dicts("lego", plain, params={"seed": s})["m"] for s in range(5)]
    again = merge_state_dicts("lego", plain, params={"seed": 3})["m"]
    assert torch.equal(results[3], again)
    assert any(not close(result, results[0], 1e-3) for result in results[1:])


@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("seed", [0, 7])
def test_order_of_experts_does_not_matter(rank, seed):
    plain = dense(loras())
    params = {"rank": rank, "seed": seed}
    expected = merge_state_dicts("lego", plain, params=params)
    found = merge_state_dicts("lego", [plain[i] for i in (2, 0, 1)], params=params)
    assert all(close(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rank", [0, 2, 6])
@pytest.mark.parametrize("ranks", [(2, 4, 3), (6, 5, 7)])
def test_core_equals_dense(rank, ranks):
    experts = loras(ranks=ranks)
    rule = make_rule("lego", 3, params={"rank": rank, "seed": 2})
    merger = Merger(rule, experts, torch.float64)
    expected = merge_state_dicts("lego", dense(experts), params={"rank": rank, "seed": 2})
    for name in expected:
        assert close(merger.dense(name), expected[name])
        exact = merger.factors(name, rank or max(ranks))
        assert close(exact.delta.dense(), expected[name])
        assert exact.error_sq <= 1e-20 * exact.norm_sq  # nothing had to be cut


def test_rotations_go_through():
    plain = dense(loras())
    left, right = basis(14, 14, 1), basis(17, 17, 2)
    turned_experts = [left @ expert["m"] @ right.T for expert in plain]
    expected = left @ merged(*[expert["m"] for expert in plain], rank=3) @ right.T
    assert close(merged(*turned_experts, rank=3), expected)


def test_weights_are_factors_and_zero_leaves_out():
    first, second, third = (expert["m"] for expert in dense(loras()))
    found = merged(first, second, third, weights=[2, -0.5, 0], rank=3)
    assert close(found, merged(2 * first, -0.5 * second, rank=3))
    assert close(found, merged(2 * first, -0.5 * second, torch.zeros_like(first), rank=3))


def test_a_common_factor_goes_through():
    first, second, third = (expert["m"] for expert in dense(loras()))
    expected = merged(first, second, third)
    assert close(merged(*[1e-20 * m for m in (first, second, third)]) * 1e20, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_small_shapes(shape):
    generator = torch.Generator().manual_seed(0)
    experts = [torch.randn(*shape, generator=generator).double() for _ in range(3)]
    assert merged(*experts).shape == shape
    assert close(merged(experts[0]), experts[0])


@pytest.mark.parametrize("params", [{"rank": -1}, {"seed": -1}, {"rank": 1.5}])
def test_bad_parameters_are_refused(params):
    with pytest.raises(UsageError):
        make_rule("lego", 2, params=params)
