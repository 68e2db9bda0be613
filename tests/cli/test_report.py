"""`cgmerge report` as a user calls it."""

import json

import pytest
import support
from record_support import write

from cgmerge.modules.expert import open_expert

ANSWERS = {
    "base": {"copy": "0000000000", "pairs": "0000000000"},
    "copy": {"copy": "1111111111", "pairs": "0000000001"},
    "ties": {"copy": "1111111110", "pairs": "1111111100"},
}


@pytest.fixture
def record(tmp_path):
    return write(tmp_path / "r.json", ANSWERS, kinds={"copy": "expert"})


def test_a_page_and_its_markdown(run, record, tmp_path):
    out, md = tmp_path / "p.html", tmp_path / "p.md"
    code, stdout, stderr = run("report", record, "-o", out, "--md", md, "--title", "Two & more")
    assert code == 0, stderr
    assert "Best overall is ties with a mean of 0.85" in stdout
    assert f"wrote    {out} and {md}" in stderr
    page = out.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>Two &amp; more</title>" in page
    assert "skills with an expert" in page
    assert md.read_text().startswith("# Two &amp; more\n")
    before = out.read_bytes()
    assert run("report", record, "-o", out, "--overwrite", "--title", "Two & more")[0] == 0
    assert out.read_bytes() == before


def test_json_holds_the_numbers(run, record, tmp_path):
    out = tmp_path / "p.html"
    code, stdout, _ = run("report", record, "-o", out, "--json")
    assert code == 0
    found = json.loads(stdout)
    assert found["schema"] == "cgmerge.report/1"
    assert (found["out"], found["md"], found["bytes"]) == (str(out), None, out.stat().st_size)
    (part,) = found["parts"]
    assert part["best"] == "ties"
    assert part["not_significantly_lower"] == ["copy"]  # 1 : 7 items
    assert {one["target"] for one in part["against_base"]} == {"copy", "ties"}
    assert "Best overall is ties" in part["text"]
    assert [one["score"] for one in part["means"]] == pytest.approx([0.0, 0.55, 0.85])


def test_dry_run_and_quiet(run, record, tmp_path):
    out = tmp_path / "p.html"
    assert run("report", record, "-o", out, "--dry-run")[0] == 0
    assert not out.exists()
    assert run("report", record, "-o", out, "-q") == (0, f"{out}\n", "")


def test_nothing_is_replaced_unasked_and_inputs_never(run, record, tmp_path):
    out, md = tmp_path / "p.html", tmp_path / "p.md"
    md.write_text("mine")
    code, _, stderr = run("report", record, "-o", out, "--md", md)
    assert code == 2
    assert "--md" in stderr
    assert (out.exists(), md.read_text()) == (False, "mine")
    items = tmp_path / "r.items.jsonl"
    for target in (record, items, tmp_path):
        assert run("report", record, "-o", target, "--overwrite")[0] == 2
        assert run("report", record, "-o", out, "--md", target, "--overwrite")[0] == 2
    assert run("report", record, "-o", out, "--md", out)[0] == 2
    assert run("report", record, "-o", out)[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--group", "x"), 2, "NAME=SKILL,SKILL"),
        (("--group", "x=copy", "--group", "x=pairs"), 2, "twice"),
        (("--group", "x=,"), 2, "at least one skill"),
        (("--group", "x=copy,copy"), 2, "each once"),
        (("--group", "x=coppy"), 2, "did you mean copy?"),
        (("--files", "ties"), 2, "TARGET=PATH"),
        (("--files", "tise=."), 2, "did you mean ties?"),
        (("--files", "ties=nowhere"), 2, "nowhere"),
        ((".",), 2, "no such record"),
    ],
)
def test_errors_say_what_to_do(run, record, tmp_path, words, code, says):
    found, stdout, stderr = run("report", record, "-o", tmp_path / "p.html", *words)
    assert (found, stdout) == (code, ""), stderr
    assert says in stderr
    assert not (tmp_path / "p.html").exists()


def test_damage_is_refused(run, record, tmp_path):
    (tmp_path / "r.items.jsonl").write_text("")
    assert run("report", record, "-o", tmp_path / "p.html")[0] == 3
    assert run("report", tmp_path / "no.json", "-o", tmp_path / "p.html")[0] == 2


def test_groups_and_files(run, tmp_path, qv):
    folder = support.make_expert(tmp_path / "E", qv, seed=1)
    other = support.make_expert(tmp_path / "F", qv, seed=2)
    record = write(
        tmp_path / "r.json",
        ANSWERS,
        kinds={"copy": "expert"},
        digests={"copy": open_expert(str(folder)).digest},
    )
    out = tmp_path / "p.html"
    words = ("report", record, "-o", out, "--group", "own=copy", "--group", "new = pairs")
    code, _, stderr = run(*words, "--files", f"copy={folder}")
    assert code == 0, stderr
    page = out.read_text()
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert f'<td class="count">{size:,}</td>' in page
    assert 'aria-label="new against own: base 0.00, 0.00; ' in page
    code, _, stderr = run(*words, "--overwrite", "--files", f"copy={other}")
    assert code == 3
    assert "is not the adapter that was scored" in stderr
