"""`run` and `init`: what was done is not done again, wherever and however often it was stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import case_support as cases
import pytest


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A pipeline that trains two experts on the embedded base, and measures three merges."""
    monkeypatch.chdir(tmp_path)
    for name, task in (("up", "caesar"), ("back", "rotr")):
        words = [("a b c", "b c d" if task == "caesar" else "c a b"),
                 ("d e f", "e f g" if task == "caesar" else "f d e")]  # fmt: skip
        lines = [json.dumps({"prompt": f"{task} : {x} =", "completion": y}) for x, y in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "p.yml").write_text(
        "base: tiny\nout: study\n"
        "train: {steps: 3, rank: 2, skills: {up: up.jsonl, back: {data: back.jsonl, rank: 3}}}\n"
        "compose:\n"
        "  - {method: task-arithmetic, scale: [0.5, 1.0]}\n"
        "  - {method: ties, set: {density: [0.2]}}\n"
        "eval: {data: {up: up.jsonl, back: back.jsonl}}\n"
        "report: false\n"
    )
    return tmp_path


NAMES = [
    "train-up", "train-back",
    "compose-task-arithmetic-scale0.5", "compose-task-arithmetic-scale1.0",
    "compose-ties-density0.2",
    "eval-base", "eval-up", "eval-back", "eval-task-arithmetic-scale0.5",
    "eval-task-arithmetic-scale1.0", "eval-ties-density0.2",
]  # fmt: skip


def test_a_pipeline_runs_once(trained, run):
    plan = cases.done(run("run", "p.yml", "--dry-run", "--json"))
    assert [step["name"] for step in plan["steps"]] == NAMES
    assert not any(step["done"] for step in plan["steps"])
    assert not (trained / "study").exists()
    first = cases.done(run("run", "p.yml", "--json"))
    assert sorted(first["done"]) == sorted(NAMES)
    assert first["cached"] == []
    targets = [name.removeprefix("eval-") for name in NAMES if name.startswith("eval-")]
    assert [(r["target"], r["skill"]) for r in first["results"]] == [
        (target, skill) for target in targets for skill in ("up", "back")
    ]
    assert first["results"][6]["settings"] == {"scale": 0.5}
    assert json.loads((trained / "study/results.json").read_text())["results"] == first["results"]
    again = cases.done(run("run", "p.yml", "--json"))
    assert again["done"] == []
    assert sorted(again["cached"]) == sorted(NAMES)
    assert again["results"] == first["results"]
    # The commands can be repeated by hand, elsewhere.
    record = json.loads((trained / "study/steps/compose-ties-density0.2.json").read_text())
    words = record["command"].split()[1:]
    words[words.index("-o") + 1] = "by-hand"
    cases.done(run(*words, "--json"))
    same = [(trained / d / "adapter_model.safetensors").read_bytes()
            for d in ("by-hand", "study/composed/ties-density0.2")]  # fmt: skip
    assert same[0] == same[1]


def test_only_what_changed_is_done_again(trained, run):
    cases.done(run("run", "p.yml", "--json"))
    text = (trained / "p.yml").read_text()
    (trained / "p.yml").write_text(text.replace("scale: [0.5, 1.0]", "scale: [0.5, 0.7]"))
    found = cases.done(run("run", "p.yml", "--json"))
    assert sorted(found["done"]) == [
        "compose-task-arithmetic-scale0.7", "eval-task-arithmetic-scale0.7"
    ]  # fmt: skip
    # Another row of one skill: its expert, and everything that stands on it or is measured on it.
    with (trained / "up.jsonl").open("a") as file:
        file.write('{"prompt": "caesar : g h =", "completion": "h i"}\n')
    found = cases.done(run("run", "p.yml", "--json"))
    assert found["cached"] == ["train-back"]
    (trained / "p.yml").write_text((trained / "p.yml").read_text().replace("rank: 2", "rank: 4"))
    found = cases.done(run("run", "p.yml", "--json"))
    assert set(found["cached"]) == {"train-back", "eval-base", "eval-back"}
    card = json.loads((trained / "study/experts/up/adapter_config.json").read_text())
    assert card["r"] == 4


