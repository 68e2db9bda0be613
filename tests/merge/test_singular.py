"""Rules on singular values of whole matrices: tsv, iso-c, iso-cts, wudi, cart, ctm."""

import numpy as np
import pytest
import scipy.linalg
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts
from cgmerge.merge.spectral import decompose, nearest_orthonormal, numerical_rank

SHAPES = {"m": (14, 17), "n": (20, 15)}
RANKS = (2, 4, 3)
CASES = [
    ("tsv", {}),
    ("iso-c", {}),
    ("iso-c", {"flatten": 0.5}),
    ("iso-c", {"rank": 4}),
    ("iso-cts", {"common": 0.4}),
    ("wudi", {}),
    ("wudi", {"form": "filtered", "steps": 3}),
    ("cart", {"ratio": 0.3, "boost": 0.7}),
    ("ctm", {}),
    ("ctm", {"rank": 3, "inner": "ties", "density": 0.6}),
    ("ctm", {"rank": 5, "inner": "tsv"}),
]
SUMS = [("tsv", {}), ("wudi", {}), ("ctm", {"rank": 9}), ("ctm", {"rank": 9, "inner": "tsv"})]


def loras(seed=0, ranks=RANKS, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: LowRank(
                torch.randn(rank, into, generator=generator).double(),
                torch.randn(out, rank, generator=generator).double(),
            )
            for name, (out, into) in (shapes or SHAPES).items()
        }
        for rank in ranks
    ]


def dense(experts):
    return [{name: delta.dense() for name, delta in expert.items()} for expert in experts]


def full(seed=0, count=3, shape=(9, 7)):
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(*shape, generator=generator).double()} for _ in range(count)]


def merged(method, *matrices, weights=None, **params):
    experts = [{"w": torch.as_tensor(m, dtype=torch.float64)} for m in matrices]
    return merge_state_dicts(method, experts, weights=weights, params=params)["w"]


def gap(found, expected):
    expected = torch.as_tensor(expected)
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


# References, in numpy, from the formulas.


def inverse_root(gram, power=-0.5, cut=1e-12):
    values, basis = np.linalg.eigh(gram)
    kept = values > cut * values[-1]
    return (basis[:, kept] * values[kept] ** power) @ basis[:, kept].T


def whitened(columns):
    return columns @ inverse_root(columns.T @ columns)


def top(matrix, count):
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :count], s[:count], vh[:count].T


def reference_tsv(matrices, kept):
    parts = [top(m, k) for m, k in zip(matrices, kept, strict=True)]
    u, v = (whitened(np.concatenate([p[i] for p in parts], axis=1)) for i in (0, 2))
    return u @ np.diag(np.concatenate([p[1] for p in parts])) @ v.T


def reference_iso_c(matrices, rank):
    total = sum(matrices)
    polar = total @ inverse_root(total.T @ total)
    return polar * np.linalg.norm(total, "nuc") / rank


def reference_iso_cts(matrices, total_rank, common):
    count = len(matrices)
    own = round((total_rank - int(total_rank * common)) / count)
    shared = top(sum(matrices), total_rank - own * count)
    project = np.eye(len(matrices[0])) - shared[0] @ shared[0].T
    parts = [shared] + [top(project @ m, own) for m in matrices]
    u, v = (whitened(np.concatenate([p[i] for p in parts], axis=1)) for i in (0, 2))
    return u @ v.T * np.mean(np.concatenate([p[1] for p in parts]))


def reference_wudi(matrices):
    """The least-squares problem itself, not its normal equations."""
    units = [m / np.linalg.norm(m) for m in matrices]
    inputs = np.concatenate([u.T for u in units], axis=1)
    outputs = np.concatenate([m @ u.T for m, u in zip(matrices, units, strict=True)], axis=1)
    return np.linalg.lstsq(inputs.T, outputs.T, rcond=1e-10)[0].T


def reference_flow(matrices, time):
    """Gradient flow of the same loss from the sum, through the matrix exponential."""
    total = sum(matrices)
    best = reference_wudi(matrices)
    units = [m / np.linalg.norm(m) for m in matrices]
    return best + (total - best) @ scipy.linalg.expm(-time * sum(u.T @ u for u in units))


