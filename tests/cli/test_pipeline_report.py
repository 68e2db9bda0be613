"""The last step of a pipeline: the page is written, kept, written anew, and never half there."""

import json
import os
import shutil

import case_support as cases
import pytest

from cgmerge import fs
from cgmerge.cli.app import main
from cgmerge.cli.app import run as call


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A pipeline that trains and measures one expert and makes a page of it, once run."""
    root = tmp_path_factory.mktemp("finished")
    rows = [{"prompt": "caesar : a b c =", "completion": " b c d"},
            {"prompt": "copy : d e =", "completion": " d e"}]  # fmt: skip
    (root / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "up.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (root / "p.yml").write_text(
        "base: tiny\nout: study\n"
        "train: {steps: 1, rank: 1, skills: {up: up.jsonl}}\n"
        "eval: {data: {few: few.jsonl}}\n"
    )
    assert call(["run", str(root / "p.yml"), "-q"]) == 0
    return root


@pytest.fixture
def study(finished, tmp_path, monkeypatch):
    """A copy of it: a folder can be moved with its results."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAGE = "study/report.html"


def test_the_page_is_written_once_and_anew_when_scores_change(study, run):
    page = (study / PAGE).read_bytes()
    assert all(name in page for name in (b"few", b"up", b"base"))
    found = cases.done(run("run", "p.yml", "--json"))
    assert (found["done"], len(found["cached"])) == ([], 4)
    (study / PAGE).unlink()
    assert cases.done(run("run", "p.yml", "--json"))["done"] == ["report"]
    assert (study / PAGE).read_bytes() == page
    with (study / "few.jsonl").open("a") as file:
        file.write('{"prompt": "copy : d =", "completion": " d"}\n')
    found = cases.done(run("run", "p.yml", "--json"))
    assert found["done"] == ["eval-base", "eval-up", "report"]
    assert (study / PAGE).read_bytes() != page


def killed(wanted):
    """Run the pipeline in a child that is gone at a step of the file system; say which.

    Steps are counted from the first that has to do with the page on.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def end(_operation, path):
            nonlocal seen
            if seen or "report" in str(path):
                seen += 1
                if seen == wanted:
                    os._exit(9)

        fs._step = end
        code = 70
        try:
            main(["run", "p.yml", "-q"])
        except SystemExit as stop:
            code = stop.code
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_any_step_of_the_page_it_resumes_to_the_same_bytes(study, run):
    expected = {name: (study / name).read_bytes() for name in (PAGE, "study/results.json")}
    at = 0
    while True:
        at += 1
        assert at < 60
        (study / PAGE).unlink()
        (study / "study/steps/report.json").unlink()
        code = killed(at)
        if (study / PAGE).exists():
            assert (study / PAGE).read_bytes() == expected[PAGE]  # whole or not at all
        if code == 0:
            break
        assert code == 9
        found = cases.done(run("run", "p.yml", "--json"))
        assert set(found["done"]) <= {"report"}
        assert {name: (study / name).read_bytes() for name in expected} == expected
    assert at > 6  # begun, the page, its record, the results: each has its write and rename
    left = [path.name for path in (study / "study").rglob("*") if "cgmerge-tmp" in path.name]
    assert left == []
