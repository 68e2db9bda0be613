"""Compressed full fine-tunes compose to the numbers of their dense deltas."""

import pytest
import support
import torch

from cgmerge.errors import Incompatible, UsageError
from cgmerge.merge import Merger, make_rule
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.compress.openedfull import CompressedDeltas, open_compressed_full
from cgmerge.modules.compress.pack import Request
from cgmerge.modules.compress.packfull import plan_full, write_full
from cgmerge.modules.expert import open_expert
from cgmerge.modules.recipe import ExpertRef, Recipe


@pytest.fixture(scope="module", params=["plain", "tied"])
def place(request, tmp_path_factory):
    """A base, three full fine-tunes of it, and their compressed deltas."""
    place = tmp_path_factory.mktemp("full")
    base = support.make_llama(place / "B", tied=request.param == "tied")
    opened = open_base(str(base))
    for number in range(3):
        full = support.make_full(place / f"F{number}", base, seed=number)
        plan = plan_full(str(full), Request(density=0.2), opened)
        write_full(plan, place / f"f{number}.cge")
    return place


def composed(place, out, names, **options):
    refs = tuple(ExpertRef(str(place / name), weight) for name, weight in names)
    recipe = Recipe(experts=refs, base=str(place / "B"), form="model", **options)
    run_plan(make_plan(recipe), out)
    return support.load_tensors(out)


@pytest.mark.parametrize(
    ("method", "params"),
    [("task-arithmetic", {"scale": 0.5}), ("ties", {"density": 0.3}), ("ties", {"density": 0.1})],
)
def test_the_model_is_that_of_the_dense_deltas(place, tmp_path, method, params):
    weights = [1.0, 0.5, -2.0]
    names = [(f"f{i}.cge", weight) for i, weight in enumerate(weights)]
    found = composed(place, tmp_path / "out", names, method=method, params=params)
    base = open_base(str(place / "B"))
    dense, digests = [], []
    for name, _ in names:
        expert = open_compressed_full(place / name, name, base)
        deltas = CompressedDeltas(expert, base)
        dense.append({key: deltas[key].dense() for key in deltas})
        digests.append(expert.digest)
    order = sorted(range(3), key=digests.__getitem__)
    rule = make_rule(method, 3, weights=[weights[i] for i in order], params=params)
    merger = Merger(rule, [dense[i] for i in order])
    for name, tensor in support.load_tensors(place / "B").items():
        if name in merger.names:
            expected = tensor + merger.dense(name).reshape(tensor.shape)
            assert torch.equal(found[name], expected), name


def test_mixed_with_a_model_and_an_adapter(place, tmp_path):
    shapes = {"model.layers.0.self_attn.q_proj": (support.HIDDEN, support.HIDDEN)}
    support.make_expert(tmp_path / "lora", shapes, rank=4, alpha=8)
    names = [("f0.cge", 1.0), ("F1", 0.5), (str(tmp_path / "lora"), 1.0)]
    found = composed(place, tmp_path / "out", names, method="linear")
    base = open_base(str(place / "B"))
    signs = CompressedDeltas(open_compressed_full(place / "f0.cge", "f0", base), base)
    lora = open_expert(str(tmp_path / "lora")).deltas()
    own = support.load_tensors(place / "B")
    full = support.load_tensors(place / "F1")
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = own[name].double() + signs[name].dense() + 0.5 * (full[name] - own[name]).double()
    expected += lora["model.layers.0.self_attn.q_proj"].dense()
    assert torch.allclose(found[name].double(), expected, atol=1e-5)


def test_counts_and_sizes_need_no_dense_delta(place):
    base = open_base(str(place / "B"))
    deltas = CompressedDeltas(open_compressed_full(place / "f0.cge", "f0", base), base)
    for name, count in deltas.nonzeros.items():
        rows, columns, _ = deltas.sizes[name]
        assert deltas[name].dense().numel() == rows * columns
        assert int((deltas[name].dense() != 0).sum()) == count == max(1, int(0.2 * rows * columns))


def test_what_does_not_fit_is_refused(place, tmp_path):
    other = open_base(str(support.make_llama(tmp_path / "O", seed=9)))
    with pytest.raises(Incompatible) as caught:
        open_compressed_full(place / "f0.cge", "f0", other)
    assert caught.value.code == "incompatible.base"
    open_compressed_full(place / "f0.cge", "f0", other, force_base=True)
    smaller = open_base(str(support.make_llama(tmp_path / "S", layers=1)))
    with pytest.raises(Incompatible) as caught:
        open_compressed_full(place / "f0.cge", "f0", smaller)
    assert caught.value.code == "incompatible.shape"
    with pytest.raises(Incompatible) as caught:
        open_expert(str(place / "f0.cge"))
    assert caught.value.code == "incompatible.full_model"
    refs = (ExpertRef(str(place / "f0.cge")),)
    recipe = Recipe(experts=refs, base=str(place / "B"), method="linear")
    with pytest.raises(UsageError) as caught:
        make_plan(recipe)
    assert caught.value.code == "usage.full_model"