def reference_cart(matrices, ratio, boost, rank):
    mean = sum(matrices) / len(matrices)
    kept = int(np.ceil(ratio * rank))
    parts = [top(m - mean, kept) for m in matrices]
    return mean + boost * sum(u @ np.diag(s) @ v.T for u, s, v in parts)


def reference_bases(matrices, rank):
    units = [m / np.linalg.norm(m) for m in matrices]
    left = np.linalg.svd(np.concatenate(units, axis=1))[0][:, :rank]
    right = np.linalg.svd(np.concatenate([u.T for u in units], axis=1))[0][:, :rank]
    return left, right


def reference_ties(small, density):
    kept = int(density * small[0].size)
    trimmed = []
    for m in small:
        order = np.argsort(-np.abs(m), axis=None)[:kept]
        mask = np.zeros(m.size, dtype=bool)
        mask[order] = True
        trimmed.append(np.where(mask.reshape(m.shape), m, 0))
    stacked = np.array(trimmed)
    agree = (stacked * np.sign(stacked.sum(axis=0))) > 0
    return (stacked * agree).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)


def arrays(experts, name):
    return [delta[name].numpy() for delta in experts]


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("seed", [0, 1])
def test_against_references_on_lora(name, seed):
    plain = dense(loras(seed))
    matrices = arrays(plain, name)

    def of(method, **params):
        return merge_state_dicts(method, plain, params=params)[name]

    assert gap(of("tsv"), reference_tsv(matrices, RANKS)) < 1e-9
    assert gap(of("iso-c"), reference_iso_c(matrices, 9)) < 1e-9
    assert gap(of("iso-c", flatten=0), sum(matrices)) < 1e-9
    assert gap(of("iso-cts", common=0.4), reference_iso_cts(matrices, 9, 0.4)) < 1e-9
    assert gap(of("wudi"), reference_wudi(matrices)) < 1e-8
    found = of("wudi", form="filtered", ratio=1.0, steps=2)
    assert gap(found, reference_flow(matrices, 2)) < 1e-8
    found = of("cart", ratio=0.3, boost=0.7)
    assert gap(found, reference_cart(matrices, 0.3, 0.7, 9)) < 1e-9
    left, right = reference_bases(matrices, 4)
    small = [left.T @ m @ right for m in matrices]
    assert gap(of("ctm"), left @ sum(small) @ right.T) < 1e-9
    found = of("ctm", inner="ties", density=0.5)
    assert gap(found, left @ reference_ties(small, 0.5) @ right.T) < 1e-9
    found = of("ctm", inner="tsv")
    assert gap(found, left @ reference_tsv(small, (1, 1, 1)) @ right.T) < 1e-8


def test_against_references_on_full_matrices():
    experts = full()
    matrices = arrays(experts, "w")

    def of(method, **params):
        return merge_state_dicts(method, experts, params=params)["w"]

    assert gap(of("tsv"), reference_tsv(matrices, (2, 2, 2))) < 1e-9
    assert gap(of("iso-c"), reference_iso_c(matrices, 7)) < 1e-9
    assert gap(of("iso-cts", common=0.5), reference_iso_cts(matrices, 7, 0.5)) < 1e-9
    assert gap(of("wudi"), reference_wudi(matrices)) < 1e-8
    assert gap(of("cart", ratio=0.3), reference_cart(matrices, 0.3, 1, 7)) < 1e-9


def test_swudi_moves_only_the_strong_directions():
    experts = full(shape=(5, 6), count=2)
    matrices = arrays(experts, "w")
    found = merge_state_dicts(
        "wudi", experts, params={"form": "filtered", "ratio": 0.5, "steps": 7}
    )["w"].numpy()
    units = [m / np.linalg.norm(m) for m in matrices]
    basis = np.linalg.eigh(sum(u.T @ u for u in units))[1]
    weak, strong = basis[:, :3], basis[:, 3:]
    assert np.allclose(found @ weak, sum(matrices) @ weak, atol=1e-10)
    assert np.allclose(found @ strong, reference_flow(matrices, 7) @ strong, atol=1e-10)


