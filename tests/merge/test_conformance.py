"""What every registered method must satisfy; a new method passes this suite unasked."""

import dataclasses
import json
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml

from cgmerge.errors import Damaged, Incompatible, UsageError
from cgmerge.merge import LowRank, Merger, deltas, make_rule, merge_state_dicts
from cgmerge.merge.deltas import Rows, matrix_shape
from cgmerge.merge.registry import all_methods

METHODS = [spec.name for spec in all_methods()]
SPECS = {spec.name: spec for spec in all_methods()}
SHAPES = {"b": (7, 5), "a": (3, 8), "c": (6,)}

pytestmark = pytest.mark.parametrize("name", METHODS)


def experts(count=3, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            key: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            for key, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def low_rank(count=3, *, seed=0, ranks=(2, 3, 1)):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            key: LowRank(
                torch.randn(ranks[i], shape[-1], generator=generator),
                torch.randn(shape[0], ranks[i], generator=generator),
            )
            for key, shape in SHAPES.items()
            if len(shape) == 2
        }
        for i in range(count)
    ]


def count_for(name):
    """Return a number of experts the method takes, three if it can."""
    least, most = SPECS[name].traits.experts
    return max(least, 3 if most is None else min(3, most))


def stats_for(name, count, *, seed=3):
    """Return positive (definite) statistics of every expert for every matrix, or None."""
    kind = SPECS[name].traits.stats
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        result.append({})
        for key, shape in SHAPES.items():
            if len(shape) == 2 and kind in ("gram", "layerwise"):
                inputs = torch.randn(4 * shape[1], shape[1], generator=generator).double()
                result[-1][key] = inputs.T @ inputs / len(inputs)
            elif len(shape) == 2:
                result[-1][key] = torch.rand(*shape, generator=generator).double()
    return result if kind else None


def merge(name, given, **options):
    """Merge with whatever the method needs besides the experts."""
    options.setdefault("stats", stats_for(name, len(given)))
    return merge_state_dicts(name, given, **options)


def merger_of(name, given, **options):
    rule = make_rule(name, len(given), params=options.pop("params", None))
    options.setdefault("stats", stats_for(name, len(given)))
    return Merger(rule, given, **options)


def same(found, expected, tolerance=1e-6):
    assert set(found) == set(expected)
    for key in expected:
        assert torch.allclose(found[key].double(), expected[key].double(), atol=tolerance), key


def skip_unless_one_expert_is_defined(name):
    if SPECS[name].traits.identity is None:
        pytest.skip("the method changes a single expert, and says so")
    if SPECS[name].traits.experts[0] > 1:
        with pytest.raises(UsageError, match="experts"):
            make_rule(name, 1)
        pytest.skip("the method is not defined for one expert")


def test_one_expert_comes_back(name):
    skip_unless_one_expert_is_defined(name)
    expert = experts(1)
    same(merge(name, expert, params=SPECS[name].traits.identity), expert[0])


def test_one_low_rank_expert_comes_back_at_its_rank(name):
    skip_unless_one_expert_is_defined(name)
    expert = low_rank(1)
    merger = merger_of(name, expert, params=SPECS[name].traits.identity)
    for key in merger.names:
        result = merger.factors(key, 2)
        wanted = expert[0][key].dense()
        gap = torch.linalg.norm(result.delta.dense() - wanted) / torch.linalg.norm(wanted)
        assert gap < 1e-6


def test_order_of_experts_does_not_matter(name):
    if SPECS[name].traits.ordered:
        pytest.skip("the order matters, and the method says so")
    first = experts(count_for(name))
    ids = ["x", "y", "z"][: len(first)]
    stats = stats_for(name, len(first))
    turn = [2, 0, 1] if len(first) == 3 else [1, 0]
    expected = merge(name, first, ids=ids, stats=stats)
    found = merge(
        name,
        [first[i] for i in turn],
        ids=[ids[i] for i in turn],
        stats=stats and [stats[i] for i in turn],
    )
    same(found, expected, 1e-5)


def test_order_of_names_does_not_matter(name):
    first = experts(count_for(name))
    turned = [dict(reversed(list(expert.items()))) for expert in first]
    expected = merge(name, first)
    found = merge(name, turned)
    assert list(found) == sorted(found)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_zero_deltas_give_zero(name):
    zeros = [
        {key: torch.zeros(shape) for key, shape in SHAPES.items()} for _ in range(count_for(name))
    ]
    result = merge(name, zeros)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in result.values())


def test_a_common_factor_goes_through(name):
    if not SPECS[name].traits.scale_free:
        pytest.skip("the method has a scale of its own, and says so")
    first = experts(count_for(name))
    expected = merge(name, first)
    scaled = [{key: value * 4.0 for key, value in expert.items()} for expert in first]
    same(
        merge(name, scaled),
        {key: value * 4.0 for key, value in expected.items()},
        1e-5,
    )


def test_the_scale_parameter_multiplies(name):
    first = experts(count_for(name))
    expected = {key: value * 0.25 for key, value in merge(name, first).items()}
    same(merge(name, first, params={"scale": 0.25}), expected)


def test_weights_are_relative_where_the_method_says_so(name):
    count = count_for(name)
    first = experts(count)
    once = merge(name, first, weights=[1.0] * count)
    tripled = merge(name, first, weights=[3.0] * count)
    equal = all(torch.allclose(once[key], tripled[key], atol=1e-6) for key in once)
    assert equal == SPECS[name].traits.relative_weights


