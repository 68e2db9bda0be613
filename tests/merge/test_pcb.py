"""PCB: clipping, scores within and across experts, the average by score."""

import numpy as np
import pytest
import torch

from cgmerge.errors import UsageError
from cgmerge.merge import LowRank, Merger, deltas, make_rule, merge_state_dicts
from cgmerge.merge.deltas import Blocks
from cgmerge.merge.methods.pcb import PcbParams, min_max, prepare, score

X1 = [4, -1, 2, 0.5, -3, 1.5]
X2 = [2, 3, -2.5, 0.1, -1, -4]
SHAPES = {"b": (11, 9), "a": (6, 8), "c": (5,)}


def merged(*rows, weights=None, dtype=torch.float64, **params):
    experts = [{"w": torch.tensor(row, dtype=dtype)} for row in rows]
    return merge_state_dicts("pcb", experts, weights=weights, params=params)["w"].tolist()


def random_experts(count, seed, factor=1.0, shapes=None):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64) * factor
            for name, shape in (shapes or SHAPES).items()
        }
        for _ in range(count)
    ]


def flat(experts):
    return np.stack([np.concatenate([e[n].numpy().ravel() for n in sorted(e)]) for e in experts])


def scaled(row):
    return (row - row.min()) / (row.max() - row.min()) if row.max() > row.min() else row * 0


def parts(rows, ratio, inter, clip):
    """Return C and S over the concatenated vectors, by sorting."""
    count, total = rows.shape
    size = np.sort(np.abs(rows), axis=1)
    low = size[:, int(total * clip + 1e-9)]
    high = size[:, int(total * (1 - clip) - 1 + 1e-9)]
    clipped = np.stack([np.clip(np.abs(r), *b) for r, *b in zip(rows, low, high, strict=True)])
    norms = np.stack([scaled(row) for row in clipped])
    if inter == "sum":
        across = np.tanh(rows * rows.sum(0))
    else:
        signed = np.sign(rows) * norms
        across = np.stack([sum(np.tanh(mine * other) for other in signed) for mine in signed])
    scores = np.exp(count * norms**2) * across
    floor = np.sort(scores, axis=1)[:, int(total * (1 - ratio) + 1e-9)]
    kept = [
        scaled(np.clip(row, least, row.max())) for row, least in zip(scores, floor, strict=True)
    ]
    return np.sign(rows) * clipped, np.stack(kept)


def reference(rows, weights, ratio, inter, clip):
    clipped, kept = parts(rows, ratio, inter, clip)
    top = (clipped * kept * np.array(weights)[:, None]).sum(0)
    return top / np.maximum(kept.sum(0), 1e-12)


def test_hand_checked():
    assert merged(X1, X2, ratio=0.5) == pytest.approx([3, 3, 0, 0, -3, -3], abs=1e-12)
    assert merged(X1, X2, ratio=0.5, scale=1.2) == pytest.approx(
        [3.6, 3.6, 0, 0, -3.6, -3.6], abs=1e-12
    )


def test_hand_checked_clipping_and_scores():
    experts = [{"w": torch.tensor(row, dtype=torch.float64)} for row in (X1, X2)]
    state = prepare(Blocks(experts, dtype=torch.float64), [1, 1], PcbParams(ratio=0.5))["w"]
    # The largest is clipped to the second largest: position ⌊6·0.9999 - 1⌋ = 4 of 0…5.
    assert state.clips == [(0.5, 3.0), (0.1, 3.0)]
    values = torch.stack([expert["w"] for expert in experts])
    scores = score(values, clips=state.clips, inter="sum")
    kept = torch.stack([min_max(s, b) for s, b in zip(scores, state.scores, strict=True)])
    assert kept[0].tolist() == pytest.approx([1, 0, 0, 0, 1, 0], abs=1e-6)
    assert kept[1].tolist() == pytest.approx([0, 0.99998, 0, 0, 0, 1], abs=6e-6)
    assert kept[1, 1] < 1


def test_defaults():
    params = make_rule("pcb", 2).params
    assert (params.ratio, params.inter, params.clip) == (0.1, "sum", 1e-4)


