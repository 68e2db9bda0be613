"""`ls`, `add`, `rm`, `verify` on the command line, and references into a library everywhere."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import case_support as cases
import library_support as lib
import pytest
import support
import torch

from cgmerge.modules.library import writing
from cgmerge.modules.library.entry import Entry, Part, digest_of
from cgmerge.modules.library.folder import Folder

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A compressed expert, made once."""
    from cgmerge.cli import app

    folder = tmp_path_factory.mktemp("small")
    shapes = support.pick(support.llama_shapes(), "q_proj", "v_proj")
    support.make_expert(folder / "E1", shapes, seed=1)
    assert app.run(["compress", str(folder / "E1"), "-o", str(folder / "tiny.cge"), "-q"]) == 0
    return folder / "tiny.cge"


@pytest.fixture
def library(run, experts, small):
    cases.done(run("add", experts / "lib", experts / "E1", experts / "E2", small, "--json"))
    return experts / "lib"


def test_what_add_says_is_what_ls_says(run, experts, small):
    words = ["--license", "mit", "--tag", "math", "--tag", "v1"]
    added = cases.done(run("add", experts / "lib", experts / "E1", small, *words, "--json"))
    assert (added["new"], added["same"], added["replaced"]) == (["E1", "tiny"], [], [])
    listed = cases.done(run("ls", experts / "lib", "--json"))
    assert listed["experts"] == added["experts"]
    one, two = listed["experts"]
    assert (one["kind"], two["kind"]) == ("peft", "cge")
    assert one["size_bytes"] == sum(p.stat().st_size for p in (experts / "E1").iterdir())
    assert two["size_bytes"] == small.stat().st_size
    assert one["parameters"] == 2 * 4 * (32 + 32) + 2 * 4 * (32 + 16)
    assert two["parameters"] == one["parameters"]  # of the expert, not of what is left of it
    assert two["parameters"] == cases.done(run("inspect", small, "--json"))["parameters"]
    assert (one["base"], one["rank"], one["license"], one["tags"]) == (
        "some/base", 4, "mit", ["math", "v1"])  # fmt: skip
    found = cases.done(run("inspect", experts / "E1", "--json"))
    assert one["expert"] == found["sha256"]
    assert cases.done(run("ls", experts / "lib", "--tag", "v2", "--json"))["experts"] == []
    code, out, _ = run("ls", experts / "lib")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["name", "E1", "tiny"]
    assert run("ls", experts / "lib", "-q") == (0, "E1\ntiny\n", "")


def test_ls_shows_what_the_expert_itself_reaches(run, experts):
    """Not the base's scores, which come first in the alphabet, nor the loss before training."""
    (item,) = lib.make_items(experts / "x", 1)
    said = {"first_loss": 4.846, "loss": 0.25}
    tested = {"eval.base_exact_match": 0.0, "eval.base_loss": 3.632, "eval.exact_match": 0.675}
    for name, scores in (("a", said), ("b", {**said, **tested, "eval.loss": 0.2221, "eval.n": 40})):
        one = replace(item.entry, name=name, scores=scores)
        writing.add(Folder(experts / "lib"), [replace(item, entry=one)])
    _, out, _ = run("ls", experts / "lib")
    a, b = out.splitlines()[1:]
    assert a.split()[-2:] == ["loss", "0.25"]
    assert b.split()[-4:] == ["eval.exact_match", "0.675,", "eval.loss", "0.2221"]
    assert "base" not in b.split("eval.exact_match")[1]
    listed = cases.done(run("ls", experts / "lib", "--json"))["experts"]
    assert listed[1]["scores"]["eval.base_loss"] == 3.632


