"""Tuning: finds what a fine grid finds, merges once per rule, keeps the curve, touches no base."""

import json
import random

import pytest
import support

from cgmerge.errors import UsageError
from cgmerge.evals import tune
from cgmerge.evals.tasks import chains
from cgmerge.merge import make_rule


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two random experts of `tiny`, which can only do harm, and validation rows of base skills."""
    from cgmerge.modules.base import open_base

    folder = tmp_path_factory.mktemp("tune")
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base("tiny").modules.items()
        if path.endswith(("q_proj", "down_proj"))
    }
    for seed in (1, 2):
        support.make_expert(folder / f"e{seed}", shapes, seed=seed, std=0.12)
    for number, name in enumerate(("first", "second")):
        rows = chains.group_rows("base1", random.Random(number), 12)
        kept = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
        text = "\n".join(map(json.dumps, kept))
        (folder / f"{name}.jsonl").write_text(text + "\n")
    return folder


def words(place, *more):
    return ["compose", place / "e1", place / "e2", "--base", "tiny", *more]


VAL = ("first.jsonl", "second.jsonl")


def test_harmful_experts_get_the_smallest_scale(run, place, tmp_path):
    files = [place / name for name in VAL]
    code, text, err = run(
        *words(place, "-m", "task-arithmetic", "--json"), "--tune", *files, "-o", tmp_path / "o"
    )
    assert code == 0, err
    result = json.loads(text)
    trials = result["tuning"]["trials"]
    # Nothing helps, so the search walks down: below every point of the grid.
    assert result["scale"] < 0.25
    assert result["scale"] == result["tuning"]["chosen"]["scale"]
    assert len(trials) <= 16
    by_scale = {trial["params"]["scale"]: trial["score"] for trial in trials}
    assert by_scale[1.7] < by_scale[0.25]
    assert set(trials[0]["skills"]) == {"first", "second"}
    for trial in trials:
        assert trial["score"] == pytest.approx(sum(trial["skills"].values()) / 2)
    assert [entry["n"] for entry in result["tuning"]["data"]] == [12, 12]


def test_the_record_keeps_the_curve_and_repeats_the_bytes(run, place, tmp_path):
    out = tmp_path / "o"
    code, _, err = run(*words(place, "--budget", 3), "--tune", place / VAL[0], "-o", out)
    assert code == 0, err
    assert "tuned" in err
    record = json.loads((out / "cgmerge.json").read_text())
    assert len(record["tuning"]["trials"]) == 3
    assert record["tuning"]["tuned"] == ["scale", "density"]
    assert record["params"] == record["tuning"]["chosen"]
    code, _, err = run("compose", out / "cgmerge.json", "-o", tmp_path / "again")
    assert code == 0, err
    assert support.folder_bytes(out) == support.folder_bytes(tmp_path / "again")
    # Another scale is no longer what was tuned.
    code, _, err = run("compose", out / "cgmerge.json", "--scale", 0.1, "-o", tmp_path / "other")
    assert code == 0, err
    assert "tuning" not in json.loads((tmp_path / "other" / "cgmerge.json").read_text())


def test_what_is_given_is_not_tuned(run, place, tmp_path):
    code, text, err = run(
        *words(place, "--scale", 0.3, "--json"), "--tune", place / VAL[0], "-o", tmp_path / "o"
    )
    assert code == 0, err
    result = json.loads(text)
    assert result["tuning"]["tuned"] == ["density"]
    assert {trial["params"]["scale"] for trial in result["tuning"]["trials"]} == {0.3}
    assert {trial["params"]["density"] for trial in result["tuning"]["trials"]} == {
        0.1, 0.2, 0.4, 0.7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "exit_code", "word"),
    [
        (["-m", "task-arithmetic", "--scale", "1"], 2, "nothing is left to tune"),
        (["--budget", "0"], 2, "budget"),
    ],
)
def test_refusals(run, place, tmp_path, more, exit_code, word):
    code, _, err = run(*words(place, *more), "--tune", place / VAL[0], "-o", tmp_path / "o")
    assert code == exit_code
    assert word in err
    assert not (tmp_path / "o").exists()


def test_no_base_and_no_file_are_refused_before_any_work(run, place, tmp_path):
    code, _, err = run("compose", place / "e1", "--tune", place / VAL[0], "-o", tmp_path / "o")
    assert code == 2
    assert "--base" in err
    code, _, err = run(*words(place), "--tune", place / "absent.jsonl", "-o", tmp_path / "o")
    assert code == 2
    assert "absent.jsonl" in err


def test_an_existing_output_is_refused_before_tuning(run, place, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("x")
    code, _, err = run(*words(place), "--tune", place / VAL[0], "-o", tmp_path / "o")
    assert code == 2
    assert "exists already" in err
    assert "score" not in err


class _Plan:
    """Just what a search looks at."""

    def __init__(self, method, given, experts=2):
        self.rule = make_rule(method, experts, params=given)
        self.recipe = type("Recipe", (), {"params": given})()
        self.deltas = [{}] * experts
        self.ids = ["a", "b", "c"][:experts]
        self.rank = 4
        self.stats = None


def search(monkeypatch, truth, method="ties", budget=16, given=None):
    found = tune.Search(_Plan(method, given or {}), None, [], budget, None)
    monkeypatch.setattr(found, "score", lambda params: tune.Trial(params, truth(params), 0.0, {}))
    found.run()
    return found


@pytest.mark.parametrize("optimum", [0.33, 0.5, 0.77, 1.0, 1.2, 2.4])
def test_the_scale_is_found_to_a_few_percent(monkeypatch, optimum):
    found = search(
        monkeypatch, lambda p: -abs(p["scale"] - optimum), method="task-arithmetic", budget=24
    )
    assert found.best.params["scale"] == pytest.approx(optimum, rel=0.05)
    assert len(found.trials) <= 24


def test_scale_and_density_together(monkeypatch):
    def truth(p):
        return -((p["scale"] - 0.7) ** 2) - (p["density"] - 0.1) ** 2

    found = search(monkeypatch, truth)
    assert found.best.params["density"] == 0.1
    assert found.best.params["scale"] == pytest.approx(0.7, abs=0.05)
    assert found.best.params["trim"] == "global"


def test_nothing_is_tried_twice_and_the_budget_holds(monkeypatch):
    for budget in (1, 2, 7, 9, 16, 40):
        found = search(monkeypatch, lambda _: 0.5, budget=budget)
        tried = [tuple(sorted(trial.params.items())) for trial in found.trials]
        assert len(set(tried)) == len(tried) <= budget
        assert len(tried) >= min(budget, 10)


def test_the_first_of_equals_wins(monkeypatch):
    assert search(monkeypatch, lambda _: 0.5).best.params["scale"] == 1.0


def test_log_likelihood_decides_between_equal_scores():
    trials = (
        tune.Trial({"scale": 1.0}, 0.5, -0.7, {}),
        tune.Trial({"scale": 0.6}, 0.5, -0.2, {}),
        tune.Trial({"scale": 0.4}, 0.4, -0.1, {}),
    )
    assert tune.Tuning((), 3, trials, ("scale",)).best.params == {"scale": 0.6}


def test_averages_are_tuned_over_a_grid_that_reaches_the_sum():
    assert max(tune.grids_of(make_rule("task-arithmetic", 4), {})["scale"]) == 1.7
    assert max(tune.grids_of(make_rule("linear", 4), {})["scale"]) == pytest.approx(6.8)


def test_scales_share_one_merge(place, monkeypatch):
    import cgmerge.merge
    from cgmerge.modules.compose import make_plan
    from cgmerge.modules.recipe import ExpertRef, Recipe

    made = []
    original = cgmerge.merge.Merger

    def count(rule, *args, **options):
        made.append(rule.params)
        return original(rule, *args, **options)

    monkeypatch.setattr(cgmerge.merge, "Merger", count)
    refs = tuple(ExpertRef(str(place / name)) for name in ("e1", "e2"))
    plan = make_plan(Recipe(experts=refs, method="ties", base="tiny"))
    found = tune.Search(plan, None, [], 16, None)
    start = {"density": 0.2, "trim": "global", "tie": "zero"}
    one = found.merge({**start, "scale": 1.0})
    half = found.merge({**start, "scale": 0.5})
    assert len(made) == 1
    for path, delta in one.items():
        assert (half[path].b * 2 - delta.b).abs().max() < 1e-6
        assert (half[path].a == delta.a).all()
    found.merge({**start, "density": 0.4, "scale": 1.0})
    assert len(made) == 2


def eval_of(run, place, target):
    """Score and log-likelihood of a written result on the first validation file."""
    words = ("eval", target, "--base", "tiny", "--data", place / VAL[0], "--no-base", "--json")
    code, text, err = run(*words)
    assert code == 0, err
    content = json.loads(text)
    assert content["warnings"] == [
        f"{target.name} was tuned on this very file, {VAL[0]}: its score is no test score"
    ] * (target.name == "o")
    (found,) = content["results"]
    return found["score"], found["loglik"]


@pytest.mark.parametrize(
    ("more", "gap"),
    [
        (("--as", "model"), 0.1),
        (("--as", "model", "--dtype", "bfloat16"), 0.1),
        (("--rank", "2"), None),
        (("--rank", "2", "--dtype", "bfloat16"), None),
    ],
)
def test_what_is_scored_is_what_is_written(run, place, tmp_path, more, gap):
    """Entry-wise rules give full rank, and a model keeps all of it."""
    settings = ("-m", "ties", "--scale", 4, "--budget", 2, "--json")
    code, text, err = run(
        *words(place, *settings, *more), "--tune", place / VAL[0], "-o", tmp_path / "o"
    )
    assert code == 0, err
    tuning = json.loads(text)["tuning"]
    chosen = max(tuning["trials"], key=lambda trial: (trial["score"], trial["loglik"]))
    score, loglik = eval_of(run, place, tmp_path / "o")
    assert (chosen["score"], chosen["loglik"]) == (score, pytest.approx(loglik, abs=1e-5))
    if gap is not None:  # the same merge as an adapter is another one: the case tells them apart
        density = f"density={tuning['chosen']['density']}"
        same = ("-m", "ties", "--set", density, "--scale", 4, "-o", tmp_path / "cut")
        assert run(*words(place, *same))[0] == 0
        assert abs(eval_of(run, place, tmp_path / "cut")[1] - loglik) > gap


def test_the_same_data_twice_is_refused_with_both_names(run, place, tmp_path):
    (tmp_path / "copy.jsonl").write_bytes((place / VAL[0]).read_bytes())
    files = place / VAL[0], tmp_path / "copy.jsonl"
    code, _, err = run(*words(place), "--tune", *files, "-o", tmp_path / "o")
    assert code == 2
    for file in files:
        assert str(file) in err
    assert not (tmp_path / "o").exists()


def test_a_budget_below_one_is_refused():
    with pytest.raises(UsageError, match="at least 1 trial"):
        tune.tune(_Plan("ties", {}), None, [], budget=0)
