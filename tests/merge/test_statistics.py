"""Rules that use statistics of data: regmean, mats, fisher."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts

SHAPES = {"m": (6, 9), "n": (12, 5)}


def data(seed=0, count=3, samples=30, dead=()):
    """Experts (LoRA), their inputs, and input Gram matrices, float64."""
    generator = torch.Generator().manual_seed(seed)
    experts, inputs, grams = [], [], []
    for rank in range(2, 2 + count):
        experts.append({})
        inputs.append({})
        grams.append({})
        for name, (out, into) in SHAPES.items():
            a = torch.randn(rank, into, generator=generator).double()
            b = torch.randn(out, rank, generator=generator).double()
            experts[-1][name] = LowRank(a, b)
            mix = torch.randn(into, into, generator=generator).double()
            x = torch.randn(samples, into, generator=generator).double() @ mix
            x[:, list(dead)] = 0
            inputs[-1][name] = x
            grams[-1][name] = x.T @ x / samples
    return experts, inputs, grams


def dense(experts):
    return [{name: delta.dense() for name, delta in expert.items()} for expert in experts]


def importance(seed=0, count=3):
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        {name: torch.rand(*shape, generator=generator).double() for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def merged(method, matrices, stats, weights=None, **params):
    experts = [{"w": torch.as_tensor(m).double()} for m in matrices]
    known = [{} if s is None else {"w": torch.as_tensor(s).double()} for s in stats]
    return merge_state_dicts(method, experts, weights=weights, params=params, stats=known)["w"]


def close(found, expected, tolerance=1e-8):
    expected = torch.as_tensor(expected)
    return float(torch.linalg.norm(found - expected)) <= tolerance * float(
        torch.linalg.norm(expected)
    )


HAND = ([[[1.0, 0.0]], [[0.0, 1.0]]], [[[2.0, 1.0], [1.0, 2.0]], [[2.0, -1.0], [-1.0, 2.0]]])


@pytest.mark.parametrize(
    ("alpha", "expected"), [(1.0, [0.25, 0.75]), (0.5, [0.375, 0.625]), (0.0, [0.5, 0.5])]
)
def test_regmean_hand_numbers(alpha, expected):
    assert merged("regmean", *HAND, alpha=alpha)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("start", ["average", "sum"])
def test_mats_hand_numbers(start):
    assert merged("mats", *HAND, start=start)[0].tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.0)])
def test_regmean_on_whole_weights(alpha, weights):
    """The base cancels: merging weights as the paper does gives base plus merged delta."""
    experts, _, grams = data()
    options = {"weights": weights, "params": {"alpha": alpha}, "stats": grams}
    found = merge_state_dicts("regmean", dense(experts), **options)
    for name, shape in SHAPES.items():
        base = np.random.default_rng(0).normal(size=shape)
        top, bottom = np.zeros(shape), 0
        for expert, gram, weight in zip(dense(experts), grams, weights, strict=True):
            g = gram[name].numpy()
            g = weight * (alpha * g + (1 - alpha) * np.diag(np.diag(g)))
            top = top + (base + expert[name].numpy()) @ g
            bottom = bottom + g
        assert close(found[name], top @ np.linalg.inv(bottom) - base)


def test_regmean_at_one_is_least_squares_on_the_inputs():
    experts, inputs, grams = data()
    found = merge_state_dicts("regmean", dense(experts), params={"alpha": 1.0}, stats=grams)
    for name in SHAPES:
        x = torch.cat([one[name] for one in inputs])
        y = torch.cat(
            [one[name] @ e[name].T for one, e in zip(inputs, dense(experts), strict=True)]
        )
        assert close(found[name], torch.linalg.lstsq(x, y).solution.T)


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_dead_inputs_keep_the_average(alpha):
    experts, _, grams = data(dead=(1, 3))
    plain = dense(experts)
    found = merge_state_dicts("regmean", plain, params={"alpha": alpha}, stats=grams)["m"]
    mean = sum(expert["m"] for expert in plain) / 3
    assert torch.allclose(found[:, [1, 3]], mean[:, [1, 3]], atol=1e-12)
    alive = [0, 2, 4, 5, 6, 7, 8]
    small = [{"m": expert["m"][:, alive]} for expert in plain]
    part = [{"m": gram["m"][alive][:, alive]} for gram in grams]
    expected = merge_state_dicts("regmean", small, params={"alpha": alpha}, stats=part)["m"]
    assert close(found[:, alive], expected)


def test_regmean_with_few_samples_still_solves_the_system():
    """Fewer inputs than features: the Gram matrices are singular, their sum too."""
    experts, inputs, grams = data(samples=2)
    plain = dense(experts)
    found = merge_state_dicts("regmean", plain, params={"alpha": 1.0}, stats=grams)["m"]
    left = found @ sum(gram["m"] for gram in grams)
    right = sum(e["m"] @ gram["m"] for e, gram in zip(plain, grams, strict=True))
    assert close(left, right)
    # Six inputs in nine dimensions: each expert's outputs are met exactly.
    for one, expert in zip(inputs, plain, strict=True):
        assert close(one["m"] @ found.T, one["m"] @ expert["m"].T, 1e-6)


def test_regmean_of_inputs_of_very_different_size():
    experts, _, grams = data()
    size = torch.logspace(-4, 4, 9).double()
    scaled = [{"m": expert["m"] / size} for expert in dense(experts)]
    stats = [{"m": gram["m"] * size[:, None] * size} for gram in grams]
    for alpha in (0.9, 1.0):
        params = {"alpha": alpha}
        expected = merge_state_dicts("regmean", dense(experts), params=params, stats=grams)["m"]
        found = merge_state_dicts("regmean", scaled, params=params, stats=stats)["m"]
        assert close(found * size, expected)


def reference_cg(matrices, grams, iterations, start):
    """The same steps by scipy, on the flattened weights."""
    shape = matrices[0].shape
    total = sum(grams)
    wanted = sum(m @ g for m, g in zip(matrices, grams, strict=True)).ravel()
    system = scipy.sparse.linalg.LinearOperator(
        (wanted.size, wanted.size), matvec=lambda x: (x.reshape(shape) @ total).ravel()
    )
    options = {"x0": start.ravel(), "rtol": 0.0, "atol": 0.0, "maxiter": iterations}
    return scipy.sparse.linalg.cg(system, wanted, **options)[0].reshape(shape)


@pytest.mark.parametrize("start", ["average", "sum"])
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_mats_takes_the_steps_of_scipy(start, iterations):
    experts, _, grams = data()
    params = {"start": start, "iterations": iterations}
    found = merge_state_dicts("mats", dense(experts), params=params, stats=grams)
    for name in SHAPES:
        matrices = [expert[name].numpy() for expert in dense(experts)]
        origin = sum(matrices) / (3 if start == "average" else 1)
        stats = [gram[name].numpy() for gram in grams]
        assert close(found[name], reference_cg(matrices, stats, iterations, origin), 1e-9)


@pytest.mark.parametrize("start", ["average", "sum"])
def test_mats_converges_to_regmean(start):
    experts, _, grams = data()
    params = {"start": start, "iterations": 500}
    found = merge_state_dicts("mats", dense(experts), params=params, stats=grams)
    expected = merge_state_dicts("regmean", dense(experts), params={"alpha": 1.0}, stats=grams)
    few = merge_state_dicts("mats", dense(experts), params={**params, "iterations": 2}, stats=grams)
    for name in SHAPES:
        assert close(found[name], expected[name], 2e-7)
        assert not close(few[name], expected[name], 1e-2)


def test_mats_keeps_its_start_where_there_are_no_inputs():
    experts, _, grams = data(dead=(2,))
    plain = dense(experts)
    total = sum(expert["m"] for expert in plain)
    for start, share in (("average", 1 / 3), ("sum", 1.0)):
        found = merge_state_dicts("mats", plain, params={"start": start}, stats=grams)["m"]
        assert torch.allclose(found[:, 2], share * total[:, 2], atol=1e-12)
        still = {"start": start, "iterations": 0}
        found = merge_state_dicts("mats", plain, params=still, stats=grams)["m"]
        assert close(found, share * total, 1e-12)
        nothing = [{name: torch.zeros_like(g) for name, g in gram.items()} for gram in grams]
        found = merge_state_dicts("mats", plain, params={"start": start}, stats=nothing)["m"]
        assert close(found, share * total, 1e-12)


@pytest.mark.parametrize(
    ("method", "params"),
    [("regmean", {}), ("regmean", {"alpha": 1.0}), ("mats", {}), ("mats", {"iterations": 3})],
)
def test_factors_equal_dense_and_output_rotations_go_through(method, params):
    experts, _, grams = data()
    expected = merge_state_dicts(method, dense(experts), params=params, stats=grams)
    merger = Merger(make_rule(method, 3, params=params), experts, torch.float64, stats=grams)
    for name in SHAPES:
        assert close(merger.dense(name), expected[name], 1e-10)
        assert close(merger.factors(name, 99).delta.dense(), expected[name], 1e-10)
    generator = torch.Generator().manual_seed(8)
    left = torch.linalg.qr(torch.randn(6, 6, generator=generator).double()).Q
    turned = [{"m": left @ expert["m"]} for expert in dense(experts)]
    found = merge_state_dicts(method, turned, params=params, stats=grams)["m"]
    assert close(found, left @ expected["m"], 1e-10)


FISHER = ([[[1.0, 2.0]], [[3.0, 6.0]]], [[[3.0, 0.0]], [[1.0, 0.0]]])


def test_fisher_hand_numbers():
    assert merged("fisher", *FISHER)[0].tolist() == pytest.approx([1.5, 4.0])
    assert merged("fisher", *FISHER, floor=0)[0].tolist() == pytest.approx([1.5, 4.0])
    absolute = merged("fisher", *FISHER, floor=2.0, floor_kind="absolute")
    assert absolute[0].tolist() == pytest.approx([(3 * 1 + 2 * 3) / 5, 4.0])
    relative = merged("fisher", *FISHER, floor=0.5)  # half of the largest, 1.5
    assert relative[0].tolist() == pytest.approx([(3 * 1 + 1.5 * 3) / 4.5, 4.0])


def test_fisher_normalize_hand_numbers():
    stats = [[[3.0, 4.0]], [[0.6, 0.8]]]
    assert merged("fisher", FISHER[0], stats, normalize=True)[0].tolist() == pytest.approx([2, 4])
    assert merged("fisher", FISHER[0], stats)[0].tolist() != pytest.approx([2, 4])
    zero = [[[3.0, 4.0]], [[0.0, 0.0]]]
    found = merged("fisher", FISHER[0], zero, normalize=True, floor=0)
    assert found[0].tolist() == pytest.approx([1, 2])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.0)])
def test_fisher_on_whole_weights(weights):
    experts, _, _ = data()
    stats = importance()
    found = merge_state_dicts("fisher", dense(experts), weights=weights, stats=stats)
    for name, shape in SHAPES.items():
        base = np.random.default_rng(0).normal(size=shape)
        f = np.array([w * one[name].numpy() for w, one in zip(weights, stats, strict=True)])
        whole = np.array([base + expert[name].numpy() for expert in dense(experts)])
        assert close(found[name], (f * whole).sum(axis=0) / f.sum(axis=0) - base, 1e-6)


def test_fisher_zero_everywhere_is_the_average():
    zeros = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 3
    experts, _, _ = data()
    for floor in (0.0, 1e-8):
        params = {"floor": floor}
        found = merge_state_dicts("fisher", dense(experts), params=params, stats=zeros)
        for name in SHAPES:
            assert close(found[name], sum(expert[name] for expert in dense(experts)) / 3)


def test_fisher_takes_the_expert_that_alone_matters():
    found = merged("fisher", [[[5.0, -1.0]], [[9.0, 9.0]]], [[[1e-3, 1e-3]], [[0.0, 0.0]]])
    assert found[0].tolist() == pytest.approx([5, -1], abs=1e-6)


def test_fisher_does_not_depend_on_the_size_of_gradients():
    experts, _, _ = data()
    small = [{name: f * 1e-25 for name, f in one.items()} for one in importance()]
    expected = merge_state_dicts("fisher", dense(experts), stats=importance())
    found = merge_state_dicts("fisher", dense(experts), stats=small)
    assert all(close(found[name], expected[name]) for name in SHAPES)


def test_fisher_shapes_of_convolutions():
    generator = torch.Generator().manual_seed(0)
    plain = [{"w": torch.randn(2, 3, 4, generator=generator).double()} for _ in range(2)]
    stats = [{"w": torch.rand(2, 3, 4, generator=generator)} for _ in range(2)]
    found = merge_state_dicts("fisher", plain, stats=stats)["w"]
    f = [one["w"].double() for one in stats]
    expected = (f[0] * plain[0]["w"] + f[1] * plain[1]["w"]) / (f[0] + f[1])
    assert close(found, expected, 1e-6)


RULES = [("regmean", {}), ("mats", {}), ("mats", {"start": "sum"}), ("fisher", {})]


def stats_of(method, count=3):
    return importance(count=count) if method == "fisher" else data(count=count)[2]


@pytest.mark.parametrize(("method", "params"), RULES)
def test_one_expert_and_duplicates_come_back(method, params):
    experts, _, _ = data()
    plain = dense(experts)
    stats = stats_of(method)
    one = merge_state_dicts(method, plain[:1], params=params, stats=stats[:1])
    same = merge_state_dicts(method, plain[:1] * 3, params=params, stats=stats)
    for name in SHAPES:
        assert close(one[name], plain[0][name], 1e-12)
        assert close(same[name], plain[0][name], 1e-9)


@pytest.mark.parametrize(("method", "params"), RULES)
def test_opposite_experts_with_the_same_statistics_cancel(method, params):
    plain = dense(data()[0])[0]
    stats = stats_of(method)
    opposite = {name: -value for name, value in plain.items()}
    found = merge_state_dicts(method, [plain, opposite], params=params, stats=[stats[0]] * 2)
    assert all(float(value.abs().max()) < 1e-12 for value in found.values())


@pytest.mark.parametrize(("method", "params"), RULES)
def test_only_the_ratio_of_weights_counts_and_zero_leaves_out(method, params):
    plain, stats = dense(data()[0]), stats_of(method)
    found = merge_state_dicts(method, plain, weights=[4, 2, 6], params=params, stats=stats)
    expected = merge_state_dicts(method, plain, weights=[2, 1, 3], params=params, stats=stats)
    assert all(close(found[name], expected[name], 1e-10) for name in SHAPES)
    if params.get("start") == "sum":
        return  # a converged start does not matter, an expert without weight still counts in it
    without = merge_state_dicts(method, plain[:2], params=params, stats=stats[:2])
    found = merge_state_dicts(method, plain, weights=[1, 1, 0], params=params, stats=stats)
    assert all(close(found[name], without[name], 1e-9) for name in SHAPES)


@pytest.mark.parametrize(("method", "params"), RULES)
@pytest.mark.parametrize("missing", [(1,), (0, 1, 2)])
def test_a_module_without_statistics_is_averaged(method, params, missing):
    plain, stats = dense(data()[0]), stats_of(method)
    known = [{"n": s["n"]} if i in missing else s for i, s in enumerate(stats)]
    found = merge_state_dicts(method, plain, weights=[2, 1, 1], params=params, stats=known)
    mean = (2 * plain[0]["m"] + plain[1]["m"] + plain[2]["m"]) / 4
    assert close(found["m"], mean, 1e-12)
    full = merge_state_dicts(method, plain, weights=[2, 1, 1], params=params, stats=stats)
    assert close(found["n"], full["n"], 1e-12)


@pytest.mark.parametrize(("method", "params"), RULES)
def test_statistics_are_not_modified_and_may_be_float32(method, params):
    plain, stats = dense(data()[0]), stats_of(method)
    single = [{name: value.float() for name, value in one.items()} for one in stats]
    copies = [{name: value.clone() for name, value in one.items()} for one in stats]
    expected = merge_state_dicts(method, plain, params=params, stats=stats)
    found = merge_state_dicts(method, plain, params=params, stats=single)
    for name in SHAPES:
        assert close(found[name], expected[name], 1e-3)
    for one, copy in zip(stats, copies, strict=True):
        assert all(torch.equal(one[name], copy[name]) for name in SHAPES)


@pytest.mark.parametrize("method", ["regmean", "mats", "fisher"])
def test_statistics_of_another_shape_are_refused(method):
    stats = [[[1.0, 0.0, 0.0]] * 3] * 2
    with pytest.raises(Incompatible, match=r"shape \[3, 3\]"):
        merged(method, HAND[0], stats)


@pytest.mark.parametrize("method", ["regmean", "mats", "fisher"])
@pytest.mark.parametrize("weights", [[1, -0.5], [0, 0]])
def test_weights_that_make_no_sense_are_refused(method, weights):
    stats = FISHER[1] if method == "fisher" else HAND[1]
    with pytest.raises(UsageError, match="negative|sum to zero"):
        merged(method, HAND[0], stats, weights=weights)


@pytest.mark.parametrize("method", ["regmean", "mats", "fisher"])
def test_statistics_are_needed(method):
    with pytest.raises(UsageError, match="statistics"):
        merge_state_dicts(method, [{"w": torch.ones(1, 2)}])
    with pytest.raises(UsageError, match="statistics"):
        make_rule(f"core+{method}", 2)


@pytest.mark.parametrize("method", ["regmean", "mats", "fisher"])
def test_single_entries(method):
    found = merged(method, [[[2.0]], [[4.0]]], [[[3.0]], [[1.0]]])
    assert found.tolist() == [[pytest.approx(2.5)]]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("regmean", {"alpha": 1.1}),
        ("regmean", {"alpha": -0.1}),
        ("mats", {"iterations": -1}),
        ("mats", {"start": "zero"}),
        ("fisher", {"floor": -1.0}),
        ("fisher", {"floor_kind": "none"}),
    ],
)
def test_bad_parameters_are_refused(method, params):
    with pytest.raises(UsageError):
        make_rule(method, 2, params=params)


def test_regmean_does_not_divide_by_rounding_errors():
    experts, _, grams = data(samples=2)
    plain = dense(experts)
    noisy = [{"m": g["m"] + 1e-9 * torch.diag(g["m"].diagonal())} for g in grams]
    expected = merge_state_dicts("regmean", plain, params={"alpha": 1.0}, stats=grams)["m"]
    found = merge_state_dicts("regmean", plain, params={"alpha": 1.0}, stats=noisy)["m"]
    assert close(found, expected, 1e-4)
