"""U28: scores that depend on the batch size."""

import json
from pathlib import Path

import pytest
import tiny_model as tiny
import torch

from cgmerge.cli.app import main

torch.set_num_threads(1)


@pytest.mark.fault("F40")
def test_nine_items_of_lengths_3_to_40(tmp_path, capsys):
    """Scored with padding on the right and generated with padding on the left."""
    letters = [1, 3, 5, 7, 9, 11, 13, 15, 17]  # copy : … = … <eos>: twice that and four
    rows = [tiny.make_rows("copy", 1, lengths=(n,))[0] for n in letters]
    rows[0] = {"prompt": "a", "completion": "b"}  # three tokens with the end
    training = tiny.make_rows("copy", 300, seed=1, lengths=(1, 2, 3, 4, 5))
    model = tiny.train(tiny.make_model(3), tiny.make_tokenizer(), training, steps=50)
    tiny.save(tmp_path / "base", model, tiny.make_tokenizer())
    tiny.make_adapter(tmp_path / "expert", model, seed=1, size=0.1)
    tiny.write_jsonl(tmp_path / "nine.jsonl", rows)
    found = {}
    for size in (1, 4, 9):
        out = tmp_path / f"r{size}.json"
        words = [str(tmp_path / "expert"), "--base", str(tmp_path / "base"), "--generate"]
        words += ["--data", str(tmp_path / "nine.jsonl"), "--batch-size", str(size)]
        with pytest.raises(SystemExit) as stop:
            main(["eval", *words, "-o", str(out), "--json", "--dtype", "float32"])
        assert stop.value.code == 0
        found[size] = json.loads(capsys.readouterr().out)
        lines = Path(found[size]["items"]).read_text().splitlines()
        found[size]["lines"] = [json.loads(line) for line in lines]
    lengths = [len(row["prompt"].split()) + len(row["completion"].split()) + 1 for row in rows]
    assert (min(lengths), max(lengths)) == (3, 38)
    for size in (4, 9):
        pairs = list(zip(found[1]["lines"], found[size]["lines"], strict=True))
        assert len(pairs) == 18
        for alone, batched in pairs:
            assert batched["id"] == alone["id"]
            assert batched["loglik"] == pytest.approx(alone["loglik"], abs=1e-5)
            assert batched["correct"] == alone["correct"]
            assert batched["generated"] == alone["generated"]
        scores = [[r["score"] for r in found[n]["results"]] for n in (1, size)]
        assert scores[0] == scores[1]
        assert all(r["agree"] == 9 for r in found[size]["results"])
