"""Hand-checked numbers of every method (base 0; the vectors are those of the papers' examples)."""

import pytest
import torch

from cgmerge.errors import CgmergeError, UsageError
from cgmerge.merge import make_rule, merge_state_dicts
from cgmerge.merge.registry import all_methods, get_method

X1 = [4, -1, 2, 0.5, -3, 1.5]
X2 = [2, 3, -2.5, 0.1, -1, -4]


def vectors(*rows):
    return [{"w": torch.tensor(row, dtype=torch.float32)} for row in rows]


def merged(method, *rows, weights=None, **params):
    return merge_state_dicts(method, vectors(*rows), weights=weights, params=params)["w"].tolist()


def test_average_of_two():
    assert merged("linear", X1, X2) == pytest.approx([3, 1, -0.25, 0.3, -2, -1.25])
    assert merged("average", X1, X2) == merged("linear", X1, X2)


def test_linear_takes_weights_as_they_are():
    assert merged("linear", [1.0], [10.0], weights=[2, -0.5]) == [-3.0]
    assert merged("average", [1.0], [10.0], weights=[3, 1]) == pytest.approx([3.25])


def test_average_refuses_weights_that_cancel():
    with pytest.raises(UsageError, match="sum to zero"):
        merged("average", X1, X2, weights=[1, -1])


def test_task_arithmetic_scale():
    expected = [2.4, 0.8, -0.2, 0.24, -1.6, -1.0]
    assert merged("task-arithmetic", X1, X2, scale=0.4) == pytest.approx(expected)


def test_average_is_task_arithmetic_at_one_over_experts():
    assert merged("linear", X1, X2) == pytest.approx(merged("task-arithmetic", X1, X2, scale=0.5))


def test_negation_forgets():
    assert merged("task-arithmetic", X1, weights=[-1]) == [-value for value in X1]


def test_analogy():
    a, b, c = [1.0, 2.0], [4.0, 1.0], [0.5, 0.5]
    assert merged("task-arithmetic", c, b, a, weights=[1, 1, -1]) == [3.5, -0.5]


def test_ties_half_density():
    # Exactly 3 of 6 kept: {4, 2, -3} and {3, -2.5, -4}.
    assert merged("ties", X1, X2, density=0.5) == [4, 3, -2.5, 0, -3, -4]


def test_ties_full_density_elects_by_mass():
    # 2 - 2.5 < 0 elects -; 1.5 - 4 elects -; -1 + 3 elects +; equal signs average.
    assert merged("ties", X1, X2, density=1.0) == pytest.approx([3, 3, -2.5, 0.3, -2, -4])


def test_ties_without_normalize_adds_up_those_who_agree():
    # By hand from the trimmed experts times their weights; the vote is the same.
    found = merged("ties", [4, 2, -3, 1], [3, -2.5, -4, -1], density=1, normalize=False)
    assert found == [7, -2.5, -7, 0]
    halves = merged("ties", [4, 2], [3, -2.5], weights=[0.5, 0.25], density=1, normalize=False)
    assert halves == [2.75, 1.0]
    # A negative weight subtracts, which the mean does as well.
    assert merged("ties", [1, 2], weights=[-0.5], density=1, normalize=False) == [-0.5, -1]
    positive = {"density": 1, "normalize": False, "tie": "positive"}
    assert merged("ties", [1.0, 0.0], [-1.0, 0.0], **positive) == [1, 0]


def test_ties_scale_multiplies_the_result():
    assert merged("ties", X1, X2, density=0.5, scale=0.5) == [2, 1.5, -1.25, 0, -1.5, -2]


@pytest.mark.parametrize(
    ("tie", "expected"), [("zero", [0, 0, 0]), ("positive", [1, 2, 4]), ("majority", [0, 0, 0])]
)
def test_ties_opposite_experts(tie, expected):
    assert merged("ties", [1, -2, 4], [-1, 2, -4], density=1, tie=tie) == expected


def test_ties_majority_decides_cancelled_votes():
    # Entry 0 cancels; entries 1 to 3 vote +, +, -: the majority is +.
    rows = ([1, 1, 1, -1], [-1, 1, 1, -1])
    assert merged("ties", *rows, density=1, tie="majority") == [1, 1, 1, -1]
    flipped = [[-value for value in row] for row in rows]
    assert merged("ties", *flipped, density=1, tie="majority") == [-1, -1, -1, 1]


