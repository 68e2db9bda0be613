"""`compose` with a router, `route`, `generate`, `chat` and `export` as a user calls them."""

import io
import json
import os
import subprocess
import sys

import pytest
import support
import torch
from case_support import done, refused
from composition_support import make_experts, shapes

from cgmerge.modules.expert import open_expert
from cgmerge.tensorfile import file_sha256

TASKS = ("sort", "reverse", "count")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    make_experts(tmp_path / "experts")
    support.make_expert(tmp_path / "general", shapes("q_proj", "v_proj"), rank=2, seed=9)
    rows = {"sort": "b a d", "reverse": "k h b", "count": "d e f g"}
    for task, letters in rows.items():
        lines = [
            json.dumps({"prompt": f"{task} : {letters} {extra} =", "completion": f" {extra}"})
            for extra in ("a", "b", "c")
        ]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXPERTS = tuple(f"experts/{task}" for task in TASKS)
EXAMPLES = ("--examples", *(f"{task}={task}.jsonl" for task in TASKS))


def compose(run, *words):
    return run("compose", *EXPERTS, *words, "--json")


def test_arrow_needs_nothing_but_experts(shelf, run):
    found = done(compose(run, "-m", "arrow", "--top-k", "2", "-o", "c"))
    assert (found["method"], found["granularity"], found["as"]) == ("arrow", "token", "composition")
    assert found["params"]["top_k"] == "2"
    assert [item["name"] for item in found["experts"]] == ["count", "reverse", "sort"]
    assert found["experts"][0]["sha256"] == open_expert("experts/count").digest
    assert (shelf / "c/experts/sort/adapter_model.safetensors").exists()
    assert found["out"] == "c"


def test_the_order_of_experts_changes_no_byte(shelf, run):
    done(run("compose", *EXPERTS, "-m", "spectral", "-o", "a", "--json"))
    done(run("compose", *reversed(EXPERTS), "-m", "spectral", "-o", "b", "--json"))
    left, right = (
        {p.relative_to(shelf / n): p.read_bytes() for p in (shelf / n).rglob("*") if p.is_file()}
        for n in ("a", "b")
    )
    assert left == right


@pytest.mark.parametrize("method", ["gate", "phatgoose", "lora-flow", "retrieval"])
def test_learned_routers_repeat_from_their_record(shelf, run, method):
    quick = () if method == "retrieval" else ("--set", "steps=3")
    words = ("-m", method, "--base", "tiny", *EXAMPLES, *quick)
    first = done(compose(run, *words, "-o", "a"))
    assert first["fit"]["request"]["examples"][0]["name"] == "sort"
    again = done(run("compose", "a/cgmerge.json", "-o", "b", "--json"))
    assert again["method"] == method
    for name in ("router.safetensors", "cgmerge.json"):
        assert (shelf / "a" / name).read_bytes() == (shelf / "b" / name).read_bytes(), name


@pytest.mark.parametrize("method", ["gate", "phatgoose", "retrieval"])
def test_several_files_of_an_expert_are_one(shelf, run, method):
    quick = () if method == "retrieval" else ("--set", "steps=2")
    words = ("-m", method, "--base", "tiny", *quick)
    whole = done(compose(run, *words, *EXAMPLES, "-o", "whole"))
    lines = (shelf / "sort.jsonl").read_text().splitlines(keepends=True)
    (shelf / "one.jsonl").write_text(lines[0])
    (shelf / "two.jsonl").write_text("".join(lines[1:]))
    split = ("--examples", "sort=one.jsonl", "sort=two.jsonl", *EXAMPLES[2:])
    parts = done(compose(run, *words, *split, "-o", "parts"))
    assert (shelf / "whole/router.safetensors").read_bytes() == (
        shelf / "parts/router.safetensors"
    ).read_bytes()
    listed = parts["fit"]["request"]["examples"]
    assert [(e["name"], e["ref"]) for e in listed[:2]] == [
        ("sort", "one.jsonl"), ("sort", "two.jsonl")
    ]  # fmt: skip
    assert [e["sha256"] for e in listed[:2]] == [
        file_sha256(shelf / "one.jsonl"), file_sha256(shelf / "two.jsonl")
    ]  # fmt: skip
    assert listed[2:] == whole["fit"]["request"]["examples"][1:]
    done(run("compose", "parts/cgmerge.json", "-o", "again", "--json"))
    for name in ("router.safetensors", "cgmerge.json"):
        assert (shelf / "parts" / name).read_bytes() == (shelf / "again" / name).read_bytes()
    (shelf / "two.jsonl").write_text(lines[1])
    refused(run("compose", "parts/cgmerge.json", "-o", "b", "--json"), 3, "incompatible.digest")


