"""No command replaces what it reads, whatever `--overwrite` says, and links change nothing."""

import case_support as cases
import pytest
import support

from cgmerge.errors import UsageError
from cgmerge.inputs import refuse_inputs

ROW = '{"prompt": "a b =", "completion": "b a"}\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An adapter of `tiny`, its small file, data inside folders, and a recipe."""
    from cgmerge.modules.base import open_base

    monkeypatch.chdir(tmp_path)
    shapes = {
        path: (shape.out_features, shape.in_features)
        for path, shape in open_base("tiny").modules.items()
        if path.endswith("q_proj")
    }
    for name in ("a", "b"):
        support.make_expert(tmp_path / name, shapes, rank=2)
    (tmp_path / "a" / "val.jsonl").write_text(ROW * 4)
    out = tmp_path / "out"
    support.make_expert(out, shapes, rank=2)
    (out / "data.jsonl").write_text(ROW * 4)
    (out / "recipe.yml").write_text("experts: [../a]\nmethod: ties\n")
    (out / "notes.json").write_text('{"experts": ["../a"], "method": "ties"}')
    (tmp_path / "link").symlink_to("a")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["compose", "a", "b", "-o", "a"], "is_input"),
        (["compose", "a", "b", "-o", "link"], "is_input"),
        (["compose", "link", "b", "-o", "a/sub"], "inside"),
        (["compose", "out/recipe.yml", "-o", "out"], "holds_input"),
        (
            ["compose", "a", "--base", "tiny", "--tune", "out/data.jsonl", "-o", "out"],
            "holds_input",
        ),
        (["compress", "a", "-o", "a/x.cge"], "inside"),
        (["compress", "a.cge", "-o", "a.cge"], "is_input"),
        (["compress", "lib.cge/a", "-o", "lib.cge"], "holds_input"),
        (["decompress", "a.cge", "-o", "a.cge"], "is_input"),
        (["decompress", "out/a.cge", "-o", "out"], "holds_input"),
        (
            ["stats", "a", "--base", "tiny", "--data", "a/val.jsonl", "-o", "a/val.jsonl"],
            "is_input",
        ),
        (
            ["stats", "a", "--base", "tiny", "--data", "a/val.jsonl", "-o",
             "a/adapter_model.safetensors"],
            "is_input",
        ),
        (
            ["train", "--base", "tiny", "--data", "out/data.jsonl", "--skill", "s", "-o", "out"],
            "holds_input",
        ),
        (["pull", "a", "-o", "a"], "is_input"),
        (["pull", "lib/a", "-o", "lib"], "is_input"),
        (["pull", "lib/a", "-o", "lib/objects"], "inside"),
        (["add", "a/lib", "a"], "inside"),
        (["push", "a", "a/lib"], "inside"),
        (["lock", "out/notes.json", "-o", "out/notes.json"], "is_input"),
    ],
)  # fmt: skip
@pytest.mark.fault("F41")
def test_inputs_are_never_replaced(run, place, words, code):
    assert run("compress", "a", "-o", "a.cge", "-q")[0] == 0
    assert run("add", "lib", "a", "-q")[0] == 0
    (place / "lib.cge").mkdir()
    support.make_expert(place / "lib.cge" / "a", {"model.layers.0.self_attn.q_proj": (8, 8)})
    (place / "out" / "a.cge").write_bytes((place / "a.cge").read_bytes())
    before = cases.tree(place)
    found, _, err = run(*words, "--overwrite")
    assert found == 2, err
    says = {"is_input": "is an input", "inside": "lies inside", "holds_input": "holds the input"}
    assert says[code] in err
    assert cases.tree(place) == before


@pytest.mark.fault("F41")
def test_what_is_no_input_is_replaced(run, place):
    words = ["compose", "a", "-m", "linear", "-o", "out2", "-q"]
    assert run(*words)[0] == 0
    assert run(*words, "--overwrite")[0] == 0
    assert run("compose", "out2/cgmerge.json", "-o", "out2", "--overwrite", "-q")[0] == 0
    stats = ["stats", "a", "--base", "tiny", "--data", "a/val.jsonl", "-q"]
    assert run(*stats)[0] == 0
    assert run(*stats, "--overwrite")[0] == 0
    again = [*stats, "-o", "a/cgmerge-stats.safetensors"]
    assert run(*again)[0] == 2
    assert run(*again, "--overwrite")[0] == 0
    assert run("add", "lib", "a", "-q")[0] == 0
    assert run("add", "lib", "lib/a", "-q")[0] == 0


def test_links_are_followed_on_both_sides(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    for out in ("real", "link", "real/x", "link/x", "."):
        for given in ("real", "link"):
            with pytest.raises(UsageError):
                refuse_inputs(tmp_path / out, [tmp_path / given])
    for out in ("other", "realm", "loop", "../x"):
        refuse_inputs(tmp_path / out, [tmp_path / "real", tmp_path / "link"])
