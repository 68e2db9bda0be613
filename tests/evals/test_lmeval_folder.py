"""Folders of task files: what is read, and that nothing in them can run or reach outside."""

import json

import pytest

from cgmerge.errors import DataError, NotFound, Unsafe, UsageError
from cgmerge.evals.lmeval.folder import read_folder

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "tasks"
    place.mkdir()
    (place / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return place


def put(folder, text, name="sums.yaml"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_task_with_its_rows(folder):
    put(folder, TASK)
    (task,) = read_folder(folder)
    assert (task.name, task.source) == ("sums", "sums.yaml")
    assert task.splits == {"test": [{"prompt": "1+1=", "answer": "2"}]}
    assert "dataset_path" not in task.config  # the harness gets rows, never a place to look
    assert task.config["doc_to_text"] == "{{prompt}}"


def test_includes_give_way_to_the_file_itself(folder):
    put(folder, TASK + "num_fewshot: 3\ntarget_delimiter: x\n", "inside/_common.yaml")
    (folder / "inside" / "sums.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    put(folder, "include: inside/_common.yaml\ntask: more\nnum_fewshot: 1\n", "more.yaml")
    first, second = read_folder(folder)
    assert (first.name, second.name) == ("sums", "more")
    assert (second.config["num_fewshot"], second.config["target_delimiter"]) == (1, "x")
    # As in the harness, data is looked for from the file that is the task.
    assert second.splits["test"][0]["prompt"] == "1+1="


def test_the_digest_is_of_settings_and_data(folder):
    path = put(folder, TASK)
    before = read_folder(folder)[0].sha256
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "3"}\n')
    after = read_folder(folder)[0].sha256
    path.write_text(TASK + "num_fewshot: 1\n")
    assert len({before, after, read_folder(folder)[0].sha256}) == 3


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("doc_to_text: !function utils.f\n", "unsafe.function", "runs code"),
        ("process_docs: x\n", "unsafe.code", "process_docs"),
        ("class: x.Y\n", "unsafe.code", "class"),
        ("unsafe_code: true\n", "unsafe.code", "unsafe_code"),
        ("custom_dataset: x\n", "unsafe.code", "custom_dataset"),
        ("use_prompt: promptsource:*\n", "unsafe.code", "use_prompt"),
        ("metric_list: [{metric: ./evil.py}]\n", "unsafe.metric", "as a script"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]\n", "unsafe.metric", "as a script"),
        ("metric_list: [{metric: code_eval}]\n", "unsafe.metric", "code_eval"),
        ("metric_list: [{metric: exact_match, regexes_to_ignore: ['(a+)+$']}]\n",
         "unsafe.regex", "regular expressions"),
        ("filter_list: [{name: a, filter: [{function: regex, regex_pattern: '(a+)+$'}]}]\n",
         "unsafe.filter", "regular expression"),
        ("filter_list: [{name: a, filter: [{function: custom}]}]\n", "unsafe.filter", "code"),
    ],
)  # fmt: skip
def test_what_would_run_is_refused(folder, change, code, says):
    key = change.partition(":")[0]
    kept = "".join(line for line in TASK.splitlines(True) if not line.startswith(f"{key}:"))
    put(folder, kept + change)
    with pytest.raises(Unsafe) as error:
        read_folder(folder)
    assert error.value.code == code
    assert says in error.value.message
    assert error.value.exit_code == 3


def test_code_in_an_included_file_is_refused(folder):
    put(folder, "process_results: !function utils.f\n", "_common.yaml")
    put(folder, TASK + "include: _common.yaml\n")
    with pytest.raises(Unsafe, match="_common.yaml"):
        read_folder(folder)


@pytest.mark.parametrize(
    "file", ["../secret.jsonl", "/etc/hostname", "https://example.org/a.jsonl", "hf://x/y.jsonl",
             "link.jsonl"]
)  # fmt: skip
def test_files_outside_of_the_folder_are_refused(folder, file):
    (folder.parent / "secret.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "link.jsonl").symlink_to(folder.parent / "secret.jsonl")
    put(folder, TASK.replace("sums.jsonl", f'"{file}"'))
    with pytest.raises(Unsafe) as error:
        read_folder(folder)
    assert error.value.code == "unsafe.path"


def test_an_include_outside_of_the_folder_is_refused(folder):
    put(folder.parent, TASK, "outside.yaml")
    put(folder, "include: ../outside.yaml\ntask: a\n")
    with pytest.raises(Unsafe) as error:
        read_folder(folder)
    assert error.value.code == "unsafe.path"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (TASK + "surprise: 1\n", UsageError, "`surprise` is not read"),
        (TASK.replace("path: json", "path: pandas"), UsageError, "found dataset_path 'pandas'"),
        (TASK.replace("path: json", "path: cais/mmlu"), UsageError, "'cais/mmlu'"),
        (TASK.replace("{data_files:", "{data_dir: x, data_files:"), UsageError, "data_dir"),
        (TASK.replace("split: test", "split: valid"), UsageError, "no data for the split 'valid'"),
        (TASK + "output_type: loglikelihood_rolling\n", UsageError, "no score for each item"),
        (TASK.replace("task: sums", "task: a/b"), UsageError, "cannot be the name"),
        (TASK.replace("task: sums", "task: [a]"), UsageError, "cannot be the name"),
        (TASK + "metric_list: acc\n", UsageError, "list of mappings"),
        (TASK + "include: sums.yaml\n", UsageError, "in a circle"),
        (TASK + "include: {a: b}\n", UsageError, "must name files"),
        (TASK.replace("sums.jsonl", "gone.jsonl"), NotFound, "gone.jsonl"),
        (TASK.replace("sums.jsonl", "sums.yaml"), DataError, ".yaml"),
        ("task: [", UsageError, "not valid YAML"),
        ("group: all\n", NotFound, "holds no task"),
    ],
)
def test_mistakes_are_named(folder, text, kind, says):
    put(folder, text)
    with pytest.raises(kind) as error:
        read_folder(folder)
    assert says in error.value.message


def test_two_tasks_of_one_name(folder):
    put(folder, TASK)
    put(folder, TASK, "again.yaml")
    with pytest.raises(UsageError, match=r"again.yaml and sums.yaml"):
        read_folder(folder)


def test_no_folder_and_an_empty_one(folder):
    with pytest.raises(NotFound, match="no such folder"):
        read_folder(folder / "gone")
    with pytest.raises(NotFound) as error:
        read_folder(folder)
    assert error.value.hint == "it holds sums.jsonl"


def test_rows_keep_their_types(folder):
    (folder / "sums.jsonl").write_text(json.dumps({"prompt": "a", "answer": 1, "x": [1.5]}) + "\n")
    put(folder, TASK)
    assert read_folder(folder)[0].splits["test"] == [{"prompt": "a", "answer": 1, "x": [1.5]}]
