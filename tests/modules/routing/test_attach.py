"""Routed layers inside models, against dense matrices in plain hooks."""

import math

import pytest
import routing_support as rs
import support
import torch

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge.deltas import LowRank
from cgmerge.modules.attach import attached
from cgmerge.modules.routing.attach import layer_name, layer_of, routed
from cgmerge.modules.routing.choice import Choice
from cgmerge.modules.routing.layer import SequenceLinear, TokenLinear
from cgmerge.modules.routing.router import RetrievalRouter, TaskRouter, TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate
from cgmerge.modules.routing.spectral import spectral_router
from cgmerge.modules.routing.stack import stacks

IDS = torch.randint(3, support.VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
GPT2 = {
    f"transformer.h.{i}.{leaf}": size
    for i in range(2)
    for leaf, size in (("attn.c_attn", (96, 32)), ("mlp.c_proj", (32, 128)))
}


@pytest.fixture(scope="module")
def base():
    return rs.llama()


def constant(found, weights, scope="module", places=None):
    """A gate that gives everybody the same weights, whatever the input."""
    bias = torch.tensor(weights).log()
    widths = {path: stack.a.shape[1] for path, stack in found.items()}
    if places is not None:
        widths = dict.fromkeys(places, support.HIDDEN)
    rules = {
        place: TokenRule(Gate(rows=torch.zeros(len(weights), width), bias=bias), Choice())
        for place, width in widths.items()
    }
    return TokenRouter(rules, scope)


def arrow_weights(experts, k, *, full=False, fro=False):
    """Arrow or SpectR, one token at a time, from dense matrices."""
    dense = [{path: d.dense().double() for path, d in own.items()} for own in experts]
    first = [{p: torch.linalg.svd(m).Vh[0] for p, m in own.items()} for own in dense]

    def score(number, path, x):
        if path not in dense[number]:
            return -math.inf
        if not full:
            return abs(float(first[number][path] @ x))
        size = float((dense[number][path] @ x).norm())
        return size / float(dense[number][path].norm()) if fro else size

    def weigh(path, x):
        found = torch.zeros(*x.shape[:-1], len(experts))
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                token = x[i, j].double()
                scores = [score(e, path, token) for e in range(len(experts))]
                found[i, j] = rs.choose(scores, k)
        return found

    return weigh


@pytest.mark.parametrize(
    ("options", "k"),
    [
        ({"directions": 1}, 1),
        ({"directions": 1}, 2),
        ({"directions": 1}, None),
        ({"directions": None}, 2),
        ({"directions": None, "normalise": True}, None),
    ],
)
def test_spectral_routing_equals_dense_matrices(base, options, k):
    experts = rs.different_experts()
    found = stacks(experts)
    full = options["directions"] is None
    weigh = arrow_weights(experts, k, full=full, fro=options.get("normalise", False))
    before = rs.logits(base.model, IDS)
    with rs.naively(base.model, experts, weigh):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, spectral_router(found, choice=Choice(k), **options)):
        during = rs.logits(base.model, IDS)
    assert (during - before).abs().max() > 0.1
    assert torch.allclose(during, wanted, atol=2e-3)
    assert torch.equal(rs.logits(base.model, IDS), before)
    assert not any(isinstance(m, TokenLinear) for m in base.model.modules())


def test_gpt2_is_routed_through_its_own_layers():
    base = rs.gpt2()
    experts = [rs.expert(GPT2, 3, 1), rs.expert(GPT2, 2, 2)]
    found = stacks(experts)
    with rs.naively(base.model, experts, arrow_weights(experts, 1)):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(1))):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-3)


@pytest.mark.parametrize("scope", ["module", "layer", "model"])
def test_a_constant_gate_is_the_weighted_sum(base, scope):
    experts, weights = rs.different_experts(), [0.2, 0.5, 0.3]
    found = stacks(experts)
    places = {"module": None, "layer": ["model.layers.0", "model.layers.1"]}
    router = constant(found, weights, scope, places.get(scope, ["model.layers.0"]))
    merged = {path: stack.mixed(torch.tensor(weights)) for path, stack in found.items()}
    with attached(base.model, merged):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, router):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-4)


