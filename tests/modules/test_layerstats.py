"""RegMean++ against a plain one: dense weights, one layer at a time, a least-squares solver."""

import copy
import json

import numpy as np
import pytest
import support
import torch

from cgmerge.errors import Incompatible, NotFound, UsageError
from cgmerge.merge import make_rule, merge_state_dicts
from cgmerge.modules.base import open_base
from cgmerge.modules.compose import make_plan, run_plan
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.expert import open_expert
from cgmerge.modules.layerstats import Along, collect_layerwise, count_layers, layers_of
from cgmerge.modules.loading import load_base
from cgmerge.modules.recipe import ExpertRef, Recipe
from cgmerge.modules.stats import collect, write_stats
from cgmerge.modules.statsfile import path_of

LEAVES = ("q_proj", "o_proj", "down_proj")
ALPHA = 0.8
WEIGHTS = (1.0, 3.0)


@pytest.fixture(scope="module")
def tiny():
    return load_base(open_base("tiny"), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """Two experts; only the first adapts o_proj."""
    folder = tmp_path_factory.mktemp("layerwise")
    found = []
    for seed, leaves in ((1, LEAVES), (2, ("q_proj", "down_proj"))):
        shapes = {
            path: (shape.out_features, shape.in_features)
            for path, shape in tiny.base.modules.items()
            if path.endswith(leaves)
        }
        made = support.make_expert(folder / f"e{seed}", shapes, seed=seed, std=0.15)
        found.append(open_expert(str(made)))
    return found


def some_rows(seed, count):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        draw = torch.randint(3, 30, (5 + index % 4,), generator=generator).tolist()
        rows.append(Encoded(draw[:3], draw[3:]))
    return rows


ROWS = [some_rows(1, 11), some_rows(2, 9)]


def rule(alpha=ALPHA, weights=WEIGHTS):
    return make_rule("regmean++", 2, weights=weights, params={"alpha": alpha})


def inputs_of(model, names, rows):
    """All inputs of modules, one row after the other: nothing to pad."""
    seen = {name: [] for name in names}
    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_pre_hook(
            lambda _m, args, name=name: seen[name].append(args[0][0].double())
        )
        for name in names
    ]
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([[*row.prompt_ids, *row.target_ids]]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).numpy() for name, parts in seen.items()}


def reference(tiny, experts):
    """Merged deltas, as the paper has it, on copies of the model."""
    dense = [support.dense_deltas(expert.folder) for expert in experts]
    names = sorted(set().union(*dense))
    share = np.array(WEIGHTS) / sum(WEIGHTS)
    merged = {}
    for layer in sorted({int(name.split(".")[2]) for name in names}):
        group = [name for name in names if int(name.split(".")[2]) == layer]
        grams = []
        for deltas, rows in zip(dense, ROWS, strict=True):
            model = copy.deepcopy(tiny.model)
            modules = dict(model.named_modules())
            own = {name: deltas[name] for name in group if name in deltas}
            for name, delta in (merged | own).items():
                modules[name].weight.data += delta.float()
            found = inputs_of(model, group, rows)
            grams.append({name: x.T @ x / len(x) for name, x in found.items()})
        for name in group:
            shape = tuple(next(d[name] for d in dense if name in d).shape)
            parts = [d[name].numpy() if name in d else np.zeros(shape) for d in dense]
            blurred = [
                p * (ALPHA * g[name] + (1 - ALPHA) * np.diag(np.diag(g[name])))
                for p, g in zip(share, grams, strict=True)
            ]
            total = sum(blurred)
            answer = sum(delta @ gram for delta, gram in zip(parts, blurred, strict=True))
            merged[name] = torch.from_numpy(np.linalg.solve(total, answer.T).T)
    return merged


def write(tiny, experts, found, made):
    along = Along.of(made, [expert.digest for expert in experts]).plain()
    for expert, result in zip(experts, found, strict=True):
        write_stats(path_of(expert, "layerwise"), result, expert, tiny, ["d"], along=along)


def compose(experts, out, weights=WEIGHTS, **params):
    refs = [ExpertRef(str(e.folder), w) for e, w in zip(experts, weights, strict=True)]
    params = {"alpha": ALPHA, **params}
    recipe = Recipe(experts=tuple(refs), method="regmean++", params=params, rank="exact")
    return run_plan(make_plan(recipe), out)


@pytest.fixture(scope="module")
def collected(tiny, pair):
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    counts = []
    found = collect_layerwise(tiny, pair, ROWS, rule(), progress=counts.append)
    write(tiny, pair, found, rule())
    assert all(torch.equal(value, before[n]) for n, value in tiny.model.state_dict().items())
    assert sum(counts) == count_layers(pair) * 20
    assert not any(module._forward_hooks for module in tiny.model.modules())
    return found


def test_the_merge_is_that_of_a_plain_implementation(tiny, pair, collected, tmp_path):
    expected = reference(tiny, pair)
    compose(pair, tmp_path / "out")
    found = support.dense_deltas(tmp_path / "out")
    assert support.relative(found, expected) < 1e-4
    # In the other order, too: weights and data belong to the expert.
    compose(pair[::-1], tmp_path / "turned", WEIGHTS[::-1])
    assert support.relative(support.dense_deltas(tmp_path / "turned"), found) < 1e-6
    assert collected[0].tokens == sum(map(len, ROWS[0]))


