"""Statistics that cannot be right, or are not the ones that were meant, are refused before work."""

import json
import math
import shlex

import case_support as cases
import pytest
import support
import torch
from stats_support import make_stats

from cgmerge.modules.base import open_base
from cgmerge.modules.expert import open_expert
from cgmerge.modules.statsfile import StatsFile
from cgmerge.tensorfile import file_sha256

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"


@pytest.fixture
def place(experts, models, monkeypatch):
    """E1 and E2 with statistics on the base B, seen from their folder."""
    monkeypatch.chdir(experts)
    (experts / "base").symlink_to(models / "B")
    for seed, name in enumerate(("E1", "E2"), 1):
        make_stats(experts / name, open_base(str(models / "B")).fingerprint, seed=seed)
    return experts


def print_of(folder):
    return open_base(str(folder)).fingerprint


def compose(method="regmean", *more, out="out"):
    rank = ["--rank", 8] if "--as" not in more else []
    return ["compose", "E1", "E2", "-m", method, *rank, "-o", out, "--json", *more]


def edit(name, change):
    """Return what changes one tensor of a file."""

    def edited(tensors):
        change(tensors[name])
        return tensors

    return edited


def put(place, value):
    return lambda tensor: tensor.__setitem__(place, value)


FLAWS = {
    "nan": ("gram", edit(f"gram.{V}", put((3, 3), math.nan)), [V, "1 NaN"]),
    "infinite": ("fisher", edit(f"fisher.{V}", put((0, 1), math.inf)), [V, "1 NaN or infinity"]),
    "negative": ("fisher", edit(f"fisher.{Q}", put((0, 1), -0.25)), [Q, "-0.25", "never below 0"]),
    "diagonal": ("gram", edit(f"gram.{Q}", torch.Tensor.neg_), [Q, "on its diagonal"]),
    "lopsided": ("gram", edit(f"gram.{Q}", put((0, 1), 9.0)), [Q, "not symmetric", "9 at [0, 1]"]),
    "missing": (
        "gram",
        lambda t: {n: v for n, v in t.items() if n != f"gram.{V}"},
        [V, "3 of 4 modules"],
    ),
    "shape": (
        "gram",
        lambda t: {**t, f"gram.{V}": torch.eye(5)},
        [V, "F32 [5, 5]", "[32, 32]"],
    ),
    "turned": (
        "fisher",
        lambda t: {**t, f"fisher.{V}": t[f"fisher.{V}"].T.contiguous()},
        [V, "[32, 16]", "[16, 32]"],
    ),
    "whole": ("gram", lambda t: {**t, f"gram.{V}": torch.ones(32, 32).int()}, [V, "I32"]),
}


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("form", [[], ["--base", "base", "--as", "model"], ["--dry-run"]])
def test_contents_that_cannot_be_right(run, place, flaw, form):
    kind, change, words = FLAWS[flaw]
    path = make_stats(place / "E2", print_of("base"), tensors=change)
    before = cases.tree(place)
    for method in ("fisher",) if kind == "fisher" else ("regmean", "mats"):
        error = cases.refused(run(*compose(method, *form)), 3, "damaged.stats", path, *words)
        assert "cgmerge stats E2 --base" in error["hint"]
        assert error["hint"].endswith("--data FILE --overwrite")
    assert cases.tree(place) == before
    # The other kind in the same file is not what is wrong.
    other = "regmean" if kind == "fisher" else "fisher"
    assert run(*compose(other, out="fine"))[0] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"shared": {"x": ["a"]}}, ["gives x the Gram of ['a']"]),
        ({"shared": {V: "model.nowhere"}}, [V, "'model.nowhere', which it does not hold"]),
        ({"shared": {V: Q}}, [V, "and one of its own"]),
        ({"shared": []}, ["is not a cgmerge.stats/1"]),
        ({"rows": True}, ["is not a cgmerge.stats/1"]),
        ({"data": "d"}, ["is not a cgmerge.stats/1"]),
        ({"data": [3]}, ["digests of data"]),
        ({"schema": "cgmerge.stats/2"}, ["is not a cgmerge.stats/1"]),
    ],
)
def test_headers_that_cannot_be_right(run, place, content, words):
    path = make_stats(place / "E1", print_of("base"), **content)
    error = cases.refused(run(*compose()), 3, "damaged.stats", path, *words)
    assert "cgmerge stats E1" in error["hint"]
    assert not (place / "out").exists()


