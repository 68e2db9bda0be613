"""Rules on inner products: slerp, nuslerp, multi-slerp, karcher, model-stock."""

import math

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, make_rule, merge_state_dicts

FAMILY = ["slerp", "nuslerp", "multi-slerp", "karcher", "model-stock"]


def merged(method, *rows, weights=None, **params):
    experts = [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]
    return merge_state_dicts(method, experts, weights=weights, params=params)["w"].tolist()


def loras(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shared = {"m": torch.randn(1, 11, generator=generator).double()}
    result = []
    for rank in range(2, 2 + count):
        a = torch.randn(rank, 11, generator=generator).double()
        a[0] += 2 * shared["m"][0]  # some agreement, so that angles differ
        b = torch.randn(8, rank, generator=generator).double()
        n = LowRank(torch.randn(1, 3, generator=generator).double(), b[:4, :1])
        result.append({"m": LowRank(a, b), "n": n})
    return result


def dense(experts):
    return [{name: d.dense() for name, d in expert.items()} for expert in experts]


def flat(experts, name):
    return [expert[name].dense().numpy().ravel() for expert in experts]


def arc(x, y, t):
    """Slerp without a cosine formula: turn x towards y inside their plane, then undo lengths."""
    e1 = x / np.linalg.norm(x)
    rest = y - (y @ e1) * e1
    e2 = rest / np.linalg.norm(rest)
    angle = math.atan2(y @ e2, y @ e1)
    # The point at angle t·θ of the unit circle, written as p·e1 + q·u with u = y/‖y‖.
    q = math.sin(t * angle) / math.sin(angle)
    p = math.cos(t * angle) - q * math.cos(angle)
    return p * x + q * y


def reference(method, vectors, weights):
    vectors = np.array(vectors)
    p = np.array(weights) / sum(weights)
    norms = np.linalg.norm(vectors, axis=1)
    units = vectors / norms[:, None]
    if method == "slerp":
        return arc(weights[0] * vectors[0], weights[1] * vectors[1], 0.5)
    if method == "nuslerp":
        return arc(vectors[0], vectors[1], p[1])
    if method == "model-stock":
        count = len(vectors)
        pairs = [units[i] @ units[j] for i in range(count) for j in range(i)]
        c = max(0.0, np.mean(pairs))
        return count * c / (1 + (count - 1) * c) * (p @ vectors)
    mean = p @ units
    mean /= np.linalg.norm(mean)
    if method == "multi-slerp":  # with the tangent step of the original, which must not matter
        v = p @ (units - (units @ mean)[:, None] * mean)
        size = np.linalg.norm(v)
        return (mean * np.cos(size) + (v * np.sin(size) / size if size > 0 else 0)) * (p @ norms)
    for _ in range(2000):
        angles = np.arccos(np.clip(units @ mean, -1, 1))
        logs = (units - (units @ mean)[:, None] * mean) * (angles / np.sin(angles))[:, None]
        mean = mean + 0.5 * (p @ logs)  # a plain gradient step, back onto the sphere
        mean /= np.linalg.norm(mean)
    return mean * (p @ norms)


@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.5)])
def test_against_dense_vectors(method, weights):
    count = 2 if "slerp" in method and method != "multi-slerp" else 3
    weights = weights[:count]
    experts = loras(count)
    rule = make_rule(method, count, weights=weights)
    merger = Merger(rule, experts, torch.float64)
    plain = merge_state_dicts(method, dense(experts), weights=weights)
    for name in ("m", "n"):
        expected = reference(method, flat(experts, name), weights)
        for found in (merger.dense(name), plain[name], merger.factors(name, 99).delta.dense()):
            assert np.allclose(found.numpy().ravel(), expected, atol=1e-9), name


