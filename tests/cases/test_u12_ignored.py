"""U12: an evaluation that silently ignores the adapter."""

import json
from pathlib import Path

import pytest
import tiny_model as tiny
import torch

from cgmerge.cli.app import main

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("u12")
    model = tiny.make_model(3)
    tiny.save(root / "base-model", model, tiny.make_tokenizer())
    tiny.make_adapter(root / "expert1", model, seed=1, size=0.3)
    tiny.make_adapter(root / "zeros", model, seed=1, size=0.0)
    tiny.write_jsonl(root / "copy.jsonl", tiny.make_rows("copy", 20))
    return root


def run(shelf, *words):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "eval",
                *words,
                "--base",
                str(shelf / "base-model"),
                "--data",
                str(shelf / "copy.jsonl"),
            ]
        )
    return stop.value.code


def test_expert_and_base_differ_on_every_item_and_in_digest(shelf, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert run(shelf, str(shelf / "expert1"), "-o", str(out), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    digests = {target["name"]: target["digest"] for target in found["targets"]}
    assert len(digests) == len(set(digests.values())) == 2
    items = [json.loads(line) for line in Path(found["items"]).read_text().splitlines()]
    base = {item["id"]: item["loglik"] for item in items if item["target"] == "base"}
    expert = {item["id"]: item["loglik"] for item in items if item["target"] == "expert1"}
    assert len(base) == len(expert) == 20
    assert all(abs(base[key] - expert[key]) > 1e-4 for key in base)


def test_scores_identical_to_the_base_are_refused(shelf, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert run(shelf, str(shelf / "zeros"), "-o", str(out)) == 3
    stderr = capsys.readouterr().err
    assert "exactly as the base on all 20 items" in stderr
    assert "--expect-same" in stderr
    assert not out.exists()
    assert run(shelf, str(shelf / "zeros"), "-o", str(out), "--expect-same") == 0
    assert out.exists()


@pytest.mark.parametrize("option", ["--adapter", "--exprt", "--peft"])
def test_a_misspelt_option_is_an_error(shelf, capsys, option):
    assert run(shelf, option, str(shelf / "expert1")) == 2
    assert "no such option" in capsys.readouterr().err
