"""The real lm-evaluation-harness beside our own scores; `make lm-eval` runs it."""

import json
import socket

import pytest
import tiny_model as tiny
import torch

pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.filterwarnings("default"),  # those of other people's packages are theirs
    pytest.mark.slow,
]

from cgmerge.cli.app import main  # noqa: E402
from cgmerge.errors import DataError, Unsafe, UsageError  # noqa: E402
from cgmerge.evals.checked import load_checked  # noqa: E402
from cgmerge.evals.lmeval.folder import read_folder  # noqa: E402
from cgmerge.evals.lmeval.harness import open_folder  # noqa: E402
from cgmerge.evals.lmeval.model import HarnessModel  # noqa: E402
from cgmerge.evals.targets import LoadOptions, Target, open_targets, ready  # noqa: E402
from cgmerge.modules.base import open_base  # noqa: E402
from cgmerge.modules.loading import load_base  # noqa: E402

torch.set_num_threads(1)

COMMON = """\
dataset_path: json
test_split: test
doc_to_text: "{{prompt}}"
metric_list: [{metric: METRIC, aggregation: mean, higher_is_better: true}]
"""
METRIC = {"written": "exact_match", "greedy": "acc", "choices": "acc", "shots": "acc"}
TASKS = {
    "written": """\
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: generate_until
doc_to_target: "{{completion}}"
generation_kwargs: {until: ["<eos>"], do_sample: false, max_gen_toks: 12}
filter_list: [{name: bare, filter: [{function: remove_whitespace}, {function: take_first}]}]
""",
    "greedy": """\
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: loglikelihood
doc_to_target: " {{completion}} <eos>"
""",
    "choices": """\
dataset_kwargs: {data_files: {test: choices.jsonl}}
output_type: multiple_choice
doc_to_choice: ended
doc_to_target: answer
""",
    "shots": """\
dataset_kwargs: {data_files: {test: rows.jsonl, train: rows.jsonl}}
fewshot_split: train
num_fewshot: 2
fewshot_delimiter: " "
output_type: loglikelihood
doc_to_target: " {{completion}}"
""",
}


def task_file(name):
    return f"task: {name}\n{COMMON.replace('METRIC', METRIC[name])}{TASKS[name]}"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    training = tiny.make_rows("copy", 300, seed=1, lengths=(1, 2, 3))
    model = tiny.train(tiny.make_model(3), tiny.make_tokenizer(), training, steps=60)
    tiny.save(root / "mine", model, tiny.make_tokenizer())
    tiny.make_adapter(root / "one", model, seed=1, size=0.3)
    tiny.make_adapter(root / "two", model, seed=2, size=0.2)
    tiny.save(root / "whole", tiny.merged(model, root / "one"), tiny.make_tokenizer())
    tasks = root / "tasks"
    tasks.mkdir()
    rows = tiny.make_rows("copy", 24, seed=9, lengths=(1, 2, 3))
    tiny.write_jsonl(tasks / "rows.jsonl", rows)
    choices = [
        {"prompt": one["prompt"], "choices": texts, "answer": 1,
         "ended": [f"{text} <eos>" for text in texts]}
        for one in rows
        for texts in [[one["completion"] + " h", one["completion"], "a"]]
        if one["completion"] != "a"
    ]  # fmt: skip
    tiny.write_jsonl(tasks / "choices.jsonl", choices)
    for name in TASKS:
        (tasks / f"{name}.yaml").write_text(task_file(name))
    return root