def test_slerp_hand_numbers():
    assert merged("slerp", [1, 0], [0, 2]) == pytest.approx([0.70711, 1.41421], abs=1e-5)
    assert np.linalg.norm(merged("slerp", [1, 0], [0, 2])) == pytest.approx(1.5811, abs=1e-4)
    assert merged("slerp", [1, 0], [0, 2], t=0) == pytest.approx([1, 0])
    assert merged("slerp", [1, 0], [0, 2], t=1) == pytest.approx([0, 2])
    third = [math.cos(math.pi / 6), math.sin(math.pi / 6)]
    assert merged("slerp", [1, 0], [0, 1], t=1 / 3) == pytest.approx(third)


def test_slerp_takes_weights_as_factors():
    expected = merged("slerp", [3, 0], [0, -2], t=0.3)
    assert merged("slerp", [1, 0], [0, 2], weights=[3, -1], t=0.3) == pytest.approx(expected)
    turned = merged("slerp", [1, 1], [0, -2], t=0.3)
    assert merged("slerp", [1, 1], [0, 2], weights=[1, -1], t=0.3) == pytest.approx(turned)


def test_slerp_order_matters_only_away_from_the_middle():
    x, y = [4, -1, 2], [2, 3, -2.5]
    assert merged("slerp", x, y) == pytest.approx(merged("slerp", y, x))
    assert merged("slerp", x, y, t=0.2) == pytest.approx(merged("slerp", y, x, t=0.8))
    assert merged("slerp", x, y, t=0.2) != pytest.approx(merged("slerp", y, x, t=0.2))


def test_slerp_is_a_straight_line_for_nearly_parallel_experts():
    x, y = [1.0, 0.0], [2.0, 0.02]
    assert merged("slerp", x, y, t=0.25) == pytest.approx([1.25, 0.005], abs=1e-12)
    away = merged("slerp", x, [2.0, 0.2], t=0.25)
    assert away != pytest.approx([1.25, 0.05], abs=1e-4)


def test_nuslerp_follows_the_weights():
    at = merged("slerp", [4, -1, 2], [2, 3, -2.5], t=0.25)
    assert merged("nuslerp", [4, -1, 2], [2, 3, -2.5], weights=[3, 1]) == pytest.approx(at)
    assert merged("nuslerp", [4, -1, 2], [2, 3, -2.5], weights=[6, 2]) == pytest.approx(at)
    swapped = merged("nuslerp", [2, 3, -2.5], [4, -1, 2], weights=[1, 3])
    assert swapped == pytest.approx(at)
    with pytest.raises(UsageError, match="sum to zero"):
        make_rule("nuslerp", 2, weights=[1, -1])


def test_multi_slerp_hand_numbers():
    found = merged("multi-slerp", [1, 0], [0, 2])
    assert found == pytest.approx([1.06066, 1.06066], abs=1e-5)
    assert np.linalg.norm(found) == pytest.approx(1.5)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.8])
def test_karcher_of_two_lies_on_the_arc(t):
    x, y = np.array([3.0, 1.0, 0.0]), np.array([-1.0, 2.0, 2.0])
    found = np.array(merged("karcher", x, y, weights=[1 - t, t]))
    direction = arc(x / np.linalg.norm(x), y / np.linalg.norm(y), t)
    length = (1 - t) * np.linalg.norm(x) + t * np.linalg.norm(y)
    assert np.allclose(found, direction * length, atol=1e-9)


def test_karcher_differs_from_multi_slerp_and_stops_early():
    rows = [[1, 0, 0], [0.9, 0.4, 0], [-0.5, 0.2, 1]]
    full = merged("karcher", *rows)
    one = merged("karcher", *rows, iterations=1)
    assert full != pytest.approx(merged("multi-slerp", *rows), abs=1e-3)
    assert one != pytest.approx(full, abs=1e-4)
    assert merged("karcher", *rows, tolerance=1.0) == pytest.approx(one)


def test_model_stock_hand_numbers():
    found = merged("model-stock", [1, 0], [1, 1])
    assert found == pytest.approx([0.82843, 0.41421], abs=1e-5)