@pytest.mark.parametrize("inter", ["sum", "pairwise"])
@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("clip", [1e-4, 0.01, 0.1, 0.0])
def test_equals_the_dense_reference(inter, ratio, clip):
    for count, weights, factor in ((2, [1, 1], 1.0), (4, [0.8, 1.3, 1.0, -0.5], 1e-3)):
        experts = random_experts(count, seed=count, factor=factor)
        params = {"inter": inter, "ratio": ratio, "clip": clip}
        # Position ⌊d(1-0) - 1⌋ is the last: no clipping.
        found = merge_state_dicts("pcb", experts, weights=weights, params=params)
        expected = reference(flat(experts), weights, ratio, inter, clip)
        values = torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
        assert np.abs(values - expected).max() < 1e-9 * factor
        assert np.count_nonzero(expected) > 5


def test_ratios_that_reach_below_zero_scores():
    # With ratio 1 the floor is the smallest score, which is negative: other end of the selection.
    experts = random_experts(3, seed=11)
    state = prepare(Blocks(experts, dtype=torch.float64), [1] * 3, PcbParams(ratio=1.0))["a"]
    assert all(floor < 0 < most for floor, most in state.scores)


def test_float32_is_computed_in_float64():
    experts = [
        {name: value.float() for name, value in expert.items()}
        for expert in random_experts(3, seed=5)
    ]
    found = merge_state_dicts("pcb", experts, params={"ratio": 0.4})
    rows = flat([{n: v.double() for n, v in expert.items()} for expert in experts])
    expected = reference(rows, [1] * 3, 0.4, "sum", 1e-4)
    values = torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
    assert np.abs(values - expected).max() < 3e-7


@pytest.mark.parametrize("inter", ["sum", "pairwise"])
def test_large_enough_to_be_sampled(inter):
    shapes = {"x": (700, 900), "y": (50, 40)}
    experts = random_experts(2, seed=1, factor=1e-2, shapes=shapes)
    found = merge_state_dicts("pcb", experts, params={"inter": inter})
    expected = reference(flat(experts), [1, 1], 0.1, inter, 1e-4)
    values = torch.cat([found[name].flatten() for name in sorted(found)]).numpy()
    assert np.abs(values - expected).max() < 1e-10
    share = np.count_nonzero(expected) / expected.size
    assert 0.1 < share < 0.2


def test_scores_are_ranked_over_the_whole_vector():
    big, small = random_experts(2, seed=2), random_experts(2, seed=3)
    experts = [{"big": b["b"] * 10, "small": s["b"]} for b, s in zip(big, small, strict=True)]
    found = merge_state_dicts("pcb", experts, params={"ratio": 0.1})
    assert int((found["big"] != 0).sum()) > 15
    assert not found["small"].any()


@pytest.mark.parametrize("inter", ["sum", "pairwise"])
def test_blocks_do_not_matter(inter, monkeypatch):
    experts = [
        {name: value.float() for name, value in expert.items()}
        for expert in random_experts(3, seed=8)
    ]
    params = {"ratio": 0.4, "inter": inter}
    expected = merge_state_dicts("pcb", experts, params=params)
    for size in (40, 16, 1):
        monkeypatch.setattr(deltas, "BLOCK_ENTRIES", size)
        found = merge_state_dicts("pcb", experts, params=params)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_is_not_scale_free():
    # tanh saturates for large entries, so that only their magnitude within the expert counts.
    experts = random_experts(3, seed=4)
    large = [{name: value * 64 for name, value in expert.items()} for expert in experts]
    once = merge_state_dicts("pcb", experts, params={"ratio": 0.4})
    found = merge_state_dicts("pcb", large, params={"ratio": 0.4})
    assert not torch.allclose(found["b"] / 64, once["b"], atol=1e-3)
    params = {"ratio": 0.4, "inter": "pairwise"}
    once = merge_state_dicts("pcb", experts, params=params)
    found = merge_state_dicts("pcb", large, params=params)
    assert torch.allclose(found["b"] / 64, once["b"], atol=1e-12)


def test_weights_scale_the_average_and_not_the_competition():
    experts = random_experts(2, seed=6)
    params = {"ratio": 0.3}
    plain = merge_state_dicts("pcb", experts, params=params)["b"]
    twice = merge_state_dicts("pcb", experts, weights=[2, 2], params=params)["b"]
    first = merge_state_dicts("pcb", experts, weights=[1, 0], params=params)["b"]
    second = merge_state_dicts("pcb", experts, weights=[0, 1], params=params)["b"]
    assert torch.allclose(twice, plain * 2, atol=1e-14)
    assert torch.allclose(first + second, plain, atol=1e-14)