@pytest.fixture
def run(shelf, capsys, monkeypatch):
    monkeypatch.chdir(shelf)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        done = capsys.readouterr()
        assert "Traceback" not in done.err
        return stop.value.code, done.out, done.err

    return call


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_words):
        raise AssertionError("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def scores(record, skill):
    return {one.target: one.score for one in record.results if one.skill == skill}


def test_our_scores_and_theirs_are_the_same(run, shelf, tmp_path, no_network):
    """Every kind of target: exact match twice, choices once, each as our own runner has it."""
    code, stdout, stderr = run(
        "compose", "one", "two", "-m", "arrow", "-o", str(tmp_path / "routed"), "--base", "mine"
    )
    assert code == 0, stderr
    code, _, stderr = run("compress", "one", "--base", "mine", "-o", str(tmp_path / "small.cge"))
    assert code == 0, stderr
    code, _, stderr = run("compose", "one", "two", "-m", "ties", "--base", "mine",
                          "-o", str(tmp_path / "ties"))  # fmt: skip
    assert code == 0, stderr
    targets = ["one", "whole", *(str(tmp_path / one) for one in ("routed", "small.cge", "ties"))]
    code, stdout, stderr = run("eval", *targets, "--base", "mine", "--lm-eval", "tasks",
                               "-o", str(tmp_path / "theirs.json"), "--json")  # fmt: skip
    assert code == 0, stderr
    assert stderr.count("\n") < 20, "the harness is heard"
    assert json.loads(stdout)["settings"]["metric"] == "lm_eval_right"
    theirs = load_checked(tmp_path / "theirs.json")
    for data, metric, skills in (
        ("rows.jsonl", "exact", ("written", "greedy")),
        ("choices.jsonl", "choice", ("choices",)),
    ):
        out = tmp_path / f"{metric}.json"
        code, _, stderr = run("eval", *targets, "--base", "mine", "--data", f"own=tasks/{data}",
                              "--metric", metric, "-o", str(out))  # fmt: skip
        assert code == 0, stderr
        own = load_checked(out)
        for skill in skills:
            assert scores(theirs.record, skill) == scores(own.record, "own"), skill
        if metric == "exact":
            assert [i.correct for i in theirs.items if i.skill == "greedy"] == [
                i.correct for i in own.items
            ]
    kinds = {one.kind for one in theirs.record.targets}
    assert kinds == {"base", "expert", "model", "routed", "merged"}
    assert len(set(scores(theirs.record, "written").values())) > 2  # it tells models apart
    code, _, stderr = run("report", str(tmp_path / "theirs.json"), "-o", str(tmp_path / "p.html"))
    assert code == 0, stderr
    assert "exact_match,bare" in (tmp_path / "p.html").read_text()


def test_answers_are_those_of_the_harness_s_own_model(shelf):
    """Logits of two ways to make batches differ in the last bits; texts and picks must not."""
    from lm_eval.models.huggingface import HFLM

    base = open_base(str(shelf / "mine"))
    loaded = load_base(base, device="cpu", dtype="float32")
    harness = open_folder(read_folder(shelf / "tasks"))
    (target,) = open_targets([str(shelf / "one")], base)
    for one in (Target.of_base(base), target):
        with ready(one, loaded, LoadOptions()) as there:
            ours = harness.ask(HarnessModel(there, batch_size=5), None)
            peer = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=7,
                        device="cpu", max_length=tiny.POSITIONS)  # fmt: skip
            theirs = harness.ask(peer, None)
        assert ours["results"] == theirs["results"]
        for task in TASKS:
            for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
                if task == "written":
                    assert a["resps"] == b["resps"]
                    continue
                for (x, right), (y, expected) in zip(a["filtered_resps"], b["filtered_resps"],
                                                     strict=True):  # fmt: skip
                    assert x == pytest.approx(y, abs=1e-4)
                    assert right == expected


def put(shelf, tmp_path, change):
    folder = tmp_path / "tasks"
    folder.mkdir()
    tiny.write_jsonl(folder / "rows.jsonl", [{"prompt": "copy : a =", "completion": "a"}])
    task = task_file("greedy")
    kept = "".join(line for line in task.splitlines(keepends=True)
                   if not line.startswith(change.partition(":")[0] + ":"))  # fmt: skip
    (folder / "t.yaml").write_text(kept + change)
    return folder


def test_templates_have_a_sandbox(shelf, tmp_path):
    reach = "{{ prompt.__class__.__mro__[1].__subclasses__() }}"
    folder = put(shelf, tmp_path, f'doc_to_text: "{reach}"\n')
    with pytest.raises(Unsafe) as error:
        open_folder(read_folder(folder))
    assert error.value.code == "unsafe.template"


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ('doc_to_text: "{{nothing}}"\n', UsageError, "'nothing' is undefined"),
        ("doc_to_text: \"{{prompt|regex_replace('a')}}\"\n", UsageError, "No filter named"),
        ("output_type: multiple_choice\ndoc_to_choice: '[{{prompt}}'\n", DataError, "t.yaml"),
    ],
)
def test_what_the_harness_refuses_has_a_name(shelf, tmp_path, change, kind, says):
    folder = put(shelf, tmp_path, change)
    with pytest.raises(kind) as error:
        open_folder(read_folder(folder))
    assert says in error.value.message


def test_unknown_tasks_are_near_known_ones(run):
    code, _, stderr = run("eval", "--base", "mine", "--lm-eval", "arc_esay")
    assert code == 2
    assert "no task 'arc_esay'" in stderr
    assert "arc_easy" in stderr
