"""U17: a torn checkpoint after a crash."""

import os

import case_support as cases
import pytest
import support
import train_support

from cgmerge.cli import training


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("u17")
    train_support.make_base(folder / "base")
    train_support.write_rows(folder / "reverse.jsonl", train_support.make_rows(20))
    return folder


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.fault("F37")
def test_newest_checkpoint_damaged(run, place, tmp_path, monkeypatch, lost):
    """A file cut in half, or gone: it says so and goes on from the one before."""
    given = ["train", "--base", place / "base", "--data", place / "reverse.jsonl", "--steps", 6]
    given += ["--skill", "reverse", "--rank", 4, "--device", "cpu", "--checkpoint-steps", 1]
    cases.done(run(*given, "-o", tmp_path / "straight", "--json"))
    plain = training.Voice.on_step

    def stop(self, step, total, loss):
        plain(self, step, total, loss)
        if step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Voice, "on_step", stop)
        assert run(*given, "-o", tmp_path / "out", "--json")[0] == 130
    work = tmp_path / ".out.training"
    before, newest = sorted(path for path in work.iterdir() if path.is_dir())
    assert (before.name, newest.name) == ("step-00000003", "step-00000004")
    biggest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(biggest, biggest.stat().st_size // 2)
    found = cases.done(run(*given, "-o", tmp_path / "out", "--dry-run", "--json"))
    assert found["start"] == 3
    if lost:
        biggest.unlink()
    found = cases.done(run(*given, "-o", tmp_path / "out", "--json"))
    assert found["resumed_from"] == 3
    assert any(f"{newest.name}" in text for text in found["warnings"]), found["warnings"]
    assert support.folder_bytes(tmp_path / "out") == support.folder_bytes(tmp_path / "straight")
