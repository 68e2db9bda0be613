"""Routers that learn: gradients, best points, pruning, and what is said when it goes wrong."""

import json
import math

import pytest
import routing_support as rs
import support
import torch

from cgmerge.errors import Damaged, DataError, Incompatible, UsageError
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.routing.attach import routed
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.learning import (
    learning,
    measure,
    parameters,
    penalised,
    places,
    prune,
    zeros,
)
from cgmerge.modules.routing.methods import FitInput, Labelled, find_routed
from cgmerge.modules.routing.router import TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate, Standardised
from cgmerge.modules.routing.stack import stacks
from cgmerge.modules.routing.support import Mark, Part, Steps, Support, descend
from cgmerge.modules.teacher import make_batch

SHAPES = support.pick(support.llama_shapes(), "q_proj", "k_proj", "down_proj")
NAMES = ["sort", "copy", "turn"]
EXPERTS = [rs.expert(SHAPES, 2, 1), rs.expert(SHAPES, 3, 2), rs.expert(SHAPES, 2, 3)]


@pytest.fixture(scope="module")
def base():
    return rs.llama()


@pytest.fixture(scope="module")
def taught(base):
    """Examples whose answers are what an expert alone would write."""
    found = []
    for number, name in enumerate(NAMES):
        with routed(base, *only(number)):
            written = [
                Encoded(row.prompt_ids, answer(base.model, row.prompt_ids))
                for row in rs.rows(3, seed=number)
            ]
        found.append(Labelled(name, written))
    return found


def only(number):
    found = stacks([EXPERTS[number]])
    rules = {
        p: TokenRule(Gate(rows=torch.zeros(1, s.a.shape[1])), Choice()) for p, s in found.items()
    }
    return found, TokenRouter(rules)


def even():
    """All experts, each with the same weight for every token."""
    found = stacks(EXPERTS)
    rules = {
        p: TokenRule(Gate(rows=torch.zeros(3, s.a.shape[1])), Choice()) for p, s in found.items()
    }
    return found, TokenRouter(rules)


def part_of(rows, skills=()):
    batch = make_batch(rows, torch.device("cpu"))
    return Part(batch, torch.ones(len(rows), dtype=torch.float64), list(skills))


