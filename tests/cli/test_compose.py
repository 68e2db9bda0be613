"""`cgmerge compose`, `inspect` and `methods` under hostile hands.

Every refusal: the right exit code, within two seconds, one readable message, nothing left behind.
"""

import json
import os
import shutil
import struct
import time
from pathlib import Path

import case_support as cases
import pytest
import support

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def place(experts, monkeypatch):
    monkeypatch.chdir(experts)
    return experts


@pytest.fixture
def attack(run, place):
    """Run a command that must be refused, and check all that holds for every refusal."""

    def call(*words, exit_code, word="", limit=2.0):
        before = cases.tree(place)
        start = time.process_time()
        code, out, err = run(*words)
        spent = time.process_time() - start
        assert code == exit_code, err
        assert "Traceback" not in err + out
        assert "a bug in cgmerge" not in err
        assert word in err
        assert spent < limit
        assert len(err) < 20_000
        plain = err.replace("\n", "")
        assert plain.isprintable(), "control characters reach the terminal"
        assert cases.tree(place) == before
        return err

    call("compose", "E1", "-o", "E1", exit_code=2)  # imports are not part of any refusal's time
    return call


ONE = ("compose", "E1", "-m", "task-arithmetic", "-o", "out")
TWO = ("compose", "E1", "E2", "-o", "out")


@pytest.mark.parametrize(
    "ref",
    ["E1=", "E1=x", "E1==", "=", "=1", "E1=nan", "E1=-inf", "E1=1e999", "E1=0x10", "", "  ", ".",
     "..", "/", "~nobody-here/x", "-E1", "E1=1=2", "E1\0", "E1\n", "😀", "\x1b[2J", "a" * 5000,
     "\udcff", "hf://", "hf://a b", "hf://../../x", "hf://x/y/z/w", "HF://x/y", "nosuch://x",
     "E1/adapter_config.json", f"E1/{WEIGHTS}", "/dev/stdin", "/proc/self/mem"],
)  # fmt: skip
def test_references(attack, ref):
    attack("compose", ref, "-m", "linear", "-o", "out", exit_code=2)
    if "=" not in ref:
        attack("inspect", ref, exit_code=2)


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        ([*ONE, "--rank", "0"], 2, "at least 1"),
        ([*ONE, "--rank", "²"], 2, "whole number"),
        ([*ONE, "--rank", "99999999"], 2, "99,999,999; the limit is 1,024"),
        ([*ONE, "--rank", "9" * 5000], 2, "whole number"),
        ([*TWO, "--rank", "exact"], 2, "entry by entry"),
        ([*ONE, "--scale", "nan"], 2, "found nan"),
        ([*ONE, "--scale", "1e300"], 3, "overflows float32"),
        ([*TWO, "--scale", "1e300"], 3, "overflows float32"),
        ([*ONE, "--scale", "0"], 3, "changes nothing"),
        ([*ONE, "--scale", "1e-320"], 3, "changes nothing"),
        (["compose", "E1=1e-320", "-m", "linear", "-o", "out"], 3, "changes nothing"),
        (["compose", "E1=1e300", "-m", "linear", "-o", "out"], 3, "overflows float32"),
        ([*ONE, "--dtype", "float64"], 2, "unknown dtype"),
        ([*ONE, "--as", "zip"], 2, "adapter or model"),
        ([*ONE, "--as", "model", "--base", "B", "--rank", "8"], 2, "rank 8 is for adapters"),
        ([*ONE, "-m", "\x1b[31m"], 2, "unknown method `\\x1b[31m`"),
        ([*TWO, "-m", "tiess"], 2, "did you mean `ties`?"),
        ([*TWO, "--set", "="], 2, "KEY=VALUE"),
        ([*TWO, "--set", "density=1", "--set", "density=1"], 2, "given twice"),
        ([*ONE, "--base", "E2"], 3, "is a LoRA adapter, not a base model"),
        (["compose", "E1", "nested.yml", "-o", "out"], 2, "no such expert: nested.yml"),
        (["compose", "-o", "out"], 2, "missing argument"),
        (["compose", "E1"], 2, "add -o OUT"),
        (["methods", "x" * 100_000], 2, "unknown method"),
        (["methods", "ties\n"], 2, "did you mean `ties`?"),
    ],
)
def test_options(attack, words, exit_code, says):
    attack(*words, exit_code=exit_code, word=says)