def test_a_moved_folder_keeps_its_results(trained, run, monkeypatch):
    cases.done(run("run", "p.yml", "--json"))
    moved = trained.parent / "moved"
    trained.rename(moved)
    monkeypatch.chdir(moved)
    assert cases.done(run("run", "p.yml", "--json"))["done"] == []
    monkeypatch.chdir(moved.parent)
    assert cases.done(run("run", "moved/p.yml", "--json"))["done"] == []


def test_compressed_experts_can_be_composed(trained, run):
    text = (trained / "p.yml").read_text().replace("compose:", (
        "compress: [{mode: ternary, density: 0.5}]\n"
        "compose:\n  - {name: small, method: linear, experts: 'cge-*'}\n"
        "  - {name: one, method: linear, experts: ['*', cge-up]}"
    ))  # fmt: skip
    (trained / "p.yml").write_text(text)
    plan = {s["name"]: s for s in cases.done(run("run", "p.yml", "--dry-run", "--json"))["steps"]}
    small, one, ties = (
        [word for word in plan[f"compose-{name}"]["command"].split() if "study/" in word][:-1]
        for name in ("small", "one", "ties-density0.2")
    )
    names = [[word.rsplit("study/", 1)[1] for word in words] for words in (small, one, ties)]
    assert names[0] == ["compressed/up.cge", "compressed/back.cge"]
    assert names[1] == ["experts/up", "experts/back", "compressed/up.cge"]
    assert names[2] == ["experts/up", "experts/back"]
    found = cases.done(run("run", "p.yml", "--only", "*up", "--only", "*back",
                           "--only", "compose-small", "--json"))  # fmt: skip
    assert "compose-small" in found["done"]
    assert (trained / "study/composed/small/adapter_model.safetensors").exists()


def test_processes_give_the_same(trained, run):
    here = cases.done(run("run", "p.yml", "--json"))
    text = (trained / "p.yml").read_text().replace("out: study", "out: other")
    (trained / "q.yml").write_text(text)
    words = ["run", "q.yml", "--executor", "processes", "--workers", "2", "--json"]
    there = cases.done(run(*words))
    assert there["results"] == here["results"]
    name = "composed/ties-density0.2/adapter_model.safetensors"
    assert (trained / "other" / name).read_bytes() == (trained / "study" / name).read_bytes()


def test_killed_twice_the_results_are_the_same(trained, run):
    whole = cases.done(run("run", "p.yml", "--json"))
    expected = (trained / "study/results.json").read_bytes()
    (trained / "study").rename(trained / "whole")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for wanted in ("train-up.json", "compose-task-arithmetic-scale0.5.json"):
        process = subprocess.Popen(
            [sys.executable, "-m", "cgmerge", "run", "p.yml", "-q"], env=environment
        )
        until = time.monotonic() + 120
        while not (trained / "study/steps" / wanted).exists() and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = cases.done(run("run", "p.yml", "--json"))
    assert found["results"] == whole["results"]
    assert (trained / "study/results.json").read_bytes() == expected
    assert "train-up" in found["cached"]


def test_a_failure_stops_what_needs_it_and_nothing_else(trained, run):
    (trained / "back.jsonl").write_text('{"prompt": "rotr : a b =", "completion": ""}\n')
    code, out, _ = run("run", "p.yml", "--json")
    found = json.loads(out)
    assert code == 3
    assert found["failed"]["train-back"]["code"] == 3
    assert "train-up" in found["done"]
    assert {"compose-ties-density0.2", "eval-ties-density0.2"} <= set(found["left"])


