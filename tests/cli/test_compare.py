"""`cgmerge compare` as a user calls it."""

import json

import pytest
from record_support import write

OLD = {"copy": "1111100000", "sort": "1100"}
NEW = {"copy": "1111111110", "sort": "0100"}


@pytest.fixture
def both(tmp_path):
    return write(tmp_path / "r.json", {"base": OLD, "ties": NEW})


def test_table(run, both):
    code, stdout, stderr = run("compare", f"{both}:base", f"{both}:ties")
    assert code == 0, stderr
    lines = stdout.splitlines()
    assert lines[0].split()[:5] == ["skill", "n", "before", "after", "change"]
    assert lines[1].split()[:5] == ["copy", "10", "0.500", "0.900", "+0.400"]
    assert lines[1].split()[-3:] == ["4", "0", "0.250"]
    assert lines[3].split()[:5] == ["mean", "14", "0.500", "0.575", "+0.075"]
    assert "McNemar" in stdout
    assert "before   base  base  sha256" in stderr
    assert "expected" not in stdout


def test_json_is_one_object(run, both):
    code, stdout, _ = run("compare", f"{both}:base", both, "--json", "--show", 2)
    assert code == 0
    found = json.loads(stdout)
    assert found["schema"] == "cgmerge.compare/1"
    assert found["after"]["name"] == "ties"
    assert found["overall"]["wins"] == 4
    assert [one["skill"] for one in found["skills"]] == ["copy", "sort"]
    assert found["skills"][0]["p_holm"] == 0.25
    assert (len(found["flips"]), found["flipped"]) == (2, 5)
    assert (found["passed"], found["dropped"], found["max_drop"]) == (True, [], None)


def test_max_drop_answers_with_the_exit_code_and_names_the_skill(run, both):
    code, _, stderr = run("compare", f"{both}:base", f"{both}:ties", "--max-drop", 0.2)
    assert code == 1
    assert "dropped  sort: -0.2500, more than 0.2 is lost" in stderr
    assert "copy:" not in stderr
    code, stdout, _ = run("compare", f"{both}:base", f"{both}:ties", "--max-drop", 0.2, "--json")
    assert (code, json.loads(stdout)["dropped"]) == (1, ["sort"])
    assert run("compare", f"{both}:base", f"{both}:ties", "--max-drop", 0.25)[0] == 0
    assert run("compare", f"{both}:base", f"{both}:ties", "--max-drop", -1)[0] == 2
    assert run("compare", f"{both}:base", f"{both}:ties", "--max-drop", "nan")[0] == 2


def test_verbose_shows_what_changed(run, both):
    code, stdout, _ = run("compare", f"{both}:base", f"{both}:ties", "-v", "--show", 3)
    assert code == 0
    assert stdout.count("won   copy ") == 3
    assert "expected yes <eos>, before no <eos>, after yes <eos>" in stdout
    assert "… and 2 more (--show)" in stdout


def test_quiet_is_one_line(run, both):
    code, stdout, stderr = run("compare", f"{both}:base", both, "-q")
    assert (code, stdout, stderr) == (0, "+0.0750 p=0.375\n", "")


def test_errors(run, both, tmp_path):
    other = write(tmp_path / "o.json", {"ties": {"copy": "11"}})
    assert run("compare", both, other)[0] == 3
    code, stdout, stderr = run("compare", both, f"{both}:bse")
    assert (code, stdout) == (2, "")
    assert "did you mean base" in stderr
    assert run("compare", tmp_path / "no.json", both)[0] == 2
    (tmp_path / "r.items.jsonl").write_text("")
    code, _, stderr = run("compare", both, both, "--json")
    assert code == 3
    assert json.loads(stderr)["code"] == "damaged.items"


def test_names_from_a_record_cannot_steer_the_terminal(run, tmp_path):
    evil = "x\x1b[2J\u202ey"
    path = write(tmp_path / "e.json", {"base": {evil: "10"}, evil: {evil: "01"}})
    code, stdout, stderr = run("compare", f"{path}:base", path, "-v", "--max-drop", 0)
    assert code == 0
    assert "\x1b" not in stdout + stderr
    assert "\u202e" not in stdout + stderr
    assert "\\x1b[2J" in stdout