def test_swudi_ends():
    experts = full(count=2)
    base = {"form": "filtered", "ratio": 1.0}
    still = merge_state_dicts("wudi", experts, params={**base, "steps": 0})["w"]
    assert gap(still, experts[0]["w"] + experts[1]["w"]) < 1e-12
    none = merge_state_dicts("wudi", experts, params={"form": "filtered", "ratio": 0.0})["w"]
    assert gap(none, experts[0]["w"] + experts[1]["w"]) < 1e-12
    far = merge_state_dicts("wudi", experts, params={**base, "steps": 10_000_000})["w"]
    assert gap(far, merge_state_dicts("wudi", experts)["w"]) < 1e-9


DIAG = (np.diag([3.0, 0.0]), np.diag([0.0, 1.0]))


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("task-arithmetic", {}, [3, 1]),
        ("iso-c", {}, [2, 2]),
        ("iso-c", {"flatten": 0.5}, [2.5, 1.5]),
        ("iso-c", {"rank": 1}, [3, 0]),  # the rank-1 SVD of the sum
        ("iso-cts", {"common": 1.0}, [2, 2]),
        ("tsv", {}, [3, 1]),
        ("wudi", {}, [3, 1]),
        ("wudi", {"form": "filtered"}, [3, 1]),
        ("ctm", {"rank": 2}, [3, 1]),
        ("cart", {"ratio": 1.0}, [1.5, 0.5]),
    ],
)
def test_shared_hand_numbers(method, params, expected):
    found = merged(method, *DIAG, **params)
    assert torch.allclose(found, torch.diag(torch.tensor(expected).double()), atol=1e-12)


def test_iso_cts_hand_numbers():
    # Nothing common: each expert gives its top direction; values are their mean.
    found = merged("iso-cts", *DIAG, common=0.0)
    assert torch.allclose(found, torch.diag(torch.tensor([2.0, 2.0]).double()), atol=1e-12)


def test_wudi_hand_numbers():
    assert torch.allclose(merged("wudi", [[1, 0]], [[1, 1]]), torch.ones(1, 2).double())


def test_iso_keeps_the_nuclear_norm_and_may_leave_a_little_order():
    sums = sum(expert["w"] for expert in full())
    found = merge_state_dicts("iso-c", full(), params={"flatten": 0.99})["w"]
    values, before = torch.linalg.svdvals(found), torch.linalg.svdvals(sums)
    assert float(values.sum()) == pytest.approx(float(before.sum()))
    assert torch.allclose(values, 0.99 * before.mean() + 0.01 * before, atol=1e-10)
    # A lower rank therefore keeps the leading directions of the sum.
    lead = torch.linalg.svd(sums).U[:, :2]
    assert torch.linalg.norm(lead.T @ torch.linalg.svd(found).U[:, :2]) ** 2 == pytest.approx(2)


@pytest.mark.parametrize("method", ["iso-c", "iso-cts"])
def test_only_iso_at_its_default_has_no_leading_directions(method):
    assert make_rule(method, 2).even
    assert not make_rule(method, 2, params={"flatten": 0.99}).even
    assert not make_rule("tsv", 2).even


def rotations(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(n, n, generator=generator).double()).Q for n in shape]


@pytest.mark.parametrize(("method", "params"), CASES)
def test_rotations_go_through(method, params):
    plain = dense(loras())
    left, right = rotations(SHAPES["m"], 3)
    turned = [{"m": left @ expert["m"] @ right.T} for expert in plain]
    expected = left @ merge_state_dicts(method, plain, params=params)["m"] @ right.T
    assert gap(merge_state_dicts(method, turned, params=params)["m"], expected) < 1e-10


@pytest.mark.parametrize(("method", "params"), CASES)
@pytest.mark.parametrize("ranks", [RANKS, (6, 5, 7), (1, 1, 1)])
def test_core_equals_dense(method, params, ranks):
    """Also where the ranks together exceed the matrix, (6, 5, 7)."""
    experts = loras(ranks=ranks)
    merger = Merger(make_rule(method, 3, params=params), experts, torch.float64)
    expected = merge_state_dicts(method, dense(experts), params=params)
    for name in SHAPES:
        assert gap(merger.dense(name), expected[name]) < 1e-10
        assert gap(merger.factors(name, 99).delta.dense(), expected[name]) < 1e-10


