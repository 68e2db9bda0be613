"""What people are told to type: it can be pasted, whatever strangers called their base."""

import ast
import shlex
from types import SimpleNamespace

import composition_support as small
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st

from cgmerge.modules.card import BaseId, ExpertCard
from cgmerge.modules.expert import open_expert
from cgmerge.modules.library.entry import Entry, Part
from cgmerge.modules.library.page import expert_page
from cgmerge.modules.training.readme import readme
from cgmerge.modules.usage import base_names, base_word, peft_snippet


@pytest.mark.parametrize(
    ("given_", "names", "word"),
    [
        (None, ["tiny"], "tiny"),
        (None, ["tiny", "tiny", ""], "tiny"),
        (None, ["tiny", "other"], "BASE"),
        (None, [], "BASE"),
        (None, [""], "BASE"),
        ("here", ["tiny"], "here"),
        ("my base", [], "'my base'"),
        (None, ["my base"], "'my base'"),
        (None, ["user/base"], "hf://user/base"),  # nothing of that name is here
        (None, ["/there/base"], "/there/base"),
        (None, ["-rf"], "BASE"),
        (None, ["a\nb"], "BASE"),
        (None, ["x" * 201], "BASE"),
    ],
)
def test_the_base_in_a_command(given_, names, word):
    assert base_word(given_, names) == word


def test_a_folder_that_is_here_is_no_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user/base").mkdir(parents=True)
    assert base_word(None, ["user/base"]) == "user/base"


@given(st.text(max_size=300))
def test_no_name_can_be_more_than_one_word_of_a_command(name):
    (word,) = shlex.split(base_word(None, [name]))
    assert not word.startswith("-")
    assert word in (name, f"hf://{name}", "BASE")


def test_what_experts_call_their_base(tmp_path):
    support.make_expert(tmp_path / "a", small.shapes("q_proj"))
    support.make_expert(tmp_path / "b", small.shapes("q_proj"), base_model_name_or_path="")
    opened = [open_expert(str(tmp_path / name)) for name in ("a", "b")]
    assert base_names(opened) == {"some/base"}
    assert base_names([opened[1], object()]) == set()  # a full model says nothing


def test_the_code_of_a_card_runs_where_it_lies(tmp_path, monkeypatch):
    support.make_expert(tmp_path / "e", small.shapes("q_proj"), base_model_name_or_path="tiny")
    monkeypatch.chdir(tmp_path / "e")
    found = {}
    exec(peft_snippet("tiny", "."), found)
    ids = small.ids(1, 6)
    moved = found["model"].eval()(input_ids=ids).logits - small.logits(ids)
    assert float(moved.detach().abs().max()) > 1e-3


@pytest.mark.parametrize("base", ["user/base", "my base", 'a"b\\', "", "tiny"])
def test_other_bases_are_named_as_they_are(base):
    code = peft_snippet(base, "me/sort")
    ast.parse(code)
    named = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert set(named) == {base or "BASE", "me/sort"}
    assert ("in place of this name" in code) == (base not in ("user/base", "tiny"))


def test_pages_of_experts_hold_this_code():
    files = {"adapter_config.json": Part("ab" * 32, 1)}
    entry = Entry(name="e", kind="peft", files=files, digest="ab" * 32, base="tiny")
    assert f"```python\n{peft_snippet('tiny', 'me/e')}\n```" in expert_page(entry, "me/e")
    card = ExpertCard(
        skill="sort", base=BaseId(name="tiny"), metrics={"loss": 0.1}, versions={"cgmerge": "0"}
    )
    plan = SimpleNamespace(
        chosen=SimpleNamespace(alpha=8, steps=2, lr=1e-3),
        settings=SimpleNamespace(rank=4, seed=0),
        step_rows=3,
    )
    assert f"```python\n{peft_snippet('tiny', '.')}\n```" in readme(card, plan)