def test_ties_weights_take_part_in_the_vote():
    # PEFT elects before weighting and would answer with the expert of weight 0.1.
    assert merged("ties", [1.0], [-1.5], weights=[5, 0.1], density=1) == pytest.approx([1.0])
    # mergekit's rule: sum of weighted values over the sum of agreeing weights.
    assert merged("ties", [1.0], [4.0], weights=[3, 1], density=1) == pytest.approx([1.75])


def test_ties_negative_weight_turns_the_expert_around():
    assert merged("ties", [1, 1], [1, -1], weights=[1, -1], density=1) == [0, 1]


def test_ties_global_and_tensor_trim_differ():
    big, small = torch.tensor([10.0, 20.0]), torch.tensor([1.0, 2.0])
    expert = [{"big": big, "small": small}]
    everywhere = merge_state_dicts("ties", expert, params={"density": 0.5})
    assert everywhere["big"].tolist() == [10, 20]
    assert everywhere["small"].tolist() == [0, 0]
    each = merge_state_dicts("ties", expert, params={"density": 0.5, "trim": "tensor"})
    assert each["big"].tolist() == [0, 20]
    assert each["small"].tolist() == [0, 2]


def test_ties_counts_absent_names_as_zero():
    # 2 of 4 entries of the union are kept: both of expert 0, which lacks "b".
    experts = [{"a": torch.tensor([1.0, 2.0])}, {"b": torch.tensor([3.0, 4.0])}]
    result = merge_state_dicts("ties", experts, params={"density": 0.5})
    assert result["a"].tolist() == [1, 2]
    assert result["b"].tolist() == [3, 4]


def test_parameters_from_strings():
    spec, _ = get_method("ties")
    made = spec.make_params({"density": "0.3", "trim": "tensor", "scale": "2"})
    assert (made.density, made.trim, made.scale) == (0.3, "tensor", 2.0)


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("ties", {"density": 0}, "must be in"),
        ("ties", {"density": 1.5}, "must be in"),
        ("ties", {"density": float("nan")}, "must be in"),
        ("ties", {"density": "many"}, "takes a number"),
        ("ties", {"trim": "layer"}, "one of global, tensor"),
        ("ties", {"scale": float("inf")}, "must be in"),
        ("linear", {"normalize": "maybe"}, "true or false"),
        ("linear", {"density": 0.2}, "no parameter"),
        ("average", {"normalize": False}, "is `linear` with"),
    ],
)
@pytest.mark.fault("F22")
def test_bad_parameters_are_usage_errors(method, params, words):
    with pytest.raises(UsageError, match=words) as caught:
        make_rule(method, 2, params=params)
    assert caught.value.exit_code == 2


@pytest.mark.fault("F22")
def test_percentages_are_explained():
    with pytest.raises(UsageError) as caught:
        make_rule("ties", 2, params={"density": 20})
    assert "did you mean 0.2?" in caught.value.hint


def test_a_share_a_little_above_one_is_not_taken_for_a_percentage():
    with pytest.raises(UsageError) as caught:
        make_rule("ties", 2, params={"density": 1.5})
    assert "(0.0, 1.0]" in caught.value.message
    assert "percentage" not in (caught.value.hint or "")


def test_unknown_names_are_corrected():
    with pytest.raises(UsageError) as caught:
        get_method("tise")
    assert "`ties`" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        make_rule("ties", 1, params={"densty": 0.2})
    assert "`density`" in caught.value.hint


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, float("nan")], [1, float("inf")]])
@pytest.mark.fault("F22")
def test_bad_weights(weights):
    with pytest.raises(UsageError):
        merge_state_dicts("linear", vectors(X1, X2), weights=weights)


def test_some_weights_given_means_one_for_the_others():
    assert make_rule("linear", 3, weights=[None, 0.5, None]).weights == (1.0, 0.5, 1.0)
    assert make_rule("linear", 4).weights == (0.25,) * 4
    assert make_rule("task-arithmetic", 4).weights == (1.0,) * 4


def test_no_expert_is_an_error():
    with pytest.raises(CgmergeError, match="no expert"):
        merge_state_dicts("linear", [])


def test_registry_lists_every_method_once():
    names = [spec.name for spec in all_methods()]
    assert names == sorted(set(names))
    assert {"linear", "task-arithmetic", "ties"} <= set(names)
