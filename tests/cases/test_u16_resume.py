"""U16: a resume that starts from scratch or from the wrong state."""

import case_support as cases
import pytest
import support
import train_support

from cgmerge.cli import training


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("u16")
    train_support.make_base(folder / "base")
    train_support.write_rows(folder / "reverse.jsonl", train_support.make_rows(20))
    return folder


@pytest.mark.fault("F37")
def test_ten_stop_ten_equals_twenty(run, place, tmp_path, monkeypatch):
    given = ["train", "--base", place / "base", "--data", place / "reverse.jsonl", "--steps", 20]
    given += ["--skill", "reverse", "--rank", 4, "--device", "cpu", "--checkpoint-steps", 5]
    cases.done(run(*given, "-o", tmp_path / "straight", "--json"))
    plain = training.Voice.on_step
    straight = {}

    def stop(self, step, total, loss):
        plain(self, step, total, loss)
        straight[step] = loss
        if step == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Voice, "on_step", stop)
        code, out, err = run(*given, "-o", tmp_path / "halves", "--json")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert not (tmp_path / "halves").exists()
    # Another configuration is not continued; both values are named.
    more = ["-o", tmp_path / "halves", "--json"]
    cases.refused(run(*given, "--lr", 0.5, *more), 2, "usage.other_run", "lr", "0.5")
    resumed = {}

    def listen(self, step, total, loss):
        plain(self, step, total, loss)
        resumed[step] = loss

    with monkeypatch.context() as patch:
        patch.setattr(training.Voice, "on_step", listen)
        result = run(*given, *more)
    found = cases.done(result)
    assert found["resumed_from"] == 10
    assert sorted(resumed) == list(range(11, 21))
    assert resumed[11] == straight[11]
    assert f"resume   after step 10 of 20, loss there {straight[10]:.4g}"[:42] in result[2]
    assert support.folder_bytes(tmp_path / "halves") == support.folder_bytes(tmp_path / "straight")
