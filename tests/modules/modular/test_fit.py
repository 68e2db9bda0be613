"""The loop that learns modules and allocation: order, gradients, repetition, refusals."""

import math
from collections import Counter

import pytest
import routing_support as rs
import support
import torch

from cgmerge.errors import InputError
from cgmerge.modules.modular import fit as fitting
from cgmerge.modules.modular.allocation import neg_log_ibp
from cgmerge.modules.modular.fit import Course, backward, fit, mixed
from cgmerge.modules.modular.inventory import Frame, Inventory
from cgmerge.modules.stats import frozen
from cgmerge.modules.training.listener import Silent

LAYERS = ("model.layers.0", "model.layers.1")
TASKS = [rs.rows(5, seed=1), rs.rows(3, seed=2), rs.rows(4, seed=3)]
COURSE = Course(steps=6, lr=0.01, allocation_lr=0.1, batch=6, seed=2)


@pytest.fixture(scope="module")
def base():
    return rs.llama()


def inventory(seed=3):
    shapes = support.pick(support.llama_shapes(), "q_proj", "down_proj")
    return Inventory(Frame(shapes, LAYERS, 3, 2, rank=2, scaling=2.0), seed, torch.device("cpu"))


def learned(base, course=COURSE, listener=None):
    made = inventory()
    with frozen(base.model), made.attached(base.model):
        losses = fit(base.model, made, TASKS, course, listener or Silent())
    return made, losses


def tensors(made):
    return [made.logits, *made.modules]


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_tasks_come_in_turn_and_rows_once_in_a_pass(batch):
    order = mixed(TASKS, batch, seed=5)
    picks = [pick for _ in range(60) for pick in next(order)]
    for end in range(1, len(picks)):
        counts = Counter(task for task, _ in picks[:end])
        assert max(counts.values()) - min(counts.get(t, 0) for t in range(3)) <= 1
    for task, rows in enumerate(TASKS):
        own = [row for number, row in picks if number == task]
        for first in range(0, len(own) - len(rows), len(rows)):
            assert sorted(own[first : first + len(rows)]) == list(range(len(rows)))


def test_the_order_follows_from_the_seed():
    one, same, other = (mixed(TASKS, 6, seed) for seed in (5, 5, 6))
    first, second, third = ([next(order) for _ in range(4)] for order in (one, same, other))
    assert first == second != third


def test_the_order_of_a_task_does_not_depend_on_the_others():
    order = mixed(TASKS, 3, 5)
    together = [pick for _ in range(3) for pick in next(order)]
    alone = next(mixed(TASKS[:1], 3, 5))
    assert [row for task, row in together if task == 0] == [row for _, row in alone]


def test_the_loss_falls_and_the_base_stays(base):
    before = [p.clone() for p in base.model.parameters()]
    made, losses = learned(base, Course(steps=25, lr=0.02, allocation_lr=0.1, batch=12, seed=2))
    assert len(losses) == 25
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(p, q) for p, q in zip(base.model.parameters(), before, strict=True))
    assert not any(p.grad is not None for p in base.model.parameters())
    assert made.logits.detach().abs().max() > 0.1


def test_the_same_run_gives_the_same_bits_and_leaves_the_generator(base):
    torch.manual_seed(8)
    state = torch.get_rng_state()
    one, losses = learned(base)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(9)
    two, again = learned(base)
    assert losses == again
    assert all(torch.equal(x, y) for x, y in zip(tensors(one), tensors(two), strict=True))
    other, _ = learned(base, Course(**{**vars_of(COURSE), "seed": 3}))
    assert not torch.equal(one.logits, other.logits)


def vars_of(course):
    return {name: getattr(course, name) for name in course.__dataclass_fields__}


def test_the_first_step_is_that_of_adam_with_two_rates(base):
    """B moves by its rate; the allocation gets its first slope when B is no longer zero."""
    start = inventory()
    one, _ = learned(base, Course(steps=1, lr=0.01, allocation_lr=0.1, batch=6, seed=2))
    for path in one.b:
        assert float(one.b[path].detach().abs().max()) == pytest.approx(0.01, rel=1e-3)
        assert torch.equal(one.a[path], start.a[path])
    assert torch.equal(one.logits, start.logits)
    two, _ = learned(base, Course(steps=2, lr=0.01, allocation_lr=0.1, batch=6, seed=2))
    moved = (two.logits - start.logits).detach().abs().max()
    assert 0.001 < float(moved) <= 0.5 * 0.1 * 1.01  # the second of two steps has half the rate


def gradients(base, course, picks):
    made = inventory()
    with torch.no_grad():
        for b in made.b.values():
            b.fill_(0.05)
    uniform = torch.rand(made.size, generator=torch.Generator().manual_seed(4))
    with frozen(base.model), made.attached(base.model):
        loss = backward(base.model, made, TASKS, picks, course, uniform)
    return loss, made


def test_parts_of_a_step_add_up(base):
    picks = next(mixed(TASKS, 6, 1))
    whole, one = gradients(base, COURSE, picks)
    parted, three = gradients(base, Course(**{**vars_of(COURSE), "parts": 3}), picks)
    assert parted == pytest.approx(whole, rel=1e-5)
    for left, right in zip(tensors(one), tensors(three), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-3, atol=1e-6)


def test_the_prior_pulls_at_the_allocation_alone(base):
    picks = next(mixed(TASKS, 6, 1))
    plain_loss, plain = gradients(base, COURSE, picks)
    loss, pulled = gradients(base, Course(**{**vars_of(COURSE), "ibp": 24.0}), picks)
    assert loss == plain_loss
    free = pulled.logits.detach().clone().requires_grad_()
    prior = sum(neg_log_ibp(free[:, place].sigmoid()) for place in range(2))
    (prior * 24.0 / 12).backward()  # twelve rows in all
    assert torch.allclose(pulled.logits.grad - plain.logits.grad, free.grad, atol=1e-5)
    assert free.grad.abs().max() > 0.01
    path = next(iter(plain.a))
    assert torch.equal(plain.a[path].grad, pulled.a[path].grad)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_every_schedule_of_train_is_there(base, schedule):
    course = Course(steps=2, lr=0.01, allocation_lr=0.1, batch=3, schedule=schedule, warmup=1)
    made, losses = learned(base, course)
    assert losses[0] != losses[1] or schedule != "constant"
    assert all(math.isfinite(loss) for loss in losses)
    if schedule == "constant":  # the rate was 0 in the step of the warm-up
        assert 0.005 < float(next(iter(made.b.values())).detach().abs().max()) < 0.0101


def test_a_loss_that_is_not_finite_ends_it(base, monkeypatch):
    plain, seen = fitting.row_losses, []

    def broken(model, batch):
        losses, right = plain(model, batch)
        seen.append(1)
        return (losses * float("nan") if len(seen) > 2 else losses), right

    monkeypatch.setattr(fitting, "row_losses", broken)
    with pytest.raises(InputError, match="not finite at step 3") as refusal:
        learned(base)
    assert refusal.value.code == "input.loss"