def test_added_weights_need_not_sum_to_one(base):
    """LoRA-Flow at the start: softmax (½, ½) plus (−½, ½) is the second expert alone."""
    experts = [rs.expert(support.llama_shapes(), 2, seed) for seed in (1, 2)]
    found = stacks(experts)
    rules = {
        f"model.layers.{i}": TokenRule(
            Gate(rows=torch.zeros(2, support.HIDDEN)), Choice(), torch.tensor([-0.5, 0.5])
        )
        for i in range(2)
    }
    with attached(base.model, experts[1]):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, TokenRouter(rules, "layer")):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-4)


def test_one_expert_is_that_expert(base):
    own = rs.expert(support.llama_shapes(), 3, 5)
    found = stacks([own])
    with attached(base.model, own):
        wanted = rs.logits(base.model, IDS)
    for options in ({"directions": 1}, {"directions": None}):
        with routed(base, found, spectral_router(found, choice=Choice(3), **options)):
            assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-4)


def test_order_of_experts_permutes_the_weights_only(base):
    experts, order = rs.different_experts(), [2, 0, 1]

    def run(deltas):
        found, seen = stacks(deltas), {}
        router = spectral_router(found, directions=1, choice=Choice(2))
        with routed(base, found, router) as routing, routing.watched(seen.__setitem__):
            return rs.logits(base.model, IDS), seen

    first, one = run(experts)
    second, two = run([experts[e] for e in order])
    assert torch.allclose(first, second, atol=1e-4)
    assert sorted(one) == sorted(two)
    for path, weights in one.items():
        assert torch.allclose(weights[..., order], two[path], atol=1e-4), path


def test_padding_and_batch_mates_change_nothing(base):
    found = stacks(rs.different_experts())
    router = spectral_router(found, directions=1, choice=Choice(1))
    padded = torch.cat([IDS[:1, :5], torch.zeros(1, 2, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    with routed(base, found, router):
        alone = rs.logits(base.model, IDS[:1, :5])
        both = rs.logits(base.model, torch.cat([padded, IDS[1:2]]), attention_mask=mask)
    assert torch.allclose(both[0, :5], alone[0], atol=1e-4)


@pytest.mark.parametrize("k", [1, None])
def test_generation_with_a_cache_writes_the_same(base, k):
    found = stacks(rs.different_experts())
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(k))) as routing:
        cached = routing.generate(IDS, **options)
        plain = routing.generate(IDS, use_cache=False, **options)
    assert cached.shape == (3, 13)
    assert torch.equal(cached, plain)


TABLE = TaskRouter({"a": (1.0, 0.0), "b": (0.0, 1.0), "both": (0.5, 0.5)})


def pair():
    return [rs.expert(support.llama_shapes(), 2, seed) for seed in (1, 2)]


def test_every_sequence_has_its_own_expert(base):
    experts = pair()
    with routed(base, stacks(experts), TABLE) as routing:
        weights = routing.route([[3]] * 3, ["b", "a", "both"])
        during = rs.logits(base.model, IDS)
    assert weights.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]
    for row, number in ((0, 1), (1, 0)):
        with attached(base.model, experts[number]):
            wanted = rs.logits(base.model, IDS[row : row + 1])
        assert torch.allclose(during[row], wanted[0], atol=1e-4)


