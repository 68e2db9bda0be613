"""Libraries and experts on an imitation of the hub, through the real client."""

import json
import os
import socket
import subprocess
import sys

import case_support as cases
import hub_imitation
import library_support as lib
import pytest
import support

CONNECT, LOOKUP = socket.socket.connect, socket.getaddrinfo
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server of its own for each test, with empty caches."""
    from huggingface_hub import constants

    monkeypatch.setattr(socket.socket, "connect", CONNECT)
    monkeypatch.setattr(socket, "getaddrinfo", LOOKUP)
    server = hub_imitation.Hub()
    monkeypatch.setenv("CGMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    for name, value in {
        "ENDPOINT": server.url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_imitation")
    yield server
    server.close()


@pytest.fixture
def library(run, experts, hub):
    words = ["--license", "mit", "--tag", "math"]
    done = run("add", "hf://me/lib", experts / "E1", experts / "E2", *words, "--json")
    assert cases.done(done)["new"] == ["E1", "E2"]
    return "hf://me/lib"


def offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_one_commit_holds_everything(hub, library, experts):
    commits = hub.repos["me/lib"]
    assert len(commits) == 2  # the repository itself, and one commit
    files = commits[-1][1]
    assert json.loads(files["cgmerge-library.json"]) == {"schema": "cgmerge.library/1"}
    entry = json.loads(files["entries/e1.json"])
    stem = f"objects/{entry['digest']}/"
    for path in (experts / "E1").iterdir():
        assert files[stem + path.name] == path.read_bytes()
    used = {path.split("?")[0] for _, path in hub.requests}
    assert any("/info/lfs/objects/batch" in path for path in used)
    page = files["README.md"].decode()
    for line in ('base_model: "some/base"', 'base_model_relation: "adapter"', 'license: "mit"',
                 'library_name: "peft"', 'tags: ["cgmerge", "lora", "math"]'):  # fmt: skip
        assert f"\n{line}\n" in page
    assert "| `E1` |" in page


def test_use_by_name_and_revision(run, experts, hub, library):
    words = ["-m", "task-arithmetic", "--json"]
    cases.done(run("compose", experts / "E1", experts / "E2", *words, "-o", experts / "a"))
    cases.done(run("compose", f"{library}/E1", f"{library}/e2", *words, "-o", experts / "b"))
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
    assert [e["name"] for e in cases.done(run("ls", library, "--json"))["experts"]] == ["E1", "E2"]
    first = hub.repos["me/lib"][-1][0]
    old = cases.done(run("inspect", f"{library}/E1@{first}", "--json"))["sha256"]
    done = run("add", library, experts / "E3", "--name", "E1", "--overwrite", "--json")
    assert cases.done(done)["replaced"] == ["E1"]
    new = cases.done(run("inspect", f"{library}/E1", "--json"))["sha256"]
    assert new != old
    assert cases.done(run("inspect", f"{library}/E1@{first}", "--json"))["sha256"] == old
    found = cases.done(run("ls", f"{library}@{first}", "--json"))["experts"]
    assert found[0]["expert"] == old
    cases.refused(run("inspect", f"{library}/E9", "--json"), 2, "not_found.entry", "lists all 2")
    cases.refused(run("inspect", f"{library}/E1@nosuch", "--json"), 2, "not_found.library")
    cases.refused(run("inspect", library, "--json"), 2, "not_found.library", f"{library}/NAME")
    cases.refused(run("inspect", "hf://me/none", "--json"), 2, "not_found.folder")


def test_adding_again_is_no_commit(run, experts, hub, library):
    done = run("add", library, experts / "E1", "--license", "mit", "--tag", "math", "--json")
    assert cases.done(done)["same"] == ["E1"]
    assert len(hub.repos["me/lib"]) == 2
    other = run("add", library, experts / "E2", "--name", "E1", "--json")
    cases.refused(other, 2, "usage.name_taken", "--overwrite")
    assert len(hub.repos["me/lib"]) == 2


def test_somebody_was_faster(run, experts, hub, library):
    """The commit is made again on top of theirs; theirs is kept, and seen."""
    others = []

    def faster():
        if len(others) < 3:
            others.append(hub.commit("me/lib", {f"entries/x{len(others)}.json": b"{}"}))

    hub.before_commit = faster
    cases.done(run("add", library, experts / "E3", "--json"))
    files = hub.tree("me/lib")[1]
    assert {"entries/e1.json", "entries/e3.json", "entries/x2.json"} <= set(files)

    def taken():
        hub.before_commit = None
        hub.commit("me/lib", {"entries/new.json": hub.tree("me/lib")[1]["entries/e2.json"]
                              .replace(b'"name":"E2"', b'"name":"new"')})  # fmt: skip

    hub.before_commit = taken
    error = run("add", library, experts / "E1", "--name", "new", "--json")
    cases.refused(error, 2, "usage.name_taken")
    hub.before_commit = lambda: hub.commit("me/lib", {"entries/y.json": b"{}"})
    error = run("add", library, experts / "E1", "--name", "late", "--json")
    cases.refused(error, 4, "environment.hub", "10 times")


def test_rm(run, experts, hub, library):
    cases.done(run("add", library, experts / "E1", "--name", "twin", "--json"))
    before = len(hub.repos["me/lib"])
    dry = cases.done(run("rm", library, "E1", "E2", "--dry-run", "--json"))
    assert len(hub.repos["me/lib"]) == before
    real = cases.done(run("rm", library, "E1", "E2", "--json"))
    assert {**real, "dry_run": True} == dry
    assert len(real["objects"]) == 1  # the twin keeps the other
    files = hub.tree("me/lib")[1]
    assert {path.split("/")[0] for path in files} >= {"entries", "objects", "README.md"}
    assert [path for path in files if path.startswith("entries/")] == ["entries/twin.json"]
    assert not any(real["objects"][0] in path for path in files)
    assert "`E2`" not in files["README.md"].decode()
    assert cases.done(run("verify", library, "--json"))["experts"] == 1


def test_offline(run, experts, hub, library, monkeypatch):
    """What was used once is there; what was not is named."""
    cases.done(run("inspect", f"{library}/E1", "--json"))
    offline(monkeypatch)
    asked = len(hub.requests)
    cases.done(run("inspect", f"{library}/E1", "--json"))
    cases.refused(
        run("inspect", "hf://me/other/E1", "--json"), 4, "environment.offline", "me/other",
        "HF_HUB_OFFLINE",
    )  # fmt: skip
    cases.refused(
        run("inspect", f"{library}/E2", "--json"), 4, "environment.offline", "entries/e2.json"
    )
    cases.refused(run("ls", library, "--json"), 4, "environment.offline", "cannot be listed")
    cases.refused(run("add", library, experts / "E3", "--json"), 4, "environment.offline")
    assert len(hub.requests) == asked


def test_an_expert_of_its_own(run, experts, hub, monkeypatch):
    """push hf://user/repo: what PEFT loads by name, with a page; `user/repo` once it is here."""
    words = ["--license", "apache-2.0", "--json"]
    cases.done(run("push", experts / "E1", "hf://me/sort", *words))
    files = hub.tree("me/sort")[1]
    for path in (experts / "E1").iterdir():
        assert files[path.name] == path.read_bytes()
    page = files["README.md"].decode()
    assert 'license: "apache-2.0"' in page
    assert 'from_pretrained(base, "me/sort")' in page
    cases.refused(
        run("push", experts / "E2", "hf://me/sort", "--json"), 2, "usage.name_taken", "--overwrite"
    )
    expected = cases.done(run("inspect", experts / "E1", "--json"))["sha256"]
    error = run("inspect", "me/sort", "--json")  # nobody is asked for a bare name
    cases.refused(error, 2, "not_found.folder", "hf://me/sort")
    first = hub.tree("me/sort")[0]
    for ref in ("hf://me/sort", f"hf://me/sort@{first}", "me/sort"):
        found = cases.done(run("inspect", ref, "--json"))
        assert (found["sha256"], found["name"]) == (expected, "sort")
    asked = len(hub.requests)
    cases.done(run("inspect", "me/sort", "--json"))
    assert len(hub.requests) == asked
    pulled = experts / "pulled"
    cases.done(run("pull", "hf://me/sort", "-o", pulled, "--json"))
    assert (pulled / WEIGHTS).read_bytes() == (experts / "E1" / WEIGHTS).read_bytes()
    cases.done(run("push", experts / "E2", "hf://me/sort", "--overwrite", "--json"))
    assert cases.done(run("inspect", f"hf://me/sort@{first}", "--json"))["sha256"] == expected
    assert cases.done(run("inspect", "hf://me/sort", "--json"))["sha256"] != expected


