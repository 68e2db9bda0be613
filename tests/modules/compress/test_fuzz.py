"""The fuzzing script runs, is repeatable, and finds what it looks for."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "fuzz_cge.py"


def campaign(folder, *words):
    command = [sys.executable, SCRIPT, "--keep", folder / "kept", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_smoke(tmp_path):
    done = campaign(tmp_path, "--executions", "1500", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,500 executions" in done.stdout
    assert "broken: 0" in done.stdout
    for target in ("section", "sealed", "bytes"):
        assert re.search(rf"{target}: [0-9,]+ refused", done.stdout)
    assert re.search(r"section: [0-9,]+ accepted", done.stdout)
    assert not (tmp_path / "kept").exists()


def test_a_fault_is_reported_and_its_input_kept(tmp_path, capsys):
    script = runpy.run_path(str(SCRIPT))
    run = script["Campaign"](0, tmp_path, tmp_path / "kept")

    def fault(data):
        raise MemoryError("found")

    run._try("section", b"input", fault)
    assert run.broken == 1
    assert (tmp_path / "kept" / "section-1.bin").read_bytes() == b"input"
    assert "MemoryError: found" in capsys.readouterr().err


def test_a_decoder_that_errs_is_found(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    run = script["Campaign"](0, tmp_path, tmp_path / "kept")
    true = script["decode"]
    monkeypatch.setitem(run.step.__func__.__globals__, "decode", lambda *args: true(*args) // 2)
    for _ in range(200):
        run.step()
    assert run.broken > 0
    assert "Broken" in capsys.readouterr().err