def test_model_stock_of_unrelated_experts_is_the_base():
    assert merged("model-stock", [1, 0, 0], [0, 2, 0], [0, 0, 3]) == [0, 0, 0]
    # c = -1/2 is where the formula divides by zero for three experts.
    spread = [[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]
    assert merged("model-stock", *spread) == [0, 0]


def test_model_stock_leaves_out_weight_zero():
    pair = merged("model-stock", [1, 0], [1, 1])
    found = merged("model-stock", [1, 0], [5, -9], [1, 1], weights=[1, 0, 1])
    assert found == pytest.approx(pair)
    assert merged("model-stock", [1, 0], [1, 1], weights=[1, 0]) == [1, 0]


@pytest.mark.parametrize("method", FAMILY)
def test_duplicates_come_back(method):
    expert = [0.5, -2.0, 3.0]
    assert merged(method, expert, expert) == pytest.approx(expert)


@pytest.mark.parametrize("method", FAMILY)
@pytest.mark.parametrize("factor", [1.0, 3.0, 1 + 1e-9])
def test_opposite_experts_give_their_average(method, factor):
    x = [0.5, -2.0, 3.0]
    found = merged(method, x, [-factor * value for value in x])
    expected = [0.0] * 3 if method == "model-stock" else [(1 - factor) / 2 * v for v in x]
    assert found == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("method", "share"),
    [("slerp", 0.5), ("nuslerp", 0.5), ("multi-slerp", 0.5), ("karcher", 0.5), ("model-stock", 0)],
)
def test_a_zero_expert_only_shortens(method, share):
    assert merged(method, [4.0, -2.0], [0.0, 0.0]) == pytest.approx([4 * share, -2 * share])


@pytest.mark.parametrize("method", ["multi-slerp", "karcher"])
def test_a_zero_expert_does_not_turn_the_direction(method):
    with_zero = merged(method, [1, 0], [0, 2], [0, 0], weights=[1, 2, 3])
    without = merged(method, [1, 0], [0, 2], weights=[1, 2])
    assert with_zero == pytest.approx([value / 2 for value in without])


@pytest.mark.parametrize("method", FAMILY)
def test_single_entries(method):
    assert merged(method, [2.0], [4.0]) == pytest.approx([3.0])
    small = merged(method, [2e-30], [4e-30])
    assert small == pytest.approx([3e-30], rel=1e-6)


@pytest.mark.parametrize("method", ["multi-slerp", "karcher", "model-stock"])
def test_weights_that_cancel_are_refused(method):
    with pytest.raises(UsageError, match="sum to zero"):
        merged(method, [1, 0], [0, 1], weights=[1, -1])
    scaled = merged(method, [1, 0], [1, 1], weights=[6, 2])
    assert merged(method, [1, 0], [1, 1], weights=[3, 1]) == pytest.approx(scaled)


@pytest.mark.parametrize(
    ("method", "count"), [("slerp", 1), ("slerp", 3), ("nuslerp", 3), ("model-stock", 1)]
)
def test_other_numbers_of_experts_are_refused(method, count):
    with pytest.raises(UsageError, match="experts"):
        make_rule(method, count)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("slerp", {"t": 1.1}),
        ("slerp", {"t": -0.1}),
        ("karcher", {"iterations": 0}),
        ("karcher", {"tolerance": 0.0}),
        ("nuslerp", {"t": 0.5}),
    ],
)
def test_bad_parameters_are_refused(method, params):
    with pytest.raises(UsageError):
        make_rule(method, 2, params=params)


def test_nuslerp_does_not_blow_up_what_nearly_cancels():
    x, y = [0.5, -2.0, 3.0], [-0.5, 2.0 + 1e-5, -3.0]
    assert merged("nuslerp", x, y) == pytest.approx([0.0, 5e-6, 0.0], abs=1e-9)
    wider = merged("nuslerp", x, [-0.5, 2.1, -3.0])  # a true angle: the arc keeps the length
    assert np.linalg.norm(wider) > np.linalg.norm(x)