def test_a_record_with_other_examples_is_refused(shelf, run):
    done(compose(run, "-m", "retrieval", "--base", "tiny", *EXAMPLES, "-o", "a"))
    with (shelf / "sort.jsonl").open("a") as file:
        file.write('{"prompt": "sort : a =", "completion": " a"}\n')
    refused(run("compose", "a/cgmerge.json", "-o", "b", "--json"), 3, "incompatible.digest")
    done(run("compose", "a/cgmerge.json", *EXAMPLES, "-o", "b", "--json"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("-m", "gate", "--base", "tiny"), "usage.examples", "prompt"),
        (("-m", "gate", *EXAMPLES), "usage.base", "--base"),
        (("-m", "arrow", *EXAMPLES), "usage.examples", "leave out"),
        (("-m", "arrow", "--scale", "0.5"), "usage.option", "--scale"),
        (("-m", "arrow", "--rank", "8"), "usage.option", "--rank"),
        (("-m", "arrow", "--as", "model"), "usage.option", "--as"),
        (("-m", "arrow", "--top-k", "0"), "usage.parameter", "top_k"),
        (("-m", "arrow", "--top-k", "two"), "usage.parameter", "two"),
        (("-m", "arrow", "--set", "tempreature=2"), "usage.parameter", "temperature"),
        (("-m", "arrow", "--set", "temperature=0"), "usage.parameter", "temperature"),
        (("-m", "arrow", "--top-k", "2", "--set", "top_k=1"), "usage.parameter", "both given"),
        (("-m", "ties", "--top-k", "2"), "usage.option", "--top-k"),
        (("-m", "ties", "--subtract", "general"), "usage.option", "--subtract"),
        (("experts/sort", "-m", "arrow"), "usage.experts", "same expert"),
        (("experts/nobody", "-m", "arrow"), "not_found.folder", "nobody"),
    ],
)
def test_requests_that_make_no_sense_are_refused_before_any_work(shelf, run, words, code, said):
    error = refused(compose(run, *words, "-o", "c"), 2, code)
    assert said in f"{error['message']} {error['hint']}"
    assert not (shelf / "c").exists()


def test_a_router_decides_weights_so_nobody_else_does(shelf, run):
    found = run("compose", "experts/sort=0.5", "experts/count", "-m", "arrow", "-o", "c", "--json")
    refused(found, 2, "usage.weights")


def test_examples_of_strangers_are_refused_with_both_sides(shelf, run):
    words = ("--examples", "sort.jsonl", "reverse.jsonl", "cuont=count.jsonl")
    error = refused(
        compose(run, "-m", "retrieval", "--base", "tiny", *words, "-o", "c"),
        3, "incompatible.examples",
    )  # fmt: skip
    assert "cuont" in error["message"]
    assert "count" in error["message"]


def test_a_dry_run_writes_nothing(shelf, run):
    found = done(compose(run, "-m", "arrow", "--dry-run"))
    assert found["out"] is None
    assert sorted(p.name for p in shelf.iterdir()) == sorted(
        ["experts", "general", *(f"{task}.jsonl" for task in TASKS)]
    )


def test_a_result_is_replaced_only_when_asked(shelf, run):
    done(compose(run, "-m", "arrow", "-o", "c"))
    refused(compose(run, "-m", "spectral", "-o", "c"), 2, "usage.out_exists")
    assert done(compose(run, "-m", "spectral", "-o", "c", "--overwrite"))["method"] == "spectral"
    inside = compose(run, "-m", "arrow", "-o", "experts/sort/c")
    assert inside[0] == 2