def test_inputs_are_not_modified(name):
    first = experts(count_for(name))
    copies = [{key: value.clone() for key, value in expert.items()} for expert in first]
    merge(name, first)
    for expert, copy in zip(first, copies, strict=True):
        assert all(torch.equal(expert[key], copy[key]) for key in copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_computed_at_least_in_float32(name, dtype):
    first = experts(count_for(name), dtype=dtype)
    result = merge(name, first)
    wide = merge(name, [{key: value.double() for key, value in expert.items()} for expert in first])
    for key, value in result.items():
        assert value.dtype == dtype
        # Within one rounding of the double result: nothing was accumulated in half precision.
        assert torch.allclose(value.double(), wide[key], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_the_same_call_gives_the_same_bits(name):
    first = experts(count_for(name))
    once, twice = merge(name, first), merge(name, first)
    assert all(torch.equal(once[key], twice[key]) for key in once)


def test_the_global_generator_is_left_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    merge(name, experts(count_for(name)))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_and_gradient_mode_are_left_alone(name):
    threads = torch.get_num_threads()
    merge(name, experts(count_for(name)))
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_factors_at_full_rank_equal_the_dense_merge(name):
    loras = low_rank(count_for(name))
    dense = [{key: delta.dense() for key, delta in expert.items()} for expert in loras]
    expected = merge(name, dense)
    merger = merger_of(name, loras)
    for key in merger.names:
        result = merger.factors(key, 99)
        assert torch.allclose(result.delta.dense(), expected[key], atol=1e-5)
        assert result.error_sq <= 1e-10 * max(result.norm_sq, 1)


def test_gauge_of_the_factors_does_not_matter(name):
    loras = low_rank(count_for(name))
    generator = torch.Generator().manual_seed(9)
    turned = []
    for expert in loras:
        turned.append({})
        for key, delta in expert.items():
            mix = torch.randn(delta.rank, delta.rank, generator=generator) + 3 * torch.eye(
                delta.rank
            )
            turned[-1][key] = LowRank(torch.linalg.solve(mix, delta.a), delta.b @ mix)
    # Where all directions weigh the same no lower rank is better than another, and it says so.
    rank = 99 if merger_of(name, loras).rule.even else 2
    for key in merger_of(name, loras).names:
        once = merger_of(name, loras).factors(key, rank).delta.dense()
        again = merger_of(name, turned).factors(key, rank).delta.dense()
        assert torch.linalg.norm(once - again) < 2e-3 * torch.linalg.norm(once)


def test_block_size_does_not_matter(name, monkeypatch):
    from cgmerge.merge import deltas

    first = experts(count_for(name))
    expected = merge(name, first)
    monkeypatch.setattr(deltas, "BLOCK_ENTRIES", 16)
    found = merge(name, first)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_is_refused(name, bad):
    first = experts(max(2, count_for(name)))
    first[1]["a"][1, 2] = bad
    with pytest.raises(Damaged, match="'a'"):
        merge(name, first)


def test_other_shapes_are_refused(name):
    first = experts(max(2, count_for(name)))
    first[1]["a"] = torch.zeros(3, 9)
    with pytest.raises(Incompatible, match=r"\[3, 9\]"):
        merge(name, first)


def test_integers_are_refused(name):
    with pytest.raises(Incompatible, match="float type"):
        merge(name, [{"w": torch.ones(2, dtype=torch.int8)}] * count_for(name))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 4), (2, 3, 4)])
def test_odd_shapes_work(name, shape):
    result = merge(name, [{"w": torch.ones(shape)} for _ in range(count_for(name))])
    assert result["w"].shape == torch.Size(shape)


def test_parameters_survive_json_and_yaml(name):
    spec = SPECS[name]
    params = dataclasses.asdict(spec.make_params({}))
    assert spec.make_params(json.loads(json.dumps(params))) == spec.make_params({})
    assert spec.make_params(yaml.safe_load(yaml.safe_dump(params))) == spec.make_params({})


def test_tuning_grids_hold_allowed_values_and_the_default(name):
    spec = SPECS[name]
    for item in dataclasses.fields(spec.params):
        grid = item.metadata["grid"]
        assert not grid or item.default in grid
        for value in grid:
            assert getattr(spec.make_params({item.name: value}), item.name) == value


def test_it_is_documented(name):
    spec = SPECS[name]
    about = spec.about
    assert spec.summary and about.formula and about.use_when and about.differs
    assert "arXiv" in about.paper
    for item in dataclasses.fields(spec.params):
        assert item.metadata["doc"], item.name
        assert item.type in (float, int, bool) or get_origin(item.type) is Literal
        if get_origin(item.type) is Literal:
            assert item.default in get_args(item.type)


class Lazy(Rows):
    """A tensor that can be read in rows only."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def rows(self, first, last):
        return self.tensor.reshape(matrix_shape(self.tensor))[first:last].clone()


def test_deltas_read_in_rows_give_the_same(name, monkeypatch):
    """And pieces put together are the whole, for tensors, factors and a mixture."""
    count = count_for(name)
    plain, factors = experts(count), low_rank(count)
    lazy = [{key: Lazy(tensor) for key, tensor in expert.items()} for expert in plain]
    mixed = [factors[0], *lazy[1:]]
    dense = [{key: delta.dense() for key, delta in factors[0].items()}, *plain[1:]]
    monkeypatch.setattr(deltas, "BLOCK_ENTRIES", 24)  # several blocks for each tensor
    for given, wanted in ((lazy, plain), (mixed, dense), (factors, factors)):
        expected = merger_of(name, wanted)
        found, pieces = merger_of(name, given), merger_of(name, given)
        assert found.names == expected.names
        for key in expected.names:
            whole = found.dense(key)
            assert torch.allclose(whole, expected.dense(key), rtol=0, atol=1e-5), key
            before = torch.is_grad_enabled()
            parts = [part.clone() for part in pieces.pieces(key)]
            assert torch.is_grad_enabled() == before
            assert torch.equal(torch.cat(parts), whole), key
