"""`--lossless`: every bit, type and scaling comes back."""

import json

import pytest
import support
import torch

from cgmerge.modules.expert import open_expert

SHAPES = {"model.layers.0.self_attn.q_proj": (12, 20), "model.layers.1.mlp.up_proj": (30, 20)}


def test_a_round_trip_keeps_every_bit(run, tmp_path):
    folder = support.make_expert(
        tmp_path / "e", SHAPES, rank=4, alpha=6, dtype=torch.bfloat16, use_rslora=True
    )
    file, back = tmp_path / "e.cge", tmp_path / "back"
    code, out, err = run("compress", folder, "--lossless", "-o", file, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["mode"] == "lossless"
    assert facts["delta_error"] == 0.0
    assert facts["size_bytes"] == file.stat().st_size
    assert run("decompress", file, "-o", back)[0] == 0
    weights = "adapter_model.safetensors"
    before, after = open_expert(str(folder)), open_expert(str(back))
    for name in before.file.infos:
        assert after.file.infos[name].dtype == "BF16"
        assert torch.equal(before.file.read(name), after.file.read(name))
    assert json.loads((back / "adapter_config.json").read_text()) == json.loads(
        (folder / "adapter_config.json").read_text()
    )
    opened = open_expert(str(file))
    for path, pair in before.pairs.items():
        assert opened.pairs[path].scaling == after.pairs[path].scaling == pair.scaling == 3.0
        assert torch.equal(opened.deltas()[path].dense(), before.deltas()[path].dense())
    again = tmp_path / "again.cge"
    assert run("compress", back, "--lossless", "-o", again)[0] == 0
    assert (back / weights).stat().st_size == (folder / weights).stat().st_size


def test_what_makes_no_sense_is_refused(run, tmp_path):
    folder = support.make_expert(tmp_path / "e", SHAPES, rank=4, alpha=6)
    words = ("compress", folder, "--lossless", "-o", tmp_path / "e.cge")
    assert run(*words, "--density", 0.2)[0] == 2
    assert run(*words, "--dry-run")[0] == 0
    assert not (tmp_path / "e.cge").exists()
    assert run(*words)[0] == 0
    small = tmp_path / "small.cge"
    assert run("compress", folder, "--density", 0.5, "-o", small)[0] == 0
    code, _, err = run("compress", small, "--lossless", "-o", tmp_path / "f.cge")
    assert code == 2
    assert "compressed already" in err


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("words", [(), ("--lossless",)])
def test_there_and_back_is_the_same_file(run, tmp_path, card, words):
    """The name and what it was made from are the first folder's, whatever the second is called."""
    folder = support.make_expert(tmp_path / "e", SHAPES, rank=4, alpha=6)
    if card:
        known = {"name": "b", "fingerprint": "fp1:" + "a" * 32}
        (folder / "expert.json").write_text(
            json.dumps({"schema": "cgmerge.expert/1", "skill": "s", "base": known})
        )
    file, back, again = tmp_path / "e.cge", tmp_path / "back", tmp_path / "again.cge"
    assert run("compress", folder, "--lossless", "-o", file)[0] == 0
    assert run("decompress", file, "-o", back)[0] == 0
    code, out, err = run("compress", back, *words, "-o", again, "--json")
    assert code == 0, err
    assert json.loads(out)["mode"] == "lossless"
    assert again.read_bytes() == file.read_bytes()
    # A file is never compressed to less than it holds without being asked to.
    assert run("compress", file, *words, "-o", again, "--overwrite")[0] == 0
    assert again.read_bytes() == file.read_bytes()
    code, out, err = run("compress", back, "--density", 0.5, "-o", again, "--overwrite", "--json")
    assert code == 0, err
    assert json.loads(out)["mode"] == "ternary"
    assert json.loads(out)["warnings"] == []  # nothing was lost before
    # It knows its own folder.
    assert run("decompress", file, "-o", back, "--overwrite")[0] == 0


@pytest.mark.parametrize("what", ["weights", "config"])
def test_a_folder_that_was_edited_is_compressed_as_it_is(run, tmp_path, what):
    folder = support.make_expert(tmp_path / "e", SHAPES, rank=4, alpha=6)
    file, back, again = tmp_path / "e.cge", tmp_path / "back", tmp_path / "again.cge"
    assert run("compress", folder, "--lossless", "-o", file)[0] == 0
    assert run("decompress", file, "-o", back)[0] == 0
    if what == "weights":
        support.edit_tensors(back, lambda found: {name: t * 2 for name, t in found.items()})
    else:
        path = back / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 12}))
    expected = open_expert(str(back)).deltas()
    assert run("compress", back, "--lossless", "-o", again)[0] == 0
    assert again.read_bytes() != file.read_bytes()
    found = open_expert(str(again)).deltas()
    assert all(torch.equal(found[path].dense(), expected[path].dense()) for path in expected)