def test_a_general_expert_is_subtracted_exactly_and_sources_stay(shelf, run):
    before = (shelf / "experts/sort/adapter_model.safetensors").read_bytes()
    found = done(compose(run, "-m", "arrow", "--subtract", "general=general", "-o", "c"))
    assert found["transforms"][0]["general"]["name"] == "general"
    written, general = open_expert("c/experts/sort").deltas(), open_expert("general").deltas()
    source = open_expert("experts/sort").deltas()
    for path, delta in written.items():
        expected = torch.zeros(delta.shape, dtype=torch.float64)
        if path in source:
            expected += source[path].dense().double()
        if path in general:
            expected -= general[path].dense().double()
        assert torch.allclose(delta.dense().double(), expected, atol=1e-6), path
    assert (shelf / "experts/sort/adapter_model.safetensors").read_bytes() == before
    again = done(run("compose", "c/cgmerge.json", "-o", "d", "--json"))
    assert again["transforms"] == found["transforms"]


def test_compressed_experts_are_routed_and_stay_compressed(shelf, run):
    done(run("compress", "experts/sort", "-o", "sort.cge", "--json"))
    done(run("compose", "sort.cge", "experts/count", "-m", "arrow", "-o", "c", "--json"))
    assert (shelf / "c/experts/sort/expert.cge").exists()
    found = done(run("generate", "c", "--base", "tiny", "-p", "sort : a b =", "--json"))
    assert found["completions"][0]["tokens"] > 0


