"""`cgmerge tasks` and `cgmerge split` on the command line."""

import hashlib
import json

import pytest
from case_support import done

from cgmerge.evals.tasks.suites import SUITES


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tasks_lists_every_suite_with_its_splits(run):
    listed = done(run("tasks", "--json"))["suites"]
    assert [one["name"] for one in listed] == list(SUITES)
    assert "addprim-jump" in listed[0]["splits"]
    assert all(one["source"] and one["licence"] and one["sizes"] for one in listed)
    code, out, _ = run("tasks")
    assert code == 0
    assert "few-shot-1 … few-shot-1024" in out
    assert max(map(len, out.splitlines()[: len(SUITES) + 1])) <= 130
    assert run("tasks", "-q") == (0, "".join(f"{name}\n" for name in SUITES), "")


def test_make_writes_parts_and_a_card_and_repeats_its_bytes(run, tmp_path):
    words = ["tasks", "make", "scan", "--split", "length", "--n", 209, "--seed", 5, "--json"]
    one, two = (done(run(*words, "-o", tmp_path / name)) for name in "ab")
    assert one["digest"] == two["digest"]
    card = json.loads((tmp_path / "a" / "card.json").read_text())
    assert (card["split"], card["seed"], card["n"]) == ("length", 5, 209)
    assert {name: part["rows"] for name, part in card["parts"].items()} == {
        "train": 153, "validation": 17, "test": 39}  # fmt: skip
    for name, part in card["parts"].items():
        content = (tmp_path / "a" / f"{name}.jsonl").read_bytes()
        assert hashlib.sha256(content).hexdigest() == part["sha256"]
        assert len(rows_of(tmp_path / "a" / f"{name}.jsonl")) == part["rows"]
    other = done(run(*words[:-2], 6, "--json", "-o", tmp_path / "c"))
    assert other["digest"] != one["digest"]


def test_what_is_made_can_be_read_for_training(run, tmp_path):
    from pathlib import Path

    from cgmerge.modules.data import read_data

    for suite in (one for one in SUITES.values() if not one.reads):
        out = tmp_path / suite.name
        done(run("tasks", "make", suite.name, "--n", 40, "-o", out, "--json"))
        for part in ("train", "test"):
            found = read_data(Path(out / f"{part}.jsonl"))
            assert found.format == "prompt/completion"
            assert found.rows == len(found.examples)


