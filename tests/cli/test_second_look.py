"""Small things that surprised people: each said, refused or left alone as it should be."""

import json
import shutil

import case_support as cases
import pytest
from support import edit_tensors, llama_shapes, make_expert, pick

ROW = {"prompt": "caesar : a b =", "completion": "b c"}


@pytest.fixture
def experts(tmp_path, monkeypatch):
    """Two adapters of one tiny shape, written by no cgmerge."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "two")):
        make_expert(tmp_path / name, pick(llama_shapes(), "q_proj"), seed=number)
    return tmp_path


def names(folder, change):
    """Rename the tensors of an adapter."""
    edit_tensors(folder, lambda tensors: {change(name): t for name, t in tensors.items()})


def test_an_output_may_be_called_as_an_argument_is(experts, run):
    cases.done(run("compose", "one", "two", "-m", "linear", "-o", "experts", "--json"))
    assert (experts / "experts/adapter_model.safetensors").exists()
    code, _, err = run("compose", "one", "two", "-o", "--overwrite")
    assert code == 2
    assert "the next word is the option --overwrite" in err


def test_modules_of_some_experts_only_are_said(experts, run):
    names(experts / "two", lambda name: name.replace("layers.0", "layers.1"))
    found = cases.done(run("compose", "one", "two", "-m", "linear", "-o", "out", "--json"))
    assert any("are changed by some experts only" in text for text in found["warnings"])


def test_one_body_under_two_names_is_refused(experts, run):
    names(experts / "two", lambda name: name.replace("model.model.", "model."))
    code, _, err = run("compose", "one", "two", "-m", "linear", "-o", "out")
    assert code == 3
    assert "call the same modules by different names" in err
    assert " model.layers.0.self_attn.q_proj" in err
    assert " layers.0.self_attn.q_proj" in err
    assert not (experts / "out").exists()


def test_experts_for_different_heads_are_refused(experts, run):
    path = experts / "two/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task_type": "SEQ_CLS"}))
    first = experts / "one/adapter_config.json"
    first.write_text(json.dumps({**json.loads(first.read_text()), "task_type": "CAUSAL_LM"}))
    code, _, err = run("compose", "one", "two", "-m", "linear", "-o", "out")
    assert code == 3
    assert "one CAUSAL_LM, two SEQ_CLS" in err


def test_next_to_nothing_is_said(experts, run):
    found = cases.done(run("compose", "one", "two", "-m", "task-arithmetic", "--scale", "1e-12",
                           "-o", "out", "--json"))  # fmt: skip
    assert any("next to nothing changes" in text for text in found["warnings"])


def test_somebody_elses_adapter_is_not_replaced(experts, run):
    before = (experts / "two/adapter_model.safetensors").read_bytes()
    code, _, err = run("compose", "one", "-m", "linear", "-o", "two", "--overwrite")
    assert code == 2
    assert "is no result of cgmerge" in err
    assert (experts / "two/adapter_model.safetensors").read_bytes() == before
    # …but its own results are, again and again.
    for _ in range(2):
        cases.done(run("compose", "one", "-m", "linear", "-o", "own", "--overwrite", "--json"))


def test_a_record_and_a_page_replace_nothing_else(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "empty.json").touch()
    words = ("eval", "--base", "tiny", "--data", "rows.jsonl", "--overwrite")
    code, _, err = run(*words, "-o", "thesis.tex")
    assert (code, "thesis.tex is no result of cgmerge" in err) == (2, True)
    for _ in range(2):
        assert run(*words, "-o", "empty.json")[0] == 0
    code, _, err = run("report", "empty.json", "-o", "thesis.tex", "--overwrite")
    assert (code, "thesis.tex is no result of cgmerge" in err) == (2, True)
    for _ in range(2):
        assert run("report", "empty.json", "-o", "page.html", "--overwrite")[0] == 0
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_parts_do_not_make_a_step_larger_in_silence(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"caesar : {x} =", "completion": x} for x in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = (
        "train",
        "--base",
        "tiny",
        "--data",
        "rows.jsonl",
        "--skill",
        "x",
        "-o",
        "out",
        "--dry-run",
    )
    code, _, err = run(*words, "--accumulate", "1000")
    assert code == 2
    assert "1,000 rows, more than the default of at most 64" in err
    assert "--batch-size 1000" in err
    assert run(*words, "--accumulate", "1000", "--batch-size", "1000")[0] == 0
    assert run(*words, "--accumulate", "64")[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("one.json", json.dumps(ROW, indent=1), "one.json holds one object; an array of objects"),
        ("none.jsonl", "", "a row is an object such as"),
        ("rows.txt", json.dumps(ROW), "write the rows as JSON lines"),
    ],
)
def test_data_files_say_what_is_wanted(tmp_path, monkeypatch, run, name, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    code, _, err = run("train", "--base", "tiny", "--data", name, "--skill", "x", "-o", "out")
    assert code == 3
    assert said in err


def test_rows_in_a_json_file_by_line_still_work(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n")
    assert (
        run(
            "train", "--base", "tiny", "--data", "rows.json", "--skill", "x", "-o", "o", "--dry-run"
        )[0]
        == 0
    )


def test_a_number_too_large_for_float32_is_called_so(experts, run):
    import torch
    from safetensors.torch import load_file, save_file

    path = experts / "one/adapter_model.safetensors"
    tensors = {name: value.double() for name, value in load_file(path).items()}
    first = next(iter(tensors))
    tensors[first].view(-1)[0] = 1e300
    save_file(tensors, path, metadata={"format": "pt"})
    code, _, err = run("compose", "one", "two", "-m", "linear", "-o", "out")
    assert code == 3
    assert "holds 1 value that is too large for float32" in err
    tensors[first].view(-1)[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    assert "1 value that is NaN or infinite" in run("compose", "one", "two", "-o", "out")[2]


def test_an_unfinished_training_is_pointed_at(experts, run):
    (experts / ".three.training").mkdir()
    code, _, err = run("compose", "one", "three", "-o", "out")
    assert code == 2
    assert "a training of it is unfinished" in err
    shutil.rmtree(experts / ".three.training")
    assert "unfinished" not in run("compose", "one", "three", "-o", "out")[2]