def test_it_is_another_merge_than_regmean(tiny, pair, collected, tmp_path):
    """The first layer sees the same inputs; from the second on they differ."""
    plain = [collect(tiny, e, rows, ["gram"]).grams for e, rows in zip(pair, ROWS, strict=True)]
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
    for own, other in zip(plain, collected, strict=True):
        assert torch.allclose(own[first], other.grams[first], rtol=1e-4, atol=1e-6)
        gap = torch.linalg.norm(own[last] - other.grams[last]) / torch.linalg.norm(own[last])
        assert gap > 0.02
    deltas = [support.dense_deltas(expert.folder) for expert in pair]
    merged = merge_state_dicts(
        "regmean", deltas, weights=WEIGHTS, params={"alpha": ALPHA}, stats=plain
    )
    compose(pair, tmp_path / "out")
    assert support.relative(support.dense_deltas(tmp_path / "out"), merged) > 0.01


def test_one_expert_comes_back(tiny, pair, tmp_path):
    folder = support.make_expert(
        tmp_path / "e", {n: (p.out_features, p.in_features) for n, p in pair[0].pairs.items()}
    )
    expert = open_expert(str(folder))
    made = make_rule("regmean++", 1, params={"alpha": ALPHA})
    write(tiny, [expert], collect_layerwise(tiny, [expert], ROWS[:1], made), made)
    compose([expert], tmp_path / "out", [1.0])
    assert (
        support.relative(support.dense_deltas(tmp_path / "out"), support.dense_deltas(folder))
        < 1e-5
    )


@pytest.mark.parametrize(
    ("weights", "params"), [((1.0, 1.0), {}), (WEIGHTS, {"alpha": 0.9}), ((3.0, 1.0), {})]
)
def test_statistics_of_another_merge_are_refused(pair, collected, tmp_path, weights, params):
    with pytest.raises(Incompatible, match="along another merge") as caught:
        compose(pair, tmp_path / "out", weights, **params)
    assert "--kind layerwise" in caught.value.hint


def test_a_common_factor_of_the_weights_and_the_scale_are_free(pair, collected, tmp_path):
    compose(pair, tmp_path / "a")
    compose(pair, tmp_path / "b", [0.25, 0.75], scale=2.0)
    a, b = (support.dense_deltas(tmp_path / name) for name in "ab")
    assert support.relative(b, {name: 2 * delta for name, delta in a.items()}) < 1e-6


def test_statistics_of_other_experts_are_refused(pair, collected, tmp_path):
    one = pair[:1]
    with pytest.raises(Incompatible, match="along another merge"):
        compose(one, tmp_path / "out", [1.0])


def test_layers_are_the_blocks_in_the_order_in_which_they_run(tiny):
    names = [
        "lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    ]  # fmt: skip
    assert layers_of(tiny, sorted(names), ROWS[0][:1]) == [
        ["model.layers.0.mlp.down_proj"],
        ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
        ["lm_head"],
    ]


def test_missing_statistics_are_asked_for_with_one_command(pair, tmp_path):
    shapes = {n: (p.out_features, p.in_features) for n, p in pair[0].pairs.items()}
    folders = [support.make_expert(tmp_path / f"f{seed}", shapes, seed=seed) for seed in (5, 6)]
    with pytest.raises(NotFound, match="needs layerwise statistics; 2 of 2") as caught:
        compose([open_expert(str(folder)) for folder in folders], tmp_path / "out", [1.0, 2.0])
    (line,) = caught.value.hint.splitlines()[1:]
    assert "--data FILE FILE --kind layerwise" in line
    for folder, weight in zip(folders, ("1", "2"), strict=True):
        assert f"{folder}={weight}" in line


def test_the_command_collects_and_compose_uses(run, tiny, pair, tmp_path):
    shapes = {n: (p.out_features, p.in_features) for n, p in pair[0].pairs.items()}
    for seed in (1, 2):
        support.make_expert(tmp_path / f"e{seed}", shapes, seed=seed, std=0.1)
        rows = [{"prompt": f"copy : {w} =", "completion": w} for w in ("a b", "b c d", "e")]
        text = "\n".join(json.dumps(row) for row in rows[seed - 1 :])
        (tmp_path / f"d{seed}.jsonl").write_text(text)
    experts = [tmp_path / "e1", tmp_path / "e2"]
    data = [tmp_path / "d1.jsonl", tmp_path / "d2.jsonl"]
    words = ["stats", *experts, "--base", "tiny", "--kind", "layerwise", "--data"]
    code, _, err = run(*words, data[0])
    assert code == 2
    assert "2 experts and 1 data file" in err
    code, _, err = run(*words, *data, "-o", tmp_path / "one.safetensors")
    assert code == 2
    assert "one for each expert" in err
    code, _, err = run("stats", *experts, "--base", "tiny", "--data", data[0])
    assert code == 2
    assert "run it once for each" in err
    code, text, err = run(*words, *data, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert result["kinds"] == ["layerwise"]
    assert result["rows"] == 5
    assert result["out"] == [
        str(folder / "cgmerge-stats-layerwise.safetensors") for folder in experts
    ]
    code, _, err = run(*words, *data)
    assert code == 2
    assert "exists already" in err
    code, _, err = run(
        "compose", *experts, "--base", "tiny", "-m", "regmean++", "--rank", 8, "-o", tmp_path / "m"
    )
    assert code == 0, err
    code, _, err = run("compose", tmp_path / "m" / "cgmerge.json", "-o", tmp_path / "again")
    assert code == 0, err
    assert support.folder_bytes(tmp_path / "m") == support.folder_bytes(tmp_path / "again")
    assert not (experts[0] / "cgmerge-stats.safetensors").exists()


def test_a_plus_in_a_name_is_not_always_a_space():
    assert rule().name == "regmean++"
    with pytest.raises(UsageError, match="unknown space `regmean`"):
        make_rule("regmean+ties", 2)


def test_only_the_scale_is_tuned():
    from cgmerge.evals.tune import grids_of

    assert list(grids_of(rule(), {})) == ["scale"]
