"""Routed compositions and what people do with them by mistake: refused by name, or done right."""

import io
import json
import subprocess
import sys

import pytest
import support
import torch
from case_support import done, refused
from composition_support import make_experts, shapes

from cgmerge.cli.talking import _forgiving
from cgmerge.errors import LimitExceeded, UsageError
from cgmerge.modules.expert import open_expert

TASKS = ("sort", "reverse", "count")
EXPERTS = tuple(f"experts/{task}" for task in TASKS)
EXAMPLES = ("--examples", *(f"{task}={task}.jsonl" for task in TASKS))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    make_experts(tmp_path / "experts")
    for task in TASKS:
        rows = [{"prompt": f"{task} : {x} =", "completion": f" {x}"} for x in ("a", "b", "c d")]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compose(run, *words):
    return run("compose", *EXPERTS, *words, "--json")


def edit(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_an_empty_prompt_is_named_before_any_is_answered(shelf, run, monkeypatch):
    done(compose(run, "-m", "arrow", "-o", "c"))
    words = ("generate", "c", "--base", "tiny", "--max-new-tokens", "2")
    code, out, err = run(*words, "-p", "sort : a =", "-p", "")
    assert (code, out) == (2, "")
    assert "a prompt is empty" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("sort : a =\n\nsort : b =\n"))
    refused(run(*words, "--json"), 2, "usage.prompt")
    refused(run("route", "c", "--base", "tiny", "--explain", "", "--json"), 2, "usage.prompt")
    refused(run("route", "c", "--base", "tiny", "--explain", "a " * 200, "--json"), 4,
            "limit.positions")  # fmt: skip


def test_what_overflows_is_no_empty_answer(shelf, run):
    support.make_expert(
        shelf / "experts/huge", shapes("q_proj", "o_proj", "up_proj"), rank=2, std=1e18, seed=5
    )
    done(run("compose", "experts/sort", "experts/huge", "-m", "arrow", "-o", "c", "--json"))
    refused(run("generate", "c", "--base", "tiny", "-p", "a b", "--json"), 3, "damaged.not_finite")
    refused(run("route", "c", "--base", "tiny", "--explain", "a b", "--json"), 3,
            "damaged.not_finite")  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "chat", "route", "export"])
