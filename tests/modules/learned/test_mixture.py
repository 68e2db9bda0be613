"""The attached mixture: numbers by hand, against the merge algebra, and its gradient."""

import learned_support as ls
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgmerge.errors import Incompatible
from cgmerge.merge import LowRank, stack
from cgmerge.modules.learned.mixture import Mixture
from cgmerge.modules.learned.objectives import attach


class Two(torch.nn.Module):
    """Two linear maps that are applied to the same input."""

    def __init__(self, into=2, out=2):
        super().__init__()
        self.p, self.q = torch.nn.Linear(into, out, bias=False), torch.nn.Linear(into, out)

    def forward(self, x):
        return torch.stack([self.p(x), self.q(x)])


def added(model, mixture, values, x):
    """What the mixture adds to the model's output."""
    before = model(x)
    with mixture.attached(model):
        mixture.set(torch.tensor(values))
        after = model(x)
    assert torch.equal(model(x), before)
    return after - before


E1 = {"p": ls.low_rank([[1, 0]], [[1], [0]])}
E2 = {"p": ls.low_rank([[0, 1]], [[0], [2]])}


def test_lorahub_in_delta_space_by_hand():
    delta = added(Two(), Mixture([E1, E2]), [[0.5], [-1.0]], torch.eye(2))[0].T
    assert torch.allclose(delta, torch.tensor([[0.5, 0.0], [0.0, -2.0]]), atol=1e-6)


def test_a_lone_negative_coefficient_subtracts():
    delta = added(Two(), Mixture([E2]), [[-1.0]], torch.eye(2))[0].T
    assert torch.allclose(delta, torch.tensor([[0.0, 0.0], [0.0, -2.0]]), atol=1e-6)


def test_the_concatenated_pass_by_hand():
    first = {"p": ls.low_rank([[1, 0]], [[1], [1]])}
    second = {"p": ls.low_rank([[0, 1]], [[2], [0]])}
    mixture = Mixture([first, second])
    found = added(Two(), mixture, [[0.25], [0.75]], torch.tensor([1.0, 2.0]))
    assert torch.allclose(found[0], torch.tensor([3.25, 0.25]), atol=1e-6)
    assert not found[1].any()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_it_is_the_weighted_sum_for_any_ranks_and_modules(data, seed):
    ranks = data.draw(
        st.lists(
            st.dictionaries(st.sampled_from("pq"), st.integers(1, 4), min_size=1),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    experts = [{k: LowRank(draw(r, 3), draw(5, r)) for k, r in one.items()} for one in ranks]
    mixture = Mixture(experts)
    values = draw(len(experts), len(mixture.modules)).tolist()
    x = draw(4, 3)
    found = dict(zip("pq", added(Two(3, 5), mixture, values, x), strict=True))
    for name, output in found.items():
        own = [(e[name], values[i]) for i, e in enumerate(experts) if name in e]
        place = mixture.modules.index(name) if own else 0
        own = [(e[name], values[i][place]) for i, e in enumerate(experts) if name in e]
        wanted = x @ stack(*map(list, zip(*own, strict=True))).dense().T if own else 0 * output
        assert torch.allclose(output, wanted, atol=1e-4)


def test_a_missing_module_is_named():
    with pytest.raises(Incompatible, match="no module nowhere"):
        added(Two(), Mixture([{"nowhere": E1["p"]}]), [[1.0]], torch.eye(2))


def test_modules_stored_transposed_are_no_exception(models):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "G").eval()
    generator = torch.Generator().manual_seed(0)
    name, hidden = "transformer.h.1.attn.c_attn", support.HIDDEN
    delta = LowRank(
        torch.randn(2, hidden, generator=generator), torch.randn(3 * hidden, 2, generator=generator)
    )
    ids = torch.arange(5)[None]
    mixture = Mixture([{name: delta}])
    with torch.no_grad(), mixture.attached(model):
        mixture.set(torch.tensor([[-0.5]]))
        found = model(ids).logits
    with torch.no_grad():
        model.get_submodule(name).weight += (-0.5 * delta.dense()).T  # Conv1D is [in, out]
        assert torch.allclose(found, model(ids).logits, atol=1e-4)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return ls.make_place(tmp_path_factory.mktemp("mixture"))


def test_the_gradient_equals_finite_differences(place):
    loaded = ls.loaded_of(place)
    loaded.model.double()
    examples = ls.support_of(place, loaded, "first", "second", limit=3)
    plan = ls.plan_of(place, "e1", "e2", "e3")
    weights = examples.weights()
    for aim in ("loss", "prompt", "answer"):
        with attach(loaded.model, Mixture(plan.deltas), examples, aim) as problem:
            generator = torch.Generator().manual_seed(1)
            # Sixteenths and a step of 1/64 are exact in float32, which coefficients are kept in.
            values = torch.randint(-8, 9, problem.shape, generator=generator).double() / 16
            _, slope = problem.gradient(values, weights)
            assert slope.shape == problem.shape
            assert float(slope.abs().max()) > 1e-3
            for expert, module in ((0, 0), (1, 1), (2, 0), (1, 3)):
                step = torch.zeros(problem.shape).double()
                step[expert, module] = 1 / 64
                ahead, behind = (
                    float((weights * problem.outcome(values + sign * step).aim).sum())
                    for sign in (1, -1)
                )
                assert (ahead - behind) * 32 == pytest.approx(
                    float(slope[expert, module]), abs=2e-4, rel=2e-2
                )


def test_the_base_is_left_as_it_was(place):
    loaded = ls.loaded_of(place)
    examples = ls.support_of(place, loaded, "first", limit=2)
    model = loaded.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = ls.plan_of(place, "e1", "e2")
    with attach(model, Mixture(plan.deltas), examples) as problem:
        assert not model.training
        problem.gradient(torch.ones(problem.shape).double(), examples.weights())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_silent_mixture_is_the_base_to_the_bit(place):
    loaded = ls.loaded_of(place)
    examples = ls.support_of(place, loaded, "first", limit=2)
    mixture, ids = Mixture(ls.plan_of(place, "e1", "e2").deltas), torch.tensor([[4, 8, 9, 7]])
    with attach(loaded.model, mixture, examples) as problem, torch.no_grad():
        mixture.set(torch.ones(problem.shape))
        mixed = loaded.model(ids).logits
        with mixture.without():
            silent = loaded.model(ids).logits
        assert torch.equal(loaded.model(ids).logits, mixed)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, silent)
    assert not torch.allclose(mixed, silent, atol=1e-2)