def answer(model, prompt):
    ids = list(prompt)
    for _ in range(2):
        ids.append(int(rs.logits(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def fit(name, base, examples, params=None, *, experts=None, names=None, **options):
    method = find_routed(name)
    deltas = EXPERTS if experts is None else experts
    return method.make(
        FitInput(
            names=names or NAMES[: len(deltas)],
            stacks=stacks(deltas),
            loaded=base,
            examples=examples,
            params=method.make_params(params),
            **options,
        )
    )


class Block(torch.nn.Module):
    """Two modules that read the same input and one that reads theirs, in float64 throughout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = torch.nn.Linear(6, 5)
        self.k_proj = torch.nn.Linear(6, 5)
        self.down_proj = torch.nn.Linear(5, 4)

    def forward(self, x):
        return self.down_proj(self.q_proj(x).tanh() * self.k_proj(x))


def test_gradients_are_those_of_finite_differences():
    base = rs.loaded(Block().double())
    shapes = {"q_proj": (5, 6), "k_proj": (5, 6), "down_proj": (4, 5)}
    found = stacks([rs.expert(shapes, rank, rank) for rank in (1, 2, 3)])
    generator = torch.Generator().manual_seed(3)
    rules = {}
    for path, stack in found.items():
        start = torch.randn(3, stack.a.shape[1], generator=generator, dtype=torch.float64) * 0.3
        bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        after = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        scorer = Gate(rows=start.requires_grad_(), bias=bias)
        rules[path] = TokenRule(scorer, Choice(None, 0.8), after)
    x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    router = TokenRouter(rules)
    tensors = parameters(router)
    assert len(tensors) == 9
    with learning(base, found, router):
        base.model(x).square().sum().backward()
        slopes = [tensor.grad.clone() for tensor in tensors]
        with torch.no_grad():
            for tensor, slope in zip(tensors, slopes, strict=True):
                flat = tensor.view(-1)
                for place in range(flat.numel()):
                    values = []
                    for step in (1e-6, -2e-6):
                        flat[place] += step
                        values.append(float(base.model(x).square().sum()))
                    flat[place] += 1e-6
                    found_slope = (values[0] - values[1]) / 2e-6
                    wanted = float(slope.flatten()[place])
                    assert found_slope == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_a_gate_learns_whose_tokens_are_whose(base, taught):
    seen = []
    fitted = fit("gate", base, taught, {"steps": 60, "lr": 0.1}, progress=lambda *s: seen.append(s))
    record = fitted.record
    assert record["dense"]["loss"] < record["start"]["loss"] - 1.0
    assert record["dense"]["score"] >= record["start"]["score"]
    assert record["kept"]["loss"] <= record["dense"]["loss"] + 0.01
    assert record["kept"]["score"] >= record["dense"]["score"]
    assert seen == [(n, 60) for n in range(1, 61)]
    assert len(record["loss"]) == 60
    assert [item["rows"] for item in record["examples"]] == [3, 3, 3]
    assert json.loads(json.dumps(record)) == record
    assert fitted.notes[0].startswith("loss on the examples")
    with learning(base, stacks(EXPERTS), fitted.router):
        assert Support(base, taught).mark().as_dict() == pytest.approx(record["kept"], abs=1e-6)
    assert not any(t.requires_grad for t in fitted.router.tensors().values())


@pytest.mark.parametrize("params", [{"lr": 10.0}, {"lr": 10.0, "batch": 4}, {"steps": 0}])
def test_a_gate_is_never_worse_than_its_even_start(base, params):
    """Wrong answers and steps far too large: the start is what is left."""
    examples = [Labelled("noise", rs.rows(6, seed=9))]
    record = fit("gate", base, examples, {"steps": 4, "top_k": "all"} | params).record
    assert record["dense"]["loss"] <= record["start"]["loss"] + 1e-6
    assert record["pruning"] == []


def test_the_same_seed_learns_the_same(base, taught):
    params = {"steps": 6, "batch": 4, "top_k": "all"}
    first, again, other = (
        fit("gate", base, taught, params, seed=seed).router.tensors() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("scope", "count"), [("module", 6), ("layer", 2), ("model", 1)])
def test_scopes_decide_in_as_many_places(base, taught, scope, count):
    params = {"scope": scope, "steps": 8, "lr": 0.1, "bias": True, "top_k": "all"}
    fitted = fit("gate", base, taught, params)
    assert len(fitted.router.rules) == count
    assert fitted.record["dense"]["loss"] < fitted.record["start"]["loss"]
    assert all(rule.scorer.bias.any() for rule in fitted.router.rules.values())


def test_a_hard_number_is_taken_and_its_price_said(base, taught):
    fitted = fit("gate", base, taught, {"steps": 30, "lr": 0.1, "top_k": 1, "entropy": 0.0})
    kept, dense = fitted.record["kept"], fitted.record["dense"]
    assert fitted.router.choice.top_k == fitted.record["top_k"] == 1
    assert fitted.record["pruning"] == [{"top_k": 1, **kept}]
    said = [text for text in fitted.warnings + fitted.notes if text.startswith("top_k=1: loss")]
    assert len(said) == 1
    assert (said[0] in fitted.warnings) == (kept["score"] < dense["score"])


def test_more_than_there_are_is_said(base, taught):
    fitted = fit("gate", base, taught, {"steps": 1, "top_k": 7})
    assert fitted.router.choice.top_k is None
    assert fitted.warnings == ["top_k=7 is more than 3 experts: all are used"]


def test_pruning_stops_at_the_first_number_that_is_good_enough():
    marks = {1: Mark(0.9, 1.0), 2: Mark(0.105, 0.9), 3: Mark(0.105, 1.0), 4: Mark(0.1, 1.0)}
    router = TokenRouter({"m": TokenRule(Gate(rows=torch.zeros(5, 2)), Choice(None, 2.0))})

    def measured(pruned):
        return marks[pruned.choice.top_k]

    cut = prune(router, measured, range(1, 5), Mark(0.1 + 0.01, 1.0))
    assert (cut.router.choice, cut.mark) == (Choice(3, 2.0), marks[3])
    assert [row["top_k"] for row in cut.table()] == [1, 2, 3]
    nothing = prune(router, measured, range(1, 5), Mark(0.05, 1.0))
    assert (nothing.router, nothing.mark, len(nothing.tried)) == (router, None, 4)
    hard = prune(router, measured, [1], None)
    assert (hard.router.choice.top_k, hard.mark) == (1, marks[1])


def test_an_entropy_penalty_makes_few_experts_speak(base, taught):
    found = {}
    for factor in (0.0, 3.0):
        params = {"steps": 25, "lr": 0.1, "entropy": factor, "top_k": "all"}
        router = fit("gate", base, taught, params).router
        with learning(base, stacks(EXPERTS), router) as routing:
            part = part_of(taught[0].rows)
            with penalised(routing, NAMES, entropy=1.0, guide=0.0) as penalty:
                base.model(input_ids=part.batch.ids, attention_mask=part.batch.mask)
                found[factor] = float(penalty(part))
    assert found[3.0] < 0.8 * found[0.0]


def test_entropy_is_that_of_real_tokens(base):
    """Even weights: ln 3, whatever the padding does."""
    found, router = even()
    part = part_of(rs.rows(3), ("sort", "nobody", "turn"))
    with (
        learning(base, found, router) as routing,
        penalised(routing, NAMES, entropy=2.0, guide=0.0) as penalty,
    ):
        base.model(input_ids=part.batch.ids, attention_mask=part.batch.mask)
        assert float(penalty(part)) == pytest.approx(2.0 * math.log(3.0), rel=1e-5)
    with penalised(routing, NAMES, entropy=0.0, guide=0.0) as nothing:
        assert nothing is None


def test_the_guide_is_the_owners_share_of_real_tokens(base):
    """Even weights: ln 3 for every token of a row that is an expert's, nothing for the others."""
    found, router = even()
    part = part_of(rs.rows(3), ("sort", "nobody", "turn"))
    tokens = part.batch.mask.sum(1).tolist()
    with (
        learning(base, found, router) as routing,
        penalised(routing, NAMES, entropy=0.0, guide=0.5) as penalty,
    ):
        base.model(input_ids=part.batch.ids, attention_mask=part.batch.mask)
        share = (tokens[0] + tokens[2]) / sum(tokens)
        assert float(penalty(part)) == pytest.approx(0.5 * share * math.log(3.0), rel=1e-5)


def test_a_guided_gate_gives_examples_to_their_owner(base, taught):
    owned = {}
    for guide in (0.0, 1.0):
        params = {"steps": 25, "lr": 0.1, "guide": guide, "top_k": "all"}
        router = fit("gate", base, taught, params).router
        with learning(base, stacks(EXPERTS), router) as routing:
            part = part_of(taught[1].rows, ["copy"] * len(taught[1].rows))
            with penalised(routing, NAMES, entropy=0.0, guide=1.0) as penalty:
                base.model(input_ids=part.batch.ids, attention_mask=part.batch.mask)
                owned[guide] = math.exp(-float(penalty(part)))
    assert owned[1.0] > 10 * owned[0.0]


def test_one_expert_needs_no_steps(base, taught):
    fitted = fit("gate", base, taught[:1], experts=EXPERTS[:1])
    assert fitted.record["loss"] == []
    assert fitted.router.choice.top_k is None


def descent(base, examples, **options):
    found = stacks(EXPERTS)
    rules = {
        place: TokenRule(Gate(rows=zeros(3, width, device)), Choice())
        for place, (width, device) in places(found, base, "module").items()
    }
    router = TokenRouter(rules)
    with learning(base, found, router):
        steps = Steps(count=4, batch=64, **options)
        return descend(Support(base, examples), parameters(router), steps), router


def test_a_loss_that_is_not_finite_ends_at_the_best_before(base, taught):
    """The third look at the penalty is NaN: two steps were made, the second point was the best."""
    penalties = iter([0.0, 0.0, math.nan, 0.0])
    found, router = descent(base, taught, lr=0.01, penalty=lambda _: torch.tensor(next(penalties)))
    assert found.failed == 3
    assert len(found.curve) == 2
    assert found.best == pytest.approx(min(found.curve))
    again = measure(base, stacks(EXPERTS), router, Support(base, taught)).loss
    assert again == pytest.approx(found.best, rel=1e-5)
    assert found.curve[1] < found.curve[0]


def test_failures_are_said_with_what_to_do(base, taught, monkeypatch):
    from cgmerge.modules.routing import support as module

    real, calls = module.row_losses, []

    def breaks(model, batch):
        losses, right = real(model, batch)
        calls.append(losses.requires_grad)
        return (losses * math.nan if calls[-1] and sum(calls) == 2 else losses), right

    monkeypatch.setattr(module, "row_losses", breaks)
    fitted = fit("gate", base, taught, {"steps": 4, "top_k": "all"})
    assert len(fitted.warnings) == 1
    assert "step 2 of 4 gave a loss or gradient that is not finite" in fitted.warnings[0]
    assert "--set lr" in fitted.warnings[0]
    json.dumps(fitted.record, allow_nan=False)


def test_marks_that_are_no_numbers_can_be_written():
    assert Mark(math.nan, 0.5).as_dict() == {"loss": None, "score": 0.5}


def test_experts_that_are_broken_are_refused(base, taught):
    broken = {p: LowRank(d.a * math.nan, d.b) for p, d in EXPERTS[0].items()}
    with pytest.raises(Damaged, match="not finite before the first step"):
        fit("gate", base, taught, {"steps": 2}, experts=[broken, EXPERTS[1]])


def test_every_skill_counts_the_same(base):
    many, few = rs.rows(6, seed=1), rs.rows(1, seed=2)
    both = Support(base, [Labelled("a", many), Labelled("b", few)]).mark().loss
    alone = [Support(base, [Labelled("x", part)]).mark().loss for part in (many, few)]
    assert both == pytest.approx(sum(alone) / 2, rel=1e-5)


def test_losses_are_means_over_answer_tokens(base):
    row = rs.rows(1)[0]
    ids = torch.tensor([[*row.prompt_ids, *row.target_ids]])
    logs = rs.logits(base.model, ids).log_softmax(-1)[0]
    first = len(row.prompt_ids)
    wanted = -sum(float(logs[first - 1 + i, t]) for i, t in enumerate(row.target_ids)) / 2
    assert Support(base, [Labelled("x", [row])]).mark().loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Encoded([], [3]), "no prompt or no answer"),
        (Encoded([3], []), "no prompt or no answer"),
        (Encoded([3] * 4000, [4]), "4001 tokens; the base reads 2048"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(base, row, message):
    with pytest.raises(DataError, match=message):
        Support(base, [Labelled("x", [row])])


@pytest.mark.parametrize("name", ["gate", "phatgoose", "lora-flow", "retrieval"])
def test_learned_methods_say_what_they_lack(base, taught, name):
    with pytest.raises(UsageError, match="from examples, and there are none") as error:
        fit(name, base, [])
    assert "--examples NAME=FILE" in error.value.hint
    with pytest.raises(UsageError, match="what the base makes of the examples"):
        fit(name, None, taught)


@pytest.mark.parametrize("name", ["phatgoose", "retrieval"])
def test_examples_must_be_some_experts(base, taught, name):
    examples = [Labelled("sort", taught[0].rows), Labelled("cpoy", taught[1].rows)]
    with pytest.raises(Incompatible) as error:
        fit(name, base, examples)
    assert "experts without examples: copy, turn" in error.value.message
    assert "examples of no expert:    cpoy" in error.value.message
    assert error.value.hint == "name them: --examples copy=FILE"


def test_phatgoose_learns_each_expert_alone(base, taught):
    seen = []
    params = {"steps": 10, "lr": 0.05}
    fitted = fit("phatgoose", base, taught, params, progress=lambda *step: seen.append(step))
    assert seen == [(n, 30) for n in range(1, 31)]
    for entry in fitted.record["experts"]:
        assert entry["kept"] < entry["start"]
    rule = next(iter(fitted.router.rules.values()))
    assert isinstance(rule.scorer, Standardised)
    assert rule.choice == Choice(2, 1.0)
    other = [taught[0], taught[1], Labelled("turn", rs.rows(3, seed=77))]
    changed = fit("phatgoose", base, other, params).router
    path = next(iter(SHAPES))
    before, after = (r.rules[path].scorer.rows for r in (fitted.router, changed))
    assert torch.equal(before[:2], after[:2])  # other experts' examples are never read
    assert not torch.equal(before[2], after[2])


def test_phatgoose_starts_with_half_an_expert(base, taught):
    record = fit("phatgoose", base, taught[:1], {"steps": 1}, experts=EXPERTS[:1]).record
    half = {p: LowRank(d.a, d.b * 0.5) for p, d in EXPERTS[0].items()}
    found, router = stacks([half]), only(0)[1]
    wanted = measure(base, found, router, Support(base, taught[:1])).loss
    assert record["experts"][0]["start"] == pytest.approx(wanted, rel=1e-4)


def test_phatgoose_leaves_out_experts_that_are_not_in_a_module(base, taught):
    some = {path: delta for path, delta in EXPERTS[1].items() if "q_proj" in path}
    experts = [EXPERTS[0], some]
    router = fit("phatgoose", base, taught[:2], {"steps": 2}, experts=experts).router
    for path, rule in router.rules.items():
        assert rule.scorer.present.tolist() == [True, "q_proj" in path]
    score = measure(base, stacks(experts), router, Support(base, taught[:2]))
    assert math.isfinite(score.loss)


def test_flow_begins_with_the_best_expert_and_is_not_worse(base, taught):
    fitted = fit("lora-flow", base, [taught[1]], {"steps": 6})
    record = fitted.record
    assert record["start"] == "copy"
    assert set(record["starts"]) == {"even", *NAMES}
    assert record["starts"]["copy"]["score"] == 1.0
    assert record["kept"]["loss"] <= min(mark["loss"] for mark in record["starts"].values()) + 1e-6
    assert all(rule.after.shape == (3,) for rule in fitted.router.rules.values())
    assert fitted.router.scope == "layer"


def test_flow_without_steps_is_its_start(base, taught):
    router = fit("lora-flow", base, taught, {"steps": 0, "start": "turn"}).router
    rule = router.rules["model.layers.0"]
    assert not rule.scorer.rows.any()
    assert torch.allclose(1 / 3 + rule.after, torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)
    with pytest.raises(UsageError, match="which is no expert") as error:
        fit("lora-flow", base, taught, {"start": "trun"})
    assert error.value.details["expected"] == ["best", "even", *NAMES]


def test_modules_outside_of_layers_need_their_own_gates(base, taught):
    experts = [rs.expert({"lm_head": (support.VOCAB, 32)}, 2, seed) for seed in (1, 2)]
    with pytest.raises(Incompatible, match="lm_head belongs to no layer"):
        fit("lora-flow", base, taught, experts=experts)
    fitted = fit("gate", base, taught, {"steps": 2}, experts=experts)
    assert list(fitted.router.rules) == ["lm_head"]
