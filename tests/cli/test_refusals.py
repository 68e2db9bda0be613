"""Refusals that say what to do next: numbers, names, devices, paths."""

import json
from pathlib import Path

import pytest
import train_support

from cgmerge.cli import app
from cgmerge.cli.compress import _parse_size
from cgmerge.errors import UsageError
from cgmerge.merge.params import build_params
from cgmerge.merge.registry import get_method
from cgmerge.modules.loading import devices, pick_device
from cgmerge.modules.training.settings import TrainSettings
from cgmerge.refs import parse_weighted

LONG = [{"prompt": "a", "completion": "b " * times} for times in (4, 200)]
ODD = ["１", "1_0", " 1", "٣"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    train_support.write_rows(folder / "rows.jsonl", train_support.make_rows(3))
    train_support.write_rows(folder / "one.jsonl", [{"prompt": "a b", "completion": "b a"}])
    train_support.write_rows(folder / "long.jsonl", LONG)
    return folder


@pytest.fixture
def at(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("text", ODD)
def test_numbers_of_methods_are_plain(text):
    with pytest.raises(UsageError, match="`density` of `ties` takes a number, found"):
        build_params(get_method("ties")[0].params, {"density": text}, "ties")
    with pytest.raises(UsageError, match="is not a number"):
        parse_weighted(f"nowhere={text}")


@pytest.mark.parametrize("text", ["１MB", "1_0MB", "٣"])
def test_sizes_are_plain(text):
    with pytest.raises(UsageError, match="is no size"):
        _parse_size(text)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--scale", "1_0"),
        ("--scale", "１"),
        ("--budget", "1_0"),
        ("--seed", " 1"),
        ("--seed", "１"),
    ],
)
def test_numbers_of_options_are_plain(run, option, text):
    code, _, err = run("compose", "nowhere", "-o", "x", option, text, "--json")
    error = json.loads(err)
    assert (code, error["code"]) == (2, "usage.option")
    assert error["message"].startswith(f"{option} must be a")
    assert repr(text) in error["message"]


def test_plain_numbers_of_options_are_taken(run):
    code, _, err = run("compose", "nowhere", "-o", "x", "--scale=-.5e1", "--seed", "07")
    assert code == 2
    assert "no such expert: nowhere" in err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("seed", 2**32, "seed must lie in [0, 4294967295], found 4294967296"),
        ("alpha", 1_000_001, "alpha must lie in [1, 1000000], found 1000001"),
        ("lr", 1000.0001, "lr must lie in [1e-12, 1000], found 1000.0001"),
        ("lr", float("nan"), "lr must lie in [1e-12, 1000], found nan"),
    ],
)
def test_ranges_are_written_exactly(name, value, says):
    with pytest.raises(UsageError) as error:
        TrainSettings(base="b", data=(Path("d"),), skill="s", out=Path("o"), **{name: value})
    assert error.value.message == says


def test_a_bar_that_no_likelihood_reaches(run, at):
    words = ("eval", "--base", "tiny", "--data", "rows.jsonl", "--dry-run")
    for bar in ("0.5", "inf", "-inf", "nan"):
        code, _, err = run(*words, "--metric", "loglik", f"--min={bar}")
        assert code == 2
        assert f"--min {bar} cannot be reached: log-likelihoods are at most 0" in err
    assert run(*words, "--metric", "loglik", "--min=-0.5")[0] == 0
    code, _, err = run(*words, "--min=-0.5")
    assert code == 2
    assert "--min must be from 0 to 1, found -0.5" in err


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a/b", "a\\b", "a\tb"])
def test_names_that_break_tables(run, at, name):
    words = ("eval", "--base", "tiny", "--data", "rows.jsonl", "--dry-run")
    for more in ((f"{name}=tiny",), ("--data", f"{name}=one.jsonl")):
        code, _, err = run(*words, *more, "--json")
        error = json.loads(err.splitlines()[-1])
        assert (code, error["code"]) == (2, "usage.name")
        assert "cannot be a name" in error["message"]
        assert error["hint"]