def test_eval_treats_a_composition_like_any_target(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    words = ("c", *EXPERTS, "--base", "tiny", "--generate", "--json", "--data")
    found = done(run("eval", *words, *(f"{task}={task}.jsonl" for task in TASKS)))
    kinds = {target["name"]: target["kind"] for target in found["targets"]}
    assert kinds == {"base": "base", "c": "routed", "sort": "expert", "reverse": "expert",
                     "count": "expert"}  # fmt: skip
    scores = {(r["target"], r["skill"]): r["loglik"] for r in found["results"]}
    for task in TASKS:
        assert scores["c", task] == pytest.approx(scores[task, task], abs=1e-5)
    assert all(r["agree"] == r["n"] for r in found["results"])


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_score_on_the_examples_of_a_router_is_no_test_score(shelf, run, dry):
    done(compose(run, "-m", "retrieval", "--base", "tiny", *EXAMPLES, "-o", "c"))
    (shelf / "other.jsonl").write_text((shelf / "sort.jsonl").read_text() + "\n")
    words = ("eval", "c", "--base", "tiny", "--data", "x=count.jsonl", "other.jsonl", *dry)
    code, _, err = run(*words)
    assert code == 0
    assert err.count("was tuned on") == 1
    assert "c was tuned on this very file, count.jsonl: its score is no test score" in err


def test_a_task_that_the_table_lacks_is_named(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    words = ("eval", "c", "--base", "tiny", "--data", "swap=sort.jsonl", "--json")
    error = refused(run(*words), 2, "usage.task")
    assert "swap" in error["message"]
    assert "reverse" in error["hint"]


def test_route_explains_layers_modules_and_tokens(shelf, run):
    done(compose(run, "-m", "arrow", "-o", "c"))
    words = ("route", "c", "--base", "tiny", "--explain", "sort : b a =")
    found = done(run(*words, "--json"))
    explained = found["explained"][0]
    assert found["experts"] == ["count", "reverse", "sort"]
    assert [t["token"] for t in explained["tokens"]][-1].endswith("=")
    for shares in [explained["overall"], *explained["layers"].values()]:
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    code, out, _ = run(*words)
    assert code == 0
    assert out.splitlines()[0] == "sort : b a ="
    assert out.splitlines()[1].split() == ["count", "reverse", "sort"]
    code, verbose, _ = run(*words, "-v")
    assert len(verbose.splitlines()) > len(out.splitlines())


def test_route_refuses_what_has_no_router(shelf, run):
    found = run("route", "experts/sort", "--base", "tiny", "--explain", "a", "--json")
    refused(found, 2, "usage.static")
    found = run("route", "general/adapter_config.json", "--base", "tiny", "--explain", "a")
    assert found[0] in (2, 3)
    assert "Traceback" not in found[2]


def test_generate_is_what_eval_scores(shelf, run):
    done(compose(run, "-m", "arrow", "-o", "c"))
    found = done(
        run("eval", "c", "--base", "tiny", "--data", "sort=sort.jsonl", "--generate", "--json",
            "-o", "record.json")
    )  # fmt: skip
    items = [json.loads(line) for line in (shelf / "record.items.jsonl").read_text().splitlines()]
    expected = {i["id"]: i["generated"] for i in items if i["target"] == "c"}
    assert found["ok"]
    words = ["-p", "sort : b a d a =", "-p", "sort : b a d b =", "--max-new-tokens", "3"]
    written = done(run("generate", "c", "--base", "tiny", *words, "--json"))["completions"]
    assert len(written) == 2
    texts = [text.replace("</s>", "").split() for text in expected.values()]
    for one in written:
        assert any(one["text"].split()[: len(t)] == t or t[: len(one["text"].split())]
                   == one["text"].split() for t in texts)  # fmt: skip


def test_sampling_follows_its_seed(run):
    words = ("generate", "--base", "tiny", "-p", "copy : a", "--temperature", "8",
             "--max-new-tokens", "20", "--json")  # fmt: skip
    state = torch.get_rng_state()
    first = done(run(*words, "--seed", "1"))["completions"]
    assert torch.equal(torch.get_rng_state(), state)
    assert done(run(*words, "--seed", "1"))["completions"] == first
    texts = {done(run(*words, "--seed", str(s)))["completions"][0]["text"] for s in range(2, 7)}
    assert len(texts) > 1


def test_generate_says_why_it_stopped(run):
    words = ("generate", "--base", "tiny", "-p", "copy : a b c =", "--json")
    whole = done(run(*words))["completions"][0]
    cut = done(run(*words, "--max-new-tokens", "1"))["completions"][0]
    assert (whole["finish"], cut["finish"], cut["tokens"]) == ("end", "length", 1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("generate", "--base", "tiny", "-p", " "), "usage.prompt"),
        (("generate", "-p", "a"), "usage.base"),
        (("generate", "--base", "tiny", "-p", "a", "--top-p", "0"), "usage.parameter"),
        (("generate", "--base", "tiny", "-p", "a " * 5000), "limit.positions"),
        (("generate", "nobody", "--base", "tiny", "-p", "a"), "not_found.folder"),
        (("route", "nobody", "--base", "tiny", "--explain", "a"), "not_found.folder"),
        (("route", "nobody", "--base", "tiny"), "usage.prompt"),
        (("export", "nobody", "-o", "x"), "not_found.folder"),
        (("export", "nobody", "--to", "tgi", "-o", "x"), "usage.server"),
    ],
)
def test_talking_refusals(run, words, code):
    exit_code = 4 if code.startswith("limit") else 2
    refused(run(*words, "--json"), exit_code, code)