def test_references_into_a_library(run, experts, library, small):
    """The same bytes out, whether an expert is named by its folder or in the library."""
    words = ["-m", "task-arithmetic", "--json"]
    plain = cases.done(
        run("compose", experts / "E1", f"{experts / 'E2'}=0.5", *words, "-o", experts / "a")
    )
    named = cases.done(
        run("compose", library / "E1", f"{library / 'E2'}=0.5", *words, "-o", experts / "b")
    )
    assert named["experts"][0]["sha256"] == plain["experts"][0]["sha256"]
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
    record = json.loads((experts / "b" / "cgmerge.json").read_text())
    assert {item["name"] for item in record["experts"]} == {"E1", "E2"}
    again = run("compose", experts / "b" / "cgmerge.json", "-o", experts / "c", "--json")
    cases.done(again)
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "c" / WEIGHTS).read_bytes()
    found = cases.done(run("inspect", library / "tiny", "--json"))
    assert found == cases.done(run("inspect", small, "--json"))
    cases.done(run("compose", library / "E1", library / "tiny", "-o", experts / "d", "--json"))
    cases.refused(
        run("inspect", library / "E3", "--json"), 2, "not_found.entry", "lists all 3", "'E3'"
    )


def test_nothing_broken_enters(run, experts):
    path = experts / "E2" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-5])
    error = run("add", experts / "lib", experts / "E1", experts / "E2", "--json")
    cases.refused(error, 3, "damaged.file", path)
    assert not (experts / "lib").exists()

    def infinite(tensors):
        next(iter(tensors.values()))[0, 0] = float("nan")
        return tensors

    support.edit_tensors(experts / "E1", infinite)
    cases.refused(run("add", experts / "lib", experts / "E1", "--json"), 3, "damaged.not_finite")
    support.edit_tensors(experts / "E3", lambda t: {n: torch.zeros_like(v) for n, v in t.items()})
    cases.refused(
        run("add", experts / "lib", experts / "E3", "--json"), 3, "damaged.empty", "changes nothing"
    )
    support.edit_tensors(experts / "E3", lambda tensors: {})
    cases.refused(
        run("add", experts / "lib", experts / "E3", "--json"), 3, "damaged.empty", "no tensors"
    )
    assert not (experts / "lib").exists()


def test_names_on_the_command_line(run, experts):
    lib_ = experts / "lib"
    for name in ("../x", "a/b", ".x", ""):
        cases.refused(run("add", lib_, experts / "E1", "--name", name, "--json"), 2, "usage.name")
    cases.refused(
        run("add", lib_, experts / "E1", experts / "E2", "--name", "x", "--json"), 2, "usage.name"
    )
    for words in (["--license", "a b"], ["--tag", "a\nb"]):
        cases.refused(
            run("add", lib_, experts / "E1", *words, "--json"), 2, f"usage.{words[0][2:]}"
        )
    assert not lib_.exists()
    found = cases.done(run("add", lib_, experts / "E1", "--dry-run", "--json"))
    assert found["new"] == []
    assert not lib_.exists()
    cases.done(run("add", lib_, experts / "E1", "--name", "sort", "--json"))
    cases.refused(
        run("add", lib_, experts / "E2", "--name", "Sort", "--json"), 2, "usage.name_taken",
        "--overwrite",
    )  # fmt: skip
    done = run("add", lib_, experts / "E2", "--name", "sort", "--overwrite", "--json")
    assert cases.done(done)["replaced"] == ["sort"]


def test_rm(run, library):
    before = lib.tree(library)
    dry = cases.done(run("rm", library, "E1", "--dry-run", "--json"))
    assert lib.tree(library) == before
    real = cases.done(run("rm", library, "E1", "--json"))
    assert {**real, "dry_run": True} == dry
    assert real["freed_bytes"] == sum(
        len(data) for name, data in before.items() if real["objects"][0] in name
    )
    cases.refused(run("rm", library, "E1", "--json"), 2, "not_found.entry")
    cases.refused(run("rm", library, "--json"), 2, "usage.names")
    cases.refused(run("rm", library, "E2", "--unreferenced", "--json"), 2, "usage.names")


