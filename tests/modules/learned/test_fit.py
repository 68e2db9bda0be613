"""Searches on formulas: exact minima, comparisons that hold, bad values, the order of experts."""

import math

import learned_support as ls
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import Damaged, UsageError
from cgmerge.modules.learned.fit import fit
from cgmerge.modules.learned.presets import make_learner

HUB = {"l1": 0}


def flat(learned):
    return learned.coefficients.values.flatten().tolist()


def test_the_penalty_of_lorahub_by_hand():
    problem = ls.Formula(ls.bowl([[0.5], [-1.0]]), 2)
    learned = fit(problem, make_learner("lorahub"))
    # At (0.5, -1) the bowl is 0 and 0.05·(0.5 + 1)/2 is left.
    at = make_learner("lorahub").l1 * 1.5 / 2
    assert at == pytest.approx(0.0375)
    assert learned.mark.objective < at
    assert flat(learned) == pytest.approx([0.475, -0.975], abs=1e-2)  # each moved by 0.05/2
    assert learned.base.objective == pytest.approx(0.625)
    assert learned.singles[0].objective == pytest.approx(0.625 + 0.025)


def test_the_first_points_are_the_base_and_every_expert_and_nothing_is_asked_twice():
    problem = ls.Formula(ls.bowl([[0.3], [0.6], [-0.2], [1.4]]), 4)
    learned = fit(problem, make_learner("lorahub", HUB))
    assert torch.equal(problem.seen[0], torch.zeros(4, 1).double())
    assert torch.equal(torch.cat(problem.seen[1:5], 1), torch.eye(4).double())
    assert learned.passes == len(problem.seen) <= 40
    assert len({point.numpy().tobytes() for point in problem.seen}) == len(problem.seen)
    assert flat(learned) == pytest.approx([0.3, 0.6, -0.2, 1.4], abs=1e-2)


@pytest.mark.parametrize("evaluations", [6, 7, 12, 40])
@pytest.mark.fault("F39")
def test_evaluations_are_a_limit(evaluations):
    problem = ls.Formula(ls.bowl([[0.3], [0.6], [-0.2], [1.4]]), 4)
    learned = fit(problem, make_learner("lorahub", {"evaluations": evaluations}))
    assert len(problem.seen) <= evaluations
    assert len(learned.curve) <= evaluations
    assert learned.mark.objective == min(learned.curve)


@pytest.mark.fault("F39")
def test_too_few_evaluations_are_refused():
    problem = ls.Formula(ls.bowl([[0.3]] * 4), 4)
    with pytest.raises(UsageError, match="at least 6 are needed"):
        fit(problem, make_learner("lorahub", {"evaluations": 5}))
    assert not problem.seen


@pytest.mark.parametrize("name", ["lorahub", "atlas"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), experts=st.integers(1, 4))
def test_never_worse_than_base_or_best_expert(name, seed, experts):
    """On rough functions, where neither optimiser can do much."""
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(5, experts, generator=generator, dtype=torch.float64) * 6

    def rough(values):
        return (waves @ values[:, 0]).sin().sum() + 0.1 * values.square().sum()

    options = {"evaluations": experts + 6} if name == "lorahub" else {"steps": 4}
    learned = fit(ls.Formula(rough, experts), make_learner(name, options))
    simple = [learned.base, *learned.singles, learned.average]
    assert learned.mark.objective <= min(mark.objective for mark in simple)


@pytest.mark.parametrize("name", ["lorahub", "atlas", "soups"])
def test_permuting_experts_permutes_coefficients(name):
    centre = [[0.2, 0.9], [0.7, 0.1], [0.1, 0.0]]
    order = [2, 0, 1]
    options = {} if name == "lorahub" else {"lr": 0.1, "steps": 50}
    one = fit(ls.Formula(ls.bowl(centre), 3, ("a", "b")), make_learner(name, options))
    other = fit(
        ls.Formula(ls.bowl([centre[i] for i in order]), 3, ("a", "b")), make_learner(name, options)
    )
    assert torch.allclose(other.coefficients.values, one.coefficients.values[order], atol=2e-2)
    assert other.mark.objective == pytest.approx(one.mark.objective, abs=1e-4)


def test_atlas_recovers_the_coefficients_of_a_linear_model():
    # Orthogonal one-hot task vectors and targets from c: least squares, as in the paper's check.
    truth = [2.0, -1.0, 0.5, 3.0]
    problem = ls.Formula(ls.bowl([[value] for value in truth]), 4)
    learned = fit(problem, make_learner("atlas", {"lr": 0.2, "steps": 160}))
    assert flat(learned) == pytest.approx(truth, abs=1e-2)
    assert learned.passes <= 3 * 160 + 12


def test_coefficients_shared_by_modules_get_the_sum_of_their_gradients():
    names = ("x.0.q", "x.0.v", "x.1.q")
    problem = ls.Formula(ls.bowl([[1.0, 0.0, 0.3]]), 1, names)
    learned = fit(problem, make_learner("atlas", {"granularity": "layer", "lr": 0.1, "steps": 60}))
    assert learned.coefficients.groups.names == ("layer 0", "layer 1")
    assert flat(learned) == pytest.approx([0.5, 0.3], abs=1e-2)


def test_penalties_pull_to_zero():
    plain = {"lr": 0.1, "steps": 60}
    ridge = fit(ls.Formula(ls.bowl([[1.0], [0.0]]), 2), make_learner("atlas", {**plain, "l2": 1}))
    assert flat(ridge)[0] == pytest.approx(0.5, abs=1e-2)  # (c - 1) + 2c/2 = 0
    lasso = fit(ls.Formula(ls.bowl([[1.0], [0.0]]), 2), make_learner("atlas", {**plain, "l1": 1}))
    assert flat(lasso)[0] == pytest.approx(0.5, abs=3e-2)  # (c - 1) + 1/2 = 0