def test_beams_follow_their_sequence(base):
    experts = pair()
    options = {
        "max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    with routed(base, stacks(experts), TABLE) as routing:
        found = routing.generate(IDS[:2], tasks=["b", "a"], **options)
    for row, number in ((0, 1), (1, 0)):
        with attached(base.model, experts[number]):
            wanted = base.model.generate(IDS[row : row + 1], **options)
        assert torch.equal(found[row], wanted[0])


def test_sequences_must_be_known(base):
    with routed(base, stacks(pair()), TABLE) as routing:
        with pytest.raises(UsageError, match="has to know the prompts first") as error:
            rs.logits(base.model, IDS)
        assert error.value.hint.startswith("call route(prompts)")
        routing.route([[3], [4]], ["a", "b"])
        with pytest.raises(UsageError, match="3 sequences, 2 prompts routed"):
            rs.logits(base.model, IDS)
        with pytest.raises(UsageError, match="task 'c' is not in its table"):
            routing.route([[3]], ["c"])
        with pytest.raises(UsageError, match="no task is named"):
            routing.route([[3]])
        with routing.without():
            base_alone = rs.logits(base.model, IDS)
    assert torch.equal(base_alone, rs.logits(base.model, IDS))


def test_layers_that_flatten_their_tokens_keep_rows_together(base):
    """Some models call their layers with [batch·tokens, width]."""
    experts, path = pair(), "model.layers.0.mlp.up_proj"
    x = torch.randn(3, 4, support.HIDDEN)
    found = {path: stacks(experts)[path]}
    for router in (TABLE, constant(found, [0.3, 0.7], "layer", ["model.layers.0"])):
        with torch.no_grad(), routed(base, found, router) as routing:
            routing.route([[3]] * 3, ["a", "b", "both"])
            routing.routes.shared["model.layers.0"] = torch.rand(3, 4, 2)
            layer = base.model.get_submodule(path)
            assert torch.allclose(layer(x).flatten(0, 1), layer(x.flatten(0, 1)), atol=1e-5)


def test_prompts_lead_to_the_expert_they_resemble(base):
    experts = pair()
    router = RetrievalRouter(torch.eye(2, support.HIDDEN), torch.zeros(support.HIDDEN))
    prompts = [IDS[0].tolist(), IDS[1, :4].tolist()]
    with routed(base, stacks(experts), router) as routing:
        weights = routing.route(prompts)
        alone = torch.cat([routing.weights([prompt]) for prompt in prompts])
        assert torch.equal(weights, routing.routes.plan.weights(2))
    assert torch.equal(weights, alone)
    assert torch.equal(weights.sum(dim=1), torch.ones(2))


def test_silent_layers_and_gradients_leave_the_base_alone(base):
    found = stacks(rs.different_experts())
    before = {name: p.clone() for name, p in base.model.named_parameters()}
    plain = rs.logits(base.model, IDS)
    with routed(base, found, constant(found, [0.2, 0.5, 0.3])) as routing:
        with routing.without():
            assert torch.equal(rs.logits(base.model, IDS), plain)
        graded = base.model(input_ids=IDS, use_cache=False).logits
        assert torch.allclose(graded, rs.logits(base.model, IDS), atol=1e-4)
        layer = base.model.get_submodule("model.layers.0.self_attn.q_proj")
        assert layer.weight is layer.base.weight
        assert layer.in_features == support.HIDDEN
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_an_error_leaves_the_base_alone(base):
    found = stacks(rs.different_experts())
    plain = rs.logits(base.model, IDS)
    router = constant(found, [0.2, 0.5, 0.3], "model", ["model.layers.0"])
    with pytest.raises(RuntimeError, match="stop"), routed(base, found, router):
        raise RuntimeError("stop")
    assert torch.equal(rs.logits(base.model, IDS), plain)
    assert not base.model.get_submodule("model.layers.0")._forward_pre_hooks


def test_routers_and_bases_that_do_not_fit_are_refused(base):
    found = stacks(pair())
    short = constant({"model.layers.0.mlp.up_proj": found["model.layers.0.mlp.up_proj"]}, [1.0, 1])
    one_layer = constant(found, [0.5, 0.5], "layer", ["model.layers.0"])
    for deltas, router, message in (
        ({"nowhere": next(iter(found.values()))}, TABLE, "the model has no module"),
        (found, short, "the router knows nothing about module"),
        (found, one_layer, "the layer of module model.layers.1"),
    ):
        with pytest.raises(Incompatible, match=message), routed(base, deltas, router):
            pass
    assert not any(isinstance(m, SequenceLinear | TokenLinear) for m in base.model.modules())


def test_layers_are_found_by_their_first_number():
    assert layer_name("model.layers.3.mlp.experts.7.w1") == "model.layers.3"
    assert layer_of("transformer.h.11.attn.c_attn") == "transformer.h.11"
    assert layer_name("lm_head") is None
    with pytest.raises(Incompatible, match="belongs to no layer"):
        layer_of("lm_head")


def test_bfloat16_models_are_routed_in_their_own_type():
    base = rs.llama(dtype=torch.bfloat16)
    found = stacks(rs.different_experts())
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(2))):
        half = rs.logits(base.model, IDS)
    exact = rs.llama()
    with routed(exact, found, spectral_router(found, directions=1, choice=Choice(2))):
        full = rs.logits(exact.model, IDS)
    assert half.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(half.float().flatten(), full.flatten(), dim=0)
    assert float(cosine) > 0.97


