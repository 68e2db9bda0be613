"""U36: a search that returns weights worse than ones it has already tried."""

import learned_support as ls
import pytest
import torch

from cgmerge.modules.learned.fit import fit
from cgmerge.modules.learned.presets import make_learner


def needle(good, depth):
    """One good point on a floor that misleads: everywhere else less is better."""
    place = torch.tensor(good, dtype=torch.float64)

    def function(values):
        if torch.equal(values.detach(), place):
            return torch.tensor(-depth, dtype=torch.float64) + 0 * values.sum()
        return 1 + (values + 1).square().sum()

    return function


@pytest.mark.parametrize("good", [[[0.0], [0.0]], [[1.0], [0.0]], [[0.0], [1.0]]])
@pytest.mark.parametrize("method", ["lorahub", "atlas"])
def test_the_base_and_each_expert_alone_are_tried_and_kept_when_best(good, method):
    learned = fit(ls.Formula(needle(good, 5.0), 2), make_learner(method, {}))
    assert learned.coefficients.values.tolist() == good


@pytest.mark.parametrize("method", ["lorahub", "atlas"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.fault("F39")
def test_never_worse_than_the_best_that_was_tried(method, seed):
    """A rough landscape; every point that was asked for is kept beside what it gave."""
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(6, 2, generator=generator, dtype=torch.float64) * 9

    def rough(values):
        return 3 + torch.sin(waves @ values).sum() + 0.1 * values.square().sum()

    problem = ls.Formula(rough, 2)
    learned = fit(problem, make_learner(method, {"l1": 0}))
    tried = [float(rough(values)) for values in problem.seen]
    assert learned.mark.loss == pytest.approx(min(tried), abs=1e-12)
    assert learned.mark.objective <= min(learned.curve)
    singles = [*learned.singles, learned.base]
    assert all(learned.mark.objective <= mark.objective for mark in singles)
    assert learned.passes <= len(problem.seen) * 3
    if method == "lorahub":
        assert learned.passes == len(problem.seen)  # the count that is printed is the true one