@pytest.mark.parametrize("optimiser", ["adam", "scipy"])
def test_bounds_hold_at_every_point(optimiser):
    problem = ls.Formula(ls.bowl([[3.0], [-3.0]]), 2)
    options = {"constraint": "bounded", "low": -0.5, "high": 1.25, "optimiser": optimiser}
    name = "atlas" if optimiser == "adam" else "lorahub"
    options |= {"lr": 0.3} if optimiser == "adam" else {"l1": 0}
    learned = fit(problem, make_learner(name, options))
    assert all(-0.5 <= float(v) <= 1.25 for point in problem.seen for v in point.flatten())
    assert flat(learned) == pytest.approx([1.25, -0.5], abs=1e-2)


def test_an_expert_alone_is_no_candidate_where_the_bounds_forbid_it():
    problem = ls.Formula(ls.bowl([[1.0], [0.0]]), 2)
    learned = fit(problem, make_learner("lorahub", {"high": 0.4, "l1": 0}))
    assert flat(learned) == pytest.approx([0.4, 0.0], abs=1e-2)
    assert learned.singles[0].objective == 0.0  # shown, not taken


@pytest.mark.parametrize("optimiser", ["adam", "scipy"])
def test_shares_are_positive_and_sum_to_one(optimiser):
    problem = ls.Formula(ls.bowl([[0.7], [0.2], [0.1]]), 3)
    options = {"optimiser": optimiser} | ({"lr": 0.2} if optimiser == "adam" else {})
    learned = fit(problem, make_learner("soups", options))
    assert flat(learned) == pytest.approx([0.7, 0.2, 0.1], abs=2e-2)
    assert float(learned.coefficients.values.sum()) == pytest.approx(1.0)


def test_shares_say_when_the_base_is_better():
    learned = fit(ls.Formula(ls.bowl([[0.0], [0.0]]), 2), make_learner("soups"))
    assert learned.base.objective < learned.mark.objective
    assert "the base alone has the lower loss" in learned.notes[0]


def test_one_expert_gets_its_strength_but_no_share():
    learned = fit(ls.Formula(ls.bowl([[0.4]]), 1), make_learner("lorahub", HUB))
    assert flat(learned) == pytest.approx([0.4], abs=1e-2)
    with pytest.raises(UsageError, match="nothing to learn with one expert"):
        fit(ls.Formula(ls.bowl([[0.4]]), 1), make_learner("soups"))


def test_the_start_of_entropy_is_given_and_the_base_is_no_candidate():
    # Surest at 0, which is the base: the way there is taken, the base is not.
    problem = ls.Formula(ls.bowl([[0.0], [0.0]]), 2)
    learned = fit(problem, make_learner("adamerging", {"steps": 5, "lr": 0.01, "start": 0.5}))
    assert learned.curve[0] == pytest.approx(0.25)
    assert learned.base.objective == 0.0
    assert 0.4 < flat(learned)[0] < 0.5
    hub = {"objective": "entropy", "evaluations": 20}
    searched = fit(ls.Formula(ls.bowl([[0.0], [0.0]]), 2), make_learner("lorahub", hub))
    assert any(flat(searched))


def not_finite_beyond(limit, centre):
    bowl = ls.bowl(centre)
    return lambda values: (
        bowl(values)
        + torch.where(
            values.max() > limit, torch.tensor(math.nan).double(), torch.tensor(0.0).double()
        )
    )


@pytest.mark.fault("F39")
def test_values_that_are_not_finite_end_the_descent_at_the_best_before():
    problem = ls.Formula(not_finite_beyond(1.2, [[3.0]]), 1)
    learned = fit(problem, make_learner("atlas", {"lr": 0.1}))
    assert 1.0 <= flat(learned)[0] <= 1.2
    assert math.isfinite(learned.mark.objective)
    assert "not finite; the best point before it is kept" in learned.notes[0]
    assert len(learned.curve) < 60


@pytest.mark.fault("F39")
def test_values_that_are_not_finite_are_avoided_without_gradients():
    problem = ls.Formula(not_finite_beyond(0.9, [[0.8], [0.8]]), 2)
    learned = fit(problem, make_learner("lorahub", HUB))
    assert math.isfinite(learned.mark.objective)
    assert max(flat(learned)) <= 0.9
    assert "points gave a loss that is not finite" in learned.notes[0]


def test_a_base_that_gives_nan_is_refused():
    with pytest.raises(Damaged, match="the base gives values that are not finite"):
        fit(ls.Formula(lambda v: v.sum() * math.nan, 1), make_learner("atlas"))


def test_examples_without_weight_do_not_matter():
    def two(values):
        return torch.stack([(values - 0.25).square().sum(), (values - 1.5).square().sum() * 9])

    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for name in ("lorahub", "atlas"):
        problem = ls.Formula(two, 1, examples=2)
        options = HUB if name == "lorahub" else {"lr": 0.1}
        learned = fit(problem, make_learner(name, options), weights=weights)
        assert flat(learned) == pytest.approx([0.25], abs=1e-2)


def test_progress_counts_points():
    seen = []
    problem = ls.Formula(ls.bowl([[0.3]]), 1)
    fit(problem, make_learner("atlas", {"steps": 7}), progress=seen.append)
    assert seen == list(range(1, 9))  # and the last point, which needs no gradient