LAUGHS = "experts: &a0 [x,x,x,x,x,x,x,x,x]\nparams: {" + ", ".join(
    f"p{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS + "}\n", "aliases are not read"),
        ("experts: &e [*e]", "aliases are not read"),
        ("!!python/object/apply:os.system ['touch pwned']", "tags are not read"),
        ("experts: " + "[" * 50_000, "nested too deeply"),
        ("experts: [" + "E1," * 20_000 + "]", "more than 10,000 values"),
        ("".join(f"k{i}: v\n" for i in range(300_000)), "the limit for YAML is"),
        ("experts: [E1]\nexperts: [E2]", "stands twice"),
        ("experts: E1", "experts must be a list"),
        ("experts: [[E1]]", "found ['E1']"),
        ("experts: [{ref: E1, weight: .nan}]", "finite number"),
        ("experts: [{ref: E1, weight: 1" + "0" * 299 + "e99}]", "digits"),
        ("experts: [{ref: E1, weight: true}]", "finite number, found True"),
        ("experts: [{ref: E1, sha256: 5}]", "sha256 must be text"),
        ("experts: [E1]\nmethod: [ties]", "method must be text"),
        ("experts: [E1]\nparams: [a]", "params must be a mapping"),
        ("experts: [E1]\nmethod: ties\nparams: {density: [1]}", "takes a number"),
        ("experts: [E1]\nbase: 5", "base must be text"),
        ("experts: [E1]\nbase: {ref: 5}", "ref must be text"),
        ("experts: [E1]\noutput: {rank: 0}", "at least 1, `exact` or `auto`, found '0'"),
        ("experts: [E1]\noutput: {rank: true}", "found 'True'"),
        ("experts: [E1]\nforce_base: no", "force_base must be true or false, found 'no'"),
        ("experts: [E1]\nallow_noop: 'false'", "allow_noop must be true or false"),
        ("experts: [E1]\noutput: {allow_rounding: []}", "true or false"),
        ("a: 2020-99-99", "unknown key `a`"),
        ("\x00", "not valid YAML"),
        ("", "must hold a mapping"),
    ],
)
@pytest.mark.fault("F07")
def test_recipes(attack, place, text, says):
    (place / "r.yml").write_text(text)
    attack("compose", "r.yml", "-o", "out", exit_code=2, word=says)


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [("[]", 3), ("", 3), ("{}", 2), ("[" * 100_000, 4), ('{"experts": ["E1"], "experts": 1}', 3),
     ('{"experts": [{"ref": "E1", "weight": 1e999}]}', 3), ('{"experts": ["E1"], "schema": 2}', 3),
     ('{"experts": [{"ref": "E1", "weight": 1' + "0" * 15 + "." + "9" * 5000 + "}], 5}", 3)],
)  # fmt: skip
@pytest.mark.fault("F07")
def test_json_recipes(attack, place, text, exit_code):
    (place / "r.json").write_text(text)
    attack("compose", "r.json", "-o", "out", exit_code=exit_code)


def test_recipes_that_are_no_files(attack, run, place):
    os.mkfifo(place / "f.yml")
    attack("compose", "f.yml", "-o", "out", exit_code=3, word="not a regular file")
    attack("compose", "none.yml", "-o", "out", exit_code=2, word="no such file: none.yml")
    shutil.copytree("E1", "odd.json")  # an expert may be called like a recipe
    cases.done(run("compose", "odd.json", "-o", "out", "--json"))


def header(entries, body=b""):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + body


def factors(names, out=2, into=2):
    entries, place = {}, 0
    for name in names:
        for factor, shape in (("A", [1, into]), ("B", [out, 1])):
            size = 4 * shape[0] * shape[1]
            entries[f"{PREFIX}{name}.lora_{factor}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [place, place + size],
            }
            place += size
    return header(entries, b"\x00\x00\x80\x3f" * (place // 4))


def entry(**fields):
    return header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}}, bytes(4))