@pytest.mark.fault("F01", "F02", "F15")
def test_verify_lists_all_damage(run, experts, library):
    """U03: one file cut in half, bytes appended to another; all are listed, exit code 3."""
    assert cases.done(run("verify", library, "--json"))["experts"] == 3
    listed = {e["name"]: e for e in cases.done(run("ls", library, "--json"))["experts"]}
    paths = {
        name: library / "objects" / listed[name]["digest"] / file
        for name, file in (("E1", WEIGHTS), ("E2", WEIGHTS), ("tiny", "expert.cge"))
    }
    paths["E1"].write_bytes(paths["E1"].read_bytes()[:999])
    paths["E2"].write_bytes(paths["E2"].read_bytes() + bytes(16))
    data = bytearray(paths["tiny"].read_bytes())
    data[-1] ^= 1
    paths["tiny"].write_bytes(data)
    (library / "entries" / "odd.json").write_text('{"schema": "cgmerge.entry/1"}')
    (library / "objects" / "stray").write_text("x")
    code, out, _ = run("verify", library, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (3, False)
    places = sorted(Path(damage["place"]).name for damage in found["damaged"])
    assert places == ["E1", "E2", "lib", "odd.json", "tiny"]
    code, out, _ = run("verify", library)
    assert code == 3
    assert len(out.splitlines()) == 5
    cases.refused(
        run("compose", library / "E2", "-o", experts / "o", "--json"), 3, "damaged.object"
    )
    cases.refused(
        run("compose", library / "tiny", library / "E2", "-o", experts / "o", "--json"),
        3, "damaged.digest", "cgmerge verify",
    )  # fmt: skip


def test_verify_of_files_and_folders(run, experts, small):
    (experts / "copy.cge").write_bytes(small.read_bytes())
    found = cases.done(run("verify", small, experts / "E1", experts, "--json"))
    assert found["experts"] == 2 + 4  # E1, E2, E3 and copy.cge
    assert len(found["unsealed"]) == 4
    data = bytearray(small.read_bytes())
    data[len(data) // 2] ^= 4
    (experts / "copy.cge").write_bytes(data)
    path = experts / "E2" / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    code, out, _ = run("verify", experts, "--json")
    assert code == 3
    assert len(json.loads(out)["damaged"]) == 2
    cases.refused(run("verify", experts / "none", "--json"), 2, "not_found.folder")
    (experts / "empty").mkdir()
    cases.refused(run("verify", experts / "empty", "--json"), 2, "not_found.expert")


@pytest.mark.fault("F12", "F25")
def test_hostile_libraries(run, experts, library):
    """What a stranger's library says leads to nothing outside it, and is exit code 3."""
    path = library / "entries" / "e1.json"
    good = json.loads(path.read_text())
    secret = experts / "secret"
    secret.write_text("x")
    for changes, code in (
        ({"name": "../../x"}, "unsafe.entry_name"),
        ({"files": {"../../secret": [digest_of({}), 1]}}, "unsafe.entry_name"),
        ({"digest": "0" * 64}, "damaged.entry_digest"),
        ({"schema": "cgmerge.entry/9"}, "incompatible.entry_schema"),
        ({"skill": "x" * 70_000}, "unsafe.entry_size"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        start = time.monotonic()
        cases.refused(run("inspect", library / "E1", "--json"), 3, code)
        assert time.monotonic() - start < 2
        listed = cases.done(run("ls", library, "--json"))
        assert [bad["entry"] for bad in listed["damaged"]] == ["e1.json"]
        assert len(listed["experts"]) == 2
    (library / "cgmerge-library.json").write_text('{"schema": "cgmerge.library/2"}')
    cases.refused(run("ls", library, "--json"), 3, "incompatible.library", "update cgmerge")
    assert run("verify", library, "--json")[0] == 3


@pytest.mark.fault("F32")
def test_ls_of_ten_thousand(experts):
    """In a process of its own, without torch; generous, as other work may share the machine."""
    root = experts / "lib"
    writing.add(Folder(root), lib.make_items(experts / "x", 1))
    files = {name: Part("ab" * 32, 9) for name in ("adapter_config.json", WEIGHTS, "expert.json")}
    for number in range(10_000):
        entry = Entry(
            name=f"skill-{number}", kind="peft", files=files, digest=digest_of(files), base="b/c"
        )
        (root / "entries" / entry.file_name).write_bytes(entry.to_bytes())
    code = (
        "import sys, time\nfrom cgmerge.cli.app import run\nstart = time.process_time()\n"
        f"assert run(['ls', {str(root)!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'huggingface_hub', 'fsspec'} & set(sys.modules)\n"
        "print(time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 10_003
    assert float(lines[-1]) < 4
