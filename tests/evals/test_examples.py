"""Files of examples: which of them are of one skill, and what is refused."""

import json

import pytest

from cgmerge.errors import UsageError
from cgmerge.evals.suite import read_examples, read_skills
from cgmerge.tensorfile import file_sha256


@pytest.fixture(autouse=True)
def shelf(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    write(tmp_path / "sort.jsonl", "b a", "c a")
    write(tmp_path / "more/sort.jsonl", "d a")
    write(tmp_path / "count.jsonl", "a a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, *prompts, **more):
    rows = [{"prompt": prompt, "completion": "x", **more} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(skills):
    return [(s.name, [e.prompt for e in s.examples]) for s in skills]


@pytest.mark.parametrize(
    "specs",
    [
        ("sort=sort.jsonl", "count.jsonl", "sort=more/sort.jsonl"),
        ("sort.jsonl", "count.jsonl", "sort=more/sort.jsonl"),
        ("sort=sort.jsonl", "count=count.jsonl", "more/sort.jsonl"),
    ],
)
def test_a_name_that_was_said_joins_files_in_their_order(shelf, specs):
    skills, digests = read_examples(specs)
    assert prompts(skills) == [("sort", ["b a", "c a"]), ("count", ["a a"]), ("sort", ["d a"])]
    files = ("sort.jsonl", "count.jsonl", "more/sort.jsonl")
    assert digests == [file_sha256(shelf / file) for file in files]


def test_a_column_says_the_name_too(shelf):
    rows = [{"prompt": p, "completion": "x", "skill": s} for p, s in (("q", "sort"), ("r", "copy"))]
    (shelf / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    skills, digests = read_examples(["mixed.jsonl", "sort.jsonl"])
    assert prompts(skills) == [("sort", ["q"]), ("copy", ["r"]), ("sort", ["b a", "c a"])]
    assert len(digests) == 2  # of files, not of skills


def test_file_names_alone_join_nothing():
    with pytest.raises(UsageError, match="two files of examples are called 'sort'") as caught:
        read_examples(["sort.jsonl", "more/sort.jsonl"])
    assert caught.value.code == "usage.name"
    assert "sort=FILE" in caught.value.hint


def test_rows_do_not_count_twice(shelf):
    (shelf / "copy.jsonl").write_bytes((shelf / "sort.jsonl").read_bytes())
    for again in ("sort=sort.jsonl", "sort=copy.jsonl"):
        with pytest.raises(UsageError, match=f"sort=sort.jsonl and {again} are the same data"):
            read_examples(["sort=sort.jsonl", again])
    for read in (read_examples, read_skills):
        for first in ("sort.jsonl", "other=sort.jsonl"):
            with pytest.raises(UsageError, match=f"{first} and copy.jsonl are the same data"):
                read([first, "copy.jsonl"])
        assert read(["sort=sort.jsonl", "other=copy.jsonl"])  # said of both
    assert len(read_examples(["sort=sort.jsonl", "other=copy.jsonl"])[0]) == 2