def test_a_shared_matrix_stands_for_its_modules(run, place):
    """As `stats` writes modules that read the same input."""
    same = "model.layers.0.self_attn.v_proj"

    def twice(tensors):
        return {**tensors, f"gram.{same}": tensors[f"gram.{Q}"].clone()}

    def once(tensors):
        return {name: value for name, value in tensors.items() if name != f"gram.{same}"}

    make_stats(place / "E1", print_of("base"), tensors=twice)
    assert run(*compose(out="a"))[0] == 0
    make_stats(place / "E1", print_of("base"), tensors=once, shared={same: Q})
    assert run(*compose(out="b"))[0] == 0
    a, b = (support.folder_bytes(place / n)["adapter_model.safetensors"] for n in "ab")
    assert a == b


def test_the_digest_is_that_of_the_file(place):
    expert = open_expert("E1")
    for kind in ("gram", "fisher"):
        file = StatsFile(expert.stats_path, expert, kind)
        assert file.sha256 == file_sha256(expert.stats_path)


def test_statistics_of_another_base(run, place, models):
    theirs, ours = print_of(models / "B2"), print_of("base")
    make_stats(place / "E2", theirs)
    error = cases.refused(
        run(*compose("fisher", "--base", "base")), 3, "incompatible.base", theirs, ours
    )
    assert "cgmerge stats E2 --base base --data FILE --overwrite" in error["hint"]
    assert (error["expected"], error["found"]) == (ours, theirs)
    # Nobody names the base: still they are not of one.
    cases.refused(run(*compose("fisher")), 3, "incompatible.base", theirs, ours)
    found = cases.done(run(*compose("fisher", "--base", "base", "--force-base")))
    assert any("--force-base" in warning for warning in found["warnings"])
    # Both of the other base: that is what counts then.
    make_stats(place / "E1", theirs)
    assert run(*compose("fisher", out="b2"))[0] == 0
    assert run(*compose("fisher", "--base", models / "B2", out="b3"))[0] == 0


def test_a_card_names_the_base_where_none_is_given(run, place, models):
    ours, theirs = print_of("base"), print_of(models / "B2")
    card = {"schema": "cgmerge.expert/1", "skill": "s", "base": {"name": "b", "fingerprint": ours}}
    for name in ("E1", "E2"):
        (place / name / "expert.json").write_text(json.dumps(card))
        make_stats(place / name, theirs)
    cases.refused(run(*compose()), 3, "incompatible.base", theirs, ours, "was trained on")
    assert run(*compose("regmean", "--force-base"))[0] == 0


@pytest.mark.parametrize("method", ["regmean", "fisher"])
def test_a_record_is_of_its_statistics(run, place, method):
    described = cases.done(run(*compose(method)))
    record = cases.record("out")
    for name, entry in zip(("E1", "E2"), described["experts"], strict=True):
        path = place / name / "cgmerge-stats.safetensors"
        seed = int(name[1])
        assert entry["stats"] == {
            "kind": "gram" if method == "regmean" else "fisher",
            "sha256": file_sha256(path),
            "data": [f"{seed:064x}"],
            "rows": 8,
            "tokens": 100 + seed,
        }
        assert entry in record["experts"]
    assert run("compose", "out/cgmerge.json", "-o", "again")[0] == 0
    assert support.folder_bytes(place / "out") == support.folder_bytes(place / "again")
    # Computed anew on other data: the same command would give other bytes.
    old = file_sha256(place / "E2" / "cgmerge-stats.safetensors")
    path = make_stats(place / "E2", print_of("base"), seed=7)
    words = ["compose", "out/cgmerge.json", "-o", "third", "--json"]
    error = cases.refused(run(*words), 3, "damaged.digest", path, old[:16], file_sha256(path)[:16])
    assert (error["expected"], error["found"]) == (old, file_sha256(path))
    assert not (place / "third").exists()
    # Another method does not use them.
    assert run(*words, "-m", "ties")[0] == 0
    # A record of an earlier version says nothing of them, and is still read.
    for entry in record["experts"]:
        del entry["stats"]
    (place / "out" / "cgmerge.json").write_text(json.dumps(record))
    assert run("compose", "out/cgmerge.json", "-o", "fourth")[0] == 0


def test_a_method_without_statistics_records_none(run, place):
    assert run(*compose("linear"))[0] == 0
    assert all("stats" not in entry for entry in cases.record("out")["experts"])