def test_a_library_goes_up_and_comes_back(run, experts, hub):
    cases.done(run("add", experts / "lib", experts / "E1", experts / "E2", "--json"))
    sent = cases.done(run("push", experts / "lib", "hf://me/copy", "--json"))
    assert sent["new"] == ["E1", "E2"]
    assert len(hub.repos["me/copy"]) == 2
    cases.done(run("push", "hf://me/copy", experts / "back", "--json"))
    assert lib.tree(experts / "back") == lib.tree(experts / "lib")
    cases.refused(run("push", experts / "E3", "hf://me/copy/E1", "--json"), 2, "usage.name_taken")
    assert cases.done(run("push", experts / "E3", "hf://me/copy/new", "--json"))["new"] == ["new"]
    assert cases.done(run("push", experts / "E3", "hf://me/copy", "--json"))["new"] == ["E3"]


def test_damage_on_the_hub(run, hub, library):
    files = hub.tree("me/lib")[1]
    path = next(p for p in files if p.endswith(WEIGHTS))
    hub.commit("me/lib", {path: files[path][:-1] + b"?"})
    code, out, _ = run("verify", library, "--json")
    assert code == 3
    assert len(json.loads(out)["damaged"]) == 1
    name = json.loads(out)["damaged"][0]["place"].rpartition("/")[2]
    cases.refused(run("inspect", f"{library}/{name}", "--json"), 3, "damaged.digest")
    hub.commit("me/lib", {"entries/e1.json": b'{"name": "../x"}'})
    cases.refused(run("inspect", f"{library}/E1", "--json"), 3, "incompatible.entry_schema")