def test_a_dry_run_and_a_taken_folder_write_nothing(run, tmp_path):
    out = tmp_path / "o"
    made = done(run("tasks", "make", "chains", "--n", 100, "-o", out, "--dry-run", "--json"))
    assert made["out"] is None
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    code, _, err = run("tasks", "make", "chains", "--n", 100, "-o", out)
    assert code == 2
    assert "exists already" in err
    assert [p.name for p in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["make"], 2, "which suite?"),
        (["make", "scan"], 2, "--out is missing"),
        (["mak", "scan"], 2, "must be one of 'make'"),
        (["make", "scn", "-o", "o"], 2, "there is no suite 'scn'"),
        (["make", "scan", "--split", "jump", "-o", "o"], 2, "scan has no split 'jump'"),
        (["make", "bbh", "-o", "o"], 2, "--from DIR"),
        (["make", "cogs", "--from", "none", "-o", "o"], 2, "none holds no train.tsv"),
    ],
)
def test_mistakes(run, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    found, _, err = run("tasks", *words)
    assert (found, message in err) == (code, True), err
    assert list(tmp_path.iterdir()) == []


def test_published_files_are_read_and_never_written_over(run, tmp_path):
    source = tmp_path / "cogs"
    source.mkdir()
    for name in ("train", "dev", "test"):
        (source / f"{name}.tsv").write_text("A cat ran .\trun ( cat )\tin_distribution\n")
    words = ["tasks", "make", "cogs", "--from", source]
    made = done(run(*words, "-o", tmp_path / "o", "--json"))
    assert made["shared_prompts"] == 1
    assert "1 test prompts are also in other parts" in made["warnings"][0]
    code, _, err = run(*words, "-o", source, "--overwrite")
    assert code == 2
    assert "is an input of this command" in err


@pytest.fixture
def data(tmp_path):
    rows = [
        {"prompt": f"{f} {x}", "completion": x, "skill": f, "n": n}
        for n, (f, x) in enumerate((f, x) for f in ("up", "down", "left") for x in "abcde")
    ]
    return write(tmp_path / "d.jsonl", [*rows, rows[3], {**rows[4], "completion": "other"}])


@pytest.mark.parametrize("by", ["iid", "template"])
def test_split_keeps_rows_of_one_prompt_together_and_loses_none(run, tmp_path, data, by):
    made = done(run("split", data, "--by", by, "-o", tmp_path / "o", "--json"))
    train, test = (rows_of(tmp_path / "o" / f"{part}.jsonl") for part in ("train", "test"))
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in test}
    assert sorted(map(json.dumps, [*train, *test])) == sorted(map(json.dumps, rows_of(data)))
    assert (made["rows"], made["duplicates"]) == (17, 2)
    assert made["test_share"]["found"] == len(test) / 17
    assert set(made["divergence"]) == {"atoms", "compounds2", "compounds3", "unseen"}
    assert made["inputs"][0]["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_split_by_a_column(run, tmp_path, data):
    words = ["--by", "template", "--column", "skill", "--test-share", 0.4]
    done(run("split", data, *words, "-o", tmp_path / "o", "--json"))
    train, test = (rows_of(tmp_path / "o" / f"{part}.jsonl") for part in ("train", "test"))
    assert len({r["skill"] for r in test}) == 1
    assert not {r["skill"] for r in train} & {r["skill"] for r in test}


def test_split_by_length_and_primitive_of_prompts(run, tmp_path):
    texts = ["jump", "jump twice", "walk", "walk twice and run", "run"]
    data = write(tmp_path / "d.jsonl", [{"prompt": t, "completion": "x"} for t in texts])
    made = done(run("split", data, "--by", "length", "-o", tmp_path / "l", "--json"))
    assert (made["longest_train"], made["longest"]) == (2, 4)
    done(run("split", data, "--by", "primitive", "--primitive", "jump", "-o", tmp_path / "p",
             "--json"))  # fmt: skip
    assert [r["prompt"] for r in rows_of(tmp_path / "p" / "test.jsonl")] == ["jump twice"]


def test_mcd_of_two_files(run, tmp_path):
    rows = [{"prompt": f"{f} {g} {x}", "completion": "y", "s": [f, [g, x]]}
            for f in "fgh" for g in "fgh" for x in "abc"]  # fmt: skip
    files = [write(tmp_path / "1.jsonl", rows[:13]), write(tmp_path / "2.jsonl", rows[13:])]
    words = ["split", *files, "--by", "mcd", "--column", "s", "--json"]
    made = done(run(*words, "-o", tmp_path / "o"))
    assert made["divergence"]["atoms"] <= 0.1
    assert made["divergence"]["compounds3"] > 0.3
    assert (made["rows"], made["left_out"], made["compound_size"]) == (27, 0, 3)
    again = done(run(*words, "-o", tmp_path / "again"))
    assert again["digest"] == made["digest"]
    some = done(run(*words, "--leave-out", 0.3, "-o", tmp_path / "some"))
    assert some["left_out"] == 8
    code, out, _ = run(*words[:-1], "-o", tmp_path / "p", "-q")
    assert (code, out) == (0, f"{tmp_path / 'p'}\n")
    code, out, _ = run(*words[:-1], "-o", tmp_path / "t")
    assert [line.split()[0] for line in out.splitlines()] == ["train", "test", "D", "D", "D",
                                                              "unseen"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--by", "iid", "--column", "tree"], 3, "'tree' is missing; found prompt, completion"),
        (["--by", "iid", "--test-share", "1"], 2, "--test-share must be above 0 and below 1"),
        (["--by", "iid", "--primitive", "a"], 2, "--primitive is for --by primitive"),
        (["--by", "iid", "--leave-out", "0.1"], 2, "--leave-out is for --by mcd"),
        (["--by", "shape"], 2, "must be one of"),
        (["--by", "primitive", "--primitive", "uq"], 2, "'uq' cannot be held out"),
        (["--by", "iid", "--column", "n"], 3, "another row has the same prompt"),
    ],
)
def test_mistakes_of_split(run, tmp_path, data, words, code, message):
    write(data, [*rows_of(data), {**rows_of(data)[0], "n": 99}])
    found, _, err = run("split", data, *words, "-o", tmp_path / "o")
    assert (found, message in err) == (code, True), err
    assert not (tmp_path / "o").exists()


def test_rows_without_a_format_and_inputs_as_outputs_are_refused(run, tmp_path):
    rows = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    data = write(tmp_path / "d.jsonl", rows)
    code, _, err = run("split", data, "--by", "iid", "-o", tmp_path / "o")
    assert code == 3
    assert "no known format has the columns question, answer" in err
    assert run("split", data, "--by", "iid", "--column", "question", "-o", tmp_path / "o")[0] == 0
    code, _, err = run("split", data, "--by", "iid", "-o", data.parent, "--overwrite")
    assert code == 2
    assert "holds the input" in err
    assert run("split", tmp_path / "none.jsonl", "--by", "iid", "-o", tmp_path / "p")[0] == 2
    only = write(tmp_path / "one.jsonl", [{"text": "a"}])
    assert run("split", only, "--by", "iid", "-o", tmp_path / "p")[0] == 3
