"""Hints: one answer to what a compressed full model is for, and commands that can be pasted."""

import json
import os
import re
import shlex
from pathlib import Path

import composition_support as small
import pytest
import support

from cgmerge.modules.base import open_base


@pytest.fixture
def whole(run, models, tmp_path, monkeypatch):
    """The compressed delta of a full model under a name with a space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my base").symlink_to(models / "B")
    support.make_full(tmp_path / "F", models / "B")
    assert run("compress", "F", "--base", "my base", "-o", "my model.cge", "-q")[0] == 0
    return "my model.cge"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["inspect", "FILE"], 0),
        (["decompress", "FILE", "-o", "x"], 2),
        (["extract", "FILE", "--base", "my base", "--rank", "4", "-o", "x"], 3),
        (["compose", "FILE", "-m", "linear", "-o", "x"], 2),
        (["stats", "FILE", "--base", "my base", "--data", "d.jsonl"], 3),
        (["eval", "FILE", "--base", "my base", "--data", "d.jsonl"], 3),
        (["compress", "FILE", "-o", "x.cge"], 3),
    ],
)
def test_every_command_says_the_same_of_a_full_model(run, whole, words, code):
    Path("d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    found, _, err = run(*[whole if word == "FILE" else word for word in words])
    assert found == code, err
    hint = next(line for line in err.splitlines() if line.startswith("hint: "))
    commands = hint.split("cgmerge ")[1:]
    decompress, compose, extract = (shlex.split(part.split(" writes")[0]) for part in commands)
    where = os.path.realpath(whole)
    assert decompress[0] == "decompress"
    assert os.path.realpath(decompress[1]) == where
    assert decompress[2:] == ["--base", "my base", "-o", "MODEL"]
    assert (compose[0], extract[0]) == ("compose", "extract")


def test_the_hint_works_as_it_stands(run, whole):
    _, _, err = run("decompress", whole, "-o", "x")
    command = err.split("cgmerge ", 1)[1].split(" writes")[0]
    code, _, err = run(*shlex.split(command))
    assert code == 0, err
    _, _, err = run("extract", "MODEL", "--base", "my base", "--rank", 4, "-o", "my lora")
    assert "cgmerge eval 'my lora' --base 'my base' --data TEST.jsonl" in err


def test_a_base_that_the_experts_name_stands_in_hints(run, tmp_path, monkeypatch):
    """Also where no --base is given; where they disagree, nobody guesses."""
    monkeypatch.chdir(tmp_path)
    shapes = small.shapes("q_proj")
    names = {"my e": "tiny", "f": "tiny", "g": "other"}
    for seed, (name, base) in enumerate(names.items()):
        support.make_expert(name, shapes, seed=seed + 1, base_model_name_or_path=base)
    Path("d.jsonl").write_text('{"prompt": "copy : a =", "completion": "a"}\n')

    def hint(*words):
        return run(*words)[2].partition("hint: ")[2].strip()

    said = "measure it: cgmerge eval 'my o' --base {} --data TEST.jsonl"
    assert hint("compose", "my e", "f", "-o", "my o") == said.format("tiny")
    assert hint("compose", "my e", "g", "-o", "my o", "--overwrite") == said.format("BASE")
    words = ["--base", "smollm2", "-o", "my o", "--overwrite"]
    Path("smollm2").symlink_to(open_base("tiny").folder)
    assert hint("compose", "my e", "g", *words) == said.format("smollm2")
    for method in ("regmean", "fisher"):
        asked = hint("compose", "my e", "f", "-m", method, "-o", "x")
        assert "cgmerge stats 'my e' --base tiny --data FILE\n" in asked
        assert asked.endswith("cgmerge stats f --base tiny --data FILE")
    assert "stats 'my e' f --base tiny --data FILE FILE" in hint(
        "compose", "my e", "f", "-m", "regmean++", "-o", "x"
    )
    for more in (["--tune", "d.jsonl"], ["-m", "lorahub", "--examples", "d.jsonl"],
                 ["-m", "gate", "--examples", "my e=d.jsonl", "f=d.jsonl"]):  # fmt: skip
        assert hint("compose", "my e", "f", *more, "-o", "x") == "add --base tiny", more
    assert hint("compress", "f", "--calibrate", "d.jsonl", "-o", "f.cge") == "add --base tiny"
    assert run("compress", "f", "-o", "f.cge", "-q")[0] == 0
    assert hint("decompress", "f.cge", "-o", "back").endswith(
        "eval back --base tiny --data TEST.jsonl"
    )
    routed = hint("compose", "my e", "f", "-m", "arrow", "-o", "my r")
    assert "eval 'my r' --base tiny --data TEST.jsonl" in routed
    assert "route 'my r' --base tiny --explain" in routed


def test_links_to_files_are_followed_where_the_user_names_them(run, whole, tmp_path):
    support.make_expert(tmp_path / "e", {"model.layers.0.self_attn.q_proj": (32, 32)})
    assert run("compress", "e", "-o", "e.cge", "-q")[0] == 0
    (tmp_path / "link.cge").symlink_to("e.cge")
    (tmp_path / "dead.cge").symlink_to("nothing.cge")
    for words in (["inspect"], ["verify"], ["add", "lib"]):
        assert run(*words, "link.cge")[0] == 0, words
    assert run("decompress", "link.cge", "-o", "back")[0] == 0
    assert run("compose", "link.cge", "-m", "linear", "-o", "out")[0] == 0
    code, _, err = run("inspect", "dead.cge")
    assert code == 2
    assert "leads nowhere" in err
    # Inside a folder, which may come from anybody, a link is not followed.
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "expert.cge").symlink_to("../e.cge")
    for words in (["inspect", "stranger"], ["decompress", "stranger", "-o", "y"]):
        code, _, err = run(*words)
        assert code == 3
        assert "links" in err


def test_a_file_of_an_adapter_is_answered_with_its_folder(run, tmp_path):
    folder = tmp_path / "my expert"
    support.make_expert(folder, {"model.layers.0.self_attn.q_proj": (32, 32)})
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        for words in (
            ["inspect"],
            ["compress", "-o", tmp_path / "x.cge"],
            ["decompress", "-o", "y"],
        ):
            code, _, err = run(words[0], folder / name, *words[1:])
            assert code == 2
            assert f"hint: name its folder: '{folder}'" in err
    (tmp_path / "loose.bin").write_bytes(b"x")
    assert "hint" not in run("inspect", tmp_path / "loose.bin")[2]
    (tmp_path / "sort").write_bytes(b"x")
    assert "rename it to end in .cge" in run("inspect", tmp_path / "sort")[2]
    code, _, err = run("decompress", folder, "-o", tmp_path / "y")
    assert code == 2
    assert "name a .cge file" in err


def test_a_space_is_suggested_only_to_rules_that_run_in_one(run, experts):
    """Those that need statistics run in none: neither `--rank exact` nor a typo leads there."""
    from cgmerge.merge import all_methods, make_rule

    words = ["compose", experts / "E1", experts / "E2", "-o", experts / "out", "--json"]
    seen = set()
    for spec in all_methods():
        if spec.low_rank:
            continue
        code, _, err = run(*words, "-m", spec.name, "--rank", "exact")
        hint = json.loads(err.splitlines()[-1])["hint"]
        assert code == 2
        assert "--as model" in hint
        named = re.findall(r"`(core\+[\w-]+)`", hint)
        seen.add(bool(named))
        assert bool(named) == (spec.traits.stats is None)
        for name in named:
            assert make_rule(name, 2).space == "core"
    assert seen == {True, False}
    for name, example in (("croe+ties", "core+ties"), ("croe+fisher", "core+ties")):
        _, _, err = run(*words, "-m", name)
        assert json.loads(err.splitlines()[-1])["hint"].endswith(f"for example {example}")
    # Nor is there a page of what is refused.
    code, _, err = run("methods", "core+fisher")
    assert code == 2
    assert "uses statistics of the inputs" in err
    assert run("methods", "core+ties")[0] == 0
