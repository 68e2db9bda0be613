"""Documentation that can be checked: the generated page, the links, the commands it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def make_reference(*words):
    script = ROOT / "scripts" / "make_reference.py"
    return subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, check=False
    )


def test_reference_is_up_to_date():
    done = make_reference("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_check_of_the_reference_can_fail_and_writes_nothing(tmp_path):
    page = tmp_path / "reference.md"
    for stale in (None, "", (ROOT / "docs" / "reference.md").read_text() + "\n"):
        if stale is not None:
            page.write_text(stale)
        done = make_reference("--check", "--page", page)
        assert done.returncode == 1, done.stderr
        assert f"{page} is out of date: run make docs" in done.stdout
        assert (page.read_text() if page.exists() else None) == stale
    assert make_reference("--page", page).returncode == 0
    assert make_reference("--check", "--page", page).returncode == 0


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--chekc", 2), ("page.md", 2)])
def test_other_words_write_no_reference(tmp_path, word, code):
    page = tmp_path / "reference.md"
    done = make_reference("--page", page, word)
    assert done.returncode == code
    assert "--check" in done.stdout + done.stderr
    assert not page.exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_placeholder_is_left(page):
    assert not re.search(r"DEMO_TABLE|SPEED_TABLE|TODO|FIXME|XXX", page.read_text())


def test_every_option_in_the_docs_exists():
    """Long options of cgmerge commands shown in code blocks are known to the reference page."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
            joined = block.replace("\\\n", " ")
            for line in joined.splitlines():
                if line.strip().startswith("cgmerge ") and "cgmerge --" not in line:
                    for option in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", line.split("#")[0]):
                        assert option in reference, f"{page.name}: {option}"


def test_the_groups_of_the_docs_are_skills_that_the_docs_measure():
    """`report --group` takes the names that `eval --data` of the same pages gives."""
    from cgmerge.evals.suite import split_name

    blocks = [
        block.replace("\\\n", " ")
        for page in (
            ROOT / "README.md",
            ROOT / "docs" / "evaluating.md",
            ROOT / "docs" / "reporting.md",
        )
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S)
    ]
    lines = [line for block in blocks for line in block.splitlines()]
    (measured,) = (
        line.partition("--data")[2].partition(" -")[0].split()
        for line in lines
        if line.startswith("cgmerge eval") and line.count(".jsonl") == 3
    )
    skills = {split_name(word)[0] or Path(word).stem for word in measured}
    experts = {word.rpartition("/")[2] for line in lines if line.startswith("cgmerge eval")
               for word in line.split() if word.startswith("experts/")}  # fmt: skip
    named = [
        skill
        for line in lines
        for group in re.findall(r'--group "\w+=([\w,]+)"', line)
        for skill in group.split(",")
    ]
    assert set(named) == skills == {"sort", "reverse", "pairs"}
    assert experts < skills  # so that the report finds their own skills by itself


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_ci_runs_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_skills_of_the_embedded_base_are_what_they_do():
    from cgmerge.evals.tasks import chains

    text = (ROOT / "docs" / "training.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| ([a-z ]+) \| [^|]+ \| ([a-l ]+) \|$", text)
    assert {name for name, known, _ in rows if known == "base"} == set(chains.BASE)
    assert {name for name, known, _ in rows if known != "base"} == set(chains.NEW)
    for name, _, result in rows:
        assert " ".join(chains.apply([name], list("abcd"))) == result, name
