"""`cgmerge eval --metric`: every metric from the command line to the page, on the embedded base."""

import json

import pytest

from cgmerge.evals.checked import load_checked
from cgmerge.evals.metrics import METRICS
from cgmerge.evals.record import load_record
from cgmerge.evals.summary import summarise

QUESTIONS = [("reverse : a b =", "b a"), ("copy : c d =", "c d"), ("rotr : a b c =", "c a b")]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for count, name in ((2, "first"), (3, "second")):
        rows = [
            {"prompt": prompt, "choices": ["a b", answer, "l"], "answer": 1}
            for prompt, answer in QUESTIONS[:count]
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--base", "tiny", "--data", "first.jsonl", "--data", "second.jsonl")


@pytest.mark.parametrize(
    "name", [info.option for info in METRICS.values() if info.needs != "lm_eval"]
)
def test_every_metric_makes_a_record_that_follows_from_its_items(run, data, tmp_path, name):
    more = ("--max-new-tokens", "12") if name in ("rouge-l", "token-f1") else ()
    code, stdout, stderr = run("eval", *data, "--metric", name, *more, "-o", "r.json", "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    info = next(one for one in METRICS.values() if one.option == name)
    for result in found["results"]:
        assert result["metric"] == info.name
        assert info.low <= result["low"] <= result["score"] <= result["high"] <= info.high
    loaded = load_record(tmp_path / "r.json")
    assert summarise(loaded.items, metric=info.name).results == loaded.record.results
    assert load_checked(tmp_path / "r.json").record.means == loaded.record.means
    code, _, stderr = run("report", "r.json", "-o", "p.html", "--md", "p.md")
    assert code == 0, stderr
    assert info.title in (tmp_path / "p.html").read_text()
    code, stdout, _ = run("compare", "r.json:base", "r.json:base", "--max-drop", "0")
    assert code == 0
    assert info.what in stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--metric", "bleu"), 2, "rouge-l"),
        (("--metric", "perplexity", "--min", "2"), 2, "less is better"),
        (("--metric", "token-accuracy", "--min", "1.5"), 2, "from 0 to 1"),
        (("--max-new-tokens", "5"), 2, "--generate"),
        (("--metric", "choice", "--max-new-tokens", "5"), 2, "--generate"),
        (("--metric", "rouge-l", "--max-new-tokens", "0"), 2, ""),
    ],
)
def test_mistakes_say_what_to_do(run, data, words, code, says):
    found, stdout, stderr = run("eval", *data, *words)
    assert (found, stdout) == (code, "")
    assert says in stderr


def test_rows_without_choices_are_refused_before_the_model_is_loaded(run, data, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"prompt": "copy : a =", "completion": "a"}\n')
    for more in ((), ("--dry-run",)):
        code, stdout, stderr = run(
            "eval", "--base", "tiny", "--data", "plain.jsonl", "--metric", "choice", *more
        )
        assert (code, stdout) == (3, "")
        assert "skill 'plain', row 1: there are no choices" in stderr


def test_min_is_about_the_metric(run, data):
    code, stdout, _ = run("eval", *data, "--metric", "token-accuracy", "--json")
    least = min(one["score"] for one in json.loads(stdout)["results"])
    assert code == 0
    for bar, expected in ((least, 0), (least + 0.01, 1)):
        words = ("--metric", "token-accuracy", f"--min={bar}", "-q")
        assert run("eval", *data, *words)[0] == expected


HOPS = [
    {"id": 1, "prompt": "reverse : a b =", "completion": "b a", "depth": 1},
    {"id": 2, "prompt": "copy : b a =", "completion": "b a", "depth": 1},
    {"part_ids": [1, 2], "prompt": "copy reverse : a b =", "completion": "b a > b a", "depth": 2},
]


@pytest.fixture
def hops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "skill": name} for row, name in zip(HOPS, ("one", "two", "both"), strict=True)]
    (tmp_path / "hops.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--base", "tiny", "--data", "hops.jsonl")


def test_analysis_of_parts_and_columns(run, hops, tmp_path):
    words = ("--by", "depth", "--by", "tokens", "-o", "r.json", "--json")
    code, stdout, stderr = run("eval", *hops, *words)
    assert code == 0, stderr
    found = json.loads(stdout)
    (base,) = found["analysis"]
    assert (base["target"], base["effects"]) == ("base", None)
    right = {one["skill"]: one["correct"] for one in found["results"]}
    (gap,) = base["gaps"]
    assert (gap["skill"], gap["wholes"]) == ("both", 1)
    assert gap["n"] == right["one"] * right["two"]
    assert [(p["first"], p["n"]) for p in base["curves"]["depth"]] == [(1.0, 2), (2.0, 1)]
    assert [(p["first"], p["n"]) for p in base["curves"]["tokens"]] == [(3.0, 2), (6.0, 1)]
    assert base["links"][0]["parts"] == ["one", "two"]
    calibration = base["calibration"]
    assert (calibration["n"], calibration["bins"]) == (3, 10)
    code, stdout, _ = run("report", "r.json", "-o", "p.html", "--json")
    assert code == 0
    assert json.loads(stdout)["parts"][0]["analysis"] == found["analysis"]
    page = (tmp_path / "p.html").read_text()
    assert "Scores by depth" in page
    assert "Scores by tokens of the answer" in page


def test_columns_that_are_not_there(run, hops):
    code, stdout, stderr = run("eval", *hops, "--by", "width", "--dry-run")
    assert (code, stdout) == (3, "")
    assert "row 1: column 'width' must hold a number" in stderr