def test_a_hub_that_fails(run, experts, hub, library):
    hub.refuse = lambda method, path: path.endswith("/commit/main")
    error = cases.refused(run("add", library, experts / "E3", "--json"), 4, "environment.hub")
    assert "500" in error["message"]
    assert len(hub.repos["me/lib"]) == 2
    assert "entries/e3.json" not in hub.tree("me/lib")[1]


def test_lock(run, experts, hub, library):
    """What a lock names stays what it was, whatever is pushed later."""
    cases.done(run("push", experts / "E3", "hf://me/three", "--json"))
    recipe = experts / "recipe.yml"
    recipe.write_text(
        f"method: task-arithmetic\nexperts:\n  - {library}/E1\n  - {{ref: E2, weight: 0.5}}\n"
        "  - hf://me/three\noutput: {rank: 4}\n"
    )
    locked = experts / "sub" / "recipe.lock.json"
    cases.done(run("lock", recipe, "-o", locked, "--json"))
    content = json.loads(locked.read_text())
    heads = [hub.tree(name)[0] for name in ("me/lib", "me/three")]
    refs = [item["ref"] for item in content["experts"]]
    assert refs == [f"{library}/E1@{heads[0]}", "../E2", f"hf://me/three@{heads[1]}"]
    assert content["experts"][1]["weight"] == 0.5
    assert (content["method"], content["output"]) == ("task-arithmetic", {"rank": 4})
    for item, ref in zip(content["experts"], ("E1", "E2", "E3"), strict=True):
        found = cases.done(run("inspect", experts / ref, "--json"))
        assert item["sha256"] == found["sha256"]
    cases.done(run("compose", recipe, "-o", experts / "a", "--json"))
    cases.done(run("add", library, experts / "E3", "--name", "E1", "--overwrite", "--json"))
    cases.done(run("push", experts / "E1", "hf://me/three", "--overwrite", "--json"))
    cases.done(run("compose", locked, "-o", experts / "b", "--json"))
    assert (experts / "a" / WEIGHTS).read_bytes() == (experts / "b" / WEIGHTS).read_bytes()
    support.edit_config(experts / "E2", lora_alpha=9)
    cases.refused(run("compose", locked, "-o", experts / "c", "--json"), 3, "damaged.digest", "E2")


def test_the_program_itself_with_the_clients_own_settings(experts, hub, tmp_path):
    """HF_ENDPOINT and HF_HUB_OFFLINE as users set them, in processes of their own."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    env.pop("HF_HUB_CACHE")

    def cgmerge(*words, **more):
        command = [sys.executable, "-m", "cgmerge", *map(str, words)]
        return subprocess.run(
            command, env={**env, **more}, capture_output=True, text=True, check=False
        )

    done = cgmerge("add", "hf://me/lib", experts / "E1", "--json", HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr
    done = cgmerge("ls", "hf://me/lib", "-q", HF_HUB_OFFLINE="0")
    assert (done.returncode, done.stdout) == (0, "E1\n"), done.stderr
    done = cgmerge("ls", "hf://me/lib", HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert "cannot be listed" in done.stderr


@pytest.mark.parametrize("ref", ["hf://", "hf://a", "hf://a/b/c/d", "hf://a b/c", "hf://../x"])
def test_malformed_references(run, hub, ref):
    cases.refused(run("inspect", ref, "--json"), 2, "usage.ref", "hf://user/repo")
    assert hub.requests == []


def test_what_the_transport_raises_is_no_bug(run, hub, experts, monkeypatch, tmp_path):
    """No name server, no route: the client passes on errors that are no OSError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    root = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    unknown = type("ConnectError", (root,), {})("Name or service not known")

    def nobody(*_args, **_options):
        raise unknown

    monkeypatch.setattr(HfApi, "list_repo_tree", nobody)
    done = run("compose", "hf://me/lib", experts / "E1", "-o", tmp_path / "out", "--json")
    cases.refused(done, 4, "environment.hub", "not known")