def test_inference_mode_works_too(base):
    found = stacks(rs.different_experts())
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(2))):
        with torch.inference_mode():
            found_logits = base.model(input_ids=IDS, use_cache=False).logits
        assert torch.allclose(found_logits, rs.logits(base.model, IDS), atol=1e-5)


@pytest.mark.slow
def test_a_four_bit_base_is_routed_and_not_repacked():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from cgmerge.modules.loading import guard_four_bit

    base = rs.llama()
    shapes = {"model.layers.0.self_attn.q_proj": (32, 32)}
    plain = base.model.get_submodule(next(iter(shapes)))
    four = bitsandbytes.nn.Linear4bit(32, 32, bias=False, quant_type="nf4")
    four.weight = bitsandbytes.nn.Params4bit(
        plain.weight.data.clone(), requires_grad=False, quant_type="nf4"
    )
    base.model.model.layers[0].self_attn.q_proj = four.to("cpu")
    guard_four_bit(base.model)
    experts = [rs.expert(shapes, 2, 1), rs.expert(shapes, 2, 2)]
    found = stacks(experts)
    bytes_before = four.weight.data.clone()
    assert not four.weight.is_floating_point()
    with rs.naively(base.model, experts, arrow_weights(experts, 1)):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(1))):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-3)
    assert torch.equal(four.weight.data, bytes_before)


@pytest.mark.slow
def test_arrow_equals_peft_given_the_same_prototypes(models, tmp_path):
    """PEFT computes its prototypes by 15 power iterations; it is given the exact ones here."""
    from peft import ArrowConfig, create_arrow_model
    from transformers import AutoModelForCausalLM

    from cgmerge.modules.expert import open_expert

    shapes = support.pick(support.llama_shapes(), "q_proj", "v_proj")
    paths = [support.make_expert(tmp_path / f"e{i}", shapes, seed=i, std=0.4) for i in range(4)]
    found = stacks([dict(open_expert(str(path)).deltas()) for path in paths])
    router = spectral_router(found, directions=1, choice=Choice(2))
    base = rs.loaded(AutoModelForCausalLM.from_pretrained(models / "B").eval())
    plain = rs.logits(base.model, IDS)
    with routed(base, found, router):
        ours = rs.logits(base.model, IDS)
    peft = create_arrow_model(
        base_model=base.model,
        task_specific_adapter_paths=[str(path) for path in paths],
        arrow_config=ArrowConfig(top_k=2, rng_seed=0),
    ).eval()
    rs.logits(peft, IDS)  # builds its own prototypes
    changed = 0
    for name, module in peft.named_modules():
        if type(module).__name__ == "ArrowLoraLinearLayer":
            path = name.removeprefix("base_model.model.").split(".lora_arrow")[0]
            module.prototypes.copy_(router.rules[path].scorer.rows)
            changed += 1
    assert changed == len(found)
    assert (ours - plain).abs().max() > 0.1
    assert torch.allclose(rs.logits(peft, IDS), ours, atol=1e-4)


def test_a_zero_expert_says_nothing(base):
    live = rs.expert(support.llama_shapes(), 2, 1)
    dead = {p: LowRank(d.a, torch.zeros_like(d.b)) for p, d in live.items()}
    found = stacks([dead, live])
    with attached(base.model, live):
        wanted = rs.logits(base.model, IDS)
    with routed(base, found, spectral_router(found, directions=1, choice=Choice(2))):
        assert torch.allclose(rs.logits(base.model, IDS), wanted, atol=1e-4)
