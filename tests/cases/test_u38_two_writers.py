"""U38: two jobs that write one folder."""

import subprocess
import sys
from collections import Counter

import case_support as cases
import pytest
import support


@pytest.mark.fault("F31")
def test_one_wins_and_the_other_is_told(run, experts):
    start = "import sys, time; from cgmerge.cli.app import main; main(sys.argv[1:])"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", start, "compose", name, "-o", "out", "--json"],
            cwd=experts,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("E1", "E2")
    ]
    results = [(*job.communicate(), job.returncode) for job in jobs]
    codes = Counter(code for _, _, code in results)
    assert codes == {0: 1, 2: 1}, results
    for _, err, code in results:
        if code == 2:
            assert "exists already" in err
            assert "usage.out_exists" in err
    winner = next(name for name, r in zip(("E1", "E2"), results, strict=True) if r[2] == 0)
    cases.done(run("compose", experts / winner, "-o", experts / "alone", "--json"))
    found, alone = (support.folder_bytes(experts / name) for name in ("out", "alone"))
    weights = "adapter_model.safetensors"
    assert found[weights] == alone[weights]
    assert sorted(found) == sorted(alone)
    assert not [path for path in experts.iterdir() if path.name.startswith(".")]