def test_opposite_experts_lose_everything():
    row = [1.0, -2.0, 3.0, -4.0, 5.0]
    assert merged(row, [-value for value in row], ratio=0.5) == [0] * 5


def test_duplicates_and_one_expert_keep_the_best_and_clip():
    row = [1.0, -2.0, 3.0, -4.0, 5.0]
    # Position ⌊5·0.5⌋ = 2 is the floor and scores 0; 5 is clipped to 4.
    assert merged(row, ratio=0.5) == pytest.approx([0, 0, 0, -4, 4])
    assert merged(row, row, ratio=0.5) == pytest.approx([0, 0, 0, -4, 4])
    assert merged(row, ratio=0.5, clip=0.0) == pytest.approx([0, 0, 0, -4, 5])


@pytest.mark.parametrize("rows", [([2.0],), ([2.0], [3.0]), ([0.0] * 4, [0.0] * 4), ([2.0] * 4,)])
def test_no_spread_means_no_score(rows):
    for inter in ("sum", "pairwise"):
        assert merged(*rows, inter=inter) == [0.0] * len(rows[0])


def test_a_zero_expert_does_not_disturb():
    row = [1.0, -2.0, 3.0, -4.0, 5.0]
    assert merged(row, [0.0] * 5, ratio=0.5) == pytest.approx([0, 0, 0, -4, 4])


def test_equal_magnitudes_in_one_expert_still_compete_across():
    # Ternary experts: within the expert nothing stands out, agreement alone decides.
    found = merged([1.0, 1.0, -1.0, 1.0], [3.0, -1.0, -2.0, -4.0], ratio=0.75)
    assert np.isfinite(found).all()
    assert found[0] > 0 > found[2]


def test_many_experts_do_not_overflow():
    values = torch.linspace(-1, 1, 20).expand(800, 20)
    found = score(values, clips=[(0.0, 1.0)] * 800, inter="sum")
    assert torch.isfinite(found).all()
    assert found[:, -1].min() > 0.99


def test_tiny_and_empty_tensors():
    experts = [{"e": torch.zeros(0, 4), "w": torch.tensor([1.0, 2.0, 3.0, 4.0])}] * 2
    found = merge_state_dicts("pcb", experts, params={"ratio": 0.5})
    assert found["e"].shape == (0, 4)
    assert found["w"].tolist() == pytest.approx([0, 0, 0, 3])
    # A ratio below one entry: the floor is the largest score, so nothing is above it.
    assert not merge_state_dicts("pcb", experts, params={"ratio": 1e-3})["w"].any()


def test_absent_names_count_as_zero():
    experts = random_experts(2, seed=7)
    del experts[1]["b"]
    filled = [experts[0], {**experts[1], "b": torch.zeros(SHAPES["b"], dtype=torch.float64)}]
    found = merge_state_dicts("pcb", experts, params={"ratio": 0.3})
    expected = merge_state_dicts("pcb", filled, params={"ratio": 0.3})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_low_rank_experts_give_what_dense_ones_give():
    generator = torch.Generator().manual_seed(5)
    low = [
        {
            "w": LowRank(
                torch.randn(3, 20, generator=generator), torch.randn(30, 3, generator=generator)
            )
        }
        for _ in range(3)
    ]
    rows = np.stack([one["w"].dense().double().numpy().ravel() for one in low])
    found = Merger(make_rule("pcb", 3, params={"ratio": 0.2}), low).dense("w").numpy().ravel()
    assert np.abs(found - reference(rows, [1] * 3, 0.2, "sum", 1e-4)).max() < 1e-4


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"ratio": 0}, "must be in"),
        ({"ratio": 1.2}, "must be in"),
        ({"clip": 0.5}, "must be in"),
        ({"clip": -0.1}, "must be in"),
        ({"clip": float("nan")}, "must be in"),
        ({"inter": "softmax"}, "one of sum, pairwise"),
    ],
)
def test_out_of_range_is_refused(params, words):
    with pytest.raises(UsageError, match=words):
        make_rule("pcb", 2, params=params)