def pipe(words, text, cwd):
    """Run in a process of its own, as a pipe would."""
    return subprocess.run(
        [sys.executable, "-m", "cgmerge", *words],
        input=text, cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_chat_reads_a_pipe_in_a_fresh_process(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    lines = "/task sort\nsort : b a =\n/task count\n\ncount : b a =\n/quit\nnever\n"
    found = pipe(["chat", "c", "--base", "tiny", "--max-new-tokens", "4"], lines, shelf)
    assert found.returncode == 0, found.stderr
    turns = found.stdout.splitlines()
    assert len(turns) == 2
    words = ("generate", "c", "--base", "tiny", "--max-new-tokens", "4", "--json")
    for said, task in zip(turns, ("sort", "count"), strict=True):
        asked = ("--task", task, "-p", f"{task} : b a =")
        assert done(run(*words, *asked))["completions"][0]["text"] == said


def test_generate_reads_prompts_from_a_pipe(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("copy : c a a =\ncopy : f a j e =\n"))
    code, out, _ = run("generate", "--base", "tiny")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [["c", "a", "a"], ["f", "a", "j", "e"]]


def test_a_conversation_is_remembered_where_the_base_has_a_template(run, monkeypatch):
    import cgmerge.evals.talk as talk

    seen = []

    def fake(there, prompt, style, *, task=None, on_text=None):
        seen.append(prompt if isinstance(prompt, str) else [(m.role, m.content) for m in prompt])
        return talk.Reply(f"answer {len(seen)}", 2, "end")

    monkeypatch.setattr(talk, "write", fake)
    import cgmerge.modules.loading as loading

    plain = loading.load_base

    def with_template(*args, **options):
        found = plain(*args, **options)
        found.tokenizer.chat_template = "{{ messages }}"
        return found

    monkeypatch.setattr(loading, "load_base", with_template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/new\nthree\n"))
    found = done(run("chat", "--base", "tiny", "--system", "be kind", "--json"))
    assert [turn["text"] for turn in found["turns"]] == ["answer 1", "answer 2", "answer 3"]
    system = ("system", "be kind")
    assert seen == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "answer 1"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_export_writes_what_servers_read(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    found = done(run("export", "c", "--to", "vllm", "-o", "v", "--json"))
    assert found["adapters"]["sort"] == "adapters/sort"
    assert "vllm serve" in found["command"]
    single = done(run("export", "c", "--task", "sort", "-o", "p", "--json"))
    assert (single["rank"], single["truncation_error"]) == (4, 0.0)
    done(run("export", "experts/sort", "--to", "ollama", "-o", "o", "--json"))
    assert "ADAPTER ." in (shelf / "o/Modelfile").read_text()
    done(compose(run, "-m", "arrow", "-o", "t"))
    error = refused(run("export", "t", "--to", "vllm", "-o", "x", "--json"), 3,
                    "incompatible.not_servable")  # fmt: skip
    assert "one adapter per request" in error["message"]
    refused(run("export", "c", "-o", "experts", "--json"), 2, "usage.out_exists")


def test_export_does_not_tell_servers_our_own_names(shelf, run, monkeypatch):
    monkeypatch.setattr("cgmerge.modules.builtin.NAMES", ("some/base",))  # what these are for
    done(compose(run, "-m", "task", "-o", "c"))
    done(run("export", "c", "--to", "vllm", "-o", "v", "--json"))
    done(run("export", "experts/sort", "--to", "ollama", "-o", "o", "--json"))
    said = "# BASE: a folder or repository of the model that cgmerge calls some/base."
    for file, wanted in (("v/serve.sh", "vllm serve BASE --"), ("o/Modelfile", "FROM BASE")):
        text = (shelf / file).read_text()
        assert said in text
        assert wanted in text


def test_inspect_tells_what_a_composition_is(shelf, run):
    done(compose(run, "-m", "arrow", "--top-k", "2", "-o", "c"))
    facts = done(run("inspect", "c", "--json"))
    assert (facts["kind"], facts["method"], facts["granularity"]) == (
        "composition",
        "arrow",
        "token",
    )
    assert facts["settings"]["top_k"] == 2
    assert [one["name"] for one in facts["experts"]] == ["count", "reverse", "sort"]
    assert facts["experts"][0]["sha256"] == open_expert("experts/count").digest
    files = [path for path in (shelf / "c").rglob("*") if path.is_file()]
    assert facts["size_bytes"] == sum(path.stat().st_size for path in files)
    code, out, _ = run("inspect", "c")
    assert code == 0
    assert "every token decides" in out
    (shelf / "c/router.safetensors").write_bytes(b"x")
    refused(run("inspect", "c", "--json"), 3, "damaged.digest", "is not what cgmerge.json says")


def test_inspect_names_the_tasks_of_a_table(shelf, run):
    done(compose(run, "-m", "task", "-o", "c"))
    facts = done(run("inspect", "c", "--json"))
    assert facts["tasks"] == ["count", "reverse", "sort"]
    assert facts["settings"] == {}
