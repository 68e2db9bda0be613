"""Hostile packages of every kind: refused by name, quickly, in little memory, touching nothing."""

import json
import subprocess
import sys
from pathlib import Path

import case_support as cases
import hostile
import pytest
import support

CHILD = Path(__file__).parent / "hostile_child.py"
SECONDS, KILOBYTES = 2.0, 200 * 1024
WARM = (("compose", "E1", "-m", "linear", "-o", "out"), ("inspect", "c"),
        (*hostile.EVAL, "d.jsonl"), ("report", "r.json", "-o", "out.html"),
        ("compose", "lib/E1", "-m", "linear", "-o", "out3"))  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every package built, and its command run in one process that has the program imported."""
    from cgmerge.cli import app

    root = tmp_path_factory.mktemp("hostile")
    sound = hostile.make_sound(root / "sound", lambda *words: (app.run([str(w) for w in words]),))
    (sound / "d.jsonl").write_text(hostile.ROW)
    jobs = [{"name": f"warm-{i}", "folder": str(sound), "words": w} for i, w in enumerate(WARM)]
    before = {}
    for name, package in hostile.PACKAGES.items():
        folder = root / "packages" / name
        folder.mkdir(parents=True)
        package.build(folder, sound)
        before[name] = cases.tree(folder)
        jobs.append({"name": name, "folder": str(folder), "words": package.words})
    (root / "jobs.json").write_text(json.dumps(jobs))
    kept = support_bytes(sound)
    done = subprocess.run(
        [sys.executable, CHILD, root / "jobs.json"], capture_output=True, text=True, check=False
    )
    found = {item["name"]: item for item in map(json.loads, done.stdout.splitlines())}
    assert len(found) == len(jobs), done.stderr[-2000:]
    for i in range(len(WARM)):
        assert found[f"warm-{i}"]["exit"] == 0, found[f"warm-{i}"]
    assert {p: kept[p] for p in kept} == {p: support_bytes(sound)[p] for p in kept}
    return {"found": found, "before": before, "root": root / "packages"}


def support_bytes(folder):
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_there_are_many():
    kinds = {name.split("-")[0] for name in hostile.PACKAGES}
    assert {"expert", "composition", "library", "recipe", "data", "record"} <= kinds
    assert len(hostile.PACKAGES) >= 150
    assert sum(name.startswith("expert-config-") for name in hostile.PACKAGES) >= 40
    assert support.HIDDEN


@pytest.mark.fault("F03", "F04", "F05", "F07", "F08", "F09", "F10", "F11", "F12")
@pytest.mark.parametrize("name", hostile.PACKAGES)
def test_refused(results, name):
    """The right code; under 2 s and 200 MiB; no socket, process, pickle, import or outside file."""
    wanted, found = hostile.PACKAGES[name], results["found"][name]
    assert found["stdout"] == ""
    error = json.loads(found["last"])
    assert (error.get("code"), found["exit"]) == (wanted.code, wanted.status), error
    assert found["seconds"] < SECONDS
    assert found["grown"] < KILOBYTES
    assert found["bad"] == []
    folder = results["root"] / name
    assert cases.tree(folder) == results["before"][name]
    assert not (folder / "pwned").exists()