WEIGHT_FILES = {
    "0 bytes": lambda: (b"", 3, "has 0 bytes"),
    "header of 2^63": lambda: (struct.pack("<Q", 2**63) + b"{}", 3, "announces a header of"),
    "20,002 tensors": lambda: (factors(f"m.{i}.q" for i in range(10_001)), 4, "20,002 tensors"),
    "80,000 names": lambda: (factors(f"m{i}" for i in range(40_000)), 4, "header of"),
    "25,000 empty tensors": lambda: (
        header({f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(25_000)}), 4, "25,000 tensors"),
    "400,000 axes": lambda: (entry(shape=[0] * 400_000, data_offsets=[0, 0]), 3, "wrongly"),
    "endless product": lambda: (entry(shape=[2**61 - 1] * 60_000), 3, "wrongly"),
    "exabytes": lambda: (entry(shape=[2**61] * 3, data_offsets=[0, 0]), 3, "takes 49,039,857,307"),
    "dtype list": lambda: (entry(dtype=[]), 3, "wrongly"),
    "dtype unknown": lambda: (entry(dtype="Q\x1b[31m"), 3, "not supported"),
    "no module path": lambda: (factors([""]), 3, "not of the form"),
    "..": lambda: (factors([".."]), 3, "letters, digits"),
    "path": lambda: (factors(["../../etc/x"]), 3, "letters, digits"),
    "space": lambda: (factors(["a b"]), 3, "letters, digits"),
    "emoji": lambda: (factors(["😀"]), 3, "letters, digits"),
    "NUL": lambda: (factors(["a\0b"]), 3, "control characters"),
    "line": lambda: (factors(["a\nhint: pay"]), 3, "control characters"),
    "escape": lambda: (factors(["\x1b[2J"]), 3, "control characters"),
    "backwards": lambda: (factors(["\u202eevil"]), 3, "control characters"),
    "long": lambda: (factors(["a" * 100_000]), 3, "more than 512 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHT_FILES)
@pytest.mark.fault("F04", "F05")
def test_weight_files(attack, place, name):
    data, exit_code, says = WEIGHT_FILES[name]()  # built when asked for: some are large
    support.edit_config(place / "E1", r=1)
    (place / "E1" / WEIGHTS).write_bytes(data)
    attack("inspect", "E1", exit_code=exit_code, word=says)
    attack("compose", "E1", "E2", "-o", "out", exit_code=exit_code, word=says)


def test_thousands_of_tensors_are_read_in_seconds(run, place):
    support.edit_config(place / "E1", r=1, target_modules=["q"])
    (place / "E1" / WEIGHTS).write_bytes(factors(f"m.{i}.q" for i in range(4_000)))
    start = time.process_time()
    assert len(cases.done(run("inspect", "E1", "--json"))["modules"]) == 4_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "dangling"])
@pytest.mark.fault("F12")
def test_weights_that_are_no_regular_file(attack, place, kind):
    path = place / "E1" / WEIGHTS
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(place / "E2" / WEIGHTS if kind == "link" else "nowhere")
    for words in (["inspect", "E1"], ["compose", "E1", "E2", "-o", "out"]):
        attack(*words, exit_code=3, word="regular file")


@pytest.mark.parametrize(
    ("text", "exit_code", "says"),
    [
        ("{" + '"a":1,' * (20 << 20) + '"b":1}', 4, "longer than the limit"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, 4, "nested too deeply"),
        ("", 3, "not valid JSON"),
        ("null", 3, "must hold an object"),
        ('{"peft_type": "LORA", "k\\u001b[31m\\n' + "v" * 900_000 + '": 1}', 3, "unknown field"),
        ('{"peft_type": "' + "x" * 100_000 + '"}', 3, "cgmerge reads LORA"),
        ('{"peft_type": ["LORA"]}', 3, "cgmerge reads LORA"),
        ('{"peft_type": "LORA", "bias": "' + "x" * 100_000 + '"}', 3, "bias is"),
        ('{"peft_type": "LORA", "foo": 1, "peft_version": {"a": 1}}', 3, "unknown version"),
    ],
)
@pytest.mark.fault("F07", "F10")
def test_configs(attack, place, text, exit_code, says):
    (place / "E1" / "adapter_config.json").write_text(text)
    for words in (["inspect", "E1"], ["compose", "E1", "E2", "-o", "out"]):
        attack(*words, exit_code=exit_code, word=says)


@pytest.mark.parametrize(
    "out", ["file", "file/sub", "/dev/null", "/dev/null/x", ".", "..", "/", "E1", "E1/sub",
            "loop", "b" * 300, "new/" + "b" * 300, "\udcff"],
)  # fmt: skip
@pytest.mark.fault("F27", "F41")
def test_outputs(attack, place, out):
    (place / "file").write_text("mine")
    (place / "loop").symlink_to("loop")
    attack("compose", "E1", "-o", out, exit_code=2)
    if out != "E1":
        attack("compose", "E1", "-o", out, "--overwrite", exit_code=2)


@pytest.mark.parametrize(
    "name", ["a b", "x=y", "run=5", "😀", "-dash", "a|b", "%s", "{x}", "a'b\"c"]
)
@pytest.mark.fault("F27")
def test_odd_but_honest_names(run, place, name):
    shutil.copytree("E1", name)
    words = ["compose", "-m", "linear", "-o", f"out {name}", "--json", f"./{name}=2", "E2=0"]
    found = cases.done(run(*words))
    assert [entry["name"] for entry in found["experts"]] == [name, "E2"]
    cases.done(run("compose", f"out {name}/cgmerge.json", "-o", "again", "--json"))
    assert support.folder_bytes(f"out {name}") == support.folder_bytes("again")
    assert cases.done(run("inspect", f"./{name}", "--json"))["name"] == name


@pytest.mark.parametrize("name", ["a\nhint: pay", "\x1b[31mred", "\u202eevil"])
def test_names_that_would_write_on_the_terminal(run, place, name):
    shutil.copytree("E1", name)
    code, out, err = run("compose", f"./{name}", "E2", "-o", "out")
    assert code == 0
    assert "\x1b" not in err
    assert "\nhint: pay" not in err
    code, out, err = run("inspect", "out")
    assert code == 0
    assert "\x1b" not in out


