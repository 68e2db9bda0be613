"""Statistics against brute force: one row at a time, plain autograd on the weights."""

import json

import pytest
import support
import torch

from cgmerge.errors import Damaged, Incompatible, NotFound
from cgmerge.modules.base import open_base
from cgmerge.modules.encoding import Encoded
from cgmerge.modules.expert import open_expert
from cgmerge.modules.loading import load_base
from cgmerge.modules.stats import collect, write_stats
from cgmerge.modules.statsfile import StatsFile

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")


@pytest.fixture(scope="module")
def tiny():
    return load_base(open_base("tiny"), device="cpu", dtype="float32")


@pytest.fixture
def expert(tiny, tmp_path):
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in tiny.base.modules.items()
        if path.endswith(LEAVES)
    }
    return open_expert(str(support.make_expert(tmp_path / "e", shapes, std=0.1)))


def some_rows(count=11):
    """Rows of different lengths, so that batches need padding."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        draw = torch.randint(3, 30, (4 + index % 5 + 3,), generator=generator).tolist()
        rows.append(Encoded(draw[: 2 + index % 3], draw[2 + index % 3 :]))
    return rows


def full_model(tiny, expert):
    """Return a copy of the base with the delta added to its weights."""
    import copy

    model = copy.deepcopy(tiny.model)
    deltas = expert.deltas(tiny.base)
    modules = dict(model.named_modules())
    for path, delta in ((path, deltas[path]) for path in deltas):
        modules[path].weight.data += delta.b @ delta.a
    return model, list(deltas)


def gap(found, expected):
    found, expected = found.double(), expected.double()
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def ids_of(row):
    return torch.tensor([[*row.prompt_ids, *row.target_ids]])


def test_grams_are_those_of_single_rows(tiny, expert):
    rows = some_rows()
    model, names = full_model(tiny, expert)
    inputs = {name: [] for name in names}
    for name, module in model.named_modules():
        if name in inputs:
            module.register_forward_pre_hook(
                lambda _m, args, name=name: inputs[name].append(args[0][0].double())
            )
    with torch.no_grad():
        for row in rows:
            model(input_ids=ids_of(row), use_cache=False)
    found = collect(tiny, expert, rows, ["gram"])
    assert found.rows == 11
    assert found.tokens == sum(len(row) for row in rows)
    assert set(found.grams) == set(names)
    for name in names:
        stacked = torch.cat(inputs[name])
        expected = stacked.T @ stacked / len(stacked)
        assert gap(found.grams[name], expected) < 1e-5


def test_fisher_is_the_squared_gradient_of_each_answer(tiny, expert):
    rows = some_rows(5)
    model, names = full_model(tiny, expert)
    modules = dict(model.named_modules())
    expected = dict.fromkeys(names, 0)
    for row in rows:
        model.zero_grad()
        logits = model(input_ids=ids_of(row), use_cache=False).logits[0]
        start = len(row.prompt_ids)
        picked = logits[start - 1 : -1].log_softmax(-1)
        picked[range(len(row.target_ids)), row.target_ids].sum().backward()
        for name in names:
            expected[name] = expected[name] + modules[name].weight.grad.double() ** 2
    found = collect(tiny, expert, rows, ["fisher"])
    assert not found.grams
    for name in names:
        assert gap(found.fishers[name], expected[name] / 5) < 1e-3


def test_one_long_batch_is_not_the_fisher_of_its_rows(tiny, expert):
    """The square of a sum is not the sum of squares: why examples go one at a time."""
    row = some_rows(1)[0]
    one = collect(tiny, expert, [row], ["fisher"]).fishers
    twice = collect(tiny, expert, [row, row], ["fisher"]).fishers
    for name, value in one.items():
        assert torch.allclose(value, twice[name], rtol=1e-5)


def test_padding_and_neighbours_do_not_matter(tiny, expert):
    rows = some_rows()
    found = collect(tiny, expert, rows, ["gram"]).grams
    turned = collect(tiny, expert, rows[::-1], ["gram"]).grams
    parts = [collect(tiny, expert, [row], ["gram"]) for row in rows]
    total = sum(part.tokens for part in parts)
    for name, gram in found.items():
        joined = sum(part.grams[name].double() * part.tokens for part in parts) / total
        assert gap(gram, joined) < 1e-5
        assert gap(turned[name], gram) < 1e-5


def test_the_base_is_as_before(tiny, expert):
    before = {name: (p.clone(), p.requires_grad) for name, p in tiny.model.named_parameters()}
    collect(tiny, expert, some_rows(3), ["gram", "fisher"])
    for name, parameter in tiny.model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.requires_grad == before[name][1]
        assert parameter.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.model.modules())


def test_round_trip_and_shared_inputs(tiny, expert):
    found = collect(tiny, expert, some_rows(), ["gram", "fisher"])
    path = expert.stats_path
    write_stats(path, found, expert, tiny, ["a" * 64])
    grams = StatsFile(path, expert, "gram")
    fishers = StatsFile(path, expert, "fisher")
    assert set(grams) == set(fishers) == set(expert.pairs)
    for name in expert.pairs:
        assert torch.equal(grams[name], found.grams[name].double())
        assert torch.equal(fishers[name], found.fishers[name].double())
    # q, k and v read the same tensor: one matrix on disk for three modules.
    layer = "model.layers.0.self_attn"
    assert grams.names[f"{layer}.k_proj"] == grams.names[f"{layer}.q_proj"]
    assert grams.names[f"{layer}.o_proj"] != grams.names[f"{layer}.q_proj"]
    assert grams.content["tokens"] == found.tokens
    # The expert is still the same expert.
    assert open_expert(str(expert.folder)).digest == expert.digest


def test_statistics_of_another_expert_are_refused(tiny, expert, tmp_path):
    path = expert.stats_path
    write_stats(path, collect(tiny, expert, some_rows(2), ["gram"]), expert, tiny, [])
    support.edit_tensors(expert.folder, lambda t: {k: v * 2 for k, v in t.items()})
    with pytest.raises(Incompatible, match="earlier state"):
        StatsFile(path, open_expert(str(expert.folder)), "gram")


def test_missing_kinds_and_broken_files_are_named(tiny, expert):
    path = expert.stats_path
    with pytest.raises(NotFound, match="no gram statistics"):
        StatsFile(path, expert, "gram")
    write_stats(path, collect(tiny, expert, some_rows(2), ["gram"]), expert, tiny, [])
    with pytest.raises(NotFound, match="no fisher statistics"):
        StatsFile(path, expert, "fisher")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Damaged):
        StatsFile(path, expert, "gram")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "copy : a b c =", "completion": "a b c"}] * 4
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_the_command_and_what_compose_does_with_it(run, expert, data, tmp_path, monkeypatch):
    words = ["compose", expert.folder, "--base", "tiny", "-m", "regmean", "-o", tmp_path / "o"]
    code, _, err = run(*words)
    assert code == 2
    assert "needs gram statistics" in err
    assert f"cgmerge stats {expert.folder}" in err.replace("\n", " ").replace("  ", " ")
    assert "--overwrite" not in err
    size = json.loads(run("inspect", expert.folder, "--json")[1])["size_bytes"]
    stats = ["stats", expert.folder, "--base", "tiny", "--data", data]
    code, text, err = run(*stats, "--limit", 3, "--json")
    assert code == 0, err
    result = json.loads(text)
    assert result["kinds"] == ["gram", "fisher"]
    assert result["rows"] == 3
    assert result["modules"] == len(expert.pairs)
    code, _, err = run(*stats)
    assert code == 2
    assert "--overwrite" in err
    # A path is said as it was given.
    monkeypatch.chdir(expert.folder.parent)
    code, text, err = run("stats", expert.folder.name, *stats[2:], "--limit", 3, "--overwrite")
    assert code == 0, err
    assert f"wrote    {expert.folder.name}/cgmerge-stats.safetensors" in err
    # Statistics beside an expert are not part of its size.
    assert json.loads(run("inspect", expert.folder, "--json")[1])["size_bytes"] == size
    for method in ("regmean", "fisher"):
        out = tmp_path / method
        code, _, err = run(
            "compose", expert.folder, "--base", "tiny", "-m", method, "--rank", 4, "-o", out
        )
        assert code == 0, err
        # One expert: whatever its statistics, it comes back.
        expected = support.dense_deltas(expert.folder)
        for name, delta in support.dense_deltas(out).items():
            assert gap(delta, expected[name]) < 1e-4