def test_a_folder_with_a_line_end_needs_a_name(run, at, tmp_path):
    folder = tmp_path / "a\nb"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    code, _, err = run(
        "eval", folder, "--base", "tiny", "--data", "rows.jsonl", "--dry-run", "--json"
    )
    assert code == 2
    assert json.loads(err)["hint"] == "give it a name of its own: NAME=PATH"


def test_a_misspelt_base(run, at):
    code, _, err = run("eval", "--base", "tnyi", "--data", "rows.jsonl", "--json")
    assert code == 2
    assert json.loads(err)["hint"] == "similar: tiny"


@pytest.mark.parametrize("name", ["zz", "meta", "", "cuda:x"])
def test_an_unknown_device(name):
    with pytest.raises(UsageError, match="unknown device") as error:
        pick_device(name)
    assert error.value.exit_code == 2
    assert error.value.hint == f"there are: auto, {', '.join(devices())}"
    assert devices()[0] == "cpu"


def test_home_in_the_middle_of_a_word(run, at, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "rows.jsonl").write_bytes((at / "rows.jsonl").read_bytes())
    monkeypatch.setenv("HOME", str(home))
    words = ("--base=tiny", "--dry-run", "--json")
    code, out, err = run("train", "--data=~/rows.jsonl", "--skill", "s", "--out=~/new", *words)
    assert code == 0, err
    assert json.loads(out)["out"] == str(home / "new")
    assert json.loads(out)["data"][0]["file"] == str(home / "rows.jsonl")
    code, out, err = run("eval", "--data=named=~/rows.jsonl", "--out=~/r.json", *words)
    assert code == 0, err
    assert json.loads(out)["skills"] == [{"name": "named", "n": 3}]
    code, _, err = run("train", "--data=~nobody-here/x.jsonl", "--skill=s", "--out=o", *words)
    assert code == 2
    assert "no such data file: ~nobody-here/x.jsonl" in err


def test_batches_of_more_rows_than_there_are(run, at, tmp_path):
    words = ["train", "--base", "tiny", "--data", "one.jsonl", "--skill", "s", "--dry-run"]
    words += ["-o", tmp_path / "x", "--json", "--batch-size"]
    for asked in (64, 1_000_000):
        code, out, err = run(*words, asked)
        found = json.loads(out)
        assert code == 0
        assert (found["batch_size"], found["batch_size_asked"]) == (1, asked)
        assert any(f"--batch-size {asked} is more than" in text for text in found["warnings"])
        assert "steps of 1 row" in err
    code, out, _ = run(*words, 1)
    assert json.loads(out)["batch_size"] == 1
    assert not any("--batch-size" in text for text in json.loads(out)["warnings"])


def test_rows_that_are_too_long_for_the_base(run, at, tmp_path):
    words = ["train", "--base", "tiny", "--skill", "s", "-o", tmp_path / "x", "--json"]
    code, _, err = run(*words, "--data", "long.jsonl")
    error = json.loads(err.splitlines()[-1])
    assert (code, error["code"]) == (3, "data.too_long")
    assert error["message"].startswith("long.jsonl: 1 of 2 rows have a target that does not fit")
    assert error["hint"].startswith("the base takes at most 128 tokens: shorten or drop the 1 row ")
    code, _, err = run(*words, "--data", "one.jsonl", "--max-length", 2)
    needed = json.loads(err.splitlines()[-1])["found"]
    assert json.loads(err.splitlines()[-1])["hint"].startswith(f"--max-length {needed}, or")
    assert run(*words, "--data", "one.jsonl", "--max-length", needed, "--dry-run")[0] == 0
    code, _, err = run("eval", "--base", "tiny", "--data", "long.jsonl", "--json")
    error = json.loads(err.splitlines()[-1])
    assert (code, error["code"]) == (3, "data.too_long")
    assert error["message"].startswith("skill 'long': 1 of 2 rows")
    assert "--max-length" not in error["hint"]


def test_every_command_reads_plain_numbers_and_homes():
    from cgmerge.cli.command import Command

    assert all(one.cls is Command for one in app.app.registered_commands)
