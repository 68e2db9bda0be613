"""U25: every further expert takes longer than the one before, and none is ever let go."""

import shutil
import time
from pathlib import Path

import case_support as cases
import pytest
import support

FEW, MANY = 20, 200


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("u25")
    shapes = {"model.layers.0.self_attn.q_proj": (16, 16)}
    for seed in range(10):
        support.make_expert(folder / f"e{seed}", shapes, seed=seed)
    for number in range(10, MANY):  # what is in them does not matter; that they are files does
        shutil.copytree(folder / f"e{number % 10}", folder / f"e{number}")
    return folder


def compose(run, shelf, out, count):
    refs = [f"{shelf}/e{number}={1 + number}" for number in range(count)]
    start = time.process_time()
    found = cases.done(
        run("compose", *refs, "-m", "linear", "--rank", 4, "-o", out, "--json", "--overwrite")
    )
    assert len(found["experts"]) == count
    return (time.process_time() - start) / count


@pytest.mark.fault("F32")
def test_time_for_each_is_flat(run, shelf, tmp_path):
    """At 200 no more than half as much again as at 20; the quicker of several tries counts."""
    compose(run, shelf, tmp_path / "warm", FEW)
    for _ in range(3):
        few = min(compose(run, shelf, tmp_path / "few", FEW) for _ in range(2))
        many = compose(run, shelf, tmp_path / "many", MANY)
        if many <= 1.5 * few:
            break
    assert many <= 1.5 * few, (many, few)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.fault("F32")
def test_nothing_is_kept(run, shelf, tmp_path):
    def held():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), pages * 4096

    compose(run, shelf, tmp_path / "warm", MANY)
    files, memory = held()
    for _ in range(2):
        compose(run, shelf, tmp_path / "out", MANY)
    assert held()[0] <= files
    assert held()[1] < memory + 8e6  # twice 200 experts would be more
