"""Shared modules in a model: what they add, what slopes they get, what they start as."""

import math

import pytest
import routing_support as rs
import support
import torch

from cgmerge.merge.deltas import LowRank
from cgmerge.modules.attach import attached
from cgmerge.modules.modular.inventory import Frame, Inventory, stream
from cgmerge.modules.routing.attach import place_of

IDS = torch.arange(3, 18).reshape(3, 5)


def frame(targets, tasks=3, skills=2, granularity="layer"):
    layers = tuple(dict.fromkeys(map(place_of, targets)))
    places = layers if granularity == "layer" else ("",)
    return Frame(targets, places, tasks, skills, rank=2, scaling=1.5)


def conv_shapes(base):
    return {
        path: (module.nf, module.nx)
        for path, module in base.model.named_modules()
        if path.endswith(("c_attn", "c_fc"))
    }


def filled(made, seed=5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for b in made.b.values():
            b.copy_(0.3 * torch.randn(b.shape, generator=generator))
        made.logits.copy_(2 * torch.randn(made.logits.shape, generator=generator))
    return made


def skills(made):
    return [
        {path: LowRank(a, made.frame.scaling * b) for path, (a, b) in made.skill(number).items()}
        for number in range(made.frame.skills)
    ]


def test_the_start_is_the_base_and_modules_differ():
    base = rs.llama()
    made = Inventory(frame(support.llama_shapes()), 3, torch.device("cpu"))
    made.shares = made.weights()
    before = rs.logits(base.model, IDS)
    with made.attached(base.model):
        assert torch.equal(rs.logits(base.model, IDS), before)
    assert torch.equal(rs.logits(base.model, IDS), before)
    for path, a in made.a.items():
        bound = 1 / math.sqrt(made.frame.targets[path][1])
        assert 0.8 * bound < a.abs().max() <= bound
        assert not torch.equal(a[:2], a[2:])
    assert made.logits.abs().max() <= 1e-3
    assert made.logits.std() > 1e-4


def test_the_start_follows_from_the_seed_and_from_nothing_else():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same, other = (
        Inventory(frame(support.llama_shapes()), seed, torch.device("cpu")) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.logits, same.logits)
    assert not torch.equal(one.logits, other.logits)
    path = next(iter(one.a))
    assert torch.equal(one.a[path], same.a[path])
    assert not torch.equal(one.a[path], other.a[path])
    draws = [torch.rand(1, generator=stream(3, name)).item() for name in ("A", "B", "A")]
    assert draws[0] == draws[2] != draws[1]


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("kind", [rs.llama, rs.gpt2])
def test_every_row_gets_its_own_weights_in_every_layer(kind, granularity):
    base = kind()
    # Conv1D keeps [in, out]
    targets = support.llama_shapes() if kind is rs.llama else conv_shapes(base)
    made = filled(Inventory(frame(targets, granularity=granularity), 3, torch.device("cpu")))
    made.shares = made.weights()

    def weigh(path, x):
        place = made.frame.places.index(place_of(path)) if granularity == "layer" else 0
        return made.shares.detach()[:, None, place].expand(*x.shape[:-1], 2)

    with rs.naively(base.model, skills(made), weigh):
        wanted = rs.logits(base.model, IDS)
    with made.attached(base.model):
        found = rs.logits(base.model, IDS)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert (wanted - rs.logits(base.model, IDS)).abs().max() > 0.1


def test_one_row_of_weights_is_for_all_sequences():
    base = rs.llama()
    made = filled(Inventory(frame(support.llama_shapes()), 3, torch.device("cpu")))
    made.shares = torch.tensor([[[0.0, 1.0]]]).expand(1, 2, 2)
    with attached(base.model, skills(made)[1]):
        wanted = rs.logits(base.model, IDS)
    with made.attached(base.model):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-4)


def test_slopes_are_those_of_finite_differences():
    base = rs.gpt2()  # Llama's norms compute in float32 whatever they are given
    base.model.double()
    made = filled(Inventory(frame(conv_shapes(base)), 3, torch.device("cpu")))
    for group in (made.a, made.b):
        for path, tensor in group.items():
            group[path] = tensor.detach().double().requires_grad_()
    made.logits = made.logits.detach().double().requires_grad_()
    uniform = torch.rand(made.size, generator=stream(1, "test"), dtype=torch.float64)
    tasks = torch.tensor([2, 0, 2])

    def loss():
        made.shares = made.weights(uniform, 0.7)[tasks]
        logits = base.model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
        return -logits[:, :-1].gather(-1, IDS[:, 1:, None]).mean()

    some = next(iter(made.a))
    with made.attached(base.model):
        loss().backward()
        for name, tensor in (("A", made.a[some]), ("B", made.b[some]), ("Z", made.logits)):
            generator = torch.Generator().manual_seed(len(name))
            way = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                tensor.add_(way, alpha=1e-5)
                above = loss()
                tensor.sub_(way, alpha=2e-5)
                below = loss()
                tensor.add_(way, alpha=1e-5)
            slope = float((tensor.grad * way).sum())
            assert abs(slope) > 1e-4, name
            assert float((above - below) / 2e-5) == pytest.approx(slope, rel=1e-5), name
    assert made.logits.grad[1].abs().max() == 0.0  # no row of task 1 was there