@pytest.mark.parametrize("target", ["c", "experts/sort"])
def test_a_task_where_there_is_no_table_is_refused(shelf, run, monkeypatch, command, target):
    done(compose(run, "-m", "arrow", "-o", "c"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\n"))
    rest = {"generate": ("-p", "a b"), "chat": (), "route": ("--explain", "a b"),
            "export": ("-o", "x")}[command]  # fmt: skip
    base = () if command == "export" else ("--base", "tiny")
    words = (command, target, *base, *rest, "--task", "sort", "--json")
    refused(run(*words), 2, "usage.task", "'sort'")
    assert not (shelf / "x").exists()


def test_chat_knows_tasks_before_they_are_used(shelf, run, monkeypatch):
    lines = "/task sort\nsort : b a =\n/task nobody\nsort : b a =\n"
    done(compose(run, "-m", "task", "-o", "c"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = run("chat", "c", "--base", "tiny", "--max-new-tokens", "4")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert "'nobody' is not in its table" in err


def test_a_person_may_correct_a_mistake(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    warned = []
    output = type("Told", (), {"warn": lambda _, text: warned.append(text)})()
    monkeypatch.setattr(sys, "stdin", Terminal())
    for error in (UsageError("no such task", code="task", hint="name one"),
                  LimitExceeded("too long", code="positions")):  # fmt: skip
        with _forgiving(output):
            raise error
    assert warned == ["no such task; name one", "too long"]
    with pytest.raises(ValueError, match="else"), _forgiving(output):
        raise ValueError("else")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UsageError), _forgiving(output):
        raise UsageError("no such task", code="task")


def test_eval_names_the_data_that_is_no_task_before_it_loads_anything(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    words = ("eval", "c", "--base", "tiny", "--data")
    (shelf / "sort.jsonl").rename(shelf / "sort.test.jsonl")
    error = refused(run(*words, "sort.test.jsonl", "--dry-run", "--json"), 2, "usage.task",
                    "'sort.test'", "--data count=FILE")  # fmt: skip
    assert error["expected"] == ["count", "reverse", "sort"]
    done(run(*words, "sort=sort.test.jsonl", "--dry-run", "--json"))


def test_files_of_one_name_in_two_folders_repeat(shelf, run):
    for name in ("sort", "reverse", "count"):
        (shelf / name).mkdir()
        (shelf / f"{name}.jsonl").rename(shelf / name / "x.jsonl")
    examples = [f"{name}={name}/x.jsonl" for name in ("sort", "reverse", "count")]
    done(compose(run, "-m", "retrieval", "--base", "tiny", "--examples", *examples, "-o", "a"))
    done(run("compose", "a/cgmerge.json", "-o", "b", "--json"))
    assert (shelf / "a/cgmerge.json").read_bytes() == (shelf / "b/cgmerge.json").read_bytes()


def test_files_that_changed_places_are_other_examples(shelf, run):
    done(compose(run, "-m", "retrieval", "--base", "tiny", *EXAMPLES, "-o", "a"))
    (shelf / "sort.jsonl").rename(shelf / "other")
    (shelf / "count.jsonl").rename(shelf / "sort.jsonl")
    (shelf / "other").rename(shelf / "count.jsonl")
    refused(run("compose", "a/cgmerge.json", "-o", "b", "--json"), 3, "incompatible.digest")


@pytest.mark.parametrize("method", ["gate", "ties", "nonsense"])
def test_a_record_is_repeated_by_its_own_method_only(shelf, run, method):
    done(compose(run, "-m", "spectral", "-o", "a"))
    words = ("compose", "a/cgmerge.json", "-o", "b", "--json", "-m")
    refused(run(*words, method), 2, "usage.method", "`spectral`", method)
    done(run(*words, "spectr"))
    assert (shelf / "a/cgmerge.json").read_bytes() == (shelf / "b/cgmerge.json").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["fit"]["request"].update(seed="x"),
        lambda r: r["fit"]["request"].update(seed=True),
        lambda r: r["fit"]["request"].update(base=["tiny"]),
        lambda r: r["fit"]["request"].update(examples=[{"name": None, "ref": 1, "sha256": ""}]),
        lambda r: r["fit"]["request"].update(subtraction={"ref": ["x"]}),
        lambda r: r["fit"]["request"].update(subtraction={"ref": "x", "space": "outer"}),
        lambda r: r["fit"]["request"].update(subtraction={"ref": "x", "rank": "all"}),
        lambda r: r["fit"]["request"].update(subtraction={"ref": "x", "strength": 1e308}),
        lambda r: r["fit"]["request"].update(subtraction={"ref": "x", "strength": True}),
        lambda r: r.update(method="someday"),
        lambda r: r.update(params="x"),
        lambda r: r.update(params=[[]]),
    ],
)
def test_a_record_of_wrong_types_is_damaged(shelf, run, change):
    done(compose(run, "-m", "arrow", "-o", "a"))
    edit(shelf / "a/cgmerge.json", change)
    refused(run("compose", "a/cgmerge.json", "-o", "b", "--json"), 3, "damaged.composition")
    assert not (shelf / "b").exists()


def test_experts_that_change_nothing_are_named(shelf, run):
    support.make_expert(shelf / "experts/idle", shapes("q_proj"), rank=2, std=0.0, seed=5)
    found = done(run("compose", "experts/idle", "experts/sort", "-m", "arrow", "-o", "c", "--json"))
    assert "idle: changes nothing (its delta is zero)" in found["warnings"]
    refused(run("compose", "experts/idle", "-m", "task", "-o", "d", "--json"), 3,
            "incompatible.no_effect")  # fmt: skip
    assert not (shelf / "d").exists()


def test_tasks_whose_names_are_folders_alike_are_all_exported(shelf, run):
    table = {"a b": "sort", "a-b": "count", "a/b": {"sort": 1.0, "count": 0.5}}
    (shelf / "table.json").write_text(json.dumps(table))
    done(compose(run, "-m", "task", "--set", "table=table.json", "-o", "c"))
    found = done(run("export", "c", "--to", "vllm", "-o", "v", "--json"))
    assert sorted(found["adapters"]) == ["a-b", "a-b-2", "a-b-3"]
    routing = json.loads((shelf / "v/routing.json").read_text())
    assert routing["tasks"] == {"a b": "a-b", "a-b": "a-b-2", "a/b": "a-b-3"}
    for task, source in (("a b", "sort"), ("a-b", "count")):
        deltas = open_expert(str(shelf / "v/adapters" / routing["tasks"][task])).deltas()
        for path, delta in open_expert(f"experts/{source}").deltas().items():
            assert torch.allclose(deltas[path].dense(), delta.dense(), atol=1e-6)
    one = done(run("export", "c", "--to", "vllm", "--task", "a-b", "-o", "w", "--json"))
    assert list(one["adapters"]) == ["a-b-2"]
    assert json.loads((shelf / "w/routing.json").read_text())["tasks"] == {"a-b": "a-b-2"}


def test_a_task_without_experts_has_no_adapter(shelf, run):
    (shelf / "table.json").write_text(json.dumps({"none": {}, "one": "sort"}))
    done(compose(run, "-m", "task", "--set", "table=table.json", "-o", "c"))
    for words in (("--to", "vllm"), ("--task", "none")):
        refused(run("export", "c", *words, "-o", "v", "--json"), 3, "incompatible.no_effect",
                "'none' uses no expert")  # fmt: skip
    done(run("generate", "c", "--base", "tiny", "--task", "none", "-p", "a b",
             "--max-new-tokens", "2", "--json"))  # fmt: skip


def test_words_say_what_decides(shelf, run):
    for method, said in (("arrow", "every token decides"), ("task", "whoever asks names the task")):
        code, _, err = run("compose", *EXPERTS, "-m", method, "-o", method)
        assert code == 0
        assert err.count(said) == 2
    assert "route task --base hf://some/base --task TASK --explain" in err
    page = (shelf / "task/README.md").read_text()
    assert "cgmerge eval . --base hf://some/base --data TASK=TEST.jsonl" in page
    assert "cgmerge chat . --base hf://some/base --task TASK\n" in page
    page = (shelf / "arrow/README.md").read_text()
    assert 'cgmerge route . --base hf://some/base --explain "text"' in page
    _, _, err = run("route", "experts/sort", "--base", "tiny", "--explain", "a b")
    assert "static decides" not in err


def test_a_reader_that_goes_away_is_no_failure(tmp_path):
    make_experts(tmp_path / "experts")
    words = [sys.executable, "-m", "cgmerge", "generate", "--base", "tiny", "--max-new-tokens", "9"]
    prompts = [word for letter in "abcdef" for word in ("-p", f"copy : {letter} b a =")]
    with subprocess.Popen(
        [*words, *prompts], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout.read(1)
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0