@pytest.mark.parametrize(
    "stats", [[], {"kind": "gram"}, {"kind": "x", "sha256": "0"}, {"kind": "gram", "sha": "0"}]
)
def test_pins_are_read_strictly(run, place, stats):
    recipe = {"method": "regmean", "experts": [{"ref": "E1", "stats": stats}, "E2"]}
    (place / "r.json").write_text(json.dumps(recipe))
    cases.refused(run("compose", "r.json", "-o", "out", "--json"), 2, "usage.recipe", "stats")


def test_lock_pins_statistics(run, place):
    recipe = {"method": "mats", "experts": ["E1", "E2"], "output": {"rank": 4}}
    (place / "r.json").write_text(json.dumps(recipe))
    code, _, err = run("lock", "r.json", "-o", "locked.json")
    assert code == 0, err
    assert run("compose", "locked.json", "-o", "out")[0] == 0
    make_stats(place / "E1", print_of("base"), seed=9)
    words = ["compose", "locked.json", "-o", "again", "--json"]
    cases.refused(run(*words), 3, "damaged.digest", "E1/cgmerge-stats.safetensors")


def layerwise(place, weights, alpha=0.9):
    """Write what `stats --kind layerwise` would, for weights in the order E1, E2."""
    digests = [open_expert(name).digest for name in ("E1", "E2")]
    shares = [[d, w / sum(weights)] for d, w in zip(digests, weights, strict=True)]
    for name in ("E1", "E2"):
        along = {"alpha": alpha, "shares": sorted(shares)}
        make_stats(place / name, print_of("base"), along=along)


def test_the_command_of_another_merge_can_be_pasted(run, place):
    layerwise(place, [1.0, 1.0])
    assert run(*compose("regmean++"))[0] == 0
    third = 1 / 3
    refs = ["E1=2", f"E2={third!r}"]
    words = ["compose", *refs, "-m", "regmean++", "--set", "alpha=0.5", "--base", "base"]
    words += ["--rank", 8, "-o", "b", "--json"]
    error = cases.refused(run(*words), 3, "incompatible.stats", "along another merge")
    command = shlex.split(error["hint"].split(": ", 1)[1])
    expected = ["cgmerge", "stats", *refs, "--base", "base", "--data", "FILE", "FILE", "--kind"]
    # Experts stand in the order of their content.
    assert sorted(command) == sorted([*expected, "layerwise", "--alpha", "0.5", "--overwrite"])
    layerwise(place, [2.0, third], 0.5)  # what it would compute
    assert run(*words)[0] == 0
    # Where they are not there at all, the same command without --overwrite.
    for name in ("E1", "E2"):
        (place / name / "cgmerge-stats-layerwise.safetensors").unlink()
    absent = cases.refused(run(*words), 2, "not_found.stats")
    assert shlex.split(absent["hint"].split("\n")[1]) == command[:-1]


def test_layerwise_statistics_of_all_modules_that_are_merged(run, place):
    """E3 has down_proj, which E1's data must have run through as well."""
    digests = [open_expert(name).digest for name in ("E1", "E3")]
    along = {"alpha": 0.9, "shares": [[digest, 0.5] for digest in sorted(digests)]}
    for name in ("E1", "E3"):
        make_stats(place / name, print_of("base"), along=along)
    words = ["compose", "E1", "E3", "-m", "regmean++", "--rank", 8, "-o", "out", "--json"]
    error = cases.refused(run(*words), 3, "damaged.stats", "4 of 6 modules")
    assert "E3" in error["hint"]
    assert error["hint"].endswith("--data FILE FILE --kind layerwise --overwrite")


@pytest.mark.parametrize("second", ["E1", "./E1", "link"])
def test_one_expert_twice_along_a_merge(run, place, second):
    (place / "link").symlink_to("E1")
    (place / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    before = cases.tree(place)
    words = ["stats", "E1", second, "--base", "base", "--kind", "layerwise", "--data"]
    said = "are the same expert"
    error = cases.refused(run(*words, "d.jsonl", "d.jsonl", "--json"), 2, "usage.experts", said)
    assert "sum of the weights" in error["hint"]
    words = ["compose", "E1", second, "-m", "regmean++", "--rank", 4, "-o", "out", "--json"]
    cases.refused(run(*words), 2, "usage.experts", said)
    assert cases.tree(place) == before
    # Their own statistics are of each place in the sum.
    assert run("compose", "E1", second, "-m", "fisher", "--rank", 4, "-o", "out")[0] == 0
