"""What newcomers do first: one expert without a method, a base without its tokenizer, odd words."""

import json

import case_support as cases
import pytest
import support
import train_support

from cgmerge.nearest import nearest


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_support.make_base(tmp_path / "base")
    train_support.write_rows(tmp_path / "copy.jsonl", train_support.make_rows(8, skill="copy"))
    return tmp_path


def test_one_expert_without_a_method_is_taken_as_it_is(run, experts, models):
    words = ["compose", experts / "E1", "--base", models / "B", "--json"]
    found = cases.done(run(*words, "-o", experts / "out"))
    assert found["method"] == "task-arithmetic"
    cases.done(run(*words, "--as", "model", "-o", experts / "model"))
    expected = cases.effect(models / "B", adapter=experts / "E1")
    cases.same_effect(cases.effect(models / "B", adapter=experts / "out"), expected)
    cases.same_effect(cases.effect(models / "B", merged=experts / "model"), expected)
    half = cases.done(run("compose", f"{experts / 'E1'}=0.5", "-o", experts / "half", "--json"))
    assert half["norm"] == pytest.approx(found["norm"] / 2, rel=1e-6)


def test_several_experts_without_a_method_are_merged_by_ties(run, experts):
    found = cases.done(
        run("compose", experts / "E1", experts / "E2", "-o", experts / "o", "--json")
    )
    assert found["method"] == "ties"


def test_a_recipe_and_a_lock_without_a_method_do_the_same(run, experts, monkeypatch):
    monkeypatch.chdir(experts)
    for names, method in ((["E1"], "task-arithmetic"), (["E1", "E2"], "ties")):
        (experts / "r.yml").write_text(f"experts: [{', '.join(names)}]\n")
        made = cases.done(run("compose", "r.yml", "-o", "out", "--overwrite", "--json"))
        assert made["method"] == method
        cases.done(run("lock", *names, "-o", "lock.json", "--overwrite", "--json"))
        assert json.loads((experts / "lock.json").read_text())["method"] == method


def test_a_base_without_tokenizer_is_said_to_have_none(run, place):
    for path in place.joinpath("base").glob("*token*"):
        path.unlink()
    for words in (
        ["train", "--base", "base", "--data", "copy.jsonl", "--skill", "s", "-o", "out"],
        ["eval", "--base", "base", "--data", "copy.jsonl"],
    ):
        error = cases.refused(
            run(*words, "--json"), 3, "incompatible.tokenizer", "holds no tokenizer",
            "config.json, generation_config.json, model.safetensors", "copy tokenizer.json",
        )  # fmt: skip
        assert error["path"] == str(place / "base")
    assert not (place / "out").exists()


def test_experts_of_two_kinds_of_model_are_refused(run, place):
    for name, root in (("llama", "model.layers.0.self_attn.q_proj"), ("gpt", "transformer.h.0.x")):
        support.make_expert(place / name, {root: (8, 8)})
    error = cases.refused(
        run("compose", "llama", "gpt", "-m", "linear", "-o", "out", "--json"), 3,
        "incompatible.modules", "llama and gpt are for models of two kinds",
    )  # fmt: skip
    assert {error["expected"], error["found"]} == {
        "model.layers.0.self_attn.q_proj", "transformer.h.0.x"
    }  # fmt: skip


def test_answers_that_the_base_cannot_write_are_counted(run, place):
    rows = [
        {"prompt": "copy : a =", "completion": "a"},
        {"prompt": "copy : a =", "completion": "Z"},
    ]
    train_support.write_rows(place / "odd.jsonl", rows)
    words = ["--base", "base", "--data", "odd.jsonl", "--json"]
    found = cases.done(run("train", *words, "--skill", "odd", "-o", "out", "--steps", 1))
    # Four tokens of each prompt, a letter and the end.
    assert (
        "1 of 12 tokens of the data are unknown to the base's tokenizer; 1 of 2 answers hold such,"
        " and can never be written"
    ) in found["warnings"]
    found = cases.done(run("eval", *words))
    assert any("1 of 2 answers hold what the base's tokenizer does not" in w
               for w in found["warnings"])  # fmt: skip


def test_two_runs_into_one_place_name_the_place(place):
    from cgmerge.errors import UsageError
    from cgmerge.modules.training.checkpoints import WorkFolder

    first, second = WorkFolder(place / "out"), WorkFolder(place / "out")
    first.open({"a": 1})
    try:
        with pytest.raises(UsageError, match=f"training into {place / 'out'} right now"):
            second.open({"a": 1})
    finally:
        first.close()


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[{}]", "expected an object, found an array", "is a .json file, not .jsonl"),
        ("null", "expected an object, found null", "a row is an object"),
        ("3", "expected an object, found a number", "a row is an object"),
        ('{"prompt": "a"', "not valid JSON", "cut short"),
        ('{"prompt": NaN}', "holds NaN", "write a finite number, or null"),
        ('{"a": 1, "a": 2}', "holds the key 'a' twice", "keep one of the two"),
    ],
)
def test_rows_that_are_none_are_called_by_their_json_names(run, place, text, said, hint):
    (place / "x.jsonl").write_text(text + "\n")
    code, _, err = run("eval", "--base", "base", "--data", "x.jsonl", "--json")
    error = json.loads(err.splitlines()[-1])
    assert code == 3
    assert said in error["message"]
    assert hint in error["hint"]


def test_a_config_with_a_byte_order_mark_says_how_to_take_it_off(run, experts):
    path = experts / "E1/adapter_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    cases.refused(run("inspect", experts / "E1", "--json"), 3, "damaged.json", "byte order mark")


def test_a_recipe_elsewhere_says_what_its_references_are_relative_to(run, experts, monkeypatch):
    monkeypatch.chdir(experts)
    (experts / "sub").mkdir()
    for text in ("experts: [E1]\n", "experts: [{ref: E1}]\n", "experts: ['E1=0.5']\n"):
        (experts / "sub/r.yml").write_text(text)
        cases.refused(
            run("compose", "sub/r.yml", "-o", "out", "--json"), 2, "not_found.expert",
            "no such expert: sub/E1", "relative to the folder of sub/r.yml: write ../E1",
        )  # fmt: skip


def test_one_broken_number_is_one(run, experts):
    def broken(tensors):
        first = next(iter(tensors))
        tensors[first][0, 0] = float("nan")
        return tensors

    support.edit_tensors(experts / "E1", broken)
    cases.refused(
        run("compose", experts / "E1", "-o", experts / "out", "--json"), 3, "damaged.not_finite",
        "holds 1 value that is NaN or infinite",
    )  # fmt: skip


def test_letters_in_the_wrong_order_are_recognised_in_short_names_too():
    assert nearest("mdi", ["mid", "max"]) == ["mid"]
    assert nearest("mdi", ["dim", "idm"]) == []  # two swaps, or letters that are far apart
    assert nearest("sortdes", ["sortdesc", "sort"]) == ["sortdesc"]