def test_a_folder_called_like_a_weight(run, place):
    """`run=5` is that folder, unless there is a folder `run`."""
    shutil.copytree("E1", "run=5")
    words = ["compose", "-m", "linear", "--dry-run"]
    assert "run=5  weight 1 " in run(*words, "run=5")[2]
    assert "run=5  weight 3 " in run(*words, "run=5=3")[2]
    shutil.copytree("E2", "run")
    assert "run  weight 5 " in run(*words, "run=5")[2]


def test_the_model_card_is_not_written_by_the_expert(run, place):
    """A base name from a file cannot add lines or keys to the card's front matter."""
    support.edit_config(place / "E1", base_model_name_or_path="x: y # z")
    cases.done(run("compose", "E1", "-o", "out", "--json"))
    lines = (place / "out" / "README.md").read_text().splitlines()
    assert lines[1] == 'base_model: "x: y # z"'


@pytest.mark.fault("F32")
def test_two_hundred_experts(run, place, qv):
    for number in range(200):
        support.make_expert(place / "many" / f"e{number}", qv, seed=number)
    start = time.process_time()
    refs = sorted(str(path) for path in (place / "many").iterdir())
    words = ["compose", *refs, "-m", "linear", "--rank", 4, "-o", "out", "--json"]
    found = cases.done(run(*words))
    assert time.process_time() - start < 5
    assert len(found["experts"]) == 200
    deltas = [support.dense_deltas(ref) for ref in refs]
    exact = {path: sum(d[path] for d in deltas) / 200 for path in deltas[0]}
    gap = support.relative(support.dense_deltas(place / "out"), exact)
    assert abs(found["truncation_error"] / gap - 1) < 1e-3


def test_too_many_open_files_is_said_so(attack, place, monkeypatch):
    plain = os.open

    def full(path, *args, **kwargs):
        if Path(path).name == WEIGHTS and "E2" in str(path):
            raise OSError(24, "Too many open files", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", full)
    attack("compose", "E1", "E2", "-o", "out", exit_code=4, word="Too many open files")


def test_no_permission_is_said_so(attack, place, monkeypatch):
    plain = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: plain(path, mode) and Path(path).name != "E2"
    )
    attack("compose", "E1", "E2", "-o", "out", exit_code=4, word="permission denied")


INDEXES = [
    ({"a": "../B/model.safetensors"}, "outside its folder"),
    ({"a": "/etc/passwd"}, "outside its folder"),
    ({"a": "x.safetensors"}, "lacks x.safetensors"),
    ({"a": 5}, "lacks 5"),
    ({"a": ""}, "not a regular file"),
    ({"a": "x\0y"}, "lacks x\\x00y"),
    ({"a": "config.json"}, "announces a header"),
    ([], "no weight_map"),
]


@pytest.mark.parametrize(("weight_map", "says"), INDEXES)
@pytest.mark.fault("F12")
def test_bases_with_an_odd_index(attack, place, models, weight_map, says):
    shutil.copytree(models / "B", "base")
    (place / "base" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    for words in (["inspect", "base"], [*ONE, "--base", "base", "--as", "model"]):
        attack(*words, exit_code=3, word=says)


def test_an_expert_inside_an_expert_and_a_base_that_is_both(run, attack, place, models):
    shutil.copytree("E1", "outer/inner")
    attack("compose", "outer", "-o", "out", exit_code=2, word="there are experts in inner")
    shutil.copytree("E2", "E1/nested")
    cases.done(run("compose", "E1", "-o", "one", "--json"))
    assert not (place / "one" / "nested").exists()
    shutil.copytree(models / "B", "both")
    for path in (place / "E2").iterdir():
        shutil.copy(path, "both")
    words = ["compose", "both", "--base", "both", "--as", "model", "-m", "linear"]
    cases.done(run(*words, "-o", "merged", "--json"))
    assert not (place / "merged" / "adapter_config.json").exists()
    cases.same_effect(
        cases.effect(models / "B", merged=place / "merged"),
        cases.effect(models / "B", adapter=place / "E2"),
    )


def test_deltas_that_cancel_are_no_merge(run, experts, tmp_path):
    pair = (f"{experts / 'E1'}=1", f"{experts / 'E1'}=-1")
    code, _, err = run("compose", *pair, "-m", "linear", "-o", tmp_path / "zero")
    assert code == 3
    assert "changes nothing" in err
    tiny = run("compose", experts / "E1", "-m", "linear", "--scale", 1e-6, "-o", tmp_path / "small")
    assert tiny[0] == 0, tiny[2]