def test_some_steps(trained, run):
    found = cases.done(run("run", "p.yml", "--only", "train-*", "--json"))
    assert sorted(found["done"]) == ["train-back", "train-up"]
    cases.refused(run("run", "p.yml", "--only", "trian-up", "--json"), 2, "usage.pipeline")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("base: tiny", "bose: tiny", "did you mean `base`"),
        ("out: study", "out: 5", "`out` must be a text, found 5"),
        ("skills: {up: up.jsonl", "skills: {a/b: up.jsonl", "letters, digits"),
        ("steps: 3", "stepz: 3", "unknown option 'stepz'"),
        ("steps: 3", "overwrite: true", "decided by the pipeline"),
        ("method: ties,", "method: ties, experts: nobody,", "no expert is called 'nobody'"),
        ("eval: {data: {up: up.jsonl, back: back.jsonl}}", "eval: {limit: 5}", "names no data"),
        ("report: false", "report: perhaps", "true or false"),
        ("scale: [0.5, 1.0]", "scale: [0.5, 0.5]", "two steps are called"),
        ("scale: [0.5, 1.0]", "scale: {a: {b: 1}}", "a value or a list"),
        ("up: up.jsonl, back: {", "up: ../none.jsonl, back: {", "none.jsonl"),
    ],
)
def test_mistakes_are_named_before_any_work(trained, run, old, new, said):
    text = (trained / "p.yml").read_text()
    assert old in text
    (trained / "p.yml").write_text(text.replace(old, new, 1))
    code, _, err = run("run", "p.yml", "--json")
    assert code == 2
    assert said in err
    assert not (trained / "study").exists()


def test_what_is_not_there_is_named_by_its_keys(trained, run):
    """All of it at once, with the places that were looked at."""
    (trained / "sub").mkdir()
    names = {"steps: 3": "steps: 3, eval_data: e.jsonl", "report: false": "experts: {x: some/x}"}
    text = (trained / "p.yml").read_text()
    for old, new in names.items():
        text = text.replace(old, new)
    (trained / "sub/p.yml").write_text(text)
    error = cases.refused(run("run", "sub/p.yml", "--dry-run", "--json"), 2, "not_found.file")
    here = trained / "sub"
    assert error["message"].splitlines() == [
        "sub/p.yml names what is not there:",
        f"  experts.x: {here}/some/x",
        f"  train.eval_data: {here}/e.jsonl",
        f"  train.skills.up: {here}/up.jsonl",
        f"  train.skills.back.data: {here}/back.jsonl",
        f"  eval.data.up: {here}/up.jsonl",
        "  and 1 more",
    ]
    assert "relative to its own folder" in error["hint"]
    for name in ("e", "up", "back"):
        (here / f"{name}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (here / "some/x").mkdir(parents=True)
    base = (here / "p.yml").read_text().replace("base: tiny", "base: bases/b")
    (here / "q.yml").write_text(base)
    cases.refused(run("run", "sub/q.yml", "--json"), 2, "not_found.file", f"base: {here}/bases/b")
    assert run("run", "sub/p.yml", "--dry-run")[0] == 0


def test_what_init_wrote_says_what_to_put_in_place(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases.done(run("init", "--json"))
    code, _, err = run("run", "pipeline.yml", "--dry-run")
    assert code == 2
    for key in ("train.skills.reverse", "train.skills.sort.data", "eval.data.pairs"):
        assert f"  {key}: {tmp_path}/" in err
    assert "hint: edit pipeline.yml" in err


def test_a_record_that_is_none_is_refused(trained, run):
    cases.done(run("run", "p.yml", "--only", "train-up", "--json"))
    (trained / "study/steps/train-up.json").write_text("{}")
    cases.refused(run("run", "p.yml", "--json"), 3, "damaged.step")


def test_init_writes_what_run_reads(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases.done(run("init", "--json"))
    cases.refused(run("init", "--json"), 2, "usage.out_exists")
    for name in ("reverse", "sort", "pairs"):
        for part in ("", ".test"):
            (tmp_path / f"{name}{part}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    plan = cases.done(run("run", "pipeline.yml", "--dry-run", "--json"))
    names = [step["name"] for step in plan["steps"]]
    assert names[:3] == ["train-reverse", "train-sort", "compose-task-arithmetic-scale0.5"]
    assert "compose-ties-density0.1-scale1.3" in names
    assert len(names) == 2 + 7 + (1 + 2 + 7) + 1
    assert plan["steps"][1]["command"].split()[-2:] == ["-o", str(Path("study/experts/sort"))]
