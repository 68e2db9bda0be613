"""A tokenizer beside an adapter: equal tables pass, moved tokens are named."""

import json
import shutil

import case_support as cases
import pytest
import support
import train_support

from cgmerge.modules.vocabulary import numbers


@pytest.fixture
def place(tmp_path):
    """A base with a tokenizer, an adapter with the same one."""
    train_support.make_base(tmp_path / "base")
    support.make_expert(tmp_path / "e", {"model.layers.0.self_attn.q_proj": (32, 32)}, rank=2)
    shutil.copy(tmp_path / "base" / "tokenizer.json", tmp_path / "e")
    return tmp_path


def change(place, edit):
    path = place / "e" / "tokenizer.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def swap(raw):
    table = raw["model"]["vocab"]
    table["a"], table["b"] = table["b"], table["a"]


def compose(run, place, *words):
    given = ["compose", place / "e", "-m", "linear", "--base", place / "base", "--overwrite"]
    return run(*given, "-o", place / "out", "--json", *words)


@pytest.mark.fault("F18")
def test_two_tokens_that_changed_places(run, place):
    cases.done(compose(run, place))
    change(place, swap)
    error = cases.refused(
        compose(run, place), 3, "incompatible.tokenizer", "2 tokens", "'b' is 8", "base 9",
        "16 tokens, the base has 16",
    )  # fmt: skip
    assert (error["found"], error["expected"]) == (8, 9)
    words = ("inspect", place / "e", "--base", place / "base", "--json")
    cases.refused(run(*words), 3, "incompatible.tokenizer")
    cases.done(compose(run, place, "--force-base"))
    cases.done(run("compose", place / "e", "-m", "linear", "-o", place / "x", "--json"))  # no base


@pytest.mark.fault("F18")
@pytest.mark.parametrize("kind", ["more", "written otherwise", "damaged", "link"])
def test_what_is_no_contradiction(run, place, kind):
    path = place / "e" / "tokenizer.json"
    if kind == "more":
        change(place, lambda raw: raw["added_tokens"].append({"id": 16, "content": "<extra>"}))
    elif kind == "written otherwise":
        change(place, lambda raw: raw.update(truncation=None, padding=None))
    elif kind == "damaged":
        path.write_text("{")
    else:
        change(place, swap)
        path.rename(place / "real.json")
        path.symlink_to(place / "real.json")  # links inside an expert are not followed
    cases.done(compose(run, place))


def test_tables_of_every_form(tmp_path):
    path = tmp_path / "tokenizer.json"

    def read(**raw):
        path.write_text(json.dumps(raw))
        return numbers(path)

    assert read(model={"vocab": {"a": 0, "b": 1}}) == {"a": 0, "b": 1}
    assert read(model={"vocab": [["x", -1.0], ["y", -2.0]]}) == {"x": 0, "y": 1}
    assert read(model={"vocab": {"a": 0}}, added_tokens=[{"id": 7, "content": "<s>"}, 3, {}]) == {
        "a": 0, "<s>": 7
    }  # fmt: skip
    assert read(model={"vocab": {"a": "0", "b": True}}) == {}
    assert read(model=[]) == read() == {}
