"""U39: files that colleagues cannot read; saving over what was loaded."""

import os

import case_support as cases
import pytest
import support


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
@pytest.mark.parametrize("form", ["adapter", "model"])
def test_modes_follow_the_umask(run, experts, models, mask, file, folder, form):
    before = os.umask(mask)
    try:
        words = ["compose", experts / "E1", "--base", models / "B", "--as", form]
        cases.done(run(*words, "-o", experts / "out", "--json"))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (experts / "out").iterdir()} == {file}
    assert (experts / "out").stat().st_mode & 0o777 == folder


def test_a_result_is_replaced_and_an_expert_is_not(run, experts):
    words = ["compose", experts / "E1", experts / "E2", "-m", "task-arithmetic", "--json"]
    before = cases.tree(experts)
    for more in ([], ["--overwrite"]):
        done = run(*words, "-o", experts / "E1", *more)
        cases.refused(done, 2, "usage.out_is_input", "inputs are never replaced")
    assert cases.tree(experts) == before
    cases.done(run("compose", experts / "E1", "-o", experts / "out", "--json"))
    cases.refused(run(*words, "-o", experts / "out"), 2, "usage.out_exists", "--overwrite")
    cases.done(run(*words, "-o", experts / "out", "--overwrite"))
    deltas = [support.dense_deltas(experts / name) for name in ("E1", "E2")]
    expected = {path: deltas[0][path] + deltas[1][path] for path in deltas[0]}
    assert support.relative(support.dense_deltas(experts / "out"), expected) < 1e-6


def test_bases_and_folders_of_inputs_are_never_replaced(run, experts, models, monkeypatch):
    monkeypatch.chdir(experts)
    support.make_llama(experts / "base")
    (experts / "mine").mkdir()
    (experts / "mine" / "thesis.txt").write_text("years of work")
    before = cases.tree(experts)
    words = ["compose", "E1", "E2", "--base", "base", "--overwrite", "--json", "-o"]
    for out, code, said in (
        ("base", "usage.out_is_base", "bases are never changed"),
        (".", "usage.out_holds_input", "holds the input"),
        ("..", "usage.out_holds_input", "holds the input"),
        ("E1/sub", "usage.out_inside", "inside the input"),
        ("mine", "usage.out_foreign", "lost would be thesis.txt"),
    ):
        cases.refused(run(*words, out), 2, code, said)
    assert cases.tree(experts) == before