@pytest.mark.parametrize(("method", "params"), CASES)
def test_padding_with_zero_rows_and_columns_changes_nothing(method, params):
    plain = dense(loras(shapes={"w": (8, 6)}, ranks=(2, 1)))
    padded = [{"w": torch.nn.functional.pad(expert["w"], (0, 5, 0, 9))} for expert in plain]
    found = merge_state_dicts(method, padded, params=params)["w"]
    assert gap(found[:8, :6], merge_state_dicts(method, plain, params=params)["w"]) < 1e-10
    assert float(found[8:].abs().max()) < 1e-10


@pytest.mark.parametrize(("method", "params"), CASES)
def test_ranks_are_bounded_by_the_sum(method, params):
    found = merge_state_dicts(method, dense(loras(shapes={"w": (25, 30)})), params=params)["w"]
    bound = params.get("rank", 4) if method == "ctm" else params.get("rank", 9)
    assert numerical_rank(found) <= bound


@pytest.mark.parametrize(("method", "params"), SUMS)
def test_orthogonal_spaces_are_summed(method, params):
    experts = loras(shapes={"w": (12, 13)})
    total = torch.zeros(12, 13).double()
    blocks, row = [], 0
    for rank, expert in zip(RANKS, experts, strict=True):
        own = torch.zeros(12, 13).double()
        own[row : row + rank, row : row + rank] = expert["w"].dense()[:rank, :rank]
        row += rank
        blocks.append(own)
        total += own
    assert gap(merged(method, *blocks, **params), total) < 1e-10


@pytest.mark.parametrize(
    ("method", "factor"),
    [("tsv", 1), ("wudi", 1), ("cart", 1), ("ctm", 2), ("iso-c", None)],
)
def test_duplicates(method, factor):
    expert = loras(ranks=(4,))[0]["m"].dense()
    found = merged(method, expert, expert)
    if factor is None:
        assert gap(found, 2 * merged(method, expert)) < 1e-10
    else:
        assert gap(found, factor * expert) < 1e-9


def test_tsv_duplicates_with_rounding_errors_are_still_one():
    expert = loras(ranks=(4,))[0]["m"]
    single = {"m": LowRank(expert.a.float(), expert.b.float())}
    mix = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) + 3 * torch.eye(4)
    other = {"m": LowRank(torch.linalg.solve(mix, single["m"].a), single["m"].b @ mix)}
    found = Merger(make_rule("tsv", 2), [single, other]).dense("m").double()
    assert gap(found, expert.dense()) < 1e-5


@pytest.mark.parametrize(("method", "params"), CASES)
def test_opposite_experts(method, params):
    expert = loras(ranks=(4,))[0]["m"].dense()
    found = merged(method, expert, -expert, **params)
    assert torch.isfinite(found).all()
    assert float(found.abs().max()) < 1e-9 * float(expert.abs().max())


def test_cart_with_all_directions_is_the_average():
    experts = full()
    mean = sum(expert["w"] for expert in experts) / 3
    for boost in (0.0, 1.0, 5.0):
        found = merge_state_dicts("cart", experts, params={"ratio": 1.0, "boost": boost})["w"]
        assert gap(found, mean) < 1e-12
    assert gap(merge_state_dicts("cart", experts, params={"ratio": 0.0})["w"], mean) < 1e-12


@pytest.mark.parametrize(("method", "params"), CASES)
def test_a_zero_expert_or_weight_zero_leaves_it_out(method, params):
    if method == "cart":
        pytest.skip("the average counts every expert")
    first, second, third = (expert["m"] for expert in dense(loras()))
    expected = merged(method, first, second, **params)
    zero = torch.zeros_like(first)
    assert gap(merged(method, first, zero, second, **params), expected) < 1e-12
    found = merged(method, first, third, second, weights=[1, 0, 1], **params)
    assert gap(found, expected) < 1e-12


