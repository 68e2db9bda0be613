"""Routers from files whose digests are right and whose numbers or types are not."""

import json

import pytest
import routing_support as rs
import support
import torch
from composition_support import ids, make_experts, tiny
from safetensors.torch import load_file, save_file

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.modules.card import BaseId
from cgmerge.modules.routing.attach import layer_name, routed
from cgmerge.modules.routing.choice import LEAST, MOST, Choice
from cgmerge.modules.routing.files import Contents, Member, open_composition, save_composition
from cgmerge.modules.routing.methods import FitInput, find_routed
from cgmerge.modules.routing.router import RetrievalRouter, TaskRouter, TokenRouter
from cgmerge.modules.routing.rule import TokenRule
from cgmerge.modules.routing.scores import Gate
from cgmerge.modules.routing.stack import stacks
from cgmerge.tensorfile import file_sha256

NAMES = ("sort", "reverse", "count")


def spectral(experts, method="arrow", **params):
    spec = find_routed(method)
    fit = FitInput(
        names=NAMES,
        stacks=stacks([dict(expert.deltas()) for expert in experts]),
        params=spec.make_params(params),
    )
    return spec.make(fit).router


def layered(experts, width=128, scope="layer"):
    paths = {path for expert in experts for path in expert.deltas()}
    layers = sorted({layer_name(path) for path in paths})[: None if scope == "layer" else 1]
    rules = {at: TokenRule(Gate(rows=torch.zeros(3, width)), Choice()) for at in layers}
    return TokenRouter(rules, scope)


def save(folder, experts, router):
    members = [Member(name, expert) for name, expert in zip(NAMES, experts, strict=True)]
    contents = Contents(
        method="any", params={}, members=members, router=router, base=BaseId(name="tiny")
    )
    return save_composition(folder, contents)


def alter(folder, settings=None, router=None, tensors=None):
    """Change the record and tensors, and make the digest right again."""
    path = folder / "cgmerge.json"
    raw = json.loads(path.read_text())
    raw["router"].update(router or {})
    raw["router"]["settings"].update(settings or {})
    if tensors is not None:
        save_file(tensors(load_file(folder / "router.safetensors")), folder / "router.safetensors")
        raw["router"]["sha256"] = file_sha256(folder / "router.safetensors")
    path.write_text(json.dumps(raw))


@pytest.fixture
def experts(tmp_path):
    return make_experts(tmp_path / "experts")


@pytest.mark.parametrize(
    "change",
    [
        {"router": {"kind": ["token"]}},
        {"router": {"kind": {}}},
        {"settings": {"form": ["gate"]}},
        {"settings": {"form": {}}},
        {"settings": {"scope": []}},
        {"settings": {"scope": "model"}},
        {"settings": {"scope": "layer"}},
        {"settings": {"temperature": 1e-44}},
        {"settings": {"temperature": 1e300}},
        {"settings": {"sharpness": 2.0}},
        {"router": {"then": "something newer"}},
        {"tensors": lambda t: {name: x[:0].clone() for name, x in t.items()}},
        {"tensors": lambda t: {name: x.flatten()[0].clone() for name, x in t.items()}},
        {"tensors": lambda t: {n: x[:1].clone() if n.endswith("rows") else x
                               for n, x in t.items()}},
    ],
)  # fmt: skip
def test_a_router_of_tokens_is_refused(tmp_path, experts, change):
    save(tmp_path / "c", experts, spectral(experts))
    alter(tmp_path / "c", **change)
    with pytest.raises(Damaged) as refusal:
        open_composition(tmp_path / "c")
    assert refusal.value.code == "damaged.router"


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_layers_that_decide_are_those_of_the_experts(tmp_path, experts, scope):
    folder = tmp_path / scope
    save(folder, experts, layered(experts, scope=scope))
    alter(folder, tensors=lambda t: {**t, "lm_head.rows": torch.zeros(3, 128)})
    with pytest.raises(Damaged, match="layers of the router"):
        open_composition(folder)


def test_layers_that_read_another_width_are_refused(tmp_path, experts):
    found = save(tmp_path / "c", experts, layered(experts, width=7))
    with pytest.raises(Incompatible, match="width 7, the model's have 128"):
        found.explain(tiny(), ids(1, 4)[0].tolist())
    assert type(tiny().model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_prompts_of_another_width_are_refused(tmp_path, experts):
    router = RetrievalRouter(torch.eye(3, 5), torch.zeros(5))
    found = save(tmp_path / "c", experts, router)
    with pytest.raises(Incompatible, match="width 5, the model's have 128"):
        found.explain(tiny(), ids(1, 4)[0].tolist())


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1e-44}, {"width": 1e-200}, {"width": 1e300}, {"threshold": 1.0}],
)
def test_a_router_of_prompts_is_refused(tmp_path, experts, settings):
    save(tmp_path / "c", experts, RetrievalRouter(torch.eye(3, 128), torch.zeros(128)))
    alter(tmp_path / "c", settings)
    with pytest.raises(Damaged):
        open_composition(tmp_path / "c")


@pytest.mark.parametrize("weight", [1e308, 10**18, float("-inf"), True, "1", None])
def test_a_table_with_weights_beyond_measure_is_refused(weight):
    with pytest.raises(Damaged, match="table of weights"):
        TaskRouter.restore({"table": {"a": [1.0, weight]}}, {})
    assert TaskRouter.restore({"table": {"a": [1, -MOST]}}, {}).table == {"a": (1.0, -MOST)}


@pytest.mark.fault("F12")
def test_folders_that_are_links_are_not_followed(tmp_path, experts):
    save(tmp_path / "c", experts, spectral(experts))
    (tmp_path / "c/experts").rename(tmp_path / "c/elsewhere")
    (tmp_path / "c/experts").symlink_to("elsewhere")
    with pytest.raises(Damaged, match="which is not in"):
        open_composition(tmp_path / "c")


@pytest.mark.parametrize("temperature", [LEAST, MOST])
def test_weights_at_the_bounds_of_the_temperature_are_numbers(temperature):
    scores = torch.tensor([[3e4, 2.9e4, -torch.inf, 0.0]])
    for k in (None, 2, 1):
        found = Choice(k, temperature).weights(scores)
        assert float(found.sum()) == pytest.approx(1.0)
        assert float(found[0, 2]) == 0.0


@pytest.mark.parametrize("value", ["1e-7", "0", "1e7", "nan"])
def test_temperatures_beyond_the_bounds_are_usage(value):
    for method in ("arrow", "spectral", "phatgoose", "lora-flow", "retrieval"):
        with pytest.raises(UsageError, match="temperature"):
            find_routed(method).make_params({"temperature": value})


def test_a_kernel_keeps_the_best_where_all_are_below_the_threshold():
    """Four experts at a width of 10 have about a quarter each, all of them below 0.4."""
    router = RetrievalRouter(torch.eye(4), torch.zeros(4), width=10.0, threshold=0.4)
    prompts = torch.tensor([[0.2, 0.9, 0.1, 0.0], [1.0, 1.0, 0.0, 0.0]])
    assert router.weights(prompts).tolist() == [[0, 1, 0, 0], [0.5, 0.5, 0, 0]]


def test_layers_of_a_small_model_are_compared_too():
    loaded = rs.llama()
    own = stacks([rs.expert(support.llama_shapes(), seed=s) for s in (1, 2)])
    rule = TokenRule(Gate(rows=torch.zeros(2, support.HIDDEN + 1)), Choice())
    router = TokenRouter({"model.layers.0": rule}, "model")
    with pytest.raises(Incompatible, match=f"have {support.HIDDEN}"), routed(loaded, own, router):
        pass