@pytest.mark.parametrize(("method", "params"), CASES)
def test_weights_are_factors_on_the_experts(method, params):
    first, second, third = (expert["m"] for expert in dense(loras()))
    found = merged(method, first, second, third, weights=[2, -0.5, 1], **params)
    if params.get("inner") == "ties":
        again = merged(method, first, second, third, weights=[4, -1, 2], **params)
        assert gap(found, again) < 1e-10
    elif method == "cart":
        again = merged(method, first, second, third, weights=[4, -1, 2], **params)
        assert gap(found, again) < 1e-10
        assert gap(found, merged(method, first, second, third, **params)) > 1e-3
    else:
        assert gap(found, merged(method, 2 * first, -0.5 * second, third, **params)) < 1e-10


def test_cart_weights():
    first, second = (expert["w"] for expert in full(count=2))
    twice = merged("cart", first, first, second, ratio=0.3)
    found = merged("cart", first, second, weights=[2, 1], ratio=0.3, boost=1.5)
    assert gap(found, twice) < 1e-10


@pytest.mark.parametrize(("method", "params"), CASES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
def test_small_shapes(method, params, shape):
    experts = full(count=4, shape=shape)
    found = merge_state_dicts(method, experts, params=params)["w"]
    assert found.shape == shape and torch.isfinite(found).all()
    assert float(found.abs().max()) > 0


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("method", ["tsv", "iso-c", "iso-cts", "wudi", "cart", "ctm"])
def test_any_size_of_deltas(method, size):
    experts = [expert["w"] for expert in full()]
    found = merged(method, *[size * matrix for matrix in experts])
    assert gap(found / size, merged(method, *experts)) < 1e-9


def test_ctm_has_the_rank_that_was_asked_for():
    plain = dense(loras(shapes={"w": (25, 30)}))
    for rank, expected in ((0, 4), (1, 1), (7, 7), (99, 9)):
        found = merge_state_dicts("ctm", plain, params={"rank": rank})["w"]
        assert numerical_rank(found) == expected
        # Each of three experts gets a third of the directions.
        params = {"rank": rank, "inner": "tsv"}
        found = merge_state_dicts("ctm", plain, params=params)["w"]
        assert numerical_rank(found) == {4: 3, 1: 1, 7: 6, 9: 9}[expected]
    total = sum(expert["w"] for expert in plain)
    assert gap(merge_state_dicts("ctm", plain, params={"rank": 9})["w"], total) < 1e-10


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("iso-c", {"flatten": 1.1}),
        ("iso-c", {"rank": -1}),
        ("iso-cts", {"common": 1.5}),
        ("wudi", {"form": "adam"}),
        ("wudi", {"ratio": 65}),
        ("cart", {"ratio": -0.1}),
        ("ctm", {"inner": "dare"}),
        ("ctm", {"density": 0}),
        ("tsv", {"rank": 3}),
    ],
)
def test_bad_parameters_are_refused(method, params):
    with pytest.raises(UsageError):
        make_rule(method, 2, params=params)


def test_cart_refuses_weights_that_cancel():
    with pytest.raises(UsageError, match="sum to zero"):
        merged("cart", [[1, 0]], [[0, 1]], weights=[1, -1])


def test_decompose_drops_rounding_errors():
    exact = loras(ranks=(3,))[0]["m"].dense()
    found = decompose(exact.float().double())
    assert found.s.numel() == numerical_rank(exact.float().double()) == 3
    assert gap((found.u * found.s) @ found.v.T, exact) < 1e-6
    assert decompose(torch.zeros(3, 4).double()).s.numel() == 0
    assert numerical_rank(torch.zeros(0, 4).double()) == 0


def test_nearest_orthonormal():
    columns = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double()
    found = nearest_orthonormal(columns)
    assert torch.allclose(found.T @ found, torch.eye(4).double(), atol=1e-12)
    assert torch.allclose(found, torch.from_numpy(whitened(columns.numpy())), atol=1e-12)
    wide = nearest_orthonormal(columns.T)
    assert torch.allclose(wide @ wide.T, torch.eye(4).double(), atol=1e-12)
    equal = nearest_orthonormal(columns[:, :1].repeat(1, 2))
    assert torch.allclose(equal[:, 0], equal[:, 1])
    assert float(torch.linalg.norm(equal)) == pytest.approx(1.0)
